"""The layers of a model: which modules count, what they are called, and what their weight is right now."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.swa_utils import AveragedModel

#: A convolution with this many input channels or fewer sees the image itself, and is left alone by default.
FEW_CHANNELS = 3

# Path components that wrappers put into the names of what they wrap.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

# How the names of a bias and of what it is computed from begin.
_BIAS = ("bias", "parametrizations.bias.")


def label(name: str) -> str:
    """A layer's name as text shows it: the model itself, where that is the layer, is called nothing."""
    return name or "the model"


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


def named_layers(model: nn.Module, others: Iterable[type] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Linear, (transposed) convolution and ``others``, with the names that they have in the plain model."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, _ConvNd, *others)):
            yield plain_name(name), module  # type: ignore[misc]


def plain_name(name: str) -> str:
    """Without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, _ConvNd))


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd)


def quantized_kinds() -> tuple[type, ...]:
    """What torch's quantised layers have in common: a method ``weight()`` and no parameter, so nothing to train."""
    utils = sys.modules.get("torch.ao.nn.quantized.modules.utils")  # where nobody imported it there are none
    kind = getattr(utils, "WeightedQuantizedModule", None)
    return () if kind is None else (kind,)


def computes_its_own_way(module: nn.Module) -> bool:
    """Whether the module's ``forward`` is not torch's own: it may make another weight of the raw one."""
    return any("forward" in kind.__dict__ for kind in type(module).__mro__ if not kind.__module__.startswith("torch."))


def parts_of_adapters(model: nn.Module) -> dict[nn.Module, str]:
    """Layers inside the wrappers of peft, which need not be imported, and why their weights are no layer's weight."""
    reasons: dict[nn.Module, str] = {}
    for wrapper in model.modules():
        if not any(kind.__module__.startswith("peft.") for kind in type(wrapper).__mro__):
            continue
        for name, child in wrapper.named_children():
            if name == "base_layer":
                reason = "the base of a peft adapter: the layer computes with base and adapter together"
            elif name == "original_module":
                reason = "replaced by a copy that peft trains"
            elif "base_layer" in wrapper._modules:
                reason = "a peft adapter"
            else:
                continue
            reasons.update(dict.fromkeys(child.modules(), reason))
    return reasons


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary parameter: not computed by its layer, not spread over devices."""
    return type(weight) is Parameter


def is_spread(weight: Tensor) -> bool:
    """Whether a weight is a DTensor; its module need not be imported to know."""
    return hasattr(weight, "full_tensor")


def copy_into_pieces(weight: Tensor, whole: Tensor) -> None:
    """Write a DTensor's value, which every rank has in one piece, into the pieces; nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * weight.device_mesh.ndim  # type: ignore[attr-defined]
    replicated = DTensor.from_local(whole, weight.device_mesh, everywhere, run_check=False)  # type: ignore[attr-defined]
    weight.to_local().copy_(replicated.redistribute(placements=weight.placements).to_local())  # type: ignore[attr-defined]


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
