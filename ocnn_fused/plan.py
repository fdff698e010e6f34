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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache, reduce
from math import gcd, prod
from typing import Any, Literal

Side = Literal["row", "column"]
Algorithm = Literal["toom", "direct"]
Matrix = tuple[tuple[Fraction, ...], ...]

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


def _power_of_two_near(value: Fraction) -> Fraction:
    """The power of two nearest below ``value``: scaling by it changes no significand, so it costs no accuracy."""
    exponent = 0
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    return Fraction(2) ** exponent


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
        scale = _power_of_two_near(Fraction(max(map(abs, row))))
        evaluation.append(tuple(value / scale for value in map(Fraction, row)))
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
    forms = [[a * b for a in left for b in right] for left, right in products]
    lags = [[Fraction(int(u - v == t)) for u in range(taps) for v in range(taps)] for t in range(-(taps - 1), taps)]
    normal, right = ([[_dot(form, other) for other in others] for form in forms] for others in (forms, lags))
    return tuple(zip(*_solve(normal, right), strict=True))


def _dot(first: Sequence[Fraction], second: Sequence[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(first, second, strict=True) if a and b), Fraction(0))


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
    return tuple(tuple(Fraction(int(i == j)) for j in range(size)) for i in range(size))


def _kronecker(left: Matrix, right: Matrix) -> Matrix:
    """Exact. The right matrix is multiplied once by each distinct entry of the left one, of which there are few."""
    scaled = {a: tuple(tuple(a * b for b in row) for row in right) for a in set(itertools.chain(*left))}
    blocks = (zip(*(scaled[a] for a in row), strict=True) for row in left)
    return tuple(tuple(itertools.chain(*pieces)) for row_of_blocks in blocks for pieces in row_of_blocks)


def _kronecker_scheme(first: Scheme, second: Scheme) -> Scheme:
    """The two-dimensional scheme of two one-dimensional ones (axes in row-major order)."""
    planes, outputs = len(second.evaluation), len(second.partner)
    return Scheme(
        evaluation=_kronecker(first.evaluation, second.evaluation),
        products=tuple(
            (l1 * planes + l2, r1 * planes + r2, o1 * outputs + o2)
            for l1, r1, o1 in first.products
            for l2, r2, o2 in second.products
        ),
        mix=_kronecker(first.mix, second.mix),
        partner=tuple(p1 * outputs + p2 for p1 in first.partner for p2 in second.partner),
    )


_POINT_SCHEME = Scheme(
    evaluation=_identity(1), products=((0, 0, 0),), mix=_identity(1), partner=(0,)
)  # the empty product: no spatial axis


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

    evaluation: Matrix
    sources: tuple[tuple[int, ...], ...]
    factors: tuple[Scheme, ...]
    plane_of: tuple[int, ...]
    output_of: tuple[tuple[int, bool], ...]

    @property
    def planes(self) -> int:
        return len(self.evaluation)

    @property
    def taps(self) -> int:
        return len(self.evaluation[0])

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


@dataclass(frozen=True)
class Rates:
    """What a device does per second; only ratios matter for choosing a plan."""

    name: str
    matmul: float  # multiply-adds inside matrix products of good size
    matmul_side: float  # side at which a product reaches half of that rate
    elementwise: float  # multiply-adds of the evaluate, mix and gather stages
    bandwidth: float  # bytes
    launch: float  # seconds to issue one stage or one run of products
    lane_products: float  # multiply-adds of the small-group kernel, all lanes busy
    lanes: int  # groups that kernel handles at once


#: Two AVX2 cores; the shape of the choice is the same on more.
CPU_RATES = Rates("cpu", 75e9, 20.0, 25e9, 12e9, 4e-6, 4e9, 16)


@dataclass(frozen=True)
class Cost:
    """Counted work of one plan over all groups, and the seconds the rates give it (for comparing plans)."""

    multiply_adds: int  # in matrix products, loss and gradient
    elementwise: int  # multiply-adds of evaluate, mix and gather
    bytes: int  # traffic of the planes, read and written, in float32
    seconds: float


@dataclass(frozen=True, eq=False)
class Plan:
    """How one weight's loss and gradient are computed; made by :func:`make_plan`, executed by a backend.

    With ``x_o = X_o[i, j]`` and ``y_o = X_o[j, i]`` of the stored outputs, half of the lags (zero first; the rest are
    transposes) are ``Z_t[i, j] = sum_o mix[t][o] x_o + mix_transposed[t][o] y_o``. ``self_paired[o]`` marks outputs
    that are symmetric. On the column side the roles of ``i`` and ``(r, c)`` are swapped, and ``offset`` is the constant
    by which the two losses differ.
    """

    rows: int  # M per group
    channels: int  # C per group
    groups: int
    axes: tuple[Axis, ...]
    side: Side
    algorithm: Algorithm
    small: bool  # products too small for a BLAS: the whole plan runs per group, vectorised over groups
    blocks: tuple[Block, ...]
    products: tuple[tuple[int, int, int, int], ...]  # (block, left, right, out), stored outputs only
    self_paired: tuple[bool, ...]
    lags: tuple[tuple[int, ...], ...]
    mix: Matrix
    mix_transposed: Matrix
    offset: int  # added to the side's loss, all groups
    cost: Cost
    alternatives: tuple[Plan, ...] = ()

    # -- derived, used by every backend --------------------------------------------------------------------------------

    @property
    def outputs(self) -> int:
        return len(self.self_paired)

    @property
    def work_rows(self) -> int:
        """Side of the Gram matrices: ``M`` on the row side, ``C' = C * prod(min(s, k))`` on the column side."""
        return self.rows if self.side == "row" else self.channels * self.blocks[0].residues

    @property
    def is_flat(self) -> bool:
        """Lag 0 only: the plane is the flattened weight itself, so evaluate and gather are views."""
        return len(self.lags) == 1 and len(self.blocks) == 1 and self.blocks[0].planes == 1

    @property
    def is_diagonal(self) -> bool:
        """Outputs are the lags themselves: mix only subtracts the identity and scales."""
        return self.algorithm == "direct"

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(_runs(self.products))

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

    def adjoint(self, matrix: Matrix) -> Matrix:
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
    def reference_multiply_adds(self) -> int:
        """What ``F.conv`` and autograd's two gradients of it cost, padding zeros included."""
        taps = prod(axis.taps for axis in self.axes)
        positions = prod(2 * axis.lags + 1 for axis in self.axes)
        return 3 * self.groups * taps * positions * self.rows**2 * self.channels

    # -- for people ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """One word and a side: ``toom/row``, ``gram/column``, ``direct/row`` or ``small/row``."""
        kind = "small" if self.small else "gram" if self.is_flat else self.algorithm
        return f"{kind}/{self.side}"

    def __repr__(self) -> str:
        shape = "x".join(map(str, (self.rows, self.channels, *(axis.taps for axis in self.axes))))
        step = "x".join(str(axis.step) for axis in self.axes) or "-"
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        planes = sum(block.planes for block in self.blocks)
        return (
            f"Plan({self.name} for {shape}, step {step}{groups}: {planes} planes, {len(self.products)} products, "
            f"{2 * len(self.lags) - 1} lags, {self.cost.multiply_adds / 1e6:.4g}M multiply-adds)"
        )

    def explain(self, device: Any = None, precision: str = "tf32") -> str:
        """The choice with the numbers behind it, one line per candidate, cheapest first.

        With a ``device`` (a CUDA device, or a name such as "H100"), the choice that the Triton backend makes there for
        products of ``precision``, by modelled times.
        """
        if device is not None:
            from .backends.triton.model import explain

            return explain(self, device, precision)
        lines = [
            repr(self),
            f"F.conv with autograd: {self.reference_multiply_adds / 1e6:.4g}M multiply-adds "
            f"({self.reference_multiply_adds / max(1, self.cost.multiply_adds):.1f}x)",
            f"{'plan':<14}{'gram side':>10}{'products':>10}{'mult-adds':>12}{'elementwise':>13}"
            f"{'MB moved':>10}{'est. us':>10}",
        ]
        for plan in sorted((self, *self.alternatives), key=lambda candidate: candidate.cost.seconds):
            cost = plan.cost
            lines.append(
                f"{plan.name:<14}{plan.work_rows:>10}{len(plan.products):>10}{cost.multiply_adds / 1e6:>11.4g}M"
                f"{cost.elementwise / 1e6:>12.4g}M{cost.bytes / 1e6:>10.4g}{cost.seconds * 1e6:>10.1f}"
                f"{'   <- chosen' if plan is self else ''}",
            )
        if self.offset:
            lines.append(f"The {self.side} side differs from the row loss by the constant {self.offset}, added back.")
        return "\n".join(lines)


def _combine(matrix: Matrix, transposed: Matrix, sign: int) -> Matrix:
    return tuple(
        tuple((a + sign * b) / 2 for a, b in zip(row, row_t, strict=True))
        for row, row_t in zip(matrix, transposed, strict=True)
    )


def _runs(products: Iterable[tuple[int, int, int, int]]) -> Iterator[Run]:
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


@cache
def _class_scheme(taps: tuple[int, ...], algorithm: Algorithm) -> Scheme:
    """Of all axes together; both sides use the same."""
    return reduce(_kronecker_scheme, _axis_schemes(taps, algorithm), _POINT_SCHEME)


def _half_lags(axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
    """Kept lags up to sign: zero, then the lexicographically positive ones."""
    lags = itertools.product(*(range(-axis.lags, axis.lags + 1) for axis in axes))
    zero = (0,) * len(axes)
    return tuple(lag for lag in sorted(lags) if lag >= zero)


@cache
def _bilinear(
    axes: tuple[Axis, ...], side: Side, algorithm: Algorithm
) -> tuple[tuple[Block, ...], tuple[tuple[int, int, int, int], ...], tuple[bool, ...], Matrix, Matrix]:
    """Blocks, stored products, self-paired flags, mix, transposed mix: all that does not depend on M and C."""
    lags = _half_lags(axes)
    blocks: list[Block] = []
    products: list[tuple[int, int, int, int]] = []
    self_paired: list[bool] = []
    columns: list[tuple[list[Fraction], list[Fraction]]] = []  # of mix and mix_transposed, one per stored output
    shared: dict[tuple[int, ...] | None, int] = {}  # direct outputs are lags, which all classes add into
    for taps, residues in _classes(axes, side):
        factors = _axis_schemes(taps, algorithm)
        scheme = _class_scheme(taps, algorithm)
        sources = tuple(_sources(axes, taps, residue) for residue in residues)
        class_lags = list(itertools.product(*(range(-(n - 1), n) for n in taps)))
        row_of = {lag: index for index, lag in enumerate(class_lags)}
        by_output: dict[int, list[tuple[int, int]]] = {}
        for left, right, out in scheme.products:
            by_output.setdefault(out, []).append((left, right))

        outputs = [out for out in range(len(scheme.partner)) if scheme.partner[out] == out]
        if algorithm == "toom":
            outputs += [out for out in range(len(scheme.partner)) if scheme.partner[out] > out]
        else:  # keep the lag that _half_lags lists
            outputs = [row_of[lag] for lag in lags if lag in row_of]

        # Planes in the order self-paired, first of each pair, partners: then all products are two batched runs.
        order = list(range(len(scheme.evaluation)))
        if all(len(pairs) == 1 for pairs in by_output.values()):
            paired = [by_output[out][0] for out in outputs]
            order = [left for left, _ in paired] + [right for left, right in paired if left != right]
        position = {plane: index for index, plane in enumerate(order)}

        output_of: dict[int, tuple[int, bool]] = {}
        for out in outputs:
            partner = scheme.partner[out]
            is_self = partner == out
            lag = class_lags[out] if algorithm == "direct" else None
            index = shared.get(lag, len(self_paired))
            if index == len(self_paired):
                if lag is not None:
                    shared[lag] = index
                self_paired.append(is_self)
                column = [scheme.mix[row_of[lag]][out] if lag in row_of else Fraction(0) for lag in lags]
                column_t = [scheme.mix[row_of[lag]][partner] if lag in row_of else Fraction(0) for lag in lags]
                if is_self:  # split evenly, so that x + y carries all of it and x - y nothing
                    column = column_t = [value / 2 for value in column]
                columns.append((column, column_t))
            products += [(len(blocks), position[left], position[right], index) for left, right in by_output[out]]
            output_of[partner] = (index, True)
            output_of[out] = (index, False)
        blocks.append(
            Block(
                evaluation=tuple(scheme.evaluation[plane] for plane in order),
                sources=sources,
                factors=factors,
                plane_of=tuple(position[plane] for plane in range(len(order))),
                output_of=tuple(output_of[out] for out in sorted(output_of)),
            )
        )
    mix = tuple(zip(*(column for column, _ in columns), strict=True))
    mix_transposed = tuple(zip(*(column for _, column in columns), strict=True))
    return tuple(blocks), tuple(products), tuple(self_paired), mix, mix_transposed


def _candidate(
    rows: int,
    channels: int,
    groups: int,
    axes: tuple[Axis, ...],
    side: Side,
    algorithm: Algorithm,
    small: bool,
    rates: Rates,
) -> Plan:
    blocks, products, self_paired, mix, mix_transposed = _bilinear(axes, side, algorithm)
    phases = prod(axis.residues for axis in axes)
    offset = 0 if side == "row" else groups * (rows - channels * phases)
    plan = Plan(
        rows, channels, groups, axes, side, algorithm, small, blocks, products, self_paired, _half_lags(axes), mix,
        mix_transposed, offset, Cost(0, 0, 0, 0.0),
    )  # fmt: skip
    object.__setattr__(plan, "cost", _cost(plan, rates))
    return plan


def _cost(plan: Plan, rates: Rates) -> Cost:
    """Work of one plan, counted, and its time under ``rates``: products, elementwise stages, traffic and launches."""
    gram = plan.work_rows
    multiply_adds, seconds = 0, 0.0
    for block, _, _, out in plan.products:
        contraction = plan.rows if plan.side == "column" else plan.channels * plan.blocks[block].residues
        applied = 1 if plan.self_paired[out] else 2
        work = plan.groups * gram * gram * contraction * (1 + applied)
        multiply_adds += work
        # A product is slow when any of its sides is short.
        seconds += work * (1 + rates.matmul_side / gram) * (1 + rates.matmul_side / contraction) / rates.matmul
    elements = plan.groups * plan.rows * plan.channels
    planes = sum(block.planes * block.residues for block in plan.blocks)
    if plan.is_flat:
        elementwise = traffic = 0
    else:
        elementwise = 2 * elements * sum(block.planes * block.taps * block.residues for block in plan.blocks)
        traffic = 4 * 4 * elements * planes
    area = plan.groups * gram * gram
    traffic += 4 * 4 * area * plan.outputs
    elementwise += area * (3 * len(plan.lags) if plan.is_diagonal else 2 * len(plan.lags) * plan.outputs)
    seconds += elementwise / rates.elementwise + traffic / rates.bandwidth + rates.launch * (3 + 3 * len(plan.runs))
    if plan.small:
        # One kernel, no planes: three multiply-adds per product, idle lanes paid for.
        busy = plan.groups / (-(-plan.groups // rates.lanes) * rates.lanes)
        seconds = multiply_adds / (busy * rates.lane_products) + rates.launch
        elementwise, traffic = 0, 4 * 2 * elements * prod(axis.taps for axis in plan.axes)
    return Cost(multiply_adds, elementwise, traffic, seconds)


#: Largest number of weights per group that the small-group kernel keeps in its lanes.
MAX_SMALL_WEIGHTS = 1024


@lru_cache(maxsize=4096)
def make_plan(
    rows: int,
    channels: int,
    axes: tuple[Axis, ...],
    groups: int = 1,
    side: Literal["row", "column", "auto"] = "auto",
    rates: Rates = CPU_RATES,
) -> Plan:
    """The cheapest plan for a weight of ``groups`` groups of ``rows x channels`` filters over ``axes``.

    ``side="auto"`` considers both sides; the column side only where its loss is not the small difference of two larger
    numbers (``C' <= M``), and only if every lag of the reduced axes is kept, since otherwise it is another loss.
    """
    full = all(axis.lags == axis.all_lags for axis in axes)
    if side == "column" and not full:
        raise ValueError("the column side needs all lags: with some of them dropped it is a different loss")
    phases = prod(axis.residues for axis in axes)
    sides: list[Side] = ["row", "column"] if side == "auto" else [side]
    if side == "auto" and (not full or channels * phases > rows):
        sides = ["row"]
    candidates = []
    taps = prod(axis.taps for axis in axes)
    for candidate_side in sides:
        algorithms: list[Algorithm] = ["direct"]
        if any(2 <= axis.class_taps(0) <= MAX_TOOM_TAPS for axis in axes):
            algorithms.append("toom")
        for algorithm in algorithms:
            candidates.append(_candidate(rows, channels, groups, axes, candidate_side, algorithm, False, rates))
    if side != "column" and rows * channels * taps <= MAX_SMALL_WEIGHTS:
        candidates.append(_candidate(rows, channels, groups, axes, "row", "direct", True, rates))
    candidates.sort(key=lambda plan: plan.cost.seconds)
    best = candidates[0]
    object.__setattr__(best, "alternatives", tuple(candidates[1:]))
    return best
