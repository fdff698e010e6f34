"""The layers of a model: which modules count, what they are called, and what their weight is right now."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.swa_utils import AveragedModel

#: A name pattern (as in fnmatch), a module type, a predicate of (name, module), or several of these.
Selector: TypeAlias = "str | type | Callable[[str, nn.Module], bool] | Iterable[Selector]"

# Path components that wrappers put into the names of what they wrap.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

# How the names of a bias and of what it is computed from begin.
_BIAS = ("bias", "parametrizations.bias.")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel, AveragedModel and torch.compile, in any nesting."""
    *_, innermost = wrappers(model)
    return innermost


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model as given, then each module that it wraps, the plain model last."""
    while True:
        yield model
        if "_orig_mod" in model._modules:  # torch.compile
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        elif isinstance(model, (DataParallel, DistributedDataParallel, AveragedModel)):
            model = model.module
        else:
            return


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear, convolution and transposed convolution modules with the names that they have in the plain model."""
    for name, module in model.named_modules():
        if is_layer(module):
            yield ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS), module


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, _ConvNd))


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd)


def matches(selector: Selector, name: str, module: nn.Module) -> bool:
    """Whether ``selector``, or any one of several, takes this layer."""
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, type):
        return isinstance(module, selector)
    if callable(selector):
        return bool(selector(name, module))
    return any(matches(part, name, module) for part in selector)


def patterns(selector: Selector | None) -> Iterator[str]:
    """The name patterns within a selector."""
    if isinstance(selector, str):
        yield selector
    elif selector is not None and not isinstance(selector, type) and not callable(selector):
        for part in selector:
            yield from patterns(part)


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


# ----------------------------------------------------------------------------------------------------------------------
# Weights
# ----------------------------------------------------------------------------------------------------------------------


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary parameter: not computed by its layer, not spread over devices."""
    return type(weight) is Parameter


def is_spread(weight: Tensor) -> bool:
    """Whether a weight is a DTensor; its module need not be imported to know."""
    return hasattr(weight, "full_tensor")


def is_uninitialized(module: nn.Module) -> bool:
    """Whether the module is lazy and has not seen an input yet."""
    return isinstance(module._parameters.get("weight"), UninitializedParameter)


def weight_of(module: nn.Module) -> Tensor:
    """The layer's weight at this moment, ``(M, C/groups, k1..kn)``; a computed one with a graph to its sources."""
    weight = module._parameters.get("weight")
    return weight if weight is not None else _computed_weight(module)


def weight_sources(module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters behind the weight: itself, or the originals that it is computed from."""
    weight = module._parameters.get("weight")
    if weight is not None:
        return (weight,)
    if parametrize.is_parametrized(module, "weight"):
        return tuple(module.parametrizations["weight"].parameters())  # type: ignore[index, union-attr]
    return tuple(parameter for name, parameter in module.named_parameters() if not name.startswith(_BIAS))


def identity(module: nn.Module) -> Hashable:
    """Equal for layers with the same weight: made of the same parameters, and in the same way."""
    kinds: tuple[type, ...] = ()
    if parametrize.is_parametrized(module, "weight"):
        kinds = tuple(type(part) for part in module.parametrizations["weight"])  # type: ignore[index, union-attr]
    return kinds, tuple(map(id, weight_sources(module))) or id(module)


def _computed_weight(module: nn.Module) -> Tensor:
    """By torch.nn.utils: parametrisations, old-style weight norm and spectral norm, pruning.

    The old-style ones set the attribute in a forward hook: it is out of date after an optimiser step, and its graph may
    be used up, so the hook is asked again.
    """
    sources = weight_sources(module)
    with torch.autocast(sources[0].device.type if sources else "cpu", enabled=False):
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm) and hook.name == "weight":
                return hook.compute_weight(module)
            if isinstance(hook, SpectralNorm) and hook.name == "weight":
                return hook.compute_weight(module, do_power_iteration=False)
            if isinstance(hook, prune.BasePruningMethod) and hook._tensor_name == "weight":
                return hook.apply_mask(module)
        with _without_power_iteration(module):
            weight = module.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight of {type(module).__name__} must be a tensor, got {type(weight).__name__}")
    return weight


@contextmanager
def _without_power_iteration(module: nn.Module) -> Iterator[None]:
    """Looking at a spectrally normalised weight in training mode would advance its estimate; only the model may."""
    stack: Iterable[nn.Module] = ()
    if parametrize.is_parametrized(module, "weight"):
        stack = module.parametrizations["weight"]  # type: ignore[index]
    training = [part for part in stack if isinstance(part, parametrizations._SpectralNorm) and part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
