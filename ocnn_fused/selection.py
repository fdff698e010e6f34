"""Which layers of a model are regularised, how, and what one pass over them needs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from . import layers as find
from .backends.lowering import accumulation_dtype
from .distributed import balanced_shares, under_fully_shard
from .functional import Geometry, geometry_of
from .plan import CPU_RATES, Axis, Plan, Rates, make_plan, reduce_axis

if TYPE_CHECKING:
    from .regularizer import OrthRegularizer

Method = Literal["conv", "kernel", "srip"]

#: A convolution with this many input channels or fewer sees the image itself, and is left alone by default.
FEW_CHANNELS = 3


@dataclass(frozen=True, eq=False)
class Layer:
    """One regularised layer, as it was when the model was last looked at."""

    name: str
    module: nn.Module
    weight: float  # lambda of this layer
    method: Method
    squared: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    device: torch.device

    @property
    def padding(self) -> int | None:
        return None if self.method == "conv" else 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        geometry = zip(self.shape[2:], self.stride, self.dilation, strict=True)
        return tuple(reduce_axis(k, s, d, self.padding) for k, s, d in geometry)

    @property
    def rows(self) -> int:
        """Filters per group, M/groups."""
        return self.shape[0] // self.groups

    @property
    def polyphase_channels(self) -> int:
        """Input channels per group times the taps that one placement does not share: ``C' = C * prod(min(s, k))``."""
        return self.shape[1] * prod(axis.residues for axis in self.axes)

    @property
    def turned(self) -> bool:
        """Whether the loss is that of the columns: the norm of kernel orthogonality takes the smaller Gram matrix."""
        return self.method == "kernel" and not self.squared and self.rows > self.polyphase_channels

    def plan(self, rates: Rates = CPU_RATES) -> Plan | None:
        """How the loss is computed on a device of these rates; None for SRIP."""
        if self.method == "srip":
            return None
        return make_plan(self.rows, self.shape[1], self.axes, self.groups, rates=rates)

    def cost(self, power_iterations: int, rates: Rates = CPU_RATES) -> float:
        """Estimated seconds of loss and gradient, for comparing layers."""
        plan = self.plan(rates)
        if plan is not None:
            return plan.cost.seconds
        return 4 * prod(self.shape) * 2 * (power_iterations + 3) / rates.bandwidth

    @property
    def floor(self) -> int:
        """Least value of the squared loss over all weights of this shape.

        At every frequency the Gram matrix of M filters has a rank of at most C', so M - C' of its eigenvalues are 0
        where 1 is wanted; a weight with orthonormal columns reaches the bound.
        """
        if self.method == "srip" or self.turned:
            return 0
        return self.groups * max(0, self.rows - self.polyphase_channels)

    @property
    def has_orthogonal(self) -> bool:
        """Whether a convolution of this shape can be orthogonal by rows or by columns.

        By columns it must see every input pixel: all residues of the stride.
        """
        sees_all = all(axis.residues == s for axis, s in zip(self.axes, self.stride, strict=True))
        return self.method != "conv" or self.floor == 0 or sees_all


@dataclass(frozen=True, eq=False)
class Pass:
    """Layers that are computed together: one device, one kind of loss."""

    indices: tuple[int, ...]
    geometry: Geometry | None  # None for SRIP
    groups: tuple[int, ...]
    turned: tuple[bool, ...]
    dtype: torch.dtype  # of the sum
    mixed: bool  # some losses have another dtype
    coefficients: tuple[float, ...]
    weights: Tensor  # the same, on the device


class Selection:
    """The regularised layers of a model at one moment, and everything that follows from them."""

    def __init__(self, reg: OrthRegularizer) -> None:
        self.layers: list[Layer] = []
        self.left_out: dict[str, str] = {}
        self._numel = reg.normalize == "numel"
        self._backend = reg._backend
        self._power_iterations = reg.power_iterations
        self._passes: dict[tuple[int, ...], list[Pass]] = {}
        self._shares: dict[int, list[tuple[int, ...]]] = {}
        model = find.unwrap(reg.model)
        chosen = _paper_resnet(model) if reg.preset else None
        owner: dict[Hashable, str] = {}
        for name, module in find.named_layers(model):
            reason = _reason_to_leave_out(reg, name, module, chosen)
            weight = reg._weight_of(name, module) if reason is None else None
            if reason is None and weight is None:
                reason = "no pattern of weight matches"
            if reason is None and weight == 0:
                reason = "weight 0"
            if reason is None:
                if find.is_uninitialized(module):
                    raise RuntimeError(
                        f"{name} is a {type(module).__name__} that has not seen an input yet; "
                        "run the model once before the regularizer"
                    )
                first = owner.setdefault(find.identity(module), name)
                if first != name:
                    reason = f"tied to {first}"
            if reason is not None:
                self.left_out[name] = reason
                continue
            self.layers.append(_layer(name, module, float(weight), reg._method_of(name, module), reg.squared))  # type: ignore[arg-type]
        self.everything = tuple(range(len(self.layers)))
        # What there is at a step, or on a rank, with nothing to compute. A leaf: reg().backward() always works.
        self.zero = torch.zeros(
            (),
            dtype=_sum_dtype(self.layers),
            device=self.layers[0].device if self.layers else None,
            requires_grad=True,
        )
        # What is compared at every call: the tree of modules, and of each layer all that a plan depends on. Every
        # layer's parameters are watched, of those left out too: one may have been tied to another.
        self._tree = [(module._modules, tuple(module._modules.values())) for module in model.modules()]
        self._watched = [module._parameters for _, module in find.named_layers(model)]
        self._identities = self._identify()
        weights = [find.weight_of(layer.module) for layer in self.layers]
        self._states = [_state(layer.module, weight) for layer, weight in zip(self.layers, weights, strict=True)]
        self._fully_sharded = under_fully_shard(model)
        self.passes(self.everything, weights)  # checks what the ops take, now rather than in the first step

    def current_weights(self) -> list[Tensor] | None:
        """The layers' weights if the model is still as it was, else None; tens of microseconds for a ResNet."""
        for children, before in self._tree:
            if tuple(children.values()) != before:
                return None
        identities = self._identify()
        if identities != self._identities:
            if _ties(identities) != _ties(self._identities):
                return None
            self._identities = identities
        weights = [find.weight_of(layer.module) for layer in self.layers]
        states = [_state(layer.module, weight) for layer, weight in zip(self.layers, weights, strict=True)]
        return weights if states == self._states else None

    def _identify(self) -> list[int]:
        return [id(parameters.get("weight")) for parameters in self._watched]

    def is_direct(self, index: int, weight: Tensor) -> bool:
        """Whether the op's gradient is the parameter's own."""
        layer = self.layers[index]
        if find.is_plain(weight) and layer.module in self._fully_sharded:
            raise RuntimeError(
                f"{layer.name} is unsharded: FSDP would drop what is added to its .grad; call model.reshard() before "
                "add_grad_()"
            )
        return layer.method != "srip" and not layer.turned and find.is_plain(weight)

    def trained_sources(self, index: int) -> list[Tensor]:
        """The parameters that a computed weight's gradient goes to."""
        layer = self.layers[index]
        sources = [source for source in find.weight_sources(layer.module) if source.requires_grad]
        if not sources or not all(source.is_leaf for source in sources):
            raise RuntimeError(
                f"{layer.name} gets its weight from tensors that are not its parameters, so add_grad_() does not know "
                "where the gradient goes; add reg() to the loss instead"
            )
        return sources

    def share(self, rank: int, world: int) -> tuple[int, ...]:
        """Indices of the layers that one of ``world`` ranks computes."""
        if world == 1:
            return self.everything
        if world not in self._shares:  # by the default rates, so that ranks with other devices agree
            costs = [layer.cost(self._power_iterations) for layer in self.layers]
            self._shares[world] = balanced_shares(costs, world)
        return self._shares[world][rank]

    def passes(self, indices: tuple[int, ...], weights: list[Tensor]) -> list[Pass]:
        """The chosen layers, put together by device and by kind of loss."""
        if indices not in self._passes:
            kinds: dict[tuple[torch.device, bool], list[int]] = {}
            for index in indices:
                layer = self.layers[index]
                kinds.setdefault((layer.device, layer.method == "srip"), []).append(index)
            self._passes[indices] = [self._pass(tuple(members), srip, weights) for (_, srip), members in kinds.items()]
        return self._passes[indices]

    def _pass(self, indices: tuple[int, ...], srip: bool, weights: list[Tensor]) -> Pass:
        layers = [self.layers[index] for index in indices]
        groups = tuple(layer.groups for layer in layers)
        geometry = None
        if not srip:
            geometry = geometry_of(
                [
                    _like_columns(layer) if layer.turned else weights[index]
                    for index, layer in zip(indices, layers, strict=True)
                ],
                [() if layer.turned else layer.stride for layer in layers],
                [() if layer.turned else layer.dilation for layer in layers],
                groups,
                [layer.padding for layer in layers],
                **self._backend,
            )
        dtype = _sum_dtype(layers)
        coefficients = tuple(layer.weight / (prod(layer.shape) if self._numel else 1) for layer in layers)
        return Pass(
            indices,
            geometry,
            groups,
            tuple(layer.turned for layer in layers),
            dtype,
            any(accumulation_dtype(layer.dtype) != dtype for layer in layers),
            coefficients,
            torch.tensor(coefficients, dtype=dtype, device=layers[0].device),
        )


def by_columns(weight: Tensor, groups: int) -> Tensor:
    """The flattened weight of each group turned round, ``(groups*C*k1*..*kn, M/groups)``: its rows are the columns."""
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2).flatten(0, 1)


def _like_columns(layer: Layer) -> Tensor:
    """What :func:`by_columns` gives, without values; a weight in several pieces is not put together for it."""
    shape = (layer.groups * prod(layer.shape[1:]), layer.rows)
    return torch.empty((), dtype=layer.dtype, device=layer.device).expand(shape)


def _sum_dtype(layers: Iterable[Layer]) -> torch.dtype:
    return torch.float64 if any(layer.dtype == torch.float64 for layer in layers) else torch.float32


def _state(module: nn.Module, weight: Tensor) -> tuple[Any, ...]:
    """All that a layer's plan depends on."""
    get = module.__dict__.get
    return weight.shape, weight.dtype, weight.device, get("stride"), get("dilation"), get("groups")


def _ties(identities: list[int]) -> list[int]:
    """For each weight the position of the first that is the same one."""
    first: dict[int, int] = {}
    return [first.setdefault(identity, index) for index, identity in enumerate(identities)]


def _layer(name: str, module: nn.Module, coefficient: float, method: Method, squared: bool) -> Layer:
    weight = find.weight_of(module)
    axes = len(module.kernel_size) if find.is_convolution(module) else 0  # type: ignore[arg-type]
    if weight.dim() != axes + 2:
        raise ValueError(
            f"weight of {name} ({type(module).__name__}) must have {axes + 2} dimensions, got {tuple(weight.shape)}; "
            "if FullyShardedDataParallel flattened it, use fully_shard (FSDP2), or call the regularizer within "
            "summon_full_params"
        )
    stride = tuple(module.stride) if axes else ()  # type: ignore[arg-type]
    dilation = tuple(module.dilation) if axes else ()  # type: ignore[arg-type]
    groups = int(module.groups) if axes else 1  # type: ignore[arg-type]
    return Layer(
        name,
        module,
        coefficient,
        method,
        squared,
        tuple(weight.shape),
        stride,
        dilation,
        groups,
        weight.dtype,
        weight.device,
    )


def _reason_to_leave_out(
    reg: OrthRegularizer, name: str, module: nn.Module, chosen: frozenset[nn.Module] | None
) -> str | None:
    if reg.exclude is not None and find.matches(reg.exclude, name, module):
        return "excluded"
    if chosen is not None:
        return None if module in chosen else f"not in preset {reg.preset}"
    if reg.include is not None:
        return None if find.matches(reg.include, name, module) else "not included"
    if not find.is_convolution(module):
        return "a Linear layer; include it by name or type"
    if not find.is_uninitialized(module) and module.in_channels <= FEW_CHANNELS:  # type: ignore[operator]
        return f"{module.in_channels} input channels"
    return None


def _paper_resnet(model: nn.Module) -> frozenset[nn.Module]:
    """Of each residual block: conv1, or conv1 to conv3 of a bottleneck, and the shortcut's convolution."""
    chosen: list[nn.Module] = []
    for block in model.modules():
        children = dict(block.named_children())
        if not {"conv1", "conv2"} <= children.keys():
            continue
        names = ("conv1", "conv2", "conv3") if "conv3" in children else ("conv1",)
        chosen += [children[name] for name in names]
        for shortcut in ("downsample", "shortcut"):
            if shortcut in children:
                chosen += [module for module in children[shortcut].modules() if find.is_convolution(module)]
    if not chosen:
        raise ValueError(
            "preset 'paper-resnet' needs blocks with children conv1 and conv2, and found none in the model"
        )
    return frozenset(chosen)
