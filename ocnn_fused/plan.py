"""Exact plans: how the orthogonality loss of one weight is computed, as a bilinear algorithm over the rationals.

A plan says which linear combinations of the kernel's taps to form (*evaluate*), which pairs of them to multiply
(*gram*), how to combine the products into the lags of the self-convolution (*mix*), and, by transposing all of that,
how to get the gradient (*apply*, *gather*). Backends only execute it. Everything here is plain Python over
``fractions.Fraction``: a plan can be proven correct without a floating-point number.

Notation, per group: weight ``K[M, C, k1..kn]``; along an axis with stride ``S`` and dilation ``D`` two placements of a
filter meet only at tap differences that are multiples of the *step* ``s = S / gcd(S, D)``; ``t`` counts those steps::

    Z_t[i, j] = sum_c sum_{u - v = t*s} K[i, c, u] K[j, c, v]      |t| <= T = (k - 1) // s
    L         = sum_t || Z_t - [t = 0] I ||_F^2
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, reduce
from math import gcd, lcm, prod
from typing import Any, Literal, NamedTuple, TypeVar

from . import problem as problems
from .problem import OFF_DIAGONAL, Problem

Side = Literal["row", "column"]
Algorithm = Literal["toom", "direct", "fourier"]
Matrix = tuple[tuple[Fraction, ...], ...]
_Number = TypeVar("_Number", Fraction, float)

#: Longest 1-D class evaluated at points; beyond it the interpolation is too ill-conditioned for float32.
MAX_TOOM_TAPS = 5

# One point of each reciprocal pair p:q <-> q:p, found by search for an interpolation that amplifies rounding least. The
# point 1:1, which is its own reciprocal, always comes first.
_POINTS: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((-5, 2),),
    3: ((-3, 2), (6, 1)),
    4: ((-3, 2), (4, 1)),
    5: ((-6, 1), (-4, 3), (2, 1)),
}

# Real points alone amplify rounding 9 times for four taps on two axes, 45 times for five. The points i and -i in place
# of one pair cost one product more per axis and leave 2 and 4 times.
_IMAGINARY = {4, 5}


# ----------------------------------------------------------------------------------------------------------------------
# One-dimensional bilinear schemes
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A bilinear algorithm for all lags of one class of taps.

    With planes ``V = evaluation @ K`` and outputs ``X_o = sum_{(l, r, o) in products} V_l V_r^T``, lag ``t`` (counted
    from ``-lags``) is ``Z_t = sum_o mix[t][o] X_o``. ``partner[o]`` is the output with ``X_partner = X_o^T``.
    """

    evaluation: Matrix
    products: tuple[tuple[int, int, int], ...]
    mix: Matrix
    partner: tuple[int, ...]


def _solve(matrix: Sequence[Sequence[Fraction]], right: Sequence[Sequence[Fraction]]) -> list[list[Fraction]]:
    """Exact ``x`` with ``matrix @ x == right``, by Gauss-Jordan elimination."""
    size = len(matrix)
    work = [[*row, *values] for row, values in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = next(row for row in range(column, size) if work[row][column])
        work[column], work[pivot] = work[pivot], work[column]
        scale = work[column][column]
        work[column] = [value / scale for value in work[column]]
        for row in range(size):
            factor = work[row][column]
            if row != column and factor:
                work[row] = [a - factor * b for a, b in zip(work[row], work[column], strict=True)]
    return [row[size:] for row in work]


def _imaginary_rows(taps: int) -> list[list[int]]:
    """Three rows whose products give ``Z(i) = b b^T + c c^T + i (c b^T - b c^T)``, with ``a(i) = b + i c``.

    The first two mirror each other, the third is minus its own mirror image. Counted from the middle, ``b`` is even and
    ``c`` odd for an odd number of taps: ``(b + c) (b - c)^T`` has the antisymmetric part wanted and the symmetric part
    ``b b^T - c c^T``, to which ``c c^T`` adds the rest. For an even number ``c`` is minus the mirror image of ``b``,
    and ``b c^T`` and ``(b + c) (b + c)^T`` do the same.
    """
    real = (1, 0, -1, 0)
    b = [real[(m - taps // 2) % 4] for m in range(taps)]
    c = [real[(m - taps // 2 - 1) % 4] for m in range(taps)]
    total = [x + y for x, y in zip(b, c, strict=True)]
    first, third = (total, c) if taps % 2 else (b, total)
    return [first, first[::-1], third]


@cache
def toom_scheme(taps: int) -> Scheme:
    """Reciprocal Toom-Cook: one product per point, ``2*taps - 1`` of them, closed under ``p:q <-> q:p``.

    ``Z(x) = a(x) a(1/x)^T`` at the point ``p:q`` is ``a(p:q) a(q:p)^T``, so the product at ``q:p`` is a transpose.
    Where it helps, ``i`` and ``-i`` take the place of a pair, with three products. Rows come as one that is its own
    mirror image, pairs of mirror images, and the third row of ``i``, which is minus its own.
    """
    points = [(1, 1)]
    for p, q in _POINTS.get(taps, ()):
        points += [(p, q), (q, p)]
    rows = [[p**m * q ** (taps - 1 - m) for m in range(taps)] for p, q in points]
    rows += _imaginary_rows(taps) if taps in _IMAGINARY else []
    partner = [0]
    for first in range(1, len(rows), 2):
        partner += [first + 1, first] if first + 1 < len(rows) else [first]
    evaluation = []
    for row in rows:
        # The power of two nearest below the largest: dividing by it changes no significand, so it costs no accuracy.
        scale = 1 << (max(map(abs, row)).bit_length() - 1)
        evaluation.append(tuple(Fraction(value, scale) for value in row))
    return Scheme(
        evaluation=tuple(evaluation),
        products=tuple((o, partner[o], o) for o in range(len(rows))),
        mix=_mix_of([(evaluation[o], evaluation[partner[o]]) for o in range(len(rows))]),
        partner=tuple(partner),
    )


def _mix_of(products: Sequence[tuple[Sequence[Fraction], Sequence[Fraction]]]) -> Matrix:
    """The mix that makes lags of products of ``left`` and ``right`` combinations of taps: ``(lags, products)``.

    It solves ``sum_o mix[t][o] left_o[u] right_o[v] = [u - v = t]`` for all taps ``u, v``, by normal equations, which
    are exact here.
    """
    taps = len(products[0][0])
    # Whole numbers, which are multiplied far more quickly than fractions: each form times its common denominator.
    scales = [lcm(*(value.denominator for value in (*left, *right))) ** 2 for left, right in products]
    forms = [
        [int(scale * a * b) for a in left for b in right] for scale, (left, right) in zip(scales, products, strict=True)
    ]
    lags = [[int(u - v == t) for u in range(taps) for v in range(taps)] for t in range(-(taps - 1), taps)]
    normal, right = ([[Fraction(_dot(form, other)) for other in others] for form in forms] for others in (forms, lags))
    mixed = [[scale * value for value in row] for scale, row in zip(scales, _solve(normal, right), strict=True)]
    return tuple(zip(*mixed, strict=True))


def _dot(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(first, second, strict=True))


@cache
def direct_scheme(taps: int) -> Scheme:
    """One product per pair of taps; the outputs are the lags themselves, so there is nothing to interpolate."""
    outputs = 2 * taps - 1
    return Scheme(
        evaluation=_identity(taps),
        products=tuple((u, v, u - v + taps - 1) for u in range(taps) for v in range(taps)),
        mix=_identity(outputs),
        partner=tuple(reversed(range(outputs))),
    )


def _identity(size: int) -> Matrix:
    zero, one = Fraction(0), Fraction(1)
    return tuple((zero,) * i + (one,) + (zero,) * (size - 1 - i) for i in range(size))


def _kronecker(left: Matrix, right: Matrix) -> Matrix:
    """Exact. The right matrix is multiplied once by each distinct entry of the left one, of which there are few."""
    scaled: dict[tuple[int, int], Matrix] = {}  # by numerator and denominator, whose hash is found far more quickly
    product: list[tuple[Fraction, ...]] = []
    for row in left:
        blocks = []
        for a in row:
            key = a.as_integer_ratio()
            if key not in scaled:
                scaled[key] = tuple(tuple(a * b for b in others) for others in right) if a else _zeros(right)
            blocks.append(scaled[key])
        product += (tuple(itertools.chain(*pieces)) for pieces in zip(*blocks, strict=True))
    return tuple(product)


def _zeros(like: Matrix) -> Matrix:
    return ((Fraction(0),) * len(like[0]),) * len(like)


class Grid(NamedTuple):
    """Planes, products and outputs of several axes together, each numbered in row-major order of those of the axes."""

    planes: int
    products: tuple[tuple[int, int, int], ...]
    partner: tuple[int, ...]


def _grid(schemes: Sequence[Scheme]) -> Grid:
    grid = Grid(1, ((0, 0, 0),), (0,))  # no spatial axis
    for scheme in schemes:
        planes, outputs = len(scheme.evaluation), len(scheme.partner)
        grid = Grid(
            grid.planes * planes,
            tuple(
                (l1 * planes + l2, r1 * planes + r2, o1 * outputs + o2)
                for l1, r1, o1 in grid.products
                for l2, r2, o2 in scheme.products
            ),
            tuple(p1 * outputs + p2 for p1 in grid.partner for p2 in scheme.partner),
        )
    return grid


# ----------------------------------------------------------------------------------------------------------------------
# Geometry: kernel, stride, dilation and padding reduced to taps, step and lags
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One spatial axis after reduction: ``taps`` kernel taps, tap difference ``step`` per lag, lags ``-lags..lags``."""

    taps: int
    step: int
    lags: int

    @property
    def all_lags(self) -> int:
        return (self.taps - 1) // self.step

    @property
    def residues(self) -> int:
        return min(self.step, self.taps)

    def class_taps(self, residue: int) -> int:
        """Number of taps ``u`` with ``u % step == residue``."""
        return (self.taps - 1 - residue) // self.step + 1


def reduce_axis(kernel: int, stride: int = 1, dilation: int = 1, padding: int | None = None) -> Axis:
    """Taps, step and kept lags of one axis; ``padding=None`` keeps every lag.

    A padding of ``P`` keeps the output positions within ``P`` of the centre. Lag 0 alone is what a step of the whole
    kernel gives, and there both sides serve.
    """
    common = gcd(stride, dilation)
    step = stride // common
    lags = (kernel - 1) // step
    if padding is not None:
        lags = min(lags, padding // (stride * (dilation // common)))
    return Axis(kernel, step if lags else kernel, lags)


def axes_of(problem: Problem) -> tuple[Axis, ...]:
    """The problem's axes, reduced."""
    paddings = problem.padding or (None,) * len(problem.kernel)
    return tuple(map(reduce_axis, problem.kernel, problem.stride, problem.dilation, paddings))


def polyphase_channels(problem: Problem) -> int:
    """Input channels per group times the taps that one placement does not share: ``C' = C * prod(min(s, k))``."""
    return problem.channels * prod(axis.residues for axis in axes_of(problem))


def tap_pairs(problem: Problem) -> int:
    """Number of pairs of taps ``(u, v)`` of a channel that meet at any of the kept lags."""
    return prod(
        sum(axis.taps - abs(lag) * axis.step for lag in range(-axis.lags, axis.lags + 1)) for axis in axes_of(problem)
    )


def lag_count(problem: Problem) -> int:
    """Number of lags that are kept, 0 and both signs of the others among them; 1 where the layer is a plain matrix."""
    return prod(2 * axis.lags + 1 for axis in axes_of(problem))


def overlaps(problem: Problem) -> int:
    """Placements of the kernel, at most, that touch one input pixel."""
    return prod(-(-axis.taps // axis.step) for axis in axes_of(problem))


def least_loss(problem: Problem) -> float:
    """Least value of the loss over all weights of this shape.

    At every frequency the Gram matrix of M filters has a rank of at most C', so M - C' of its eigenvalues are 0 where
    the target is wanted; a weight with orthonormal columns reaches the bound. Without a target the least value is 0, if
    only that of the zero weight.
    """
    target = max(problem.target, 0.0)
    return target**2 * problem.groups * max(0, problem.rows - polyphase_channels(problem))


def has_orthogonal(problem: Problem) -> bool:
    """Whether a convolution of this shape can be orthogonal by rows or, on an image, by columns.

    By columns it must see every input pixel: all residues of the stride.
    """
    axes = zip(axes_of(problem), problem.stride, strict=True)
    return problem.rows <= polyphase_channels(problem) or all(axis.residues == s for axis, s in axes)


def check_side(problem: Problem, side: problems.Side) -> None:
    """The column side needs all lags, and lag 0 with its diagonal: with a part of them dropped it is another loss."""
    if side == "column" and problem.target == OFF_DIAGONAL:
        raise ValueError("side='column' needs part='all': the off-diagonal part of the columns is a different loss")
    for axis in axes_of(problem) if side == "column" else ():
        if axis.lags != axis.all_lags:
            raise ValueError(
                f"side='column' needs all lags or lag 0 alone: with padding={problem.padding} only "
                f"{2 * axis.lags + 1} of {2 * axis.all_lags + 1} lags are kept, and the column loss of those is a "
                "different one"
            )


# ----------------------------------------------------------------------------------------------------------------------
# Plans
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Residue classes with equal tap counts, stacked.

    ``V_p[i, (r, c)] = sum_m evaluation[p][m] K[i, c, sources[r][m]]``.

    ``sources[r][m]`` is a flat (row-major) tap index, or -1 for a tap that a short phase does not have.

    The block is the product of one scheme per axis, ``factors``: the grid's plane ``g`` is row ``plane_of[g]`` of
    ``evaluation``, and its output ``g`` is the stored output ``output_of[g][0]``, or its transpose if
    ``output_of[g][1]``. Plans whose outputs are the lags themselves do not use ``output_of``.
    """

    sources: tuple[tuple[int, ...], ...]
    factors: tuple[Scheme, ...]
    plane_of: tuple[int, ...]
    output_of: tuple[tuple[int, bool], ...]

    # Whole matrices grow with the product of all axes; they are made for backends that do not go axis by axis.

    @cached_property
    def evaluation(self) -> Matrix:
        """``(planes, taps)``."""
        on_grid = reduce(_kronecker, (scheme.evaluation for scheme in self.factors), _identity(1))
        order = sorted(range(self.planes), key=self.plane_of.__getitem__)
        return tuple(on_grid[g] for g in order)

    @cached_property
    def grid_mix(self) -> Matrix:
        """Lags of the class from the grid's outputs, ``(lags, outputs)``, both in row-major order."""
        return reduce(_kronecker, (scheme.mix for scheme in self.factors), _identity(1))

    @property
    def planes(self) -> int:
        return len(self.plane_of)

    @property
    def taps(self) -> int:
        return len(self.sources[0])

    @property
    def residues(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class Run:
    """``count`` products that a backend can issue as one: ``(left + j, right + j)`` for ``j < count``.

    A batched run writes outputs ``out + j``; a *summed* run adds all of them into ``out`` (one long contraction).
    """

    block: int
    left: int
    right: int
    out: int
    count: int
    summed: bool


class Product(NamedTuple):
    """``V_left V_right^T`` of one block's planes, added to the stored output ``out``."""

    block: int
    left: int
    right: int
    out: int


@dataclass(frozen=True)
class Work:
    """Counted work of one plan over all groups."""

    multiply_adds: int  # in matrix products, loss and gradient
    elementwise: int  # multiply-adds of evaluate, mix and gather
    bytes: int  # traffic of the planes, read and written, in float32


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanBase(ABC):
    """How one weight's loss and gradient are computed; made by :func:`candidates`, executed by a backend."""

    rows: int  # M per group
    channels: int  # C per group
    groups: int
    axes: tuple[Axis, ...]
    side: Side
    algorithm: Algorithm
    offset: int  # M - C' of all groups, on the column side: times the square of the target, a mean over groups where
    # that is free, it is what the two losses differ by
    target: float  # the problem's

    @property
    def phases(self) -> int:
        """Residues of all axes together."""
        return prod(axis.residues for axis in self.axes)

    @property
    def work_rows(self) -> int:
        """Side of the Gram matrices: ``M`` on the row side, ``C' = C * prod(min(s, k))`` on the column side."""
        return self.rows if self.side == "row" else self.channels * self.phases

    @property
    def reference_multiply_adds(self) -> int:
        """What ``F.conv`` and autograd's two gradients of it cost, padding zeros included."""
        taps = prod(axis.taps for axis in self.axes)
        positions = prod(2 * axis.lags + 1 for axis in self.axes)
        return 3 * self.groups * taps * positions * self.rows**2 * self.channels

    @property
    @abstractmethod
    def work(self) -> Work: ...

    @property
    def name(self) -> str:
        """One word and a side: ``toom/row``, ``fourier/row``, ``gram/column``, ``direct/row`` or ``small/row``."""
        return f"{self.algorithm}/{self.side}"

    @property
    @abstractmethod
    def product_count(self) -> int:
        """Matrix products of gram."""

    def __repr__(self) -> str:
        shape = "x".join(map(str, (self.rows, self.channels, *(axis.taps for axis in self.axes))))
        step = "x".join(str(axis.step) for axis in self.axes) or "-"
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        lags = prod(2 * axis.lags + 1 for axis in self.axes)
        return (
            f"Plan({self.name} for {shape}, step {step}{groups}: {self.product_count} products, "
            f"{lags} lags, {self.work.multiply_adds / 1e6:.4g}M multiply-adds)"
        )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class FourierPlan(PlanBase):
    """By Parseval: no lag is ever formed, and nothing is amplified.

    With ``N = prod(sizes)`` points, ``A_w = B + iC`` the transform of the polyphase kernel at frequency ``w``, and one
    frequency of each pair ``w, -w``, whose terms count twice::

        L     = 1/N sum_w || A_w A_w^H - I ||_F^2
        dL/dK = 4 IDFT[(A_w A_w^H - I) A_w]  cut to the kernel

    The real matrix ``U = Re + Im`` of the residual is ``(B + C)(B - C)^T + 2 C C^T - I``: two real products instead of
    the four of a complex one, and ``||U||`` is the residual's norm. Its symmetric part ``P`` is the real part of the
    residual, the antisymmetric ``Q`` the imaginary one, and ``(P + iQ)(B + iC)`` takes three products. Where some lags
    are dropped, those that are kept are formed after all, ``Z = IDFT[A A^H]``, and the residual is their transform::

        Re = U B - Q (B + C),  Im = U B - P (B - C)
    """

    sizes: tuple[int, ...]  # points per axis: as many as there are lags

    @property
    def keeps_all_lags(self) -> bool:
        return all(axis.lags == axis.all_lags for axis in self.axes)

    @property
    def half_lags(self) -> tuple[tuple[int, ...], ...]:
        """Kept lags: zero and one of each pair ``t, -t``."""
        return _half_lags(self.axes)

    @property
    def frequencies(self) -> int:
        """One of each pair; the number of points is odd, so that only zero is its own partner."""
        return prod(self.sizes) // 2 + 1

    @property
    def class_taps(self) -> tuple[int, ...]:
        """Taps of the longest class, per axis."""
        return tuple(axis.class_taps(0) for axis in self.axes)

    @property
    def transform_order(self) -> tuple[int, ...]:
        """Numbers of the axes, shortest class first: on the last one half of the frequencies are left out."""
        taps = self.class_taps
        return tuple(sorted(range(len(taps)), key=taps.__getitem__))

    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Flat tap indices ``(residues, taps)``, -1 where a short phase has no tap."""
        residues = itertools.product(*(range(axis.residues) for axis in self.axes))
        return tuple(_sources(self.axes, self.class_taps, residue) for residue in residues)

    @property
    def contraction(self) -> int:
        """Length of the sums in gram."""
        return self.channels * self.phases if self.side == "row" else self.rows

    @property
    def product_count(self) -> int:
        return 2 * self.frequencies

    @property
    def work(self) -> Work:
        elements = self.groups * self.rows * self.channels * self.phases
        area = self.groups * self.work_rows**2
        return Work(
            multiply_adds=5 * self.frequencies * area * self.contraction,
            elementwise=2 * 2 * self.frequencies * elements * prod(self.class_taps),
            bytes=4 * self.frequencies * (12 * elements + 8 * area),
        )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Plan(PlanBase):
    """Planes, products of them, and lags mixed from these: Toom-Cook or tap by tap.

    With ``x_o = X_o[i, j]`` and ``y_o = X_o[j, i]`` of the stored outputs, half of the lags (zero first; the rest are
    transposes) are ``Z_t[i, j] = sum_o mix[t][o] x_o + mix_transposed[t][o] y_o``. ``self_paired[o]`` marks outputs
    that are symmetric. On the column side the roles of ``i`` and ``(r, c)`` are swapped.
    """

    small: bool  # products too small for a BLAS: the whole plan runs per group, vectorised over groups
    blocks: tuple[Block, ...]
    products: tuple[Product, ...]  # of stored outputs only
    runs: tuple[Run, ...]  # the same, as a backend can issue them
    self_paired: tuple[bool, ...]
    lags: tuple[tuple[int, ...], ...]

    # -- derived, used by every backend --------------------------------------------------------------------------------

    @property
    def outputs(self) -> int:
        return len(self.self_paired)

    @property
    def is_flat(self) -> bool:
        """Lag 0 only: the plane is the flattened weight itself, so evaluate and gather are views."""
        return len(self.lags) == 1 and len(self.blocks) == 1 and self.blocks[0].planes == 1

    @property
    def is_diagonal(self) -> bool:
        """Outputs are the lags themselves: mix only subtracts the identity and scales."""
        return self.algorithm == "direct"

    def contraction(self, product: Product) -> int:
        """Length of the sums in one of the plan's products."""
        return self.rows if self.side == "column" else self.channels * self.blocks[product.block].residues

    @cached_property
    def work(self) -> Work:
        gram, multiply_adds = self.work_rows, 0
        for product in self.products:
            applied = 1 if self.self_paired[product.out] else 2
            multiply_adds += self.groups * gram * gram * self.contraction(product) * (1 + applied)
        elements = self.groups * self.rows * self.channels
        if self.small:  # one kernel, no planes
            return Work(multiply_adds, 0, 4 * 2 * elements * prod(axis.taps for axis in self.axes))
        elementwise = traffic = 0
        if not self.is_flat:
            elementwise = 2 * elements * sum(block.planes * block.taps * block.residues for block in self.blocks)
            traffic = 4 * 4 * elements * sum(block.planes * block.residues for block in self.blocks)
        area = self.groups * gram * gram
        elementwise += area * (3 * len(self.lags) if self.is_diagonal else 2 * len(self.lags) * self.outputs)
        return Work(multiply_adds, elementwise, traffic + 4 * 4 * area * self.outputs)

    @property
    def mix(self) -> Matrix:
        """``(lags, outputs)``; of an output that is its own transpose half, so that ``x + y`` carries all of it."""
        return _mixes(self.axes, self.side, self.algorithm)[0]

    @property
    def mix_transposed(self) -> Matrix:
        return _mixes(self.axes, self.side, self.algorithm)[1]

    @cached_property
    def symmetric(self) -> Matrix:
        """``rs = symmetric @ (x + y)``: the part of Z that is symmetric under ``i <-> j``; shape (lags, outputs)."""
        return _combine(self.mix, self.mix_transposed, 1)

    @cached_property
    def antisymmetric(self) -> Matrix:
        """``ra = antisymmetric @ (x - y)``; ``Z_t[i, j] = rs + ra`` and ``Z_t[j, i] = rs - ra``; (lags, outputs)."""
        return _combine(self.mix, self.mix_transposed, -1)

    @property
    def lag_weights(self) -> tuple[int, ...]:
        """``L = sum over i <= j of weight/2 * (rs^2 + ra^2)``, the diagonal counted half; also scales the adjoint."""
        return (4, *(8 for _ in self.lags[1:]))

    def adjoint(self, matrix: Sequence[Sequence[_Number]]) -> tuple[tuple[_Number, ...], ...]:
        """``Y = adjoint(symmetric) @ rs + adjoint(antisymmetric) @ ra``: the gradient with respect to the outputs.

        Self-paired outputs count twice because both factors of their product are the same planes.
        """
        return tuple(
            tuple(
                (2 if self.self_paired[o] else 1) * w * row[o] for w, row in zip(self.lag_weights, matrix, strict=True)
            )
            for o in range(self.outputs)
        )

    @property
    def product_count(self) -> int:
        return len(self.products)

    @property
    def name(self) -> str:
        kind = "small" if self.small else "gram" if self.is_flat else self.algorithm
        return f"{kind}/{self.side}"


AnyPlan = Plan | FourierPlan


def _combine(matrix: Matrix, transposed: Matrix, sign: int) -> Matrix:
    """``(matrix + sign * transposed) / 2``, each entry as one fraction: large plans have thousands."""

    def half(a: Fraction, b: Fraction) -> Fraction:
        if not b:
            return Fraction(a.numerator, 2 * a.denominator) if a else a
        over, under = a.numerator * b.denominator + sign * b.numerator * a.denominator, a.denominator * b.denominator
        return Fraction(over, 2 * under)

    return tuple(tuple(map(half, row, row_t)) for row, row_t in zip(matrix, transposed, strict=True))


def _runs(products: Iterable[Product]) -> Iterator[Run]:
    """Merge neighbouring products greedily into the longest batched or summed runs."""
    current: Run | None = None
    for block, left, right, out in sorted(products, key=lambda product: (product[0], product[3], product[1])):
        if current is not None:
            n = current.count
            follows = (block, left, right) == (current.block, current.left + n, current.right + n)
            if follows and out == current.out and (current.summed or n == 1):
                current = Run(block, current.left, current.right, out, n + 1, True)
                continue
            if follows and out == current.out + n and not current.summed:
                current = Run(block, current.left, current.right, current.out, n + 1, False)
                continue
            yield current
        current = Run(block, left, right, out, 1, False)
    if current is not None:
        yield current


def _classes(axes: tuple[Axis, ...], side: Side) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Tap counts per axis and the residue vectors that share them.

    On the row side every residue keeps its own number of taps; on the column side all are padded to the longest.
    """
    by_taps: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for residue in itertools.product(*(range(axis.residues) for axis in axes)):
        taps = tuple(axis.class_taps(r if side == "row" else 0) for axis, r in zip(axes, residue, strict=True))
        by_taps.setdefault(taps, []).append(residue)
    for taps, residues in by_taps.items():
        yield taps, tuple(residues)


def _sources(axes: tuple[Axis, ...], taps: tuple[int, ...], residue: tuple[int, ...]) -> tuple[int, ...]:
    flat = []
    for position in itertools.product(*(range(n) for n in taps)):
        index = 0
        for axis, m, r in zip(axes, position, residue, strict=True):
            u = m * axis.step + r
            index = -1 if index < 0 or u >= axis.taps else index * axis.taps + u
        flat.append(index)
    return tuple(flat)


def _axis_schemes(taps: tuple[int, ...], algorithm: Algorithm) -> tuple[Scheme, ...]:
    return tuple(toom_scheme(n) if algorithm == "toom" and n <= MAX_TOOM_TAPS else direct_scheme(n) for n in taps)


def _half_lags(axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
    """Kept lags up to sign: zero, then the lexicographically positive ones."""
    lags = itertools.product(*(range(-axis.lags, axis.lags + 1) for axis in axes))
    zero = (0,) * len(axes)
    return tuple(lag for lag in sorted(lags) if lag >= zero)


class Bilinear(NamedTuple):
    """What of a plan does not depend on M and C."""

    blocks: tuple[Block, ...]
    products: tuple[Product, ...]
    runs: tuple[Run, ...]
    self_paired: tuple[bool, ...]


def _bilinear(axes: tuple[Axis, ...], side: Side, algorithm: Algorithm) -> Bilinear:
    # Where all classes have equally many taps there is nothing to pad: both sides have the same blocks.
    is_even = all(axis.taps % axis.residues == 0 for axis in axes)
    return _built(axes, "row" if is_even else side, algorithm)


@cache
def _built(axes: tuple[Axis, ...], side: Side, algorithm: Algorithm) -> Bilinear:
    builder = _Builder(_half_lags(axes), algorithm)
    for taps, residues in _classes(axes, side):
        builder.add_class(taps, tuple(_sources(axes, taps, residue) for residue in residues))
    return builder.finish()


@cache
def _mixes(axes: tuple[Axis, ...], side: Side, algorithm: Algorithm) -> tuple[Matrix, Matrix]:
    """``Plan.mix`` and ``Plan.mix_transposed``."""
    bilinear, lags = _bilinear(axes, side, algorithm), _half_lags(axes)
    mixes = [[[Fraction(0)] * len(bilinear.self_paired) for _ in lags] for _ in range(2)]
    if algorithm == "direct":  # outputs are the lags themselves
        for number in range(len(lags)):
            mixes[0][number][number] = Fraction(1)
    for block in bilinear.blocks if algorithm != "direct" else ():
        class_lags = itertools.product(*(range(-(len(s.mix) // 2), len(s.mix) // 2 + 1) for s in block.factors))
        row_of = dict(zip(class_lags, block.grid_mix, strict=True))
        for number, lag in enumerate(lags):
            if lag in row_of:
                for value, (out, is_transposed) in zip(row_of[lag], block.output_of, strict=True):
                    mixes[is_transposed][number][out] = value
    for out in (out for out, is_own in enumerate(bilinear.self_paired) if is_own):
        for row, row_t in zip(*mixes, strict=True):
            row[out] = row_t[out] = (row[out] + row_t[out]) / 2
    stored, transposed = (tuple(map(tuple, mix)) for mix in mixes)
    return stored, transposed


class _Builder:
    """Collects blocks, products and stored outputs, class of taps by class of taps."""

    def __init__(self, lags: Sequence[tuple[int, ...]], algorithm: Algorithm) -> None:
        self.lags = lags
        self.algorithm = algorithm
        self.blocks: list[Block] = []
        self.products: list[Product] = []
        self.self_paired: list[bool] = []
        self.output_of_lag: dict[tuple[int, ...], int] = {}  # direct outputs are lags, which all classes add into

    def add_class(self, taps: tuple[int, ...], sources: tuple[tuple[int, ...], ...]) -> None:
        factors = _axis_schemes(taps, self.algorithm)
        grid = _grid(factors)
        class_lags = list(itertools.product(*(range(-(n - 1), n) for n in taps)))
        row_of = {lag: index for index, lag in enumerate(class_lags)}
        pairs_of: dict[int, list[tuple[int, int]]] = {}
        for left, right, out in grid.products:
            pairs_of.setdefault(out, []).append((left, right))
        stored = self._stored_outputs(grid, row_of)
        order = _plane_order(grid, pairs_of, stored)
        position = {plane: index for index, plane in enumerate(order)}
        output_of: dict[int, tuple[int, bool]] = {}
        for out in stored:
            index = self._output(grid, out, class_lags)
            block = len(self.blocks)
            self.products += [Product(block, position[left], position[right], index) for left, right in pairs_of[out]]
            output_of[grid.partner[out]] = (index, True)
            output_of[out] = (index, False)
        self.blocks.append(
            Block(
                sources=sources,
                factors=factors,
                plane_of=tuple(position[plane] for plane in range(len(order))),
                output_of=tuple(output_of[out] for out in sorted(output_of)),
            )
        )

    def _stored_outputs(self, grid: Grid, row_of: dict[tuple[int, ...], int]) -> list[int]:
        """One of each pair of transposes: of direct outputs the lag that is kept, else self-paired ones first."""
        if self.algorithm == "direct":
            return [row_of[lag] for lag in self.lags if lag in row_of]
        outputs = range(len(grid.partner))
        return [o for o in outputs if grid.partner[o] == o] + [o for o in outputs if grid.partner[o] > o]

    def _output(self, grid: Grid, out: int, class_lags: Sequence[tuple[int, ...]]) -> int:
        """Number of a stored output among those of all classes."""
        index = len(self.self_paired)
        if self.algorithm == "direct":
            known = self.output_of_lag.setdefault(class_lags[out], index)
            if known != index:
                return known
        self.self_paired.append(grid.partner[out] == out)
        return index

    def finish(self) -> Bilinear:
        return Bilinear(tuple(self.blocks), tuple(self.products), tuple(_runs(self.products)), tuple(self.self_paired))


def _plane_order(grid: Grid, pairs_of: dict[int, list[tuple[int, int]]], stored: Sequence[int]) -> list[int]:
    """Planes in the order self-paired, first of each pair, partners: then all products are two batched runs."""
    if any(len(pairs) > 1 for pairs in pairs_of.values()):
        return list(range(grid.planes))
    paired = [pairs_of[out][0] for out in stored]
    return [left for left, _ in paired] + [right for left, right in paired if left != right]


#: Largest number of weights per group that the small-group kernel keeps in its lanes.
MAX_SMALL_WEIGHTS = 1024


#: Most products of a plan: with more, Fourier is many times faster, and making the plan takes longer than using it.
MAX_PRODUCTS = 4096


def _most_products(axes: tuple[Axis, ...], algorithm: Algorithm) -> int:
    """Of all residues together, transposes included."""
    total = 1
    for axis in axes:
        taps = axis.class_taps(0)
        is_toom = algorithm == "toom" and taps <= MAX_TOOM_TAPS
        total *= axis.residues * (len(toom_scheme(taps).products) if is_toom else taps**2)
    return total


def candidates(problem: Problem, side: problems.Side = "auto") -> tuple[AnyPlan, ...]:
    """Every plan that computes the problem's loss; which one is fastest is for a backend to say.

    ``side="auto"`` considers both sides; the column side only where its loss is not the small difference of two larger
    numbers (``C' <= M``), and only if every lag of the reduced axes is kept, and the diagonal of lag 0, since otherwise
    it is another loss.
    """
    check_side(problem, side)
    axes = axes_of(problem)
    full = all(axis.lags == axis.all_lags for axis in axes)
    sides: list[Side] = ["row"] if side == "auto" else [side]
    is_whole = full and problem.target != OFF_DIAGONAL
    if side == "auto" and polyphase_channels(problem) <= problem.rows and is_whole:
        sides.append("column")
    algorithms: list[Algorithm] = ["direct"]
    if any(2 <= axis.class_taps(0) <= MAX_TOOM_TAPS for axis in axes):
        algorithms.append("toom")
    algorithms = [algorithm for algorithm in algorithms if _most_products(axes, algorithm) <= MAX_PRODUCTS]
    plans: list[AnyPlan] = [_bilinear_plan(problem, axes, one, algorithm) for one in sides for algorithm in algorithms]
    if any(axis.lags for axis in axes):
        plans += [_fourier_plan(problem, axes, one) for one in sides]
    if side != "column" and "direct" in algorithms and prod(problem.shape) // problem.groups <= MAX_SMALL_WEIGHTS:
        plans.append(_bilinear_plan(problem, axes, "row", "direct", small=True))
    return tuple(plans)


def _common(problem: Problem, axes: tuple[Axis, ...], side: Side, algorithm: Algorithm) -> dict[str, Any]:
    rows, groups = problem.rows, problem.groups
    return {
        "rows": rows,
        "channels": problem.channels,
        "groups": groups,
        "axes": axes,
        "side": side,
        "algorithm": algorithm,
        "offset": 0 if side == "row" else groups * (rows - polyphase_channels(problem)),
        "target": problem.target,
    }


def _fourier_plan(problem: Problem, axes: tuple[Axis, ...], side: Side) -> FourierPlan:
    return FourierPlan(**_common(problem, axes, side, "fourier"), sizes=tuple(2 * axis.all_lags + 1 for axis in axes))


def _bilinear_plan(
    problem: Problem, axes: tuple[Axis, ...], side: Side, algorithm: Algorithm, small: bool = False
) -> Plan:
    bilinear = _bilinear(axes, side, algorithm)
    return Plan(**_common(problem, axes, side, algorithm), small=small, lags=_half_lags(axes), **bilinear._asdict())
