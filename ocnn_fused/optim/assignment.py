"""Which parameter of a model gets orthogonal updates, with which geometry, and why the others do not."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from .. import modules
from ..regularizer.selection import chosen_layers
from ..regularizer.settings import Selector, check_selector, matches


class Geometry(NamedTuple):
    """Of a layer: what makes a weight a convolution."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Assigned(NamedTuple):
    """One parameter, its name, its geometry if its updates are to be orthogonal, and the reason."""

    name: str
    parameter: Tensor
    geometry: Geometry | None
    reason: str


def assigned(model: nn.Module, include: Selector | None, exclude: Selector | None) -> list[Assigned]:
    """Every parameter of the model once, in its order.

    By default every convolution that sees more than the image, and every Linear layer but the last layer of the model,
    which is its head.
    """
    plain = modules.unwrap(model)
    include, exclude = check_selector("include", include), check_selector("exclude", exclude)
    layers = dict(modules.named_layers(plain))
    owners = {id(tensor): name for name, module in layers.items() for tensor in module._parameters.values()}
    shared = {
        id(tensor): type(module).__name__
        for module in plain.modules()
        if not modules.is_layer(module)
        for tensor in module._parameters.values()
        if tensor is not None
    }
    refused = _refused(layers, include, exclude, shared, modules.parts_of_adapters(plain))
    chosen = chosen_layers(plain, lambda name, _: name not in refused, None, None)
    own = {}
    for layer in chosen:
        weight = layer.module._parameters.get("weight")
        if weight is None:
            refused[layer.name] = "computed from other parameters"
        elif id(weight) not in own:
            problem = layer.problem
            own[id(weight)] = layer, Geometry(problem.stride, problem.dilation, problem.groups)
    found = []
    for name, parameter in plain.named_parameters():
        key = id(parameter)
        name = modules.plain_name(name)
        if key in own:
            layer, geometry = own[key]
            found.append(Assigned(name, parameter, geometry, f"the weight of {_a(type(layer.module).__name__)}"))
            continue
        owner = owners.get(key)
        if parameter.dim() < 2:
            reason = f"{parameter.dim()}-D: a bias, a norm or a scale"
        elif owner is None:
            reason = f"of {_a(shared.get(key, 'module'))}, which is no layer"
        else:
            reason = refused.get(owner, "not the weight of its layer")
        found.append(Assigned(name, parameter, None, reason))
    return found


def _refused(
    layers: dict[str, nn.Module],
    include: Selector | None,
    exclude: Selector | None,
    shared: dict[int, str],
    adapters: dict[nn.Module, str],
) -> dict[str, str]:
    """Layers whose weights are left to the auxiliary optimiser, by name, and why."""
    refused = {}
    last = next(reversed(layers), None)
    for name, module in layers.items():
        weight = module._parameters.get("weight")
        if exclude is not None and matches(exclude, name, module):
            refused[name] = "excluded"
        elif include is not None and not matches(include, name, module):
            refused[name] = "not included"
        elif id(weight) in shared:
            refused[name] = f"shared with {_a(shared[id(weight)])}"
        elif module in adapters:
            refused[name] = adapters[module]
        elif include is not None:
            continue
        elif modules.is_convolution(module) and _channels(module) <= modules.FEW_CHANNELS:
            refused[name] = f"{_channels(module)} input channels"
        elif isinstance(module, nn.Linear) and name == last:
            refused[name] = "the last layer, a Linear one: the head"
    return refused


def _channels(module: nn.Module) -> int:
    return int(module.in_channels)  # type: ignore[arg-type]


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
