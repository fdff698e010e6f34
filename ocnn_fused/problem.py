"""One layer and what is asked of it, as values that are checked once and can be looked up.

Ops cannot take such values, so they are flattened into lists of numbers and back again; nobody else knows how.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Literal, NamedTuple, SupportsFloat, get_args

from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

Side = Literal["auto", "row", "column"]
Precision = Literal["ieee", "tf32x3", "tf32", "bf16"]
Launch = Literal["auto", "single", "staged"]
IntOrTuple = int | Sequence[int]
Target = float | Literal["free"]
Part = Literal["all", "off_diagonal"]

#: What a problem's ``target`` is where it is no number that was asked for.
FREE, OFF_DIAGONAL = 0.0, -1.0


class Problem(NamedTuple):
    """The orthogonality loss of one layer; made by :func:`problem_of`, which checks it.

    ``padding=None`` keeps every lag; otherwise it is a multiple of the stride on every axis. ``target`` is what the
    diagonal of lag 0 is compared with: a positive number, FREE for the one that makes the loss least, which is
    ``||K||^2 / M`` of each group, or OFF_DIAGONAL for nothing: it does not count.
    """

    shape: tuple[int, ...]  # (M, C/groups, k1..kn)
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | None
    groups: int
    target: float = 1

    @property
    def rows(self) -> int:
        """Filters per group, ``M/groups``."""
        return self.shape[0] // self.groups

    @property
    def channels(self) -> int:
        """Input channels per group."""
        return self.shape[1]

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.shape[2:]

    @property
    def is_linear(self) -> bool:
        """Whether the layer is a product with a matrix, and no convolution."""
        return len(self.shape) == 2


class Options(NamedTuple):
    """How a loss is to be computed, where the user has a wish."""

    side: Side = "auto"
    backend: str | None = None
    precision: Precision | None = None
    launch: Launch | None = None


DEFAULT_OPTIONS = Options()

#: Names of the backends, in the order in which they are preferred.
BACKENDS = ("cpu", "triton", "cuda", "torch")


def problem_of(
    shape: Sequence[int],
    stride: IntOrTuple,
    dilation: IntOrTuple,
    groups: int,
    padding: IntOrTuple | None,
    target: Target = 1,
    part: str = "all",
) -> Problem:
    """The problem of a weight of ``shape``, each number checked and one per spatial axis."""
    if not 2 <= len(shape) <= 5:
        raise ValueError(
            f"weight must have 2 (Linear) to 5 (Conv3d) dimensions (M, C/groups, k1..kn), got shape {tuple(shape)}"
        )
    if 0 in shape:
        raise ValueError(f"weight must not have an empty dimension, got shape {tuple(shape)}")
    axes = len(shape) - 2
    # The common case costs no call.
    strides = (stride,) * axes if type(stride) is int and stride > 0 else per_axis("stride", stride, axes, 1)
    dilations = (
        (dilation,) * axes if type(dilation) is int and dilation > 0 else per_axis("dilation", dilation, axes, 1)
    )
    if type(groups) is not int:
        groups = _whole_number("groups must be a positive int", groups)
    if groups < 1 or shape[0] % groups:
        raise ValueError(f"groups must be positive and divide weight.shape[0] = {shape[0]}, got {groups}")
    paddings = None
    if padding is not None:
        paddings = per_axis("padding", padding, axes, 0)
        if any(p % s for p, s in zip(paddings, strides, strict=True)):
            raise ValueError(
                "padding must be a multiple of the stride on every axis (else lag 0 is missed), "
                f"got {paddings} with stride {strides}"
            )
    # An int, as is every default of it: torch.compile would take a float for something that changes, and start again.
    number = 1 if target == 1 and part == "all" else target_of(target, part)
    return Problem(tuple(shape), strides, dilations, paddings or None, groups, number)


def target_of(target: Target, part: str) -> float:
    """What the diagonal of lag 0 is compared with, checked; see :class:`Problem`."""
    check_choice("part", part, get_args(Part))
    if target == "free":
        value = FREE
    elif isinstance(target, (str, bool)) or not isinstance(target, SupportsFloat):
        raise TypeError(f"target must be a positive number or 'free', got {target!r}")
    else:
        value = float(target)
        if not 0 < value < inf:
            raise ValueError(f"target must be a positive number or 'free', got {target!r}")
    if part == "all":
        return value
    if value != 1.0:
        raise ValueError(f"target must be left out with part='off_diagonal', which has none, got {target!r}")
    return OFF_DIAGONAL


def per_axis(name: str, value: IntOrTuple, axes: int, least: int) -> tuple[int, ...]:
    """An int for all axes or one per axis, each at least ``least``."""
    expected = f"{name} must be a {'positive' if least else 'non-negative'} int or a tuple of {axes}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = tuple([_whole_number(expected, entry, value) for entry in value])
    else:
        values = (_whole_number(expected, value),) * max(axes, 1)
    # The messages are made only when they are needed: torch.compile cannot format a symbolic int.
    if any(entry < least for entry in values):
        raise ValueError(f"{expected}, got {value!r}")
    if not isinstance(value, Sequence):
        return values[:axes]
    if len(values) != axes:
        raise ValueError(f"{expected}, got {value!r}")
    return values


def _whole_number(expected: str, value: object, given: object = None) -> int:
    """An int, also one of numpy's; True and 1.0 are none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{expected}, got {value if given is None else given!r}")


def is_number(value: object) -> bool:
    """Whether it is a real number, also one of numpy's; True is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def options_of(side: str, backend: str | None, precision: str | None, launch: str | None) -> Options:
    """The options, each checked."""
    check_choice("side", side, get_args(Side))
    for name, value, choices in (
        ("backend", backend, BACKENDS),
        ("precision", precision, get_args(Precision)),
        ("launch", launch, get_args(Launch)),
    ):
        if value is not None:
            check_choice(name, value, choices, "None or one of")
    return Options(side, backend, precision, launch)  # type: ignore[arg-type]


def check_choice(name: str, value: object, choices: Sequence[object], expected: str = "one of") -> None:
    """An error unless ``value`` is one of ``choices``."""
    # By identity where it is no text: 1 is equal to True.
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be {expected} {', '.join(map(repr, choices))}, got {value!r}")


# ----------------------------------------------------------------------------------------------------------------------
# As ops take them
# ----------------------------------------------------------------------------------------------------------------------

#: Arguments after the weights: lists over all axes of all weights, one after the other; one ``groups`` and one
#: ``target`` per weight; then an option each. What :func:`flatten` returns.
PROBLEMS_SCHEMA = "int[] strides, int[] dilations, int[] paddings, int[] groups, float[] targets"
SCHEMA = f"{PROBLEMS_SCHEMA}, str side, str? backend, str? precision, str? launch"

FlatProblems = tuple[list[int], list[int], list[int], list[int], list[float]]
Flat = tuple[list[int], list[int], list[int], list[int], list[float], str, str | None, str | None, str | None]

_ALL_LAGS = -1


def flatten(problems: Sequence[Problem], options: Options) -> Flat:
    return *flatten_problems(problems), *options


def flatten_problems(problems: Sequence[Problem]) -> FlatProblems:
    flat: FlatProblems = ([], [], [], [], [])
    strides, dilations, paddings, groups, targets = flat
    for problem in problems:
        strides += problem.stride
        dilations += problem.dilation
        paddings += problem.padding or (_ALL_LAGS,) * len(problem.stride)
        groups.append(problem.groups)
        targets.append(problem.target)
    return flat


def unflatten(weights: Sequence[Tensor], *flat: Unpack[Flat]) -> tuple[tuple[Problem, ...], Options]:
    """The problems of these weights, and the options."""
    return unflatten_problems(weights, *flat[:5]), Options(*flat[5:])  # type: ignore[arg-type]


def unflatten_problems(weights: Sequence[Tensor], *flat: Unpack[FlatProblems]) -> tuple[Problem, ...]:
    strides, dilations, paddings, every_groups, targets = flat
    problems = []
    begin = 0
    for weight, groups, target in zip(weights, every_groups, targets, strict=True):
        axes = slice(begin, begin + weight.dim() - 2)
        begin = axes.stop
        padding = tuple(paddings[axes])
        kept = None if not padding or _ALL_LAGS in padding else padding
        problems.append(Problem(weight.shape, tuple(strides[axes]), tuple(dilations[axes]), kept, groups, target))
    return tuple(problems)


def repeated(times: int, *flat: Unpack[Flat]) -> Flat:
    """Of the same weights several times over."""
    return *repeated_problems(times, *flat[:5]), *flat[5:]


def repeated_problems(times: int, *flat: Unpack[FlatProblems]) -> FlatProblems:
    strides, dilations, paddings, groups, targets = (list(values) * times for values in flat)
    return strides, dilations, paddings, groups, targets  # type: ignore[return-value]
