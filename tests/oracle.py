"""The definition of the loss, written as plain loops in float64, and kernels whose loss is known.

Nothing here uses a convolution routine or the package under test. Positions are counted in input pixels: a filter tap
``u`` of the placement at 0 and a tap ``v`` of the placement at ``p`` see the same pixel if ``dilation * (u - v) = p``.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np
import torch

Ints = int | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A weight's shape with the options of its convolution."""

    shape: tuple[int, ...]
    stride: Ints = 1
    dilation: Ints = 1
    groups: int = 1
    padding: Ints | None = None
    target: float | str = 1.0
    part: str = "all"

    def __str__(self) -> str:
        def join(value: Ints) -> str:
            return "x".join(map(str, (value,) if isinstance(value, int) else value))

        parts = [join(self.shape)]
        for letter, value, default in (("s", self.stride, 1), ("d", self.dilation, 1), ("g", self.groups, 1)):
            parts += [letter + join(value)] if value != default else []
        parts += [] if self.padding is None else [f"p{join(self.padding)}"]
        parts += [] if self.target == 1.0 else [f"a{self.target}"]
        parts += [] if self.part == "all" else [self.part]
        return "-".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every implementation."""
        names = ["stride", "dilation", "groups", "padding"]
        names += [name for name, default in (("target", 1.0), ("part", "all")) if getattr(self, name) != default]
        return {name: getattr(self, name) for name in names}

    @property
    def rank(self) -> int:
        return len(self.shape) - 2

    @property
    def strides(self) -> tuple[int, ...]:
        return per_axis(self.stride, self.rank)

    @property
    def dilations(self) -> tuple[int, ...]:
        return per_axis(self.dilation, self.rank)

    @property
    def paddings(self) -> tuple[int, ...]:
        """Farthest positions kept, per axis; by default the last one where two placements meet."""
        if self.padding is not None:
            return per_axis(self.padding, self.rank)
        axes = zip(self.shape[2:], self.strides, self.dilations, strict=True)
        return tuple(dilation * (k - 1) // stride * stride for k, stride, dilation in axes)

    @property
    def steps(self) -> tuple[int, ...]:
        """Tap difference between neighbouring lags, per axis."""
        return tuple(s // gcd(s, d) for s, d in zip(self.strides, self.dilations, strict=True))

    @property
    def class_taps(self) -> int:
        """Taps of the longest residue class over all axes: what bounds the accuracy of an interpolation."""
        return max((-(-k // step) for k, step in zip(self.shape[2:], self.steps, strict=True)), default=1)

    @property
    def has_orthogonal(self) -> bool:
        """Whether some kernel of this shape has loss zero."""
        phases = prod(min(k, step) for k, step in zip(self.shape[2:], self.steps, strict=True))
        return self.shape[0] // self.groups <= self.shape[1] * phases

    @cached_property
    def seed(self) -> int:
        return zlib.crc32(str(self).encode())

    def random(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Independent normal weights, filters of length about one."""
        generator = torch.Generator().manual_seed(self.seed + seed)
        weight = torch.randn(self.shape, generator=generator, dtype=torch.float64, device="cpu")
        return (weight / max(1, prod(self.shape[1:])) ** 0.5).to(torch.get_default_device(), dtype)

    def orthogonal(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """A kernel with loss zero that, if it has channels enough, uses every tap."""
        if not self.has_orthogonal:
            raise ValueError(f"{self} has more filters than polyphase channels: no orthogonal kernel exists")
        rng = np.random.default_rng(self.seed + seed)
        rows = self.shape[0] // self.groups
        groups = [orthogonal_kernel((rows, *self.shape[1:]), self.steps, rng) for _ in range(self.groups)]
        return from_numpy(np.concatenate(groups)).to(dtype)

    def with_options(self, **options: Any) -> Case:
        return replace(self, **options)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """On the device that is the default: the GPU while a test runs for one."""
    return torch.from_numpy(array).to(torch.get_default_device())


def per_axis(value: Ints, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


# ----------------------------------------------------------------------------------------------------------------------
# Loss and gradient
# ----------------------------------------------------------------------------------------------------------------------


def loss_and_grad(weight: Any, case: Case, *, squared: bool = True) -> tuple[float, np.ndarray]:
    """``L = sum_p ||Z_p - [p = 0] a I||_F^2`` over the kept positions, and ``dL/dK_u = 4 sum_v R_(u - v) K_v``.

    A free ``a`` is the squared length of a group's filters on average; "off_diagonal" has zeros where ``a`` would be.
    """
    array = _float64(weight)
    rows = case.shape[0] // case.groups
    kernel = array.reshape(case.groups, rows, *case.shape[1:])
    taps = {u: np.ascontiguousarray(kernel[(..., *u)]) for u in np.ndindex(*case.shape[2:])}
    origin = (0,) * case.rank
    free = np.array([(group**2).sum() / rows for group in kernel])
    targets = free if case.target == "free" else np.full(case.groups, float(case.target))
    residual = {origin: -targets[:, None, None] * np.eye(rows)}
    meetings = []
    for u, v in itertools.product(taps, repeat=2):
        position = tuple(d * (a - b) for d, a, b in zip(case.dilations, u, v, strict=True))
        kept = zip(position, case.strides, case.paddings, strict=True)
        if all(p % stride == 0 and abs(p) <= padding for p, stride, padding in kept):
            meetings.append((u, v, position))
            product = taps[u] @ taps[v].swapaxes(1, 2)
            residual[position] = residual[position] + product if position in residual else product
    if case.part == "off_diagonal":
        residual[origin] = residual[origin] * (1 - np.eye(rows))
    gradient = np.zeros_like(kernel)
    for u, v, position in meetings:
        gradient[(..., *u)] += 4 * residual[position] @ taps[v]
    loss = float(sum((value**2).sum() for value in residual.values()))
    gradient = gradient.reshape(array.shape)
    if squared:
        return loss, gradient
    norm = loss**0.5
    return norm, gradient / (2 * norm) if norm else np.zeros_like(gradient)


def _float64(weight: Any) -> np.ndarray:
    if isinstance(weight, torch.Tensor):
        weight = weight.detach().to(torch.float64).cpu().numpy()
    return np.asarray(weight, dtype=np.float64)


def circular_matrix(weight: Any, case: Case, size: tuple[int, ...]) -> np.ndarray:
    """The matrix that maps a periodic input of ``size`` pixels to the output of the convolution, both flattened."""
    kernel = _float64(weight)
    rows, channels = case.shape[0] // case.groups, case.shape[1]
    outputs = tuple(n // stride for n, stride in zip(size, case.strides, strict=True))
    matrix = np.zeros((case.shape[0], *outputs, channels * case.groups, *size))
    for row, group in ((i, i // rows) for i in range(case.shape[0])):
        inputs = slice(group * channels, (group + 1) * channels)
        for output in np.ndindex(*outputs):
            for tap in np.ndindex(*case.shape[2:]):
                axes = zip(output, tap, case.strides, case.dilations, size, strict=True)
                pixel = tuple((o * stride + u * dilation) % n for o, u, stride, dilation, n in axes)
                matrix[(row, *output, inputs, *pixel)] += kernel[(row, slice(None), *tap)]
    return matrix.reshape(case.shape[0] * prod(outputs), -1)


# ----------------------------------------------------------------------------------------------------------------------
# The polyphase view and orthogonal kernels
# ----------------------------------------------------------------------------------------------------------------------


def _split(tap: tuple[int, ...], steps: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Position within its residue class, and the residue, of a tap."""
    return (
        tuple(u // s for u, s in zip(tap, steps, strict=True)),
        tuple(u % s for u, s in zip(tap, steps, strict=True)),
    )


def polyphase(kernel: np.ndarray, steps: tuple[int, ...]) -> np.ndarray:
    """``K'[i, (c, r), m] = K[i, c, m*s + r]``: the same loss at stride 1; short phases end in zeros."""
    taps = kernel.shape[2:]
    counts = tuple(-(-k // s) for k, s in zip(taps, steps, strict=True))
    phases = tuple(min(k, s) for k, s in zip(taps, steps, strict=True))
    result = np.zeros((*kernel.shape[:2], *phases, *counts), dtype=kernel.dtype)
    for tap in np.ndindex(*taps):
        position, residue = _split(tap, steps)
        place: tuple[Any, ...] = (..., *residue, *position)
        result[place] = kernel[(..., *tap)]
    return result.reshape(kernel.shape[0], -1, *counts)


def orthogonal_matrix(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Orthonormal rows, or orthonormal columns if there are more rows than columns."""
    q, _ = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
    return q if rows > columns else np.ascontiguousarray(q.T)


def _convolve(kernel: np.ndarray, pair: tuple[np.ndarray, np.ndarray], axis: int) -> np.ndarray:
    """``kernel`` followed by the two-tap kernel ``pair`` along one spatial axis: one tap more on that axis."""
    widths = [(0, 0)] * kernel.ndim
    first, second = (
        np.pad(np.einsum("ij...,jk->ik...", kernel, matrix), widths[: axis + 2] + [width] + widths[axis + 3 :])
        for matrix, width in zip(pair, ((0, 1), (1, 0)), strict=True)
    )
    return first + second


def orthogonal_kernel(shape: tuple[int, ...], steps: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A spatial kernel whose convolution has orthonormal rows.

    In the polyphase view it is an orthogonal matrix followed by two-tap convolutions ``[P, I - P]`` with orthogonal
    projections ``P``, each of which is orthogonal: ``P P + (I - P)(I - P) = I`` and ``P (I - P) = 0``. Residues with
    fewer taps get fewer of them, so that nothing falls outside the kernel.
    """
    rows, channels, *taps = shape
    phases = tuple(min(k, s) for k, s in zip(taps, steps, strict=True))
    residues = list(np.ndindex(*phases))
    width = channels * len(residues)
    kernel = orthogonal_matrix(rows, width, rng).reshape(rows, width, *(1 for _ in taps))
    for axis, (k, step) in enumerate(zip(taps, steps, strict=True)):
        for factor in range(1, -(-k // step)):
            projection = np.zeros((len(residues), channels, len(residues), channels))
            for index, residue in enumerate(residues):
                has_factor = (k - 1 - residue[axis]) // step >= factor
                basis = orthogonal_matrix(channels, max(1, channels // 2), rng)
                projection[index, :, index, :] = basis @ basis.T if has_factor else np.eye(channels)
            square = projection.reshape(width, width)
            kernel = _convolve(kernel, (square, np.eye(width) - square), axis)
    counts = kernel.shape[2:]
    kernel = kernel.reshape(rows, len(residues), channels, *counts)
    result = np.zeros(shape)
    for tap in np.ndindex(*taps):
        position, residue = _split(tap, steps)
        place: tuple[Any, ...] = (slice(None), residues.index(residue), slice(None), *position)
        result[(..., *tap)] = kernel[place]
    return result


def dirac(case: Case) -> torch.Tensor:
    """Every filter copies one channel, at the middle tap."""
    weight = torch.zeros(case.shape, dtype=torch.float64)
    middle = tuple(k // 2 for k in case.shape[2:])
    for row in range(case.shape[0]):
        weight[(row, row % (case.shape[0] // case.groups), *middle)] = 1
    return weight


def near(kernel: torch.Tensor, eps: float = 1e-3, seed: int = 0) -> torch.Tensor:
    """``kernel`` moved in a random direction by ``eps`` times its length."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(kernel.shape, generator=generator, dtype=torch.float64, device="cpu").to(kernel.device)
    moved = kernel.double() + eps * kernel.double().norm() / noise.norm() * noise
    return moved.to(kernel.dtype)
