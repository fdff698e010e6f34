"""The public functions: validate, and hand the problems on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from . import backends, engine
from .autograd import orth_loss, orth_losses
from .autograd.transforms import PLAIN_TYPES
from .backends.triton.config import Config
from .backends.triton.tune import search
from .plan import Plan, check_side
from .problem import DEFAULT_OPTIONS, IntOrTuple, Part, Problem, Target, options_of, problem_of
from .reference import frobenius_norm

_Of = TypeVar("_Of")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fused_orth_loss(
    weight: Tensor,
    stride: IntOrTuple = 1,
    *,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    padding: IntOrTuple | None = None,
    target: Target = 1,
    part: Part = "all",
    squared: bool = True,
    side: str = "auto",
    backend: str | None = None,
    precision: str | None = None,
    launch: str | None = None,
) -> Tensor:
    r"""Orthogonality loss of one layer, as a 0-dim tensor: loss and gradient in one pass.

    .. math:: L = \sum_t \lVert Z_t - [t=0] a I \rVert_F^2, \quad
              Z_t[i, j] = \sum_c \sum_{u - v = t} K[i, c, u] K[j, c, v]

    which at ``a = 1`` is the paper's :math:`\lVert \mathrm{Conv}(K, K, padding=P, stride=S) - I_{r0} \rVert_F^2`;
    equal to :func:`ocnn_fused.reference.orth_loss` up to rounding.

    Args:
        weight: ``(M, C/groups, k1..kn)``, n from 0 (Linear) to 3 (Conv3d); float64, float32, bfloat16 or float16, any
            strides. A transposed convolution's weight is passed as it is.
        stride, dilation: of the layer, an int or one per spatial axis.
        groups: of the layer; groups are independent and their losses add.
        padding: None keeps every lag (``floor((k-1)/S)*S``, the paper's); a smaller multiple of the stride keeps fewer.
        target: the ``a`` above, the squared length that filters are to have: a positive number, or "free" for
            orthogonality up to a factor: ``a = ||K||^2 / M`` of each group, the one that makes the loss least.
        part: "off_diagonal" leaves out the diagonal of lag 0, so that filters may have any length; only the row side
            serves.
        squared: False returns the Frobenius norm, whose gradient at zero is zero.
        side: "row" or "column" forces the Gram side that is worked on; the value is the same, the cost is not. On a
            side much longer than the other a small loss is a difference of large numbers and keeps fewer digits.
        backend: None chooses by device; "cpu", "triton", "cuda" or "torch" forces one.
        precision: of the matrix products on a GPU: "ieee", "tf32x3", "tf32" or "bf16"; None does what PyTorch would do
            with the layer there: ``F.conv2d`` uses TF32 unless ``torch.backends.cudnn`` says otherwise, and products
            of a Linear do not unless ``torch.backends.cuda.matmul`` says so. Backend "cuda" always follows the latter:
            there another one is an error. Everything else is float32.
        launch: "single" does everything in one kernel launch on a GPU, "staged" in at most five, None chooses.

    Returns:
        The loss in float64 for a float64 weight, else in float32. The gradient has the weight's dtype.
    """
    options = DEFAULT_OPTIONS
    if (side, backend, precision, launch) != options:
        options = options_of(side, backend, precision, launch)
    if (
        weight.__class__ not in PLAIN_TYPES
        or weight.dtype not in _DTYPES
        or weight.layout is not torch.strided
        or weight.is_nested
    ):
        check_weight(weight)
    problem = problem_of(weight.shape, stride, dilation, groups, padding, target, part)
    if side == "column":
        check_side(problem, "column")
    loss = orth_loss(weight, problem, options)
    return loss if squared else frobenius_norm(loss)


def fused_orth_loss_foreach(
    weights: Iterable[Tensor],
    strides: int | Sequence[IntOrTuple] = 1,
    *,
    dilations: int | Sequence[IntOrTuple] = 1,
    groups: int | Sequence[int] = 1,
    paddings: int | Sequence[IntOrTuple | None] | None = None,
    target: Target = 1,
    part: Part = "all",
    squared: bool = True,
    side: str = "auto",
    backend: str | None = None,
    precision: str | None = None,
    launch: str | None = None,
) -> Tensor:
    """:func:`fused_orth_loss` of many weights in one pass, as a 1-D tensor with one loss per weight.

    ``strides``, ``dilations``, ``groups`` and ``paddings`` are one int (or None) for all weights, or a sequence with
    one entry per weight, each as :func:`fused_orth_loss` takes it; the other arguments are for all weights. All weights
    must be on one device. The result is float64 if any weight is, else float32.
    """
    if isinstance(weights, Tensor):
        raise TypeError("weights must be a sequence of tensors, got one tensor; use fused_orth_loss for that")
    weights = list(weights)
    if not weights:
        return torch.zeros(0)
    problems = problems_of(weights, strides, dilations, groups, paddings, side, target, part)
    losses = orth_losses(weights, problems, options_of(side, backend, precision, launch))
    return losses if squared else frobenius_norm(losses)


def kernel_orth_loss(
    weight: Tensor,
    *,
    groups: int = 1,
    target: Target = 1,
    part: Part = "all",
    squared: bool = True,
    side: str = "auto",
    backend: str | None = None,
    precision: str | None = None,
    launch: str | None = None,
) -> Tensor:
    r"""Kernel orthogonality :math:`\lVert W W^T - I \rVert_F^2` of the flattened weight ``W = (M, C*k1*..*kn)``.

    The paper's baseline: lag 0 alone. Worked on the smaller Gram matrix; the constant by which the two sides differ is
    added back, so the value is always that of the rows. Arguments are those of :func:`fused_orth_loss`.
    """
    return fused_orth_loss(
        weight,
        groups=groups,
        padding=0,
        target=target,
        part=part,
        squared=squared,
        side=side,
        backend=backend,
        precision=precision,
        launch=launch,
    )


def explain(
    weight: Tensor | Sequence[int],
    stride: IntOrTuple = 1,
    *,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    padding: IntOrTuple | None = None,
    target: Target = 1,
    part: Part = "all",
    side: str = "auto",
    backend: str | None = None,
    precision: str | None = None,
    device: torch.device | str | None = None,
) -> str:
    """How the loss of a layer is computed: every plan that would do, with the numbers by which one was chosen.

    ``weight`` may be a shape. ``device`` is the weight's, or the CPU, unless it is given; the name of a GPU ("H100",
    "A100", "RTX 4090") asks for the choice there, by modelled times. Other arguments as for :func:`fused_orth_loss`.
    """
    dtype = torch.float32
    if isinstance(weight, Tensor):
        check_weight(weight)
        dtype, device, weight = weight.dtype, device or weight.device, weight.shape
    problem = problem_of(weight, stride, dilation, groups, padding, target, part)
    return engine.explain(problem, dtype, device or "cpu", options_of(side, backend, precision, None))


def tune(
    weights: Sequence[Tensor],
    strides: int | Sequence[IntOrTuple] = 1,
    *,
    dilations: int | Sequence[IntOrTuple] = 1,
    groups: int | Sequence[int] = 1,
    paddings: int | Sequence[IntOrTuple | None] | None = None,
    precision: str | None = None,
    measure: Callable[[Callable[[], object]], float] | None = None,
    report: Callable[[str], None] = print,
) -> Config:
    """Measure every configuration of the Triton kernels on these weights, and remember the fastest on disk.

    Weights and their geometry are given as to :func:`fused_orth_loss_foreach`. ``measure`` times a call in seconds; by
    default CUDA events around ten calls after a warm-up. A candidate that does not compile or does not fit is reported
    and skipped. Nothing is ever tuned unless this is called.
    """
    weights = [weight.detach() for weight in weights]
    device = weights[0].device
    reason = backends.triton.unavailable_reason(device)
    if reason is not None:
        raise RuntimeError(f"there is nothing to tune: {reason}")
    problems = problems_of(weights, strides, dilations, groups, paddings)
    # As the convolutions of a list are computed, so is the list tuned.
    options = engine.resolve(options_of("auto", "triton", precision, "staged"), device).convolution
    plans = [
        engine.choose(problem, weight.dtype, device, options).plan
        for problem, weight in zip(problems, weights, strict=True)
    ]
    tuned = [(weight, plan) for weight, plan in zip(weights, plans, strict=True) if isinstance(plan, Plan)]
    if not tuned:
        raise RuntimeError("there is nothing to tune: the Triton kernels compute none of these weights")
    return search(
        [weight for weight, _ in tuned], [plan for _, plan in tuned], options.precision or "ieee", measure, report
    )


# ----------------------------------------------------------------------------------------------------------------------
# Checks
# ----------------------------------------------------------------------------------------------------------------------


def problems_of(
    weights: Sequence[Tensor],
    strides: int | Sequence[IntOrTuple] = 1,
    dilations: int | Sequence[IntOrTuple] = 1,
    groups: int | Sequence[int] = 1,
    paddings: int | Sequence[IntOrTuple | None] | None = None,
    side: str = "auto",
    target: Target = 1,
    part: Part = "all",
) -> tuple[Problem, ...]:
    """The problem of every weight; arguments are one value for all weights or one per weight."""
    count = len(weights)
    of_each = zip(
        weights,
        _one_each("strides", strides, count),
        _one_each("dilations", dilations, count),
        _one_each("groups", groups, count),
        _one_each("paddings", paddings, count),
        strict=True,
    )
    problems = []
    for index, (weight, stride, dilation, group, padding) in enumerate(of_each):
        try:
            check_weight(weight)
            problem = problem_of(weight.shape, stride, dilation, group, padding, target, part)  # type: ignore[arg-type]
            if side == "column":
                check_side(problem, "column")
        except (TypeError, ValueError) as error:
            raise type(error)(f"weights[{index}]: {error}") from None
        if weight.device != weights[0].device:
            raise ValueError(f"weights must be on one device, got {weights[0].device} and {weight.device}")
        problems.append(problem)
    return tuple(problems)


def _one_each(name: str, value: Sequence[_Of] | int | None, count: int) -> Sequence[_Of | int | None]:
    if not isinstance(value, Sequence):
        if value is None or (hasattr(value, "__index__") and not isinstance(value, bool)):
            return [value] * count
        raise TypeError(f"{name} must be one int or a sequence of {count} (one entry per weight), got {value!r}")
    if len(value) != count:
        raise ValueError(f"{name} must be one value or a sequence of {count} (one per weight), got {len(value)}")
    return value


def check_weight(weight: Tensor, label: str = "weight") -> None:
    """That it is a dense floating tensor; its shape is a part of the problem."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{label} must be a tensor, got {type(weight).__name__}")
    if weight.is_nested:
        raise TypeError(f"{label} must be one dense tensor, got a nested one; give its parts to the foreach function")
    if weight.layout != torch.strided:
        raise TypeError(f"{label} must be a dense (strided) tensor, got layout {weight.layout}")
    if weight.dtype not in _DTYPES:
        raise TypeError(f"{label} must be float64, float32, bfloat16 or float16, got {weight.dtype}")
