"""Fourier plans with ordinary PyTorch calls, on any device: matrix products are all that they are made of.

Frequencies are worked on in pieces that a cache holds. Short kernels are transformed by a matrix product, which leaves
frequencies outermost; long ones by an FFT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log2, pi, prod

import torch
from torch import Tensor

from ..plan import FourierPlan
from ..problem import FREE, OFF_DIAGONAL, Precision
from .cpu import BANDWIDTH, product_seconds
from .device import SPECS, Device, spec_of
from .job import Executable, Job, accumulation_dtype, prepare_each

#: Entries of the largest matrix that transforms a kernel.
_MOST_ENTRIES = 1 << 18
#: What a piece takes: a core's own caches on a CPU, enough to keep a GPU busy.
_PIECE_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}
#: Multiply-adds of a matrix product below which a BLAS is not worth its call.
_FEWEST_PRODUCTS = 400
#: What one multiply-add takes in the large, in units of what the CPU backend's own take: measured, passes included.
_SLOWER = 2.4
#: Arithmetic of an FFT per second.
_FFT_RATE = 1e10
#: Calls of PyTorch for one piece, loss and gradient.
_CALLS = 16
_SECONDS_PER_CALL = 5e-6


def seconds(plan: FourierPlan, device: Device, precision: Precision) -> float:
    """Estimated time of loss and gradient on a device, or on one that is named."""
    work, points = plan.work, prod(plan.sizes)
    issue = _CALLS * _SECONDS_PER_CALL * _pieces(plan, device)
    elements = plan.groups * plan.rows * plan.channels * plan.phases
    by_fft = 0.0 if _by_matrix(plan) else 4 * elements * points * log2(points)
    if _kind(device) == "cpu":
        products = product_seconds(work.multiply_adds, plan.work_rows, plan.contraction) + work.bytes / (4 * BANDWIDTH)
        transform = by_fft / _FFT_RATE if by_fft else product_seconds(work.elementwise, 32, 1024)
        return _SLOWER * (products + transform) + issue
    spec = spec_of(device)
    rate = spec.matmul[precision if precision in ("ieee", "tf32") and precision in spec.matmul else "ieee"]
    products = (work.multiply_adds + (0 if by_fft else work.elementwise)) / (rate * spec.efficiency)
    return products + work.bytes / spec.bandwidth + by_fft / (spec.elementwise * spec.efficiency) + issue


def _by_matrix(plan: FourierPlan) -> bool:
    return 2 * plan.frequencies * prod(plan.class_taps) <= _MOST_ENTRIES


def prepare(jobs: Sequence[Job[FourierPlan]], device: torch.device) -> Executable:
    return prepare_each(jobs, device, _Executor)


def _pieces(plan: FourierPlan, device: Device) -> int:
    """Into how many pieces the frequencies are cut."""
    return min(plan.frequencies, ceil(plan.work.bytes / 4 / _PIECE_BYTES.get(_kind(device), _PIECE_BYTES["cuda"])))


def _kind(device: Device) -> str:
    return "cuda" if isinstance(device, str) and device in SPECS else torch.device(device).type


class _Executor:
    """A plan with its matrices on a device."""

    def __init__(self, plan: FourierPlan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self.dtype = accumulation_dtype(dtype)
        self.sources = torch.tensor(plan.sources(), device=device) if plan.phases > 1 else None
        self.transform = (_Matrix if _by_matrix(plan) else _FFT)(plan, self.dtype, device)
        self.lags = None if plan.keeps_all_lags else _KeptLags(plan, self.transform, self.dtype, device)
        self.per_piece = ceil(len(self.transform.counts) / _pieces(plan, device))

    def __call__(self, weight: Tensor, with_grad: bool) -> tuple[Tensor, Tensor]:
        plan, counts = self.plan, self.transform.counts
        kernel = weight.reshape(plan.groups * plan.rows, plan.channels, -1).to(self.dtype)
        if self.sources is not None:  # (rows, channels, residues, taps) with zeros where a short phase has no tap
            kernel = torch.where(self.sources >= 0, kernel[..., self.sources.clamp(min=0)], 0).flatten(1, 2)
        given = self.transform.start(kernel)
        gradient = self.transform.gradient(given) if with_grad else given
        pieces = [slice(begin, begin + self.per_piece) for begin in range(0, len(counts), self.per_piece)]
        target = self.target(kernel)
        loss = plan.offset * target.double().square().mean()
        kept = None
        if self.lags is not None:
            grams = (self.gram(*self.evaluate(given, piece)[1:]) for piece in pieces)
            kept = self.lags.residual(pieces, grams, target)
            loss += self.lags.loss(kept)
        for piece in pieces:
            values, real, imaginary = self.evaluate(given, piece)
            if self.lags is None:
                residual = self.gram(real, imaginary)
                residual.diagonal(dim1=-2, dim2=-1).sub_(target)
                loss += counts[piece] @ residual.square().sum((1, 2, 3)).double() / self.transform.points
            elif kept is not None:
                residual = self.lags.at(piece, kept)
            if with_grad:
                self.apply(residual, real, imaginary, out=values)
                self.transform.gather(gradient, values, piece)
        loss = loss.clamp_min(0).to(self.dtype)
        if not with_grad:
            return loss, weight.new_empty(0)
        return loss, self.to_weight(self.transform.finish(gradient).reshape(kernel.shape), weight)

    def target(self, kernel: Tensor) -> Tensor:
        """What the diagonal of lag 0 is compared with: ``(groups, 1)``, or ``(groups, rows)`` if it does not count."""
        by_row = kernel.square().sum((1, 2)).unflatten(0, (self.plan.groups, self.plan.rows))
        if self.plan.target == OFF_DIAGONAL:
            return by_row
        free = by_row.mean(1, keepdim=True)
        return free if self.plan.target == FREE else torch.full_like(free, self.plan.target)

    def evaluate(self, given: Tensor, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The transform at some frequencies, and its real and imaginary part as matrices."""
        values = self.transform.evaluate(given, piece)
        return values, self.as_matrices(values[:, 0]), self.as_matrices(values[:, 1])

    def gram(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """``Re + Im`` of ``A A^H``."""
        product = _product(real + imaginary, (real - imaginary).mT)
        return product.add_(_product(imaginary, imaginary.mT), alpha=2)

    def as_matrices(self, part: Tensor) -> Tensor:
        """``(frequencies, groups, side, contraction)`` of ``(frequencies, rows * channels)``."""
        matrices = part.unflatten(1, (self.plan.groups, self.plan.rows, -1))
        return matrices.mT if self.plan.side == "column" else matrices

    def apply(self, residual: Tensor, real: Tensor, imaginary: Tensor, out: Tensor) -> None:
        """Real and imaginary part of the residual times the transform, in place of the transform."""
        symmetric = (residual + residual.mT).mul_(0.5)
        common, total, difference = _product(residual, real), real + imaginary, real - imaginary
        torch.sub(common, _product(residual - symmetric, total), out=self.as_matrices(out[:, 0]))
        torch.sub(common, _product(symmetric, difference), out=self.as_matrices(out[:, 1]))

    def to_weight(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """``(rows, channels * residues, taps)`` in the weight's shape and memory format."""
        if self.sources is not None:
            spread = gradient.unflatten(1, (self.plan.channels, self.plan.phases))
            present = self.sources >= 0
            gradient = gradient.new_empty(*spread.shape[:2], prod(axis.taps for axis in self.plan.axes))
            gradient[..., self.sources[present]] = spread[..., present]
        return torch.empty_like(weight).copy_(gradient.reshape(weight.shape))


class _Matrix:
    """The transform as a product with a matrix, one frequency of each pair."""

    def __init__(self, plan: FourierPlan, dtype: torch.dtype, device: torch.device) -> None:
        self.points = prod(plan.sizes)
        middle = torch.tensor([size // 2 for size in plan.sizes])
        self.sizes = plan.sizes
        self.waves = (_grid(plan.sizes) - middle)[self.points // 2 :]  # those before zero are their negatives
        angles = _angles(self.waves, _grid(plan.class_taps), self.sizes)
        exact = torch.stack([angles.cos(), -angles.sin()], 1)
        self.counts = torch.full((len(self.waves),), 2.0, dtype=torch.float64, device=device)
        self.counts[0] = 1
        self.matrix = exact.to(device, dtype)  # (frequencies, 2, taps)
        self.adjoint = (exact.to(device) * (4 / self.points * self.counts)[:, None, None]).to(dtype)

    def start(self, kernel: Tensor) -> Tensor:
        """``(taps, rows * channels)``."""
        return kernel.flatten(0, 1).mT.contiguous()

    def evaluate(self, taps: Tensor, piece: slice) -> Tensor:
        """Real and imaginary part at some frequencies, ``(frequencies, 2, rows * channels)``."""
        matrix = self.matrix[piece]
        return torch.mm(matrix.flatten(0, 1), taps).unflatten(0, matrix.shape[:2])

    def gradient(self, taps: Tensor) -> Tensor:
        """Where all pieces add what they contribute."""
        return torch.zeros_like(taps)

    def gather(self, gradient: Tensor, values: Tensor, piece: slice) -> None:
        """Adds what some frequencies contribute."""
        gradient.addmm_(self.adjoint[piece].flatten(0, 1).mT, values.flatten(0, 1))

    def finish(self, gradient: Tensor) -> Tensor:
        """``(rows * channels, taps)``."""
        return gradient.mT


class _FFT:
    """The transform by ATen's FFT: half of the frequencies, all at once, at as many points as it likes."""

    def __init__(self, plan: FourierPlan, dtype: torch.dtype, device: torch.device) -> None:
        self.taps = plan.class_taps
        self.sizes = tuple(map(_smooth, plan.sizes))
        self.points = prod(self.sizes)
        *others, last = self.sizes
        counts = torch.full((last // 2 + 1,), 2.0, dtype=torch.float64, device=device)
        counts[0] = 1
        if last % 2 == 0:
            counts[-1] = 1
        self.counts = counts.expand(prod(others), -1).flatten()
        self.half = (*others, len(counts))
        self.waves = _grid(self.half)
        self.axes = tuple(range(1, 1 + len(self.sizes)))

    def start(self, kernel: Tensor) -> Tensor:
        """``(frequencies, 2, rows * channels)``."""
        spectrum = torch.fft.rfftn(kernel.flatten(0, 1).unflatten(1, self.taps), s=self.sizes, dim=self.axes)
        return torch.view_as_real(spectrum.flatten(1)).permute(1, 2, 0).contiguous()

    def evaluate(self, values: Tensor, piece: slice) -> Tensor:
        """Real and imaginary part at some frequencies, ``(frequencies, 2, rows * channels)``."""
        return values[piece]

    def gradient(self, values: Tensor) -> Tensor:
        """In place of the values, piece by piece."""
        return values

    def gather(self, gradient: Tensor, values: Tensor, piece: slice) -> None:
        """It is there already."""

    def finish(self, gradient: Tensor) -> Tensor:
        """``(rows * channels, taps)``."""
        complex_ = torch.view_as_complex(gradient.permute(2, 0, 1).contiguous())
        whole = torch.fft.irfftn(complex_.unflatten(1, self.half), s=self.sizes, dim=self.axes)
        del complex_  # as large as all that follows
        return whole[(..., *map(slice, self.taps))].flatten(1).mul_(4)


class _KeptLags:
    """Lags between the frequencies: formed from all of them, and transformed back."""

    def __init__(self, plan: FourierPlan, transform: _Matrix | _FFT, dtype: torch.dtype, device: torch.device) -> None:
        angles = _angles(transform.waves, torch.tensor(plan.half_lags), transform.sizes)
        cosine, sine = angles.cos().to(device), angles.sin().to(device)
        self.sum, self.difference = (cosine + sine).to(dtype), (cosine - sine).to(dtype)  # (frequencies, lags)
        self.scale = (transform.counts / (2 * transform.points)).to(dtype)
        self.counts = torch.full((len(plan.half_lags),), 2.0, dtype=torch.float64, device=device)
        self.counts[0] = 1

    def residual(self, pieces: Sequence[slice], grams: Iterable[Tensor], target: Tensor) -> Tensor:
        """``Z_t - [t=0] a I``, ``(lags, groups, side, side)``, zero and one of each pair ``t, -t``."""
        lags: Tensor | None = None
        for piece, gram in zip(pieces, grams, strict=True):
            scaled = (gram * self.scale[piece, None, None, None]).flatten(1)
            of_piece = (self.difference[piece].mT @ scaled).view(-1, *gram.shape[1:])
            of_piece += (self.sum[piece].mT @ scaled).view(-1, *gram.shape[1:]).mT
            lags = of_piece if lags is None else lags.add_(of_piece)
        assert lags is not None
        lags[0].diagonal(dim1=-2, dim2=-1).sub_(target)
        return lags

    def loss(self, residual: Tensor) -> Tensor:
        return self.counts @ residual.square().sum((1, 2, 3)).double()

    def at(self, piece: slice, residual: Tensor) -> Tensor:
        """``Re + Im`` of the residual's transform at some frequencies."""
        others = residual[1:]
        result = self.difference[piece, 1:] @ others.flatten(1) + self.sum[piece, 1:] @ others.mT.flatten(1)
        return result.view(-1, *residual.shape[1:]) + residual[0]


def _angles(waves: Tensor, positions: Tensor, sizes: Sequence[int]) -> Tensor:
    """``(waves, positions)``, each reduced to one turn before it is rounded."""
    turns = (waves[:, None] * positions[None] % torch.tensor(sizes)).double() / torch.tensor(sizes)
    return turns.sum(-1) * (2 * pi)


def _smooth(size: int) -> int:
    """The next number without a prime factor above 5, which an FFT is fast at."""
    while True:
        rest = size
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 1


def _grid(sizes: Sequence[int]) -> Tensor:
    """All positions of a grid in row-major order, ``(positions, axes)``."""
    positions = torch.cartesian_prod(*(torch.arange(size, device="cpu") for size in sizes))
    return positions.reshape(-1, len(sizes))  # also of a single axis, whose product is 1-D


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched ``left @ right``; of matrices that are single numbers, or nearly so, without a BLAS."""
    if left.shape[-1] == 1:
        return left * right
    if left.shape[-2] * right.shape[-1] * left.shape[-1] < _FEWEST_PRODUCTS:
        return (left.unsqueeze(-1) * right.unsqueeze(-3)).sum(-2)
    return left @ right
