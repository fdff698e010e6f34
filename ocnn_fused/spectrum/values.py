"""Singular values of a layer: all of them, the extreme ones, and what they say in a few numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .matrix import extreme_values, zero_padded_fits, zero_padded_values
from .operator import Ints, LayerOptions, Operator, Symbol, operator_of

PaddingMode = Literal["circular", "zeros"]

# Eigenvalues of a Gram matrix are squares: relative to the largest, one of 1e-8 still gives its root to 1e-11.
_SAFE_RATIO = 1e-8
# Multiplications of all Gram matrices: above it the computation takes more than some seconds.
_LONG = 5e9
# For the largest value alone: steps to guess where it is, and blocks that are decomposed at a time.
_POWER_STEPS = 8
_DECOMPOSED = 4


def singular_values(
    layer: Tensor | nn.Module,
    input_size: Ints,
    *,
    padding_mode: PaddingMode = "circular",
    progress: bool | None = None,
    **options: Unpack[LayerOptions],
) -> Tensor:
    r"""All singular values of a layer as the matrix that maps its flattened input to its flattened output.

    Args:
        layer: a weight ``(M, C/groups, k1..kn)`` (of a transposed convolution ``(C, M/groups, k1..kn)``) with its
            options, see :class:`LayerOptions`, or a module.
        input_size: spatial size ``(n1..nn)`` of the layer's input, or one int for all axes.
        padding_mode: "circular", where the output has ``n/stride`` positions per axis, or "zeros", any size.
        progress: whether to show a bar (with tqdm); None shows one on a terminal when it takes long.

    Returns:
        float64, descending, ``min(M * positions, C * pixels)`` of them. With a graph to the weight if that asks for
        gradients; under ``torch.no_grad()`` it is several times faster.

    A circular layer is block diagonal in the Fourier basis: with ``Q = n/stride`` positions per axis its values are

    .. math:: \bigcup_{w} \sigma(A(2πw/Q)), \qquad A(θ) = \sum_m K'_m e^{i m·θ},

    where ``K'`` is the polyphase kernel. Frequencies ``w`` and ``-w`` have the same values and are computed once. The
    values of a block are roots of eigenvalues of its Gram matrix; a block of a float64 weight with values below 1e-4
    of its largest is decomposed itself. Errors are below 1e-10 of the largest value; for other dtypes below 1e-7, which
    is what rounding the weight to float32 costs. The zero-padded layer has no such structure: its matrix is decomposed.
    """
    operator = operator_of(layer, **options)
    if _is_zeros(padding_mode):
        return zero_padded_values(operator, input_size)
    by_frequency = _by_frequency(operator, input_size, progress)
    values = by_frequency.flatten().sort(descending=True).values
    unseen = by_frequency[..., 0].numel() * operator.groups * operator.unseen_zeros
    return torch.cat([values, values.new_zeros(unseen)])


def values_by_frequency(
    layer: Tensor | nn.Module, input_size: Ints, *, progress: bool | None = None, **options: Unpack[LayerOptions]
) -> Tensor:
    """Singular values of the circular layer at each frequency: ``(Q1..Qn, V)``, in no order along ``V``.

    ``Q`` are the output positions (transposed: the input's) and ``V`` is ``groups * min(M/groups, C')``. Entry 0 of an
    axis is the constant input, its middle the highest frequency. Zeros of pixels that no tap sees are left out.
    """
    return _by_frequency(operator_of(layer, **options), input_size, progress)


def _by_frequency(operator: Operator, input_size: Ints, progress: bool | None) -> Tensor:
    frequencies = operator.frequencies(input_size)
    symbol = operator.symbol()
    pieces = symbol.pieces(frequencies.angles)
    work = prod(symbol.kernel.shape[:3]) * symbol.rows * len(frequencies.angles)
    long = work > _LONG if progress is None else progress
    parts = [block_values(symbol, angles).flatten(1) for angles in with_progress(pieces, long, "frequencies")]
    return torch.cat(parts)[frequencies.place]


def _is_zeros(padding_mode: PaddingMode) -> bool:
    if padding_mode not in ("circular", "zeros"):
        raise ValueError(f"padding_mode must be 'circular' or 'zeros', got {padding_mode!r}")
    return padding_mode == "zeros"


def block_values(symbol: Symbol, angles: Tensor) -> Tensor:
    """(F, groups, rows), ascending or descending."""
    blocks = symbol.blocks(angles)
    if symbol.rows == 1:
        return torch.linalg.vector_norm(blocks, dim=-1)
    if blocks.requires_grad:  # the root of an eigenvalue has no gradient at zero
        return torch.linalg.svdvals(blocks)
    squares = torch.linalg.eigvalsh(blocks @ blocks.mH)
    values = squares.clamp(min=0).sqrt()
    if symbol.exact_zeros:
        unsafe = squares[..., 0] <= _SAFE_RATIO * squares[..., -1]
        if unsafe.any():
            values[unsafe] = torch.linalg.svdvals(blocks[unsafe])
    return values


Item = TypeVar("Item")


def with_progress(items: Sequence[Item], show: bool, label: str) -> Iterator[Item]:
    """``items``, with a bar if there are several, tqdm is installed and stderr is a terminal."""
    if show and len(items) > 1 and sys.stderr.isatty():
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            pass
        else:
            return iter(tqdm(items, desc=label, leave=False))
    return iter(items)


# ----------------------------------------------------------------------------------------------------------------------
# The largest value alone
# ----------------------------------------------------------------------------------------------------------------------


def spectral_norm(
    layer: Tensor | nn.Module,
    input_size: Ints,
    *,
    padding_mode: PaddingMode = "circular",
    **options: Unpack[LayerOptions],
) -> Tensor:
    """The largest singular value, 0-dim, float64, with a graph to the weight; arguments as in :func:`singular_values`.

    For a circular layer exact to rounding, and faster than all values. Power iteration on the Gram matrices of all
    frequencies says where the largest may be; a few blocks are decomposed, and for the others a Cholesky decomposition
    of ``best^2 I - A A^H`` shows that they are below. Those for which it fails are next. A zero-padded layer too large
    for its matrix goes through the Lanczos method, to 1e-8, without a graph.
    """
    operator = operator_of(layer, **options)
    if _is_zeros(padding_mode):
        if zero_padded_fits(operator, input_size):
            return zero_padded_values(operator, input_size)[0]
        return extreme_values(operator, input_size)[0]
    symbol = operator.symbol()
    kernel = symbol.kernel.detach()
    # Of a size that single precision can square.
    detached = Symbol(kernel / kernel.abs().max().clamp(min=torch.finfo(kernel.dtype).tiny), symbol.exact_zeros)
    angles = operator.frequencies(input_size).angles
    best, where = 0.0, angles[:1]
    for piece in detached.pieces(angles):
        best, index = _largest(detached, piece, best)
        if index >= 0:
            where = piece[index : index + 1]
    return torch.linalg.matrix_norm(symbol.blocks(where), 2).amax()


def _largest(symbol: Symbol, angles: Tensor, best: float) -> tuple[float, int]:
    """Largest ``||A(θ)||`` among ``angles`` and its index; ``best`` and -1 if none exceeds that."""
    index = -1
    left = torch.arange(len(angles), device=angles.device)
    single = Symbol(symbol.kernel.float(), exact_zeros=False).blocks(angles.float())
    gram = single @ single.mH
    likely = _power_iteration(gram).amax(-1)
    while len(left):
        order = likely[left].argsort(descending=True)
        first, left = left[order[:_DECOMPOSED]], left[order[_DECOMPOSED:]]
        blocks = symbol.blocks(angles[first])
        squares = torch.linalg.eigvalsh(blocks @ blocks.mH)[..., -1].amax(-1)
        norm = float(squares.max().clamp(min=0).sqrt())
        if norm > best:
            best, index = norm, int(first[squares.argmax()])
        # Below best, with a margin of tens of times the rounding errors of single precision.
        below = best**2 * (1 - 8 * symbol.rows * torch.finfo(torch.float32).eps)
        gaps = -gram[left]
        gaps.diagonal(dim1=-2, dim2=-1).add_(below)
        left = left[(torch.linalg.cholesky_ex(gaps).info != 0).any(-1)]
    return best, index


def _power_iteration(gram: Tensor) -> Tensor:
    """About the largest eigenvalue of each of ``gram`` (F, groups, r, r); from a fixed start."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(gram.shape[-1], 2, generator=generator, device="cpu").to(gram)
    vectors = start.expand(*gram.shape[:-1], 2)
    for _ in range(_POWER_STEPS):
        vectors = gram @ vectors
        vectors = vectors / torch.linalg.vector_norm(vectors, dim=-2, keepdim=True).clamp(min=1e-30)
    return torch.linalg.vector_norm(gram @ vectors, dim=-2).amax(-1)


# ----------------------------------------------------------------------------------------------------------------------
# In a few numbers
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A spectrum in a few 0-dim tensors, with a graph to the weight except for ``near_one``."""

    largest: Tensor
    smallest: Tensor
    median: Tensor
    near_one: Tensor  # share of the values within 10% of 1
    effective_rank: Tensor  # exp of the entropy of s / sum(s)

    def as_floats(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}


def summary(values: Tensor) -> Summary:
    """Of the singular values ``(V,)``, in any order."""
    shares = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny)
    near = (values.detach() - 1).abs() <= 0.1
    entropy = -torch.xlogy(shares, shares.clamp(min=torch.finfo(values.dtype).tiny)).sum()
    return Summary(values.amax(), values.amin(), values.median(), near.double().mean(), entropy.exp())


def condition_number(
    layer: Tensor | nn.Module,
    input_size: Ints,
    *,
    padding_mode: PaddingMode = "circular",
    **options: Unpack[LayerOptions],
) -> Tensor:
    """Largest over smallest singular value, 0-dim; infinite where the smallest is zero, NaN for a layer of zeros."""
    if _is_zeros(padding_mode):
        operator = operator_of(layer, **options)
        if not zero_padded_fits(operator, input_size):
            largest, smallest = extreme_values(operator, input_size)
            return largest / smallest
    values = singular_values(layer, input_size, padding_mode=padding_mode, **options)
    return values[0] / values[-1]


def dead_filters(layer: Tensor | nn.Module, tolerance: float = 1e-3, **options: Unpack[LayerOptions]) -> list[int]:
    """Indices of the filters whose length ``||K_i||`` is at most ``tolerance`` times that of the longest.

    Filters make outputs: for a transposed convolution they are counted along the output channels of all groups.
    """
    operator = operator_of(layer, **options)
    weight = operator.weight.detach()
    if operator.transposed:
        weight = weight.unflatten(0, (operator.groups, -1)).transpose(1, 2).flatten(0, 1)
    lengths = torch.linalg.vector_norm(weight.double().flatten(1), dim=1)
    return [int(index) for index in (lengths <= tolerance * lengths.max()).nonzero().flatten()]


def excess_by_frequency(layer: Tensor | nn.Module, input_size: Ints, **options: Unpack[LayerOptions]) -> Tensor:
    r"""How the loss above its least value is spread over frequencies: a map of the whole grid, ``(Q1..Qn)``.

    .. math:: e(w) = \lVert A(2πw/Q) A(2πw/Q)^H - I \rVert_F^2 - \text{least}

    Its mean is ``fused_orth_loss(weight) - least`` if ``Q`` is larger than twice the lags on every axis. Entry 0 is
    the constant input, the middle of an axis its highest frequency; with a graph to the weight.
    """
    values = values_by_frequency(layer, input_size, progress=False, **options)
    return (values.square() - 1).square().sum(-1)
