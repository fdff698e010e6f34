"""What is asked of a regulariser, checked here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from numbers import Integral
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from .. import modules
from ..problem import Options, Part, Target, check_choice, is_number, options_of, target_of
from .distributed import Shard

Method = Literal["conv", "kernel", "srip"]

#: Lambda of one layer: a number, or one that is steered.
Lambda: TypeAlias = "float | Literal['auto']"

#: One for all layers, a callable of (name, module), or a mapping from name patterns.
Weight: TypeAlias = "Lambda | Callable[[str, nn.Module], Lambda] | Mapping[str, Lambda]"

#: A name pattern (as in fnmatch), a module type, a predicate of (name, module), or several of these.
Selector: TypeAlias = "str | type | Callable[[str, nn.Module], bool] | Iterable[Selector]"


@dataclass(frozen=True)
class Settings:
    """The arguments of :class:`OrthRegularizer` besides the model, which says what they mean; an instance is valid."""

    weight: Weight = 0.01
    include: Selector | None = None
    exclude: Selector | None = None
    method: Method | Mapping[str, Method] = "conv"
    squared: bool = True
    normalize: Literal["none", "numel", "excess"] = "none"
    schedule: Callable[[int], float] | None = None
    every: int = 1
    shard: Shard = "auto"
    preset: Literal["paper-resnet"] | None = None
    backend: str | None = None
    precision: str | None = None
    launch: str | None = None
    power_iterations: int = 8
    weight_of: Mapping[type, Callable[[Any], Tensor]] | None = None
    target: Target = 1
    part: Part = "all"
    tolerance: float = 1.0

    def __post_init__(self) -> None:
        check_weight(self.weight)
        check_tolerance(self.tolerance)
        object.__setattr__(self, "include", check_selector("include", self.include))
        object.__setattr__(self, "exclude", check_selector("exclude", self.exclude))
        check_method(self.method)
        check_choice("squared", self.squared, (True, False))
        check_choice("normalize", self.normalize, ("none", "numel", "excess"))
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(f"schedule must be None or a callable of the step number, got {self.schedule!r}")
        check_positive("every", self.every)
        object.__setattr__(self, "every", int(self.every))
        for weight in self.weight.values() if isinstance(self.weight, Mapping) else (self.weight,):
            self._check_steered(weight)
        check_choice("shard", self.shard, ("auto", True, False))
        check_choice("preset", self.preset, (None, "paper-resnet"))
        check_positive("power_iterations", self.power_iterations)
        object.__setattr__(self, "power_iterations", int(self.power_iterations))
        check_weight_of(self.weight_of)
        options_of("auto", self.backend, self.precision, self.launch)
        methods = self.method.values() if isinstance(self.method, Mapping) else (self.method,)
        if target_of(self.target, self.part) != 1 and "srip" in methods:
            raise ValueError("target and part must be left out with method 'srip', which compares with the identity")
        if self.preset is not None and self.include is not None:
            raise ValueError("include must be None with a preset, which chooses the layers; exclude may be given")

    @property
    def options(self) -> Options:
        """How the losses are computed."""
        return options_of("auto", self.backend, self.precision, self.launch)

    @property
    def goes_by_steps(self) -> bool:
        """Whether the loss depends on how many steps were counted."""
        return self.schedule is not None or self.every > 1

    @property
    def custom_kinds(self) -> tuple[type, ...]:
        """Types of modules whose weight the user names."""
        return tuple(self.weight_of or ())

    @property
    def other_kinds(self) -> tuple[type, ...]:
        """Types of modules that are looked at besides Linear and convolutions; quantised ones are then left out."""
        return *self.custom_kinds, *modules.quantized_kinds()

    def reader_of(self, module: nn.Module) -> Callable[[Any], Tensor]:
        """What gives the module's weight at the moment of the call."""
        for kind, read in (self.weight_of or {}).items():
            if isinstance(module, kind):
                return read
        return modules.weight_of

    def lambda_of(self, name: str, module: nn.Module) -> Lambda | None:
        """Lambda of one layer; None where no pattern matches."""
        if isinstance(self.weight, Mapping):
            return first_match(self.weight, name, module)
        if not callable(self.weight):
            return self.weight
        weight = self.weight(name, module)
        check_lambda(f"weight of {modules.label(name)}", weight)
        self._check_steered(weight)
        return weight

    def _check_steered(self, weight: Any) -> None:
        """Neither of the two would change what a steered lambda arrives at."""
        if not isinstance(weight, str):
            return
        if not self.squared:
            raise ValueError("squared must be True with weight 'auto': lambda is steered by the squared loss")
        if self.normalize == "numel":
            raise ValueError("normalize must not be 'numel' with weight 'auto', which gives each layer its own lambda")

    def method_of(self, name: str, module: nn.Module, kernel: tuple[int, ...]) -> Method:
        """The method of one layer whose weight has this kernel."""
        if isinstance(self.method, Mapping):
            return first_match(self.method, name, module) or "conv"
        if self.preset is not None and self.method == "conv" and kernel == (1,) * len(kernel):
            return "kernel"
        return self.method

    def factor_at(self, step: int) -> float:
        """What the weights are multiplied by at a step: the schedule's value, times ``every`` or 0."""
        factor = 1.0 if self.schedule is None else float(self.schedule(step))
        if not 0 <= factor < inf:
            raise ValueError(f"schedule {self.schedule!r} must be finite and not negative, got {factor} at step {step}")
        return factor * self.every if step % self.every == 0 else 0.0

    def check_patterns(self, names: Sequence[str]) -> None:
        """A pattern that matches none of a model's layers is a typing error; lazy layers have their names already."""
        mappings = {"weight": self.weight, "method": self.method}
        given: dict[str, Any] = {name: value for name, value in mappings.items() if isinstance(value, Mapping)}
        for argument, selector in {"include": self.include, "exclude": self.exclude, **given}.items():
            for pattern in patterns(selector):
                if not any(matches_name(pattern, name) for name in names):
                    raise ValueError(
                        f"{argument} pattern {pattern!r} matches none of the layers {', '.join(names) or '(none)'}"
                    )


def matches(selector: Selector, name: str, module: nn.Module) -> bool:
    """Whether ``selector``, or any one of several, takes this layer."""
    if isinstance(selector, str):
        return matches_name(selector, name)
    if isinstance(selector, type):
        return isinstance(module, selector)
    if callable(selector):
        return bool(selector(name, module))
    return any(matches(part, name, module) for part in selector)


def matches_name(pattern: str, name: str) -> bool:
    """As fnmatch, and a layer's own name always: it may contain what is special in a pattern, as ``a[0]`` does."""
    return pattern == name or fnmatchcase(name, pattern)


def first_match(mapping: Mapping[str, Any], name: str, module: nn.Module) -> Any:
    """The value of the first pattern that matches, else None."""
    return next((value for pattern, value in mapping.items() if matches(pattern, name, module)), None)


def patterns(selector: Selector | None) -> Iterator[str]:
    """The name patterns within a selector."""
    if isinstance(selector, str):
        yield selector
    elif selector is not None and not isinstance(selector, type) and not callable(selector):
        for part in selector:
            yield from patterns(part)


def check_weight(weight: Any) -> None:
    if isinstance(weight, Mapping):
        check_keys("weight", weight)
        for pattern, value in weight.items():
            check_lambda(f"weight[{pattern!r}]", value)
    elif not callable(weight):
        check_lambda("weight", weight)


def check_lambda(label: str, value: Any) -> None:
    if isinstance(value, str) and value == "auto":
        return
    if not is_number(value):
        raise TypeError(
            f"{label} must be a float, 'auto', a callable of (name, module) or a mapping of patterns, got {value!r}"
        )
    if not 0 <= value < inf:
        raise ValueError(f"{label} must be finite and not negative, got {value!r}")


def check_tolerance(value: Any) -> None:
    if not is_number(value):
        raise TypeError(f"tolerance must be a float, got {value!r}")
    if not 0 < value < inf:
        raise ValueError(f"tolerance must be positive and finite, got {value!r}")


def check_selector(argument: str, selector: Any) -> Selector | None:
    """``selector`` with its iterables made into tuples (a generator would be empty the second time), or an error."""
    if selector is None or isinstance(selector, (str, type)) or callable(selector):
        return selector
    if isinstance(selector, Iterable):
        return tuple(part for part in (check_selector(argument, part) for part in selector) if part is not None)
    raise TypeError(
        f"{argument} must be a name pattern, a module type, a predicate of (name, module) or several of these, "
        f"got {selector!r}"
    )


def check_keys(argument: str, mapping: Mapping[Any, Any]) -> None:
    for key in mapping:
        if not isinstance(key, str):
            raise TypeError(f"{argument} must map name patterns (text) to values, got the key {key!r}")


def check_weight_of(readers: Any) -> None:
    if readers is None:
        return
    if isinstance(readers, Mapping) and all(isinstance(k, type) and callable(v) for k, v in readers.items()):
        return
    raise TypeError(f"weight_of must be a mapping from module types to callables of the module, got {readers!r}")


def check_method(method: Any) -> None:
    if isinstance(method, Mapping):
        check_keys("method", method)
    for name in method.values() if isinstance(method, Mapping) else (method,):
        check_choice("method", name, ("conv", "kernel", "srip"))


def check_positive(argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{argument} must be a positive int, got {value!r}")
