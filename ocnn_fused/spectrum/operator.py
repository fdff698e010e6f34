"""A layer as a linear operator and its symbol: the one place that knows how taps, strides and dilations meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, pi, prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack

from ..modules import is_convolution, is_layer, weight_of
from ..plan import axes_of, polyphase_channels
from ..problem import Problem, per_axis, problem_of

Ints = int | Sequence[int]

#: Bytes that the frequency blocks of one piece may take, with what is computed from them.
PIECE_BYTES = 1 << 28

#: Side from which on decomposing a matrix takes longer than handing it to a thread.
SIDE_FOR_THREADS = 48


class LayerOptions(TypedDict, total=False):
    """What a weight does not say about its layer; a module says it itself.

    ``stride``, ``dilation``, ``groups`` and ``output_padding`` are torch's. ``padding`` matters to the zero-padded
    operator alone: an int or one per axis, "same", "valid", or None for half of the dilated kernel. ``transposed`` is
    for the weight ``(in, out/groups, k1..kn)`` of a transposed convolution.
    """

    stride: Ints
    dilation: Ints
    groups: int
    padding: Ints | Literal["same", "valid"] | None
    transposed: bool
    output_padding: Ints


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The distinct ``angles`` (F, n) of a frequency grid, and which of them each point has: ``place`` (Q1..Qn)."""

    angles: Tensor
    place: Tensor


@dataclass(frozen=True, eq=False)
class Symbol:
    r"""``A(θ) = sum_m K'_m exp(i m·θ)`` with the polyphase kernel ``K'``, of which the shorter side is the rows.

    A circular layer is block diagonal in the Fourier basis, and its blocks are values of the symbol, up to unitary
    factors. ``kernel`` is ``(groups, rows, columns, m1..mn)`` in float64, or float32 for a first look.
    """

    kernel: Tensor
    exact_zeros: bool  # whether values near zero are wanted to float64's accuracy, and not to the weight's

    @property
    def degrees(self) -> tuple[int, ...]:
        """Per axis, the largest m."""
        return tuple(taps - 1 for taps in self.kernel.shape[3:])

    @property
    def rows(self) -> int:
        return self.kernel.shape[1]

    def blocks(self, angles: Tensor) -> Tensor:
        """``A(θ)`` of every group at float64 ``angles`` (F, n): (F, groups, rows, columns), complex unless constant."""
        if not any(self.degrees):
            return self.kernel.reshape(1, *self.kernel.shape[:3]).expand(len(angles), -1, -1, -1)
        phases = angles.new_zeros(len(angles), 1)
        for axis, count in enumerate(self.kernel.shape[3:]):
            tap = torch.arange(count, dtype=angles.dtype, device=angles.device)
            phases = (phases[:, :, None] + (angles[:, axis, None] * tap)[:, None]).flatten(1)
        taps = self.kernel.reshape(*self.kernel.shape[:3], -1).movedim(3, 0).flatten(1)
        blocks = torch.complex(phases.cos().to(taps.dtype) @ taps, phases.sin().to(taps.dtype) @ taps)
        return blocks.reshape(-1, *self.kernel.shape[:3])

    def single(self) -> Symbol:
        """In float32."""
        return Symbol(self.kernel.float(), exact_zeros=False)

    def gram(self, count: int) -> Gram:
        """Of the symbol, for being asked at about ``count`` angles."""
        points = grid(tuple(2 * degree + 1 for degree in self.degrees), (1,) * len(self.degrees), self.kernel.device)
        if len(points.angles) >= count or self.kernel.requires_grad or not any(self.degrees):
            return Gram(self, None)
        blocks = self.blocks(points.angles)
        return Gram(self, (points.angles, blocks @ blocks.mH))


@dataclass(frozen=True, eq=False)
class Gram:
    r"""``G(θ) = A(θ) A(θ)^H``, exact to rounding times its largest value over all θ.

    Its entries are trigonometric polynomials of degree ``n_j`` in ``θ_j``, twice the symbol's span. So ``samples``, the
    angles of a grid of ``N_j = 2 n_j + 1`` points and ``G`` there, say all, and every further value is their sum,

    .. math:: G(θ) = \sum_j D(θ - θ_j) G(θ_j), \qquad D(θ) = \prod_a \frac{1}{N_a} \sum_{|m| \le n_a} e^{i m θ_a},

    instead of a product of matrices. ``G(-θ)`` is the conjugate: half of the samples are kept.
    """

    symbol: Symbol
    samples: tuple[Tensor, Tensor] | None  # None where products are fewer, or a graph is wanted

    def at(self, angles: Tensor) -> Tensor:
        """(F, n) to (F, groups, rows, rows); real if the symbol is constant."""
        if self.samples is None:
            blocks = self.symbol.blocks(angles)
            return blocks @ blocks.mH
        points, values = self.samples
        plus, minus = self._kernel(angles[:, None] - points), self._kernel(angles[:, None] + points)
        minus = torch.where((points == 0).all(1), 0.0, minus)  # its own mirror image
        real = (plus + minus).to(values.real.dtype) @ values.real.flatten(1)
        imaginary = (plus - minus).to(values.real.dtype) @ values.imag.flatten(1)
        return torch.complex(real, imaginary).reshape(-1, *values.shape[1:])

    @cached_property
    def accurate_to(self) -> Tensor:
        """Rounding errors are as those of numbers of this size, 0-dim."""
        if self.samples is None:
            return self.symbol.kernel.new_zeros(())  # the errors of each matrix are relative to its own size
        return torch.linalg.matrix_norm(self.samples[1]).max()

    @property
    def threads(self) -> int:
        """How many should work on pieces of a batch."""
        worth = self.symbol.kernel.device.type == "cpu" and self.symbol.rows >= SIDE_FOR_THREADS
        return torch.get_num_threads() if worth else 1

    def pieces(self, angles: Tensor, threads: int = 1) -> list[Tensor]:
        """``angles`` in pieces, some for each of several threads; what is there at a time fits into PIECE_BYTES."""
        groups, rows, columns = self.symbol.kernel.shape[:3]
        widths = 3 * rows + (3 * columns if self.samples is None else 0)
        most = PIECE_BYTES // threads // (2 * self.symbol.kernel.itemsize * groups * rows * widths)
        evenly = len(angles) if threads == 1 else -(-len(angles) // (4 * threads))
        return list(angles.split(max(1, min(most, evenly))))

    def _kernel(self, angles: Tensor) -> Tensor:
        """``D`` of (..., n)."""
        product = torch.ones_like(angles[..., 0])
        for axis, degree in enumerate(self.symbol.degrees):
            multiples = torch.arange(1, degree + 1, dtype=angles.dtype, device=angles.device)
            product = product * (1 + 2 * (angles[..., axis, None] * multiples).cos().sum(-1)) / (2 * degree + 1)
        return product


@dataclass(frozen=True, eq=False)
class Operator:
    """A checked layer: weight and geometry of a convolution; transposed, its adjoint is meant."""

    weight: Tensor
    problem: Problem
    padding: tuple[tuple[int, int], ...]  # before and after, per axis
    transposed: bool
    output_padding: tuple[int, ...]

    @property
    def filters(self) -> Tensor:
        """Flattened weights of each output channel, groups together, ``(M, C/groups * k1 * .. * kn)``; no graph."""
        weight = self.weight.detach().double()
        if self.transposed:
            weight = weight.unflatten(0, (self.problem.groups, -1)).transpose(1, 2).flatten(0, 1)
        return weight.flatten(1)

    @property
    def unseen_zeros(self) -> int:
        """Singular values, per frequency, that are zero because no tap sees some pixels of the input."""
        rows, pixels = self.problem.rows, self.problem.channels * prod(self.problem.stride)
        return self.problem.groups * (min(rows, pixels) - min(rows, polyphase_channels(self.problem)))

    def symbol(self) -> Symbol:
        """With a graph to the weight. A residue's position within its pixel is a phase of its columns: left out."""
        if not self.weight.isfinite().all():
            raise ValueError("weight must be finite, got NaN or infinite entries")
        weight = self.weight.double() if self.weight.device.type != "mps" else self.weight.cpu().double()
        axes, groups, rows = axes_of(self.problem), self.problem.groups, self.problem.rows
        widths = [axis.class_taps(0) * axis.step - axis.taps for axis in reversed(axes)]
        padded = F.pad(weight, [width for pad in widths for width in (0, pad)]) if widths else weight
        split = [size for axis in axes for size in (axis.class_taps(0), axis.step)]
        phases = padded.reshape(groups, rows, weight.shape[1], *split)
        taps, residues = range(3, phases.dim(), 2), range(4, phases.dim(), 2)
        kernel = phases.permute(0, 1, 2, *residues, *taps)
        kernel = kernel.reshape(groups, rows, -1, *(axis.class_taps(0) for axis in axes))
        if kernel.shape[1] > kernel.shape[2]:
            kernel = kernel.transpose(1, 2)
        return Symbol(kernel, self.weight.dtype == torch.float64)

    def positions(self, input_size: Ints) -> tuple[int, ...]:
        """Output positions per axis of the circular convolution (input positions, if transposed)."""
        stride = self.problem.stride
        sizes = per_axis("input_size", input_size, len(stride), least=1)
        if self.transposed:
            return sizes
        if any(n % s for n, s in zip(sizes, stride, strict=True)):
            raise ValueError(
                f"input_size must be a multiple of the stride for a circular layer, got {sizes} with stride "
                f"{stride}; padding_mode='zeros' takes any size"
            )
        return tuple(n // s for n, s in zip(sizes, stride, strict=True))

    def frequencies(self, input_size: Ints) -> Frequencies:
        """Those at which the circular layer samples its symbol.

        A real kernel has ``A(-θ) = conj A(θ)``: one of the two is enough. What is left of the dilation multiplies the
        frequencies, and several of them may have the same angle; on an axis with one tap all do.
        """
        geometry = zip(axes_of(self.problem), self.problem.stride, self.problem.dilation, strict=True)
        factors = tuple(d // gcd(s, d) if axis.class_taps(0) > 1 else 0 for axis, s, d in geometry)
        return grid(self.positions(input_size), factors, self.weight.device)

    def zero_padded_sizes(self, input_size: Ints) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Input and output size of the convolution (whose adjoint the layer is, if transposed)."""
        problem = self.problem
        sizes = per_axis("input_size", input_size, len(problem.kernel), least=1)
        layer = problem.kernel, problem.stride, problem.dilation, self.padding, self.output_padding
        geometry = zip(sizes, *layer, strict=True)
        if self.transposed:
            larger = tuple(
                (n - 1) * s - before - after + d * (k - 1) + 1 + o for n, k, s, d, (before, after), o in geometry
            )
            pair = larger, sizes
        else:
            pair = sizes, tuple((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, s, d, p, _ in geometry)
        if min((1, *pair[0], *pair[1])) < 1:
            raise ValueError(
                f"input_size {sizes} is too small for a kernel of {problem.kernel} with padding {self.padding}"
            )
        return pair

    def split_groups(self) -> Iterator[Operator]:
        """The groups as layers of their own."""
        for weight in self.weight.chunk(self.problem.groups):
            yield replace(self, weight=weight, problem=self.problem._replace(shape=tuple(weight.shape), groups=1))


def grid(counts: tuple[int, ...], factors: tuple[int, ...], device: torch.device) -> Frequencies:
    """Angles ``2π w f / Q`` for all ``w`` of a grid of ``counts`` Q with ``factors`` f; of θ and -θ only one."""
    if not counts:
        only = torch.zeros((), dtype=torch.long, device=device)
        return Frequencies(torch.zeros(1, 0, dtype=torch.float64, device=device), only)
    sizes = torch.tensor(counts)
    index = torch.cartesian_prod(*(torch.arange(count) for count in counts)).reshape(-1, len(counts))
    index = index * torch.tensor(factors) % sizes
    steps = torch.tensor([prod(counts[axis + 1 :]) for axis in range(len(counts))])
    keys, place = torch.minimum(index @ steps, (-index % sizes) @ steps).unique(return_inverse=True)
    angles = 2 * pi * (keys[:, None] // steps % sizes).double() / sizes
    return Frequencies(angles.to(device), place.reshape(counts).to(device))


def operator_of(layer: Tensor | nn.Module, **options: Unpack[LayerOptions]) -> Operator:
    """The operator of a Linear, convolution or transposed convolution module, or of a weight with its options."""
    if isinstance(layer, nn.Module):
        if not is_layer(layer):
            raise TypeError(
                f"layer must be a Linear, convolution or transposed convolution, got {type(layer).__name__}"
            )
        if options:
            raise TypeError(
                f"a module says itself what its {', '.join(sorted(options))} is; pass its weight to change that"
            )
        weight = weight_of(layer)
        if is_convolution(layer):
            options = {name: getattr(layer, name) for name in LayerOptions.__annotations__}  # type: ignore[assignment]
    elif isinstance(layer, Tensor):
        weight = layer
    else:
        raise TypeError(f"layer must be a weight or a module, got {type(layer).__name__}")
    if not weight.is_floating_point():
        raise ValueError(f"weight must be a floating tensor (M, C/groups, k1..kn), got {weight.dtype}")
    stride, dilation = options.get("stride", 1), options.get("dilation", 1)
    problem = problem_of(weight.shape, stride, dilation, options.get("groups", 1), None)
    axes = len(problem.kernel)
    extents = [d * (k - 1) for k, d in zip(problem.kernel, problem.dilation, strict=True)]
    padding = options.get("padding")
    if padding == "same":
        pairs = [(extent // 2, extent - extent // 2) for extent in extents]
    elif padding is None or isinstance(padding, str):
        pairs = [(0, 0) if padding == "valid" else (extent // 2, extent // 2) for extent in extents]
    else:
        pairs = [(p, p) for p in per_axis("padding", padding, axes, least=0)]
    output_padding = per_axis("output_padding", options.get("output_padding", 0), axes, least=0)
    return Operator(weight, problem, tuple(pairs), options.get("transposed", False), output_padding)
