"""The public functions: validate, and call the op that plans and computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import PLAIN_TYPES, orth_losses
from .backends import BACKENDS, encode
from .backends.triton.config import LAUNCHES, PRECISIONS
from .plan import reduce_axis
from .reference import frobenius_norm

IntOrTuple = int | Sequence[int]

#: What the ops take after the weights: strides, dilations and paddings, flattened; groups; side; backend.
Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], str, str]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fused_orth_loss(
    weight: Tensor,
    stride: IntOrTuple = 1,
    *,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    padding: IntOrTuple | None = None,
    squared: bool = True,
    side: str = "auto",
    backend: str | None = None,
    precision: str | None = None,
    launch: str | None = None,
) -> Tensor:
    r"""Orthogonality loss of one layer, as a 0-dim tensor: loss and gradient in one pass.

    .. math:: L = \sum_t \lVert Z_t - [t=0] I \rVert_F^2, \quad
              Z_t[i, j] = \sum_c \sum_{u - v = t} K[i, c, u] K[j, c, v]

    which is the paper's :math:`\lVert \mathrm{Conv}(K, K, padding=P, stride=S) - I_{r0} \rVert_F^2`; equal to
    :func:`ocnn_fused.reference.orth_loss` up to rounding.

    Args:
        weight: ``(M, C/groups, k1..kn)``, n from 0 (Linear) to 3 (Conv3d); float64, float32, bfloat16 or float16, any
            strides. A transposed convolution's weight is passed as it is.
        stride, dilation: of the layer, an int or one per spatial axis.
        groups: of the layer; groups are independent and their losses add.
        padding: None keeps every lag (``floor((k-1)/S)*S``, the paper's); a smaller multiple of the stride keeps fewer.
        squared: False returns the Frobenius norm, whose gradient at zero is zero.
        side: "row" or "column" forces the Gram side that is worked on; the value is the same, the cost is not. On a
            side much longer than the other a small loss is a difference of large numbers and keeps fewer digits.
        backend: None chooses by device; "cpu", "triton", "cuda" or "torch" forces one.
        precision: of the matrix products on a GPU: "ieee", "tf32x3", "tf32" or "bf16"; None follows
            PyTorch's setting of float32 products, and so does backend "cuda" always: there another one is an error.
            Everything else is float32.
        launch: "single" does everything in one kernel launch on a GPU, "staged" in at most five, None chooses.

    Returns:
        The loss in float64 for a float64 weight, else in float32. The gradient has the weight's dtype.
    """
    geometry = _geometry_of_one(weight, (stride, dilation, groups, padding), side, backend, precision, launch)
    (loss,) = orth_losses([weight], *geometry)
    return loss if squared else frobenius_norm(loss)


def fused_orth_loss_foreach(
    weights: Iterable[Tensor],
    strides: IntOrTuple | Sequence[IntOrTuple] = 1,
    *,
    dilations: IntOrTuple | Sequence[IntOrTuple] = 1,
    groups: int | Sequence[int] = 1,
    paddings: IntOrTuple | Sequence[IntOrTuple | None] | None = None,
    squared: bool = True,
    side: str = "auto",
    backend: str | None = None,
    precision: str | None = None,
    launch: str | None = None,
) -> Tensor:
    """:func:`fused_orth_loss` of many weights in one pass, as a 1-D tensor with one loss per weight.

    ``strides``, ``dilations``, ``groups`` and ``paddings`` are one int (or None) for all weights, or a sequence with
    one entry per weight, each as :func:`fused_orth_loss` takes it. All weights must be on one device. The result is
    float64 if any weight is, else float32.
    """
    if isinstance(weights, Tensor):
        raise TypeError("weights must be a sequence of tensors, got one tensor; use fused_orth_loss for that")
    weights = list(weights)
    count = len(weights)
    if count == 0:
        return torch.zeros(0)
    geometry = _geometry(
        weights,
        _one_each("strides", strides, count),
        _one_each("dilations", dilations, count),
        _one_each("groups", groups, count),
        _one_each("paddings", paddings, count),
        side,
        _backend(backend, precision, launch),
        names=_PLURAL,
    )
    losses = orth_losses(weights, *geometry)
    if any(loss.dtype != losses[0].dtype for loss in losses):
        losses = [loss.double() for loss in losses]
    stacked = torch.stack(list(losses))
    return stacked if squared else frobenius_norm(stacked)


def kernel_orth_loss(
    weight: Tensor,
    *,
    groups: int = 1,
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
        squared=squared,
        side=side,
        backend=backend,
        precision=precision,
        launch=launch,
    )


def geometry_of(
    weights: list[Tensor],
    strides: Sequence[IntOrTuple],
    dilations: Sequence[IntOrTuple],
    groups: Sequence[int],
    paddings: Sequence[IntOrTuple | None],
    backend: str | None = None,
    precision: str | None = None,
    launch: str | None = None,
) -> Geometry:
    """What :func:`fused_orth_loss_foreach` passes to the ops, checked once, for who calls them with it many times."""
    encoded = _backend(backend, precision, launch)
    return _geometry(weights, list(strides), list(dilations), list(groups), list(paddings), "auto", encoded, _PLURAL)


_SINGULAR = {
    "weights": "weight",
    "strides": "stride",
    "dilations": "dilation",
    "groups": "groups",
    "paddings": "padding",
}
_PLURAL = {name: name for name in _SINGULAR}


def _backend(backend: str | None, precision: str | None, launch: str | None) -> str:
    """Backend and options, checked, as the op takes them."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    if launch is not None and launch not in LAUNCHES:
        raise ValueError(f"launch must be None or one of {', '.join(map(repr, LAUNCHES))}, got {launch!r}")
    return encode(backend, precision=precision, launch=launch)


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if value is None or isinstance(value, int):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name} must be one value or a sequence of {count} (one per weight), got {len(values)}")
    return values


#: Of arguments that were found good, the geometry; see :func:`_geometry_of_one`.
_known: dict[tuple[Any, ...], Geometry] = {}


def _geometry_of_one(
    weight: Any, numbers: tuple[Any, Any, Any, Any], side: str, backend: Any, precision: Any, launch: Any
) -> Geometry:
    """Looks up arguments that were found good before, which is quicker than checks; ``numbers``: stride to padding."""
    key = None
    if type(weight) in PLAIN_TYPES and not torch.compiler.is_compiling():  # others may have symbolic shapes
        # As text, because True == 1 == 1.0, and a list has no hash.
        key = (weight.shape, weight.dtype, weight.layout, repr(numbers), side, backend, precision, launch)
        if key in _known:
            return _known[key]
    stride, dilation, groups, padding = ([number] for number in numbers)
    encoded = _backend(backend, precision, launch)
    geometry = _geometry([weight], stride, dilation, groups, padding, side, encoded, _SINGULAR)
    if key is not None:
        if len(_known) >= 4096:
            _known.clear()
        _known[key] = geometry
    return geometry


def _geometry(
    weights: list[Tensor],
    strides: list[Any],
    dilations: list[Any],
    groups: list[Any],
    paddings: list[Any],
    side: str,
    backend: str,
    names: dict[str, str],
) -> Geometry:
    if side not in ("auto", "row", "column"):
        raise ValueError(f"side must be 'auto', 'row' or 'column', got {side!r}")
    flat_strides: tuple[int, ...] = ()
    flat_dilations: tuple[int, ...] = ()
    flat_paddings: tuple[int, ...] = ()
    for index, weight in enumerate(weights):
        label = names["weights"] if names is _SINGULAR else f"weights[{index}]"
        _check_weight(label, weight, weights[0])
        axes = weight.dim() - 2
        stride = _per_axis(names["strides"], strides[index], axes, least=1)
        dilation = _per_axis(names["dilations"], dilations[index], axes, least=1)
        _check_groups(names["groups"], groups[index], label, weight)
        padding = (-1,) * axes
        if paddings[index] is not None:
            padding = _per_axis(names["paddings"], paddings[index], axes, least=0)
            _check_padding(names["paddings"], padding, stride)
        if side == "column":
            _check_column(weight, stride, dilation, padding, names["paddings"])
        flat_strides += stride
        flat_dilations += dilation
        flat_paddings += padding
    return flat_strides, flat_dilations, flat_paddings, tuple(groups), side, backend


def _check_weight(label: str, weight: Any, first: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"{label} must be a tensor, got {type(weight).__name__}")
    if weight.layout != torch.strided:
        raise TypeError(f"{label} must be a dense (strided) tensor, got layout {weight.layout}")
    if weight.dtype not in _DTYPES:
        raise TypeError(f"{label} must be float64, float32, bfloat16 or float16, got {weight.dtype}")
    if not 2 <= weight.dim() <= 5:
        raise ValueError(
            f"{label} must have 2 (Linear) to 5 (Conv3d) dimensions (M, C/groups, k1..kn), "
            f"got shape {tuple(weight.shape)}"
        )
    if any(size == 0 for size in weight.shape):
        raise ValueError(f"{label} must not have an empty dimension, got shape {tuple(weight.shape)}")
    if weight.device != first.device:
        raise ValueError(f"weights must be on one device, got {first.device} and {weight.device}")


def _check_groups(name: str, groups: Any, label: str, weight: Tensor) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"{name} must be a positive int, got {groups!r}")
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"{name} must be positive and divide {label}.shape[0] = {weight.shape[0]}, got {groups}")


def _per_axis(name: str, value: Any, axes: int, least: int) -> tuple[int, ...]:
    """An int for all axes or one per axis, each at least ``least``."""
    # The message is made only when it is needed: torch.compile cannot format a symbolic int.
    if not isinstance(value, int) and not isinstance(value, Sequence):
        raise TypeError(_per_axis_message(name, value, axes, least))
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    for entry in (value,) if isinstance(value, int) else values:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise TypeError(_per_axis_message(name, value, axes, least))
        if entry < least:
            raise ValueError(_per_axis_message(name, value, axes, least))
    if len(values) != axes:
        raise ValueError(_per_axis_message(name, value, axes, least))
    return values


def _per_axis_message(name: str, value: Any, axes: int, least: int) -> str:
    return f"{name} must be a {'positive' if least else 'non-negative'} int or a tuple of {axes}, got {value!r}"


def _check_padding(name: str, padding: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if any(p % s for p, s in zip(padding, stride, strict=True)):
        raise ValueError(
            f"{name} must be a multiple of the stride on every axis (else lag 0 is missed), "
            f"got {padding} with stride {stride}"
        )


def _check_column(
    weight: Tensor, stride: tuple[int, ...], dilation: tuple[int, ...], padding: tuple[int, ...], name: str
) -> None:
    for k, s, d, p in zip(weight.shape[2:], stride, dilation, padding, strict=True):
        axis = reduce_axis(k, s, d, None if p < 0 else p)
        if axis.lags != axis.all_lags:
            raise ValueError(
                f"side='column' needs all lags or lag 0 alone: with {name}={padding} only {2 * axis.lags + 1} of "
                f"{2 * axis.all_lags + 1} lags are kept, and the column loss of those is a different one"
            )
