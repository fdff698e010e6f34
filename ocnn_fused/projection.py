"""Steps outside the loss: weights moved towards orthogonality directly, with no autograd and no optimiser.

A step is ``K - rate/(8a) * gradient of L`` with the target ``a``. Without the cut to the kernel's support that is the
Björck step ``A - (A A^T - a I) A / (2a)`` of the convolution's matrix. It lowers the loss where singular values are
below about ``1.29 sqrt(a)``, and may raise it where one is above: such a step is halved, if it is checked.

To check a step, the loss after it must be computed, which costs about as much as half of the step itself. Nothing that
the step's own pass knows can replace it for a large layer: bounds of the largest singular value by sums of squares are
too coarse by the square root of the number of filters. So every step is checked, unless the caller asks for less:
:class:`Steps`, which takes one step after the other, can check the first and then each sixteenth. In between the loss
before each step, which costs nothing, shows whether a layer's loss has doubled since the step before; then it is left
alone until the next check. That is too late where an optimiser moves weights far in one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import engine
from .backends.job import Epilogue
from .functional import check_weight
from .plan import axes_of, least_loss
from .problem import OFF_DIAGONAL, IntOrTuple, Options, Problem, options_of, problem_of

__all__ = ["Orthogonalized", "Safe", "Steps", "orthogonalize_", "step_"]


# ----------------------------------------------------------------------------------------------------------------------
# One step
# ----------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def step_(
    weights: Sequence[Tensor],
    problems: tuple[Problem, ...],
    options: Options,
    rate: float,
    safe: bool = True,
    shares: Tensor | None = None,
) -> list[Tensor]:
    """One step of each weight, in place; returns their losses before it.

    Without ``safe`` the step is a part of the pass that computes it: no gradient is kept, nothing is read twice.
    ``shares``, one per weight, shorten such steps.

    ``safe`` computes the losses after the step too. Where one has risen, the step is halved as often as the curve
    ``before - slope * x + c * x^4`` through all that is known says, and taken back if the loss rises even so.
    On a GPU that is decided there, and costs two passes for the loss; on a CPU only weights that need it get a second.
    """
    if not safe and _can_move_at_once(weights, problems):
        return _move_all_(weights, problems, options, rate, shares)
    losses, steps = engine.losses_and_grads(weights, problems, options, [True] * len(weights))
    slopes = [
        _scale_(step, weight, problem, rate) for step, weight, problem in zip(steps, weights, problems, strict=True)
    ]
    for place, step in enumerate(steps if shares is not None else ()):
        step.mul_(shares[place])  # type: ignore[index]
    torch._foreach_sub_(list(weights), steps)
    if safe:
        _halve_(weights, problems, options, _stacked(losses), _stacked(slopes), steps)
    return losses


def _can_move_at_once(weights: Sequence[Tensor], problems: Sequence[Problem]) -> bool:
    """Whether no weight is there twice, and the passes know what each step is divided by."""
    different = len({weight.data_ptr() for weight in weights}) == len(weights)
    return different and all(problem.target != OFF_DIAGONAL for problem in problems)


def _move_all_(
    weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, rate: float, shares: Tensor | None
) -> list[Tensor]:
    """Steps of different weights, added to them where the gradients are computed."""
    losses = list(weights)
    kinds: dict[bool, list[int]] = {}
    for place, problem in enumerate(problems):
        kinds.setdefault(problem.target > 0, []).append(place)
    for has_target, places in kinds.items():
        some, of_some = [weights[place] for place in places], tuple(problems[place] for place in places)
        numbers = tuple(-1 / (8 * problem.target) if has_target else -1 / 8 for problem in of_some)
        factors = _on_device(numbers, weights[0].device)
        if shares is not None:
            factors = factors * Epilogue(shares).of(places).factors
        epilogue = Epilogue(factors, rate, some, per_target=not has_target)
        found = engine.losses_and_grads(some, of_some, options, [True] * len(some), epilogue)[0]
        for place, loss in zip(places, found, strict=True):
            losses[place] = loss
    return losses


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """In float64; kept, so that nothing is copied at every step."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float64, device=device)


#: Which steps are checked: each, none, or some.
Safe = bool | Literal["sometimes"]


class Steps:
    """One step after the other of always the same weights; see the top of this file. Nothing waits for a device."""

    CHECK_EACH = 16
    GROWTH = 2.0

    def __init__(self) -> None:
        self._taken = 0
        self._rate = 0.0  # of the last check
        self._before: Tensor | None = None  # losses before the last step of those that are trusted
        self._trusted: Tensor | None = None  # 1 or 0 for each weight

    def take_(
        self, weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, rate: float, safe: Safe
    ) -> None:
        """One step of each weight, in place; ``safe`` is that of ``OrthRegularizer.project_``."""
        if not safe:
            step_(weights, problems, options, rate, safe=False)
            return
        checked = safe is True or self._taken % self.CHECK_EACH == 0 or rate > 2 * self._rate
        losses = _stacked(step_(weights, problems, options, rate, checked, None if checked else self._trusted))
        if checked or self._before is None or self._trusted is None:
            self._taken, self._rate = 0, rate
            self._before, self._trusted = losses, torch.ones_like(losses)
        else:
            self._trusted = self._trusted * (losses <= self.GROWTH * self._before)  # NaN is not
            self._before = torch.where(self._trusted > 0, losses, self._before)
        self._taken += 1


def _scale_(grad: Tensor, weight: Tensor, problem: Problem, rate: float) -> Tensor:
    """Turn a gradient into a step; returns the slope of the loss along it."""
    grouped = grad.unflatten(0, (problem.groups, -1))
    every = tuple(range(1, grouped.dim()))
    squares = torch.linalg.vector_norm(grouped, dim=every, keepdim=True).double().square()
    if problem.target > 0:
        factors: Tensor | float = rate / (8 * problem.target)
    else:  # groups go by their own scale
        rows = weight.unflatten(0, (problem.groups, -1))
        scales = torch.linalg.vector_norm(rows, dim=every, keepdim=True).double().square() / problem.rows
        factors = rate / (8 * torch.where(scales > 0, scales, 1.0))
    slope = (squares * factors).sum()
    grouped.mul_(factors.to(grad.dtype) if isinstance(factors, Tensor) else factors)
    return slope


def _halve_(
    weights: Sequence[Tensor],
    problems: tuple[Problem, ...],
    options: Options,
    before: Tensor,
    slopes: Tensor,
    steps: Sequence[Tensor],
) -> None:
    """Shorten steps that raise the loss; ``weights`` have taken them already."""
    after = _losses(weights, problems, options)
    rose = ~(after <= before)  # NaN too
    fractions = (slopes / (4 * (after - before + slopes))).pow(1 / 3).nan_to_num(0.0, 0.0, 0.0)
    kept = torch.where(rose, torch.exp2(torch.floor(torch.log2(fractions))), 1.0)
    places = list(range(len(weights)))
    if _decides_on_host(before):
        places = rose.nonzero().flatten().tolist()
        if not places:
            return
    chosen = [weights[place] for place in places]
    for place, weight in zip(places, chosen, strict=True):
        _move_(weight, steps[place], 1 - kept[place])
    again = _losses(chosen, tuple(problems[place] for place in places), options)
    still = ~(again <= before[places]) & rose[places]
    for place, weight, back in zip(places, chosen, torch.where(still, kept[places], 0.0).unbind(), strict=True):
        _move_(weight, steps[place], back)


def _decides_on_host(tensor: Tensor) -> bool:
    """Whether looking at a number waits for nothing."""
    return tensor.device.type == "cpu"


def _move_(weight: Tensor, step: Tensor, factor: Tensor) -> None:
    weight.addcmul_(step, factor.to(weight.dtype))


def _losses(weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options) -> Tensor:
    return _stacked(engine.losses_and_grads(weights, problems, options, [False] * len(weights))[0])


def _stacked(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.double() for value in values])


# ----------------------------------------------------------------------------------------------------------------------
# All the way
# ----------------------------------------------------------------------------------------------------------------------


class Orthogonalized(NamedTuple):
    """How far :func:`orthogonalize_` came."""

    loss: float  # above the least of this shape, see ocnn_fused.plan.least_loss
    distance: float  # from where the weight was, Frobenius norm
    steps: int  # losses and gradients computed
    reached: bool  # the loss is within tol


#: Steps between two looks at the progress, and the share of the loss that must go in the meantime.
_PATIENCE = 20
_PROGRESS = 0.1


@torch.no_grad()
def orthogonalize_(
    weight: Tensor,
    stride: IntOrTuple = 1,
    *,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    padding: IntOrTuple | None = None,
    tol: float = 1e-6,
    max_steps: int = 2000,
    backend: str | None = None,
) -> Orthogonalized:
    """Move ``weight`` in place to an orthogonal convolution near by, and say how far it came.

    The loss is lowered by L-BFGS in float64 until it is within ``tol`` of the least that the shape allows, and the
    result rounded once to the weight's dtype. Away from its least value the loss has local minima: a single filter that
    is spread over its taps is one. Where the descent stalls, groups that are not orthogonal are moved a quarter of the
    way to an orthogonal kernel, and it goes on from there; if it stalls again half of the way, then all of it. That
    kernel has, on the block of ``min(step, k)`` taps per axis that is strongest, the orthogonal matrix nearest to it.

    Arguments are those of :func:`fused_orth_loss`. Waits for the device at every step.
    """
    check_weight(weight)
    problem = problem_of(weight.shape, stride, dilation, groups, padding)
    options = options_of("auto", backend, None, None)
    least, start = least_loss(problem), weight.detach().double()
    kernel = start.clone(memory_format=torch.contiguous_format)
    loss, steps, share = inf, 0, 0.25

    def evaluate() -> float:
        nonlocal loss, steps
        steps += 1
        (value,), (kernel.grad,) = engine.losses_and_grads([kernel], (problem,), options, [True])
        loss = value.item() - least
        return loss

    evaluate()
    while steps < max_steps and loss > tol:
        optimizer = torch.optim.LBFGS(
            [kernel.requires_grad_()], lr=1.0, max_iter=_PATIENCE, history_size=20, line_search_fn="strong_wolfe",
            tolerance_grad=0, tolerance_change=0,
        )  # fmt: skip
        before = inf
        while steps < max_steps and tol < loss and (before == inf or loss < (1 - _PROGRESS) * before):
            before = loss
            optimizer.step(evaluate)
            evaluate()
        if steps < max_steps and loss > tol:
            _lead_out_(kernel.detach(), problem, options, tol, share)
            share = min(1.0, 2 * share)
    weight.copy_(kernel.detach())
    return Orthogonalized(loss, torch.linalg.vector_norm(weight.double() - start).item(), steps, loss <= tol)


def _lead_out_(kernel: Tensor, problem: Problem, options: Options, tol: float, share: float) -> None:
    """Move groups that are not orthogonal a ``share`` of the way to a kernel that is, on their strongest block."""
    sizes = [axis.residues for axis in axes_of(problem)]
    begins = itertools.product(*(range(0, k - s + 1, s) for k, s in zip(problem.kernel, sizes, strict=True)))
    blocks = [tuple(slice(b, b + s) for b, s in zip(begin, sizes, strict=True)) for begin in begins]
    alone = problem._replace(shape=(problem.rows, *problem.shape[1:]), groups=1)
    groups = list(kernel.chunk(problem.groups))
    excess = _losses(groups, (alone,) * problem.groups, options) - least_loss(alone)
    for index in (excess > tol / problem.groups).nonzero().flatten().tolist():
        parts = [groups[index][(slice(None), slice(None), *block)] for block in blocks]
        strongest = max(parts, key=lambda part: part.square().sum().item())
        left, _, right = torch.linalg.svd(strongest.flatten(1), full_matrices=False)
        groups[index].mul_(1 - share)
        strongest.add_((left @ right).reshape(strongest.shape), alpha=share)
