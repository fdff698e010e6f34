"""Singular values of a layer: all of them, the extreme ones, and what they say in a few numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..problem import check_choice
from .matrix import extreme_values, zero_padded_fits, zero_padded_values
from .operator import Gram, Ints, LayerOptions, Operator, Symbol, operator_of

PaddingMode = Literal["circular", "zeros"]

# Eigenvalues of a Gram matrix are squares: relative to the largest of all, one of 1e-8 still gives its root to 1e-11.
_SAFE_RATIO = 1e-8
# Multiplications of all Gram matrices: above it the computation takes more than some seconds.
_LONG = 5e9
# For the largest value alone: steps and vectors to guess where it is.
_POWER_STEPS = 5
_POWER_VECTORS = 8


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
    values of a block are roots of eigenvalues of its Gram matrix, which is interpolated from those of a few
    frequencies; a block of a float64 weight with values below 1e-4 of the largest is decomposed itself. Errors are
    below 1e-10 of the largest value; for other dtypes below 1e-7, which is what rounding the weight to float32 costs.
    The zero-padded layer has no such structure: its matrix is decomposed.
    """
    operator = operator_of(layer, **options)
    if _is_zeros(padding_mode):
        return zero_padded_values(operator, input_size)
    by_frequency = _by_frequency(operator, input_size, progress)
    values = by_frequency.flatten().sort(descending=True).values
    unseen = by_frequency[..., 0].numel() * operator.unseen_zeros
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
    work = prod(symbol.kernel.shape[:3]) * symbol.rows * len(frequencies.angles)
    long = work > _LONG if progress is None else progress
    gram = symbol.gram(len(frequencies.angles))
    threads = 1 if symbol.kernel.requires_grad else gram.threads
    pieces = gram.pieces(frequencies.angles, threads)
    results = in_threads(partial(block_values, gram), pieces, threads)
    parts = with_progress(results, long, "frequencies", len(pieces))
    return torch.cat([part.flatten(1) for part in parts])[frequencies.place]


def _is_zeros(padding_mode: PaddingMode) -> bool:
    check_choice("padding_mode", padding_mode, get_args(PaddingMode))
    return padding_mode == "zeros"


def block_values(gram: Gram, angles: Tensor) -> Tensor:
    """(F, groups, rows), ascending or descending."""
    symbol = gram.symbol
    if symbol.rows == 1:
        return torch.linalg.vector_norm(symbol.blocks(angles), dim=-1)
    if symbol.kernel.requires_grad:  # the root of an eigenvalue has no gradient at zero
        return torch.linalg.svdvals(symbol.blocks(angles))
    squares = torch.linalg.eigvalsh(gram.at(angles))
    values = squares.clamp(min=0).sqrt()
    if symbol.exact_zeros:
        size = squares[..., -1].clamp(min=gram.accurate_to)
        unsafe = (squares[..., 0] <= _SAFE_RATIO * size).any(-1)
        if unsafe.any():
            values[unsafe] = torch.linalg.svdvals(symbol.blocks(angles[unsafe]))
    return values


Item = TypeVar("Item")


def with_progress(items: Iterable[Item], show: bool, label: str, count: int) -> Iterator[Item]:
    """``items``, ``count`` of them, with a bar if there are several, tqdm is installed and stderr is a terminal."""
    if show and count > 1 and sys.stderr.isatty():
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            pass
        else:
            return iter(tqdm(items, desc=label, leave=False, total=count))
    return iter(items)


def in_threads(function: Callable[[Tensor], Tensor], pieces: Sequence[Tensor], threads: int) -> Iterator[Tensor]:
    """``function`` of every piece, in order, ``threads`` at a time; for what has no graph if that is more than one.

    LAPACK takes one matrix of a batch after the other, and its own threads only slow down matrices of these sizes.
    """
    if threads == 1 or len(pieces) == 1:
        yield from map(function, pieces)
        return
    before = torch.get_num_threads()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield from pool.map(function, pieces)
        finally:  # the workers have set what threads to come would start with
            torch.set_num_threads(before)


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

    For a circular layer exact to rounding, and faster than all values. Some power iteration on the Gram matrices of all
    frequencies, in float32, says where the largest may be. There it is computed in float64, and for the others a
    Cholesky decomposition of ``best^2 I - A A^H`` in float32 shows that they are below; those for which it fails are
    next. What is too near for float32 is computed in float64. A zero-padded layer too large for its matrix goes through
    the Lanczos method, to 1e-8, without a graph.
    """
    operator = operator_of(layer, **options)
    if _is_zeros(padding_mode):
        if zero_padded_fits(operator, input_size):
            return zero_padded_values(operator, input_size)[0]
        return extreme_values(operator, input_size)[0]
    symbol = operator.symbol()
    angles = operator.frequencies(input_size).angles
    norm, where = _largest(symbol, angles)
    return torch.linalg.matrix_norm(symbol.blocks(angles[where]), 2).amax() if symbol.kernel.requires_grad else norm


@torch.no_grad()
def _largest(symbol: Symbol, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Largest ``||A(θ)||`` among ``angles``, and the index of the frequency that has it, (1,)."""
    kernel = symbol.kernel.detach()
    # At least the largest norm: what is left is at most 1, and single precision can raise it to some powers.
    scale = (
        torch.linalg.vector_norm(kernel.reshape(*kernel.shape[:3], -1), dim=(0, 1, 2))
        .sum()
        .clamp(min=torch.finfo(kernel.dtype).tiny)
    )
    double = Symbol(kernel / scale, exact_zeros=False).gram(0)
    single = double.symbol.single().gram(len(angles))
    where, done = torch.zeros(1, dtype=torch.long, device=angles.device), 0
    best = torch.zeros((), dtype=kernel.dtype, device=angles.device)
    for piece in single.pieces(angles):
        if symbol.rows == 1:
            squares = block_values(double, piece).square().flatten(1).amax(1)
            square, index = squares.max(0, keepdim=True)
        else:
            square, index = _largest_square(double, single, piece, best)
        if square > best:
            best, where = square.squeeze(), done + index
        done += len(piece)
    return best.sqrt() * scale, where


def _largest_square(double: Gram, single: Gram, angles: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalue of the Gram matrices at ``angles`` and its index, (1,), if any exceeds ``best``; else that."""
    left = torch.arange(len(angles), device=angles.device)
    index = left[:1]
    grams = single.at(angles)
    likely = _likely_square(grams).amax(-1)
    # Tens of times the rounding errors.
    margin = 8 * (single.symbol.rows + 8) * torch.finfo(torch.float32).eps
    if best > 0:
        left = left[~_are_below(grams, left, best * (1 - margin), double.threads)]
    while len(left):
        first = left[likely[left].argmax(0, keepdim=True)]
        square = _largest_eigenvalues(double, angles[first]).squeeze()
        if square <= best:  # float32 cannot tell what is left from the best
            pieces = double.pieces(angles[left], double.threads)
            squares = in_threads(partial(_largest_eigenvalues, double), pieces, double.threads)
            square, place = torch.cat(list(squares)).max(0, keepdim=True)
            return (square.squeeze(), left[place]) if square > best else (best, index)
        best, index = square, first
        left = left[left != first]
        left = left[~_are_below(grams, left, best * (1 - margin), double.threads)]
    return best, index


def _largest_eigenvalues(gram: Gram, angles: Tensor) -> Tensor:
    """At each of ``angles``, of all groups: (F,)."""
    return torch.linalg.eigvalsh(gram.at(angles)).amax((1, 2))


def _are_below(grams: Tensor, chosen: Tensor, bound: Tensor, threads: int) -> Tensor:
    """Whether all eigenvalues of the ``chosen`` among ``grams`` (F, groups, r, r) are below ``bound``, one by one."""

    def are_below(part: Tensor) -> Tensor:
        gaps = -grams[part]
        gaps.diagonal(dim1=-2, dim2=-1).add_(bound.to(grams.real.dtype))
        return (torch.linalg.cholesky_ex(gaps).info == 0).all(-1)

    return torch.cat(list(in_threads(are_below, chosen.split(max(1, -(-len(chosen) // threads))), threads)))


def _likely_square(grams: Tensor) -> Tensor:
    """About the largest eigenvalue of each of ``grams`` (F, groups, r, r), of norm at most 1.

    That of ``V^H G V`` with ``V`` an orthonormal basis of what some steps of power iteration make of a fixed start.
    """
    generator = torch.Generator().manual_seed(0)
    width = min(_POWER_VECTORS, grams.shape[-1])
    start = torch.randn(grams.shape[-1], width, generator=generator, device="cpu").to(grams)
    vectors = start.expand(*grams.shape[:-1], width)
    for _ in range(_POWER_STEPS):
        vectors = grams @ vectors
    vectors = vectors / torch.linalg.vector_norm(vectors, dim=-2, keepdim=True).clamp(min=1e-30)
    overlap = vectors.mH @ vectors
    overlap.diagonal(dim1=-2, dim2=-1).add_(1e-6)
    lower = torch.linalg.cholesky_ex(overlap).L
    half = torch.linalg.solve_triangular(lower, vectors.mH @ (grams @ vectors), upper=False)
    inner = torch.linalg.solve_triangular(lower, half.mH, upper=False)
    return torch.linalg.eigvalsh(torch.nan_to_num(inner))[..., -1]


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
    lengths = torch.linalg.vector_norm(operator_of(layer, **options).filters, dim=1)
    return [int(index) for index in (lengths <= tolerance * lengths.max()).nonzero().flatten()]


def excess_by_frequency(layer: Tensor | nn.Module, input_size: Ints, **options: Unpack[LayerOptions]) -> Tensor:
    r"""How the loss above its least value is spread over frequencies: a map of the whole grid, ``(Q1..Qn)``.

    .. math:: e(w) = \lVert A(2πw/Q) A(2πw/Q)^H - I \rVert_F^2 - \text{least}

    Its mean is ``fused_orth_loss(weight) - least`` if ``Q`` is larger than twice the lags on every axis. Entry 0 is
    the constant input, the middle of an axis its highest frequency; with a graph to the weight.
    """
    values = values_by_frequency(layer, input_size, progress=False, **options)
    return (values.square() - 1).square().sum(-1)
