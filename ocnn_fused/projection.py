"""Steps outside the loss: weights moved towards orthogonality directly, with no autograd and no optimiser.

A step is ``K - rate/(8a) * gradient of L`` with the target ``a``. Without the cut to the kernel's support that is the
Björck step ``A - (A A^T - a I) A / (2a)`` of the convolution's matrix. It lowers the loss where singular values are
below about ``1.29 sqrt(a)``, and may raise it where one is above: such a step is halved, if it is checked.

To check a step, the loss after it must be computed, which costs about half of the step itself. The loss before it costs
nothing, and on a CPU it can be looked at before the weight is moved. So :class:`Past` remembers, for each weight, the
last step that was checked, and asks for the next check only where something is in doubt: see :meth:`Past.vouches`.
Near orthogonality, below :func:`harmless`, no step can raise the loss at all. On a GPU looking would mean waiting, so
every step is checked there, without anybody looking.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import inf, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import engine
from .backends.epilogue import Epilogue
from .functional import check_weight
from .plan import axes_of, least_loss
from .problem import FREE, OFF_DIAGONAL, IntOrTuple, Options, Problem, options_of, problem_of

__all__ = ["Orthogonalized", "Past", "Safe", "harmless", "orthogonalize_", "step_"]


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
    pasts: Sequence[Past] | None = None,
) -> list[Tensor]:
    """One step of each weight, in place; returns their losses before it.

    Without ``safe`` the step is a part of the pass that computes it: no gradient is kept, nothing is read twice.

    ``safe`` computes the losses after the step too. Where one has risen, the step is halved as often as the curve
    ``before - slope * x + c * x^4`` through all that is known says, and taken back if the loss rises even so.
    On a GPU that is decided there, and costs two passes for the loss. On a CPU only weights that need it get a second;
    with ``pasts``, one per weight, only steps that these do not vouch for are checked at all, and gradients are in
    memory for one piece of the list at a time.
    """
    if not safe and _can_move_at_once(weights, problems):
        return _pass(weights, problems, options, rate, in_place=True)[0]
    losses: list[Tensor] = []
    for piece in _pieces(weights):
        own = pasts[piece] if pasts is not None and _decides_on_host(weights[0]) else None
        losses += _take_(weights[piece], problems[piece], options, rate, safe, own)
    return losses


def _take_(
    weights: Sequence[Tensor],
    problems: tuple[Problem, ...],
    options: Options,
    rate: float,
    safe: bool,
    pasts: Sequence[Past] | None,
) -> list[Tensor]:
    """Steps that are in memory for a while, so that they can be shortened; returns the losses before them."""
    losses, steps = _pass(weights, problems, options, rate, in_place=False)
    doubtful = list(range(len(weights))) if safe else []
    excess: list[float] = []
    if pasts is not None:
        excess = [loss.item() - least_loss(problem) for loss, problem in zip(losses, problems, strict=True)]
        doubtful = [
            place
            for place in doubtful
            if not pasts[place].vouches(excess[place], harmless(problems[place], rate), rate)
        ]
    slopes = [_slope(steps[place], weights[place], problems[place], rate) for place in doubtful]
    torch._foreach_sub_(list(weights), steps)
    if doubtful:
        well = _halve_(
            [weights[place] for place in doubtful],
            tuple(problems[place] for place in doubtful),
            options,
            _stacked([losses[place] for place in doubtful]),
            _stacked(slopes),
            [steps[place] for place in doubtful],
        )
        if pasts is not None:
            for place, fell in zip(doubtful, well.tolist(), strict=True):
                pasts[place].note(excess[place], rate, fell)
    return losses


def _pieces(weights: Sequence[Tensor]) -> list[slice]:
    """Neighbours whose steps are taken together.

    A weight that is there twice takes one step after the other. On a CPU no piece is larger than the largest weight,
    so that steps need little memory; elsewhere more pieces would mean more launches.
    """
    limit = max(weight.nbytes for weight in weights) if _decides_on_host(weights[0]) else inf
    begins, size = [0], 0
    there: set[int] = set()
    for place, weight in enumerate(weights):
        if size + weight.nbytes > limit or weight.data_ptr() in there:
            begins.append(place)
            size = 0
            there.clear()
        size += weight.nbytes
        there.add(weight.data_ptr())
    return [slice(begin, end) for begin, end in itertools.pairwise([*begins, len(weights)])]


def _can_move_at_once(weights: Sequence[Tensor], problems: Sequence[Problem]) -> bool:
    """Whether no weight is there twice, and the passes know what each step is divided by."""
    different = len({weight.data_ptr() for weight in weights}) == len(weights)
    return different and all(problem.target != OFF_DIAGONAL for problem in problems)


def _pass(
    weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, rate: float, in_place: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and steps to subtract; or these are subtracted from different weights where they are computed."""
    losses, steps = list(weights), list(weights)
    kinds: dict[float | None, list[int]] = {}  # None: a number as the target
    for place, problem in enumerate(problems):
        kinds.setdefault(None if problem.target > 0 else problem.target, []).append(place)
    sign = -1 if in_place else 1
    for kind, places in kinds.items():
        some, of_some = [weights[place] for place in places], tuple(problems[place] for place in places)
        numbers = tuple(sign / (8 * problem.target) if problem.target > 0 else sign / 8 for problem in of_some)
        epilogue = Epilogue(
            _on_device(numbers, weights[0].device), rate, some if in_place else (), per_target=kind == FREE
        )
        found, grads = engine.losses_and_grads(some, of_some, options, [True] * len(some), epilogue)
        for place, loss in zip(places, found, strict=True):
            losses[place] = loss
        for place, grad in zip(places, grads, strict=False) if not in_place else ():
            if kind == OFF_DIAGONAL:
                grouped = grad.unflatten(0, (problems[place].groups, -1))
                grouped.div_(_scales(weights[place], problems[place]).to(grad.dtype))
            steps[place] = grad
    return losses, steps


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """In float64; kept, so that nothing is copied at every step."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float64, device=device)


#: Which steps are checked: those in doubt, none, or each.
Safe = bool | Literal["always"]


class Past:
    """What is known of the steps of one weight since the last one that was checked."""

    CHECK_EACH = 16
    GROWTH = 1.25
    MARGIN = 0.25

    def __init__(self) -> None:
        self._left = 0  # steps until the next check
        self._rate = 0.0  # of the last check
        self._least = 0.0  # loss before a step since then

    def vouches(self, loss: float, harmless: float, rate: float) -> bool:
        """Whether the next step, from where the loss is ``loss`` above its least, need not be checked.

        It need not if no step can do harm from there; or if the last check found a good step, it is fewer than
        ``CHECK_EACH`` steps ago, and neither the rate nor the loss has grown since by more than ``GROWTH``.
        """
        if loss <= harmless:
            return True
        if not (self._left > 0 and rate <= self.GROWTH * self._rate and loss <= self.GROWTH * self._least):
            return False  # NaN too
        self._left -= 1
        self._least = min(self._least, loss)
        return True

    def note(self, loss: float, rate: float, fell: bool) -> None:
        """A step was checked; ``fell``: the loss by at least ``MARGIN`` of what its slope promised."""
        self._left, self._rate, self._least = self.CHECK_EACH - 1 if fell else 0, rate, loss


@lru_cache(maxsize=1024)
def harmless(problem: Problem, rate: float) -> float:
    """Losses above the least of which no step at ``rate`` raises the loss, or a negative number if none is known.

    The loss is the mean over ``n`` frequencies of ``||A A^H - a I||^2``, so no singular value there is above
    ``s^2 = a + sqrt(n * loss)``, here and wherever the loss is not larger; the curvature is at most ``12 s^2 - 4 a``,
    and a step of at most two over that cannot leave the set where the loss is not larger.
    """
    axes = axes_of(problem)
    if problem.target <= 0 or rate >= 2 or any(axis.lags != axis.all_lags for axis in axes):
        return -1.0
    return (problem.target * (2 / rate - 1) / 1.5) ** 2 / prod(2 * axis.lags + 1 for axis in axes)


def _squares(tensor: Tensor, groups: int) -> Tensor:
    """Sum of squares of each group, shaped for its filters."""
    grouped = tensor.unflatten(0, (groups, -1))
    every = tuple(range(1, grouped.dim()))
    return torch.linalg.vector_norm(grouped, dim=every, keepdim=True).double().square()


def _scales(weight: Tensor, problem: Problem) -> Tensor:
    """What the step of each group is divided by, shaped for its filters."""
    squares = _squares(weight, problem.groups) / problem.rows
    if problem.target > 0:
        return torch.full_like(squares, problem.target)
    return torch.where(squares > 0, squares, 1.0)


def _slope(step: Tensor, weight: Tensor, problem: Problem, rate: float) -> Tensor:
    """Of the loss along a step that has not been taken yet."""
    return (_squares(step, problem.groups) * _scales(weight, problem)).sum() * (8 / rate)


def _halve_(
    weights: Sequence[Tensor],
    problems: tuple[Problem, ...],
    options: Options,
    before: Tensor,
    slopes: Tensor,
    steps: Sequence[Tensor],
) -> Tensor:
    """Shorten steps that raise the loss; ``weights`` have taken them already. Returns which losses fell well."""
    after = _losses(weights, problems, options)
    rose = ~(after <= before)  # NaN too
    well = before - after >= Past.MARGIN * slopes
    fractions = (slopes / (4 * (after - before + slopes))).pow(1 / 3).nan_to_num(0.0, 0.0, 0.0)
    kept = torch.where(rose, torch.exp2(torch.floor(torch.log2(fractions))), 1.0)
    places = list(range(len(weights)))
    if _decides_on_host(before):
        places = rose.nonzero().flatten().tolist()
        if not places:
            return well
    chosen = [weights[place] for place in places]
    for place, weight in zip(places, chosen, strict=True):
        _move_(weight, steps[place], 1 - kept[place])
    again = _losses(chosen, tuple(problems[place] for place in places), options)
    still = ~(again <= before[places]) & rose[places]
    for place, weight, back in zip(places, chosen, torch.where(still, kept[places], 0.0).unbind(), strict=True):
        _move_(weight, steps[place], back)
    return well


def _decides_on_host(tensor: Tensor) -> bool:
    """Whether looking at a number waits for nothing."""
    return tensor.device.type == "cpu"


def _move_(weight: Tensor, step: Tensor, factor: Tensor) -> None:
    weight.addcmul_(step, factor.to(weight.dtype))


def _losses(weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options) -> Tensor:
    return engine.losses_and_grads(weights, problems, options, [False] * len(weights))[0].double()


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
    A few hundred steps are usual: orthogonal kernels lie in a flat valley, and shorter ways into it, such as moving
    there sooner or cubic steps with minimax coefficients, end farther away or save no step.

    Arguments are those of :func:`fused_orth_loss`. Waits for the device at every step.
    """
    check_weight(weight)
    problem = problem_of(weight.shape, stride, dilation, groups, padding)
    options = options_of("auto", backend, None, None)
    least, start = least_loss(problem), weight.detach().to(torch.float64, copy=True)
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
