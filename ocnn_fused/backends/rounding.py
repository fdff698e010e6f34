"""What products with rounded operands (TF32, bfloat16) cost a plan in accuracy, from its exact matrices.

Every operand of a product is rounded, with errors that are independent and in proportion to its size. To first order
the gradient's error is then linear in them, and for independent random weights of variance ``x`` its variance per
entry follows from the matrices alone. A weight with ``side`` filters, ``length`` channels and ``T`` taps has, in units
of ``16 x`` times the variance of one relative rounding error,

    (side x)^2 A + 2 side x d X + 2 d^2 D + 2 side length x^2 (I + P),      d = length T x - 1

with ``A`` from planes rounded in gram whose error meets the weight again in apply, ``I`` from the rest of gram's
errors, ``D`` and ``P`` from apply's operands, by the diagonal ``d`` of the residual and by the rest of it, and ``X``
because gram and apply round the same planes. Each of the five is a mean over taps and a product over axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod, sqrt

import torch

from ..plan import Plan, Scheme, direct_scheme

#: A plan's error, in units of the direct plan's, that is taken for accurate. The promise is four; the rest is for
#: weights that are not random, and for chance.
MAX_AMPLIFICATION = 3.4
#: Fewest filters and (polyphase) channels for which chance is that small: with fewer the direct plan may err by luck
#: a tenth of what is expected of it. There is nothing to gain from fewer products there.
MIN_SIDE = 8

#: Sizes of the weights, as variances in units of the one that cancels the direct plan's main error.
_SIZES = [2.0 ** (k / 2) for k in range(-16, 17)]


@dataclass(frozen=True)
class _Noise:
    """The five terms of the module's formula, of one axis or of all."""

    a: float
    x: float
    d: float
    i: float
    p: float

    def __mul__(self, other: _Noise) -> _Noise:
        return _Noise(self.a * other.a, self.x * other.x, self.d * other.d, self.i * other.i, self.p * other.p)

    def variance(self, side: float, length: float, taps: int, x: float) -> float:
        diagonal = length * taps * x - 1
        planes = (side * x) ** 2 * self.a + 2 * side * x * diagonal * self.x + 2 * diagonal**2 * self.d
        return planes + 2 * side * length * x**2 * (self.i + self.p)


@cache
def _axis_noise(scheme: Scheme, kept: int) -> _Noise:
    """Of one axis with lags ``-kept .. kept``."""
    evaluation = [[float(value) for value in row] for row in scheme.evaluation]
    power = [sum(value**2 for value in row) for row in evaluation]
    taps = len(evaluation[0])
    mix = {t: [float(value) for value in scheme.mix[t + taps - 1]] for t in range(-kept, kept + 1)}
    total = [0.0] * 5
    for u in range(taps):
        reached = [t for t in mix if 0 <= u - t < taps]
        in_gram, in_apply = [0.0] * len(power), [0.0] * len(power)  # coefficients of the planes' rounding errors
        for left, right, out in scheme.products:
            in_gram[left] += sum(mix[t][out] * evaluation[right][u - t] for t in reached)
            in_apply[right] += evaluation[left][u] * mix[0][out]
            total[3] += power[left] * power[right] * sum(mix[t][out] ** 2 for t in reached)
            # A lag of the residual is a sum over as many pairs of taps as it has.
            residual = sum((taps - abs(t)) * mix[t][out] ** 2 for t in mix)
            total[4] += evaluation[left][u] ** 2 * power[right] * residual
        total[0] += sum(e * g**2 for e, g in zip(power, in_gram, strict=True))
        total[1] += sum(e * g * h for e, g, h in zip(power, in_gram, in_apply, strict=True))
        total[2] += sum(e * h**2 for e, h in zip(power, in_apply, strict=True))
    return _Noise(*(value / taps for value in total))


@lru_cache(maxsize=4096)
def amplification(plan: Plan) -> float:
    """Error of the gradient with rounded operands, root mean square, in units of the direct row plan's.

    For independent random weights of whatever size is worst. The longest class of taps stands for all.
    """
    plan_noise = direct_noise = _Noise(1.0, 1.0, 1.0, 1.0, 1.0)
    taps = 1
    for axis, factor in zip(plan.axes, plan.blocks[0].factors, strict=True):
        taps *= axis.class_taps(0)
        plan_noise *= _axis_noise(factor, axis.lags)
        direct_noise *= _axis_noise(direct_scheme(axis.class_taps(0)), axis.lags)
    rows, channels = plan.rows, plan.channels * prod(axis.taps for axis in plan.axes) / taps
    side, length = (rows, channels) if plan.side == "row" else (channels, rows)
    unit = 1 / ((rows + channels) * taps)
    return sqrt(
        max(
            plan_noise.variance(side, length, taps, x) / direct_noise.variance(rows, channels, taps, x)
            for x in (unit * size for size in _SIZES)
        )
    )


#: Weights that products take without rounding, so that a direct plan rounds nothing but the residual: near
#: orthogonality, where that vanishes, any other plan would err by any factor.
_EXACT = {("tf32", torch.float16), ("tf32", torch.bfloat16), ("bf16", torch.bfloat16)}


def is_accurate(plan: Plan, precision: str, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the gradient of weights of ``dtype`` stays within four times the direct plan's error."""
    if precision not in ("tf32", "bf16") or plan.is_diagonal:
        return True
    shorter = min(plan.rows, plan.channels * prod(axis.residues for axis in plan.axes))
    return (precision, dtype) not in _EXACT and shorter >= MIN_SIDE and amplification(plan) <= MAX_AMPLIFICATION
