r"""The orthogonal update of a list of tensors, in few passes over all of them: as operators, as matrices, or by taps.

As operators: the odd cubic ``a X + b (Z * X)`` of a convolution, cut to the kernel's support, needs nothing but the
gradient of the orthogonality loss with a target that is as good as zero, ``dL/dX = 4 Z * X``. So one fused pass over
all layers, which adds ``b/4 * dL/dX`` to the tensors themselves, is one step of all of them, for every stride,
dilation, groups and rank. The cut is not a part of the polynomial: it can raise the largest singular value, see
:func:`promised_norm`.

As matrices: polynomials of one matrix commute, so the steps run on the small Gram matrix, and only its first and its
last product see the long side.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import prod, sqrt
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..autograd import add_grads_
from ..backends.epilogue import Epilogue
from ..backends.job import accumulation_dtype
from ..functional import problems_of
from ..plan import axes_of, lag_count, overlaps, polyphase_channels
from ..problem import IntOrTuple, Options, Problem, check_choice, options_of
from ..spectrum import upper_bound
from .coefficients import Coefficients, Rational, Step, largest, rational, steps_of

Mode = Literal["operator", "flatten", "per_tap"]
Scale = Literal["unit", "certified", "match_rms_adamw", "original"]

#: What the passes compare the diagonal of lag 0 with: as good as zero, which stands for another target.
NO_TARGET = 2.0**-60

#: By how much the cut to the kernel's support may raise the norm, for each axis that has more than one lag.
CUT = 1.3


class How(NamedTuple):
    """How updates are made orthogonal; checked by :func:`how_of`."""

    mode: Mode
    steps: tuple[Step, ...] | Rational
    scale: Scale
    options: Options


def how_of(
    mode: str,
    steps: int | None,
    coefficients: Coefficients | None,
    scale: str,
    backend: str | None = None,
    precision: str | None = None,
) -> How:
    """The settings, each checked; ``coefficients=None`` takes the mode's own."""
    check_choice("mode", mode, get_args(Mode))
    check_choice("scale", scale, get_args(Scale))
    if steps is None:
        steps = 2 if coefficients == "rational" else 5
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive int, got {steps!r}")
    if coefficients is None:
        coefficients = "minimax" if mode == "operator" else "muon"
    if coefficients == "rational":
        if mode == "operator":
            raise ValueError("coefficients must be cubic in mode 'operator', got 'rational'")
        return How(mode, rational(steps), scale, options_of("auto", backend, precision, None))  # type: ignore[arg-type]
    found = steps_of(coefficients, steps)
    if mode == "operator" and not all(a and not c for a, _, c in found):
        raise ValueError(
            "coefficients must be cubic, (a, b) with a other than 0, in mode 'operator', where a step is one fused "
            f"pass; got {coefficients!r}"
        )
    return How(mode, found, scale, options_of("auto", backend, precision, None))  # type: ignore[arg-type]


@torch.no_grad()
def orthogonal_update(
    tensors: Sequence[Tensor],
    strides: int | Sequence[IntOrTuple] = 1,
    *,
    dilations: int | Sequence[IntOrTuple] = 1,
    groups: int | Sequence[int] = 1,
    mode: Mode = "operator",
    steps: int | None = None,
    coefficients: Coefficients | None = None,
    scale: Scale = "unit",
    backend: str | None = None,
    precision: str | None = None,
) -> list[Tensor]:
    """The tensors with singular values near 1: new ones of the same shapes and dtypes, all computed together.

    Args:
        tensors: gradients or momenta of Linear, Conv1d/2d/3d and transposed convolutions, ``(M, C/groups, k1..kn)``.
        strides, dilations, groups: of the layers, one for all or one for each tensor.
        mode: "operator" moves the singular values of the convolution, at every frequency, as far as a kernel of this
            size allows. "flatten" those of the matrix ``M x (C k1..kn)``, "per_tap" those of the ``M x C`` matrix of
            each tap; both know neither stride nor dilation.
        steps: of the polynomial iteration, or poles; 5, and 2 for "rational", where it is left out.
        coefficients: "minimax" (cubic, for singular values from 0.01 on; the default of "operator"), "muon" (the
            quintic of ``torch.optim.Muon``; the default of the others), or the (a, b, c) of each step, where
            ``s -> a s + b s^3 + c s^5``. In mode "operator" ``c`` must be 0. "rational", for the other modes, is the
            best rational function with ``steps`` poles instead of a polynomial: flatter (from 0.01 on within 7% of 1
            with two poles, 1.3% with three), and the fastest on a CPU; by Cholesky's method.
        scale: "unit" leaves the singular values near 1. "certified" divides a convolution by
            :func:`ocnn_fused.spectrum.upper_bound`, so that its operator norm is at most 1: a search on the host that
            takes much longer than the update. "match_rms_adamw" gives entries the mean square of AdamW's updates,
            "original" is the factor ``sqrt(max(1, rows / columns))`` of ``torch.optim.Muon``.
        backend, precision: as for :func:`ocnn_fused.fused_orth_loss`.

    Groups are made orthogonal each by itself, whatever their sizes. A tensor, or group, of zeros stays zero, and so
    does one whose norm is below 1e-19 in float32. One with a NaN or an infinity becomes NaN, and others do not change.
    Where the rank is too low, some singular values stay near zero. Computed in float32, in float64 for float64. Nothing
    waits for the device, except with "certified".
    """
    how = how_of(mode, steps, coefficients, scale, backend, precision)
    problems = problems_of(tensors, strides, dilations, groups, None, target=NO_TARGET)
    updates = [_copied(tensor) for tensor in tensors]
    if updates:
        updates, factors = orthogonalize_all(updates, problems, how)
        torch._foreach_mul_(updates, factors)
    return [update.to(tensor.dtype) for update, tensor in zip(updates, tensors, strict=True)]


def _copied(tensor: Tensor) -> Tensor:
    """A new contiguous tensor in the dtype that updates are computed in."""
    copied = torch.empty(tensor.shape, dtype=accumulation_dtype(tensor.dtype), device=tensor.device)
    return copied.copy_(tensor.detach())


def orthogonalize_all(
    tensors: Sequence[Tensor], problems: tuple[Problem, ...], how: How
) -> tuple[list[Tensor], list[float]]:
    """Orthogonal updates of contiguous tensors on one device, up to factors: one each. The tensors are written to."""
    found, factors = list(tensors), [1.0] * len(tensors)
    as_operators: dict[torch.dtype, list[int]] = {}
    as_matrices: dict[int, Tensor] = {}
    for place, (tensor, problem) in enumerate(zip(tensors, problems, strict=True)):
        if how.mode == "per_tap":
            taps = tensor.view(problem.groups, problem.rows, problem.channels, -1)
            as_matrices[place] = taps.permute(0, 3, 1, 2)
        elif how.mode == "flatten" or lag_count(problem) == 1:
            as_matrices[place] = tensor.view(problem.groups, problem.rows, -1)
        else:
            as_operators.setdefault(tensor.dtype, []).append(place)
    results = matrices(list(as_matrices.values()), how.steps, tight=how.mode == "operator")
    for place, result in zip(as_matrices, results, strict=True):
        taps_last = result.permute(0, 2, 3, 1) if how.mode == "per_tap" else result
        found[place] = taps_last.reshape(tensors[place].shape)
    for places in as_operators.values():
        assert not isinstance(how.steps, Rational)  # how_of refuses it
        some, of_some = [tensors[place] for place in places], tuple(problems[place] for place in places)
        left = operators_(some, of_some, how.options, how.steps)
        for place in places:
            factors[place] = left
    for place, problem in enumerate(problems):
        factors[place] *= _scale(found[place], problem, how, factors[place])
    return found, factors


def _scale(tensor: Tensor, problem: Problem, how: How, factor: float) -> float:
    """What an update is multiplied by, once its singular values are near 1."""
    if how.scale == "certified":
        options = {"stride": problem.stride, "dilation": problem.dilation, "groups": problem.groups}
        bound = upper_bound(tensor, **options) * abs(factor) if tensor.isfinite().all() else 1.0  # type: ignore[arg-type]
        return 1 / bound if bound > 0 else 1.0
    if how.scale == "original":
        return sqrt(max(1.0, problem.rows / prod(problem.shape[1:])))
    if how.scale == "match_rms_adamw":  # from how many squares the entries of an orthogonal one have in all
        columns = {
            "operator": polyphase_channels(problem), "flatten": prod(problem.shape[1:]), "per_tap": problem.channels,
        }[how.mode]  # fmt: skip
        matrices = problem.groups * (prod(problem.kernel) if how.mode == "per_tap" else 1)
        return 0.2 * sqrt(prod(problem.shape) / (matrices * min(problem.rows, columns)))
    return 1.0


def promised_norm(problem: Problem, steps: Sequence[Step]) -> float:
    """What the operator norm of an update in mode "operator" is not above: the largest value that the steps give to a
    matrix, times ``CUT`` for each axis on which the cut to the kernel's support takes something away."""
    return largest(steps) * CUT ** sum(axis.lags > 0 for axis in axes_of(problem))


# ----------------------------------------------------------------------------------------------------------------------
# As operators
# ----------------------------------------------------------------------------------------------------------------------


def add_gradients_(
    tensors: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, factor: float, targets: Sequence[Tensor]
) -> Tensor:
    """Add ``factor * 4 Z * X`` of each tensor to its target, which may be the tensor; returns ``||Z||^2`` of each.

    All that this package asks of the fused pass.
    """
    ones = _numbers((1.0,) * len(tensors), tensors[0].device)
    return add_grads_(tensors, problems, options, Epilogue(ones, factor, targets))


def operators_(
    tensors: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, steps: Sequence[Step]
) -> float:
    """Move the singular values of convolutions towards 1, in place; returns what is left to multiply them by.

    Each group is scaled to the squares of an orthogonal one, and then the layer divided by the smaller of two bounds
    of its operator norm: ``||K|| sqrt(n)``, where ``n`` placements of the kernel touch an input pixel, and
    ``(lags * ||Z||^2)^(1/4)``, because ``||A A^H|| <= sum_t ||Z_t||`` at every frequency. The first pass finds the
    second one, so the first step is taken when its pass is over.
    """
    _normalize_groups_(tensors, problems)
    grads = [torch.zeros_like(tensor) for tensor in tensors]
    squares = add_gradients_(tensors, problems, options, 0.25, grads).double()
    lags, others = (_numbers(numbers, squares.device) for numbers in _bounds(problems))
    scales = torch.minimum((lags * squares).pow(0.25), others).reciprocal().mul_(squares != 0)
    (a, b, _), *following = steps
    torch._foreach_mul_(list(tensors), list((a * scales).to(tensors[0].dtype).unbind()))
    torch._foreach_mul_(grads, list((b * scales**3).to(tensors[0].dtype).unbind()))
    torch._foreach_add_(list(tensors), grads)
    del grads
    left = 1.0  # ``a`` of the other steps: they only add to the tensors, and are multiplied out at the end
    for a, b, _ in following:
        add_gradients_(tensors, problems, options, b / a * left**2 / 4, tensors)
        left *= a
    return left


def _normalize_groups_(tensors: Sequence[Tensor], problems: Sequence[Problem]) -> None:
    """Give each group as many squares as an orthogonal one has rows; a group of zeros stays as it is."""
    views = [tensor.view(problem.groups, -1) for tensor, problem in zip(tensors, problems, strict=True)]
    whole = [place for place, problem in enumerate(problems) if problem.groups == 1]
    norms: list[Tensor] = [tensor.new_empty(0) for tensor in tensors]
    for place, norm in zip(whole, torch._foreach_norm([views[place] for place in whole]) if whole else (), strict=True):
        norms[place] = norm
    for place, (view, problem) in enumerate(zip(views, problems, strict=True)):
        if problem.groups > 1:
            norms[place] = torch.linalg.vector_norm(view, dim=1, keepdim=True)
    factors = [
        torch.where(norm == 0, 0.0, sqrt(problem.rows) / norm) for norm, problem in zip(norms, problems, strict=True)
    ]
    torch._foreach_mul_(views, factors)


@lru_cache(maxsize=64)
def _bounds(problems: tuple[Problem, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each problem how many lags it has, and ``||K|| sqrt(n)`` of a group that has been normalized."""
    lags = tuple(float(lag_count(problem)) for problem in problems)
    return lags, tuple(sqrt(problem.rows * overlaps(problem)) for problem in problems)


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """In float64 on the device; kept, so that nothing is copied at every step."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float64, device=device)


# ----------------------------------------------------------------------------------------------------------------------
# As matrices
# ----------------------------------------------------------------------------------------------------------------------

#: Smaller matrices of one shape are computed in one batch; for larger ones a copy costs more than a call.
_BATCHED = 1 << 18

#: A CPU computes symmetric products by panels, leaving out most of the other half, from this side on; and from the
#: second one where the products are long. On smaller ones the panels cost more than they save.
_PANELS_FROM, _LONG_PANELS_FROM, _PANELS = 768, 256, 4

#: Squares of norms that are smaller count as this.
_TINY = 1e-37


def matrices(tensors: Sequence[Tensor], steps: Sequence[Step] | Rational, tight: bool = False) -> list[Tensor]:
    """Matrices (..., m, n) with singular values near 1.

    Each is first divided by its norm; ``tight`` by the root of its Gram matrix's, which is nearer to the largest value.
    """
    kinds: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alone = (place,) if prod(tensor.shape[-2:]) >= _BATCHED else ()
        kinds.setdefault((tuple(tensor.shape[-2:]) + alone, tensor.dtype), []).append(place)
    results = list(tensors)
    for (shape, _), places in kinds.items():
        stacked = [tensors[place].reshape(-1, *shape[:2]) for place in places]
        found = _orthogonal(stacked[0] if len(stacked) == 1 else torch.cat(stacked), steps, tight)
        for place, part in zip(places, found.split([len(one) for one in stacked]), strict=True):
            results[place] = part.view(tensors[place].shape)
    return results


def _orthogonal(batch: Tensor, steps: Sequence[Step] | Rational, tight: bool) -> Tensor:
    """Of a batch (B, m, n): the factor of the smaller side times the matrices themselves, which are read but twice."""
    is_tall = batch.shape[1] > batch.shape[2]
    gram = _symmetric(batch.mT, batch) if is_tall else _symmetric(batch, batch.mT)
    squares = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_(min=_TINY)
    gram.div_(squares)
    if tight:
        fourth = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True).clamp_(min=_TINY)
        gram.div_(fourth)
        squares.mul_(fourth)
    factor = _rational_of_gram(gram, steps) if isinstance(steps, Rational) else _polynomial_of_gram(gram, steps)
    factor.mul_(squares.rsqrt_())
    return torch.bmm(batch, factor) if is_tall else torch.bmm(factor, batch)


def _polynomial_of_gram(gram: Tensor, steps: Sequence[Step]) -> Tensor:
    """The matrices that all steps together multiply by, from the Gram matrices (B, m, m)."""
    total: Tensor | None = None
    for number, (a, b, c) in enumerate(steps):
        rest = _symmetric(gram, gram, gram, b, c) if c else gram * b  # what a step multiplies by, without its ``a``
        if total is None:
            total = rest.clone()
            total.diagonal(dim1=1, dim2=2).add_(a)
        else:
            total = _symmetric(rest, total, total, a)
        if number + 1 < len(steps):
            gram = _symmetric(rest, gram, gram, a)
            gram = _symmetric(rest, gram, gram, a)
    assert total is not None
    return total


def _rational_of_gram(gram: Tensor, rational: Rational) -> Tensor:
    """The same by partial fractions: nothing but inverses of positive definite matrices, by Cholesky's method."""
    total = torch.zeros_like(gram)
    total.diagonal(dim1=1, dim2=2).add_(rational.factor)
    for pole, weight in rational.fractions:
        shifted = gram.clone()
        shifted.diagonal(dim1=1, dim2=2).add_(pole)
        total.add_(torch.cholesky_inverse(torch.linalg.cholesky_ex(shifted).L), alpha=weight)
    return total


def _symmetric(
    left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """``beta added + alpha left right`` of (B, m, k) and (B, k, m), which is symmetric; little more than half of it is
    computed where that pays."""
    side, length = left.shape[1:]
    pays = side >= (_LONG_PANELS_FROM if length >= 2 * side else _PANELS_FROM)
    if not pays or left.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.bmm(left, right) if added is None else torch.baddbmm(added, left, right, beta=beta, alpha=alpha)
    found = left.new_empty(len(left), side, side)
    begins = [side * panel // _PANELS for panel in range(_PANELS + 1)]
    for index, (one, a, b) in enumerate(zip(found, left, right, strict=True)):
        for begin, end in itertools.pairwise(begins):
            panel = one[begin:end, begin:]
            if added is None:
                torch.mm(a[begin:end], b[:, begin:], out=panel)
            else:
                more = added[index, begin:end, begin:]
                torch.addmm(more, a[begin:end], b[:, begin:], beta=beta, alpha=alpha, out=panel)
            one[end:, begin:end] = one[begin:end, end:].T
    return found
