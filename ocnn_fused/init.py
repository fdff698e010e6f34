"""Exact starts: convolutions that are orthogonal before the first step, to rounding.

In the polyphase view a convolution is a matrix ``A(z)`` of polynomials, M filters by ``C' = C * prod(min(s, k))``
channels: each input channel and each residue of the step ``s`` is a channel of its own. It is orthogonal if
``A(z) A(1/z)^T = I`` or, with more filters than channels, ``A(1/z)^T A(z) = I``. A constant orthogonal matrix is one,
and so is its product with factors ``P + (I - P) z`` for projections ``P``, each of which adds a tap along one axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from . import modules
from .functional import check_weight
from .plan import axes_of, has_orthogonal, polyphase_channels
from .problem import IntOrTuple, Problem, check_choice, problem_of
from .regularizer.selection import chosen_layers
from .regularizer.settings import Selector

__all__ = ["init_model_", "orthogonal_"]

Support = Literal["delta", "full"]


@torch.no_grad()
def orthogonal_(
    weight: Tensor,
    stride: IntOrTuple = 1,
    *,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    transposed: bool = False,
    support: Support = "delta",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``weight`` with a random orthogonal convolution, in place, and return it.

    Every singular value of the convolution on a periodic image is 1, and the loss is at its least: zero, or M - C' per
    group with more filters than polyphase channels. Drawn in float64 and rounded once.

    Args:
        weight: ``(M, C/groups, k1..kn)``, n from 0 (Linear) to 3 (Conv3d).
        stride, dilation, groups: of the layer.
        transposed: the weight is that of a transposed convolution, ``(in, out/groups, k1..kn)``: the adjoint of the
            convolution with the same weight, so that the same kernels serve.
        support: "delta" puts a random orthogonal matrix on one block of ``min(step, k)`` taps per axis, near the middle
            and aligned to the stride; at stride 1 this is the single tap of :func:`torch.nn.init.dirac_`. "full" goes
            on to fill every tap with products of random projections along each axis.
        generator: of the random numbers; without one torch's own on the CPU is used, whatever the weight's device.

    Raises:
        ValueError: no such convolution exists. That is so where a group has more filters than ``C * prod(min(s, k))``,
            with the step ``s = stride / gcd(stride, dilation)``, and some input pixels are skipped (a step below the
            stride, or a kernel shorter than the step). Support "full" also needs room for the factors: a group of one
            input channel has none at stride 1, since a single filter that is orthogonal to its own shifts is one tap.
    """
    check_weight(weight)
    check_choice("support", support, get_args(Support))
    problem = problem_of(weight.shape, stride, dilation, groups, None)
    return weight.copy_(_orthogonal(problem, transposed, support, generator))


@torch.no_grad()
def init_model_(
    model: nn.Module,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    preset: Literal["paper-resnet"] | None = None,
    support: Support = "delta",
    generator: torch.Generator | None = None,
) -> list[str]:
    """Fill the weights of a model's layers by :func:`orthogonal_`, in place, and return the layers' names.

    ``include``, ``exclude`` and ``preset`` choose layers as they do for :class:`OrthRegularizer`: by default every
    convolution with more than 3 input channels. If any of them cannot be orthogonal, or has a weight that is computed
    from others, spread over devices or not there yet (lazy, meta), nothing is changed and the error names it.
    """
    filled: list[tuple[str, Tensor, Tensor]] = []
    for layer in chosen_layers(model, include, exclude, preset):
        weight = modules.weight_of(layer.module)
        if not modules.is_plain(weight):
            raise ValueError(f"{layer.name}: its weight is computed or spread over devices; fill it before that")
        transposed = bool(getattr(layer.module, "transposed", False))
        try:
            filled.append((layer.name, weight, _orthogonal(layer.problem, transposed, support, generator)))
        except ValueError as error:
            raise ValueError(f"{layer.name}: {error}") from None
    for _, weight, values in filled:
        weight.copy_(values)
    return [name for name, _, _ in filled]


# ----------------------------------------------------------------------------------------------------------------------
# Construction
# ----------------------------------------------------------------------------------------------------------------------


def _orthogonal(problem: Problem, transposed: bool, support: Support, generator: torch.Generator | None) -> Tensor:
    """The weight in float64."""
    check_exists(problem, transposed)
    layout = _Layout.of(problem)
    orders = _orders(problem, layout) if support == "full" else None
    groups = [
        _delta(problem, layout, generator) if orders is None else _full(problem, layout, orders, generator)
        for _ in range(problem.groups)
    ]
    return torch.cat(groups)


def check_exists(problem: Problem, transposed: bool = False) -> None:
    """Orthonormal rows need ``M <= C'``; orthonormal columns need every input pixel to be seen."""
    if has_orthogonal(problem):
        return
    channels = polyphase_channels(problem)
    filters, inputs = ("input", "output") if transposed else ("output", "input")
    raise ValueError(
        f"no orthogonal convolution has weight {tuple(problem.shape)} with stride {problem.stride}, dilation "
        f"{problem.dilation} and groups {problem.groups}: per group its {problem.rows} {filters} channels are more "
        f"than the {channels} {inputs} channels times taps that do not meet, and some pixels are skipped"
    )


@dataclass(frozen=True)
class _Layout:
    """The polyphase channels of a group: ``(residue, c)``, and along each axis which residues have a tap more."""

    residues: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]  # never longer than the kernel
    counts: tuple[int, ...]  # taps that all residues have, per axis
    longer: tuple[int, ...]  # residues below this one have one more

    @classmethod
    def of(cls, problem: Problem) -> _Layout:
        steps = tuple(axis.residues for axis in axes_of(problem))
        residues = tuple(itertools.product(*map(range, steps)))
        counts = tuple(k // s for k, s in zip(problem.kernel, steps, strict=True))
        return cls(residues, steps, counts, tuple(k % s for k, s in zip(problem.kernel, steps, strict=True)))

    def is_longer(self, residue: Sequence[int]) -> tuple[bool, ...]:
        return tuple(r < below for r, below in zip(residue, self.longer, strict=True))


def _delta(problem: Problem, layout: _Layout, generator: torch.Generator | None) -> Tensor:
    matrix = _random_orthogonal(problem.rows, polyphase_channels(problem), generator)
    weight = matrix.new_zeros(problem.rows, *problem.shape[1:])
    block = tuple(slice(n // 2 * s, (n // 2 + 1) * s) for n, s in zip(layout.counts, layout.steps, strict=True))
    place = (slice(None), slice(None), *block)
    weight[place] = matrix.reshape(weight[place].shape)
    return weight


#: For each axis in turn, the channels that one factor mixes: by group of indices.
_Classes = list[tuple[int, list[list[int]]]]


@dataclass(frozen=True)
class _Orders:
    """What the factors of "full" act on: the polyphase channels, and virtual ones, whose columns are left out."""

    channels: int  # with the virtual ones
    last: _Classes  # of the factors that add the last tap of the longer residues


def _orders(problem: Problem, layout: _Layout) -> _Orders:
    """An order of the axes in which no factor acts on a single channel, which it could only delay.

    The factor that adds the last tap of an axis mixes only channels that have that tap and agree on the axes that come
    before: what it has mixed must not be delayed along an axis on which a channel has no tap left. With more filters
    than channels there are M - C' virtual channels; they join whatever class has one channel alone.
    """
    channels = [residue for residue in layout.residues for _ in range(problem.channels)]
    spare = max(0, problem.rows - len(channels))
    if len(channels) + spare > 1 or all(n == 1 for n in layout.counts):
        for order in itertools.permutations(axis for axis, below in enumerate(layout.longer) if below):
            patterns = [layout.is_longer(residue) for residue in channels]
            for _ in range(spare):
                alone = (patterns[c[0]] for _, classes in _last(order, patterns) for c in classes if len(c) == 1)
                patterns.append(next(alone, (False,) * len(layout.steps)))
            last = _last(order, patterns)
            if all(len(members) > 1 for _, classes in last for members in classes):
                return _Orders(len(patterns), last)
    raise ValueError(
        f"support='full' cannot use every tap of weight {tuple(problem.shape)} with stride {problem.stride} and groups "
        f"{problem.groups}: where a single channel of a group reaches a tap, orthogonality to shifts forces a zero; "
        "use support='delta'"
    )


def _last(order: Sequence[int], patterns: Sequence[tuple[bool, ...]]) -> _Classes:
    result: _Classes = []
    for place, axis in enumerate(order):
        classes: dict[tuple[bool, ...], list[int]] = {}
        for index, pattern in enumerate(patterns):
            if pattern[axis]:
                classes.setdefault(tuple(pattern[before] for before in order[:place]), []).append(index)
        result.append((axis, list(classes.values())))
    return result


def _full(problem: Problem, layout: _Layout, orders: _Orders, generator: torch.Generator | None) -> Tensor:
    size, axes = orders.channels, len(layout.steps)
    kernel = _random_orthogonal(problem.rows, size, generator).reshape(problem.rows, size, *(1,) * axes)
    for axis, classes in _factors(layout, orders):
        projection = torch.eye(size, dtype=kernel.dtype, device=kernel.device)
        for members in classes:
            basis = _random_orthogonal(len(members), len(members) // 2, generator)
            projection[torch.tensor(members)[:, None], torch.tensor(members)] = basis @ basis.T
        kept = torch.einsum("mc...,cd->md...", kernel, projection)
        kernel = _padded(kept, axis, 0, 1) + _padded(kernel - kept, axis, 1, 0)
    weight = kernel.new_zeros(problem.rows, *problem.shape[1:])
    for index, residue in enumerate(layout.residues):
        taps = tuple(slice(r, None, s) for r, s in zip(residue, layout.steps, strict=True))
        channels = slice(index * problem.channels, (index + 1) * problem.channels)
        kept_taps = tuple(slice(n) for n in weight[0, 0][taps].shape)
        weight[(slice(None), slice(None), *taps)] = kernel[(slice(None), channels, *kept_taps)]
    return weight


def _factors(layout: _Layout, orders: _Orders) -> Iterator[tuple[int, list[list[int]]]]:
    """Axis and channels mixed, from left to right: first those that act on all, last those of the longer residues."""
    everything = [list(range(orders.channels))]
    for axis, count in enumerate(layout.counts):
        yield from itertools.repeat((axis, everything), count - 1)
    yield from orders.last


def _padded(kernel: Tensor, axis: int, before: int, after: int) -> Tensor:
    """With taps of zeros along one spatial axis."""
    behind = kernel.dim() - 3 - axis
    return torch.nn.functional.pad(kernel, (0, 0) * behind + (before, after))


def _random_orthogonal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """Orthonormal rows, or columns where there are more rows; uniformly distributed."""
    device = torch.device("cpu") if generator is None else generator.device
    normal = torch.randn(
        max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64, device=device
    )
    q, r = torch.linalg.qr(normal)
    q = q * r.diagonal().sign()
    return q if rows >= columns else q.T
