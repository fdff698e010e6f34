"""Which layers of a model are regularised, how, and what one pass over them needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import engine, modules
from ..autograd import Weighting
from ..backends.cpu import BANDWIDTH
from ..functional import check_weight
from ..plan import AnyPlan, has_orthogonal, least_loss, polyphase_channels
from ..problem import OFF_DIAGONAL, Options, Problem, problem_of
from ..projection import Past
from .distributed import balanced_shares, under_fully_shard
from .presets import paper_resnet
from .settings import Lambda, Method, Selector, Settings, matches
from .steering import START, Known, Lambdas, Yardstick
from .watch import Watch

#: Layers are compared by what they would cost a CPU, so that ranks with other devices agree on the shares.
_CPU = Options(backend="cpu", precision="ieee")


@dataclass(frozen=True, eq=False)
class Layer:
    """One regularised layer, as it was when the model was last looked at."""

    name: str
    module: nn.Module
    weight: float  # lambda of this layer; where it is steered, of the first call
    method: Method
    squared: bool
    problem: Problem
    dtype: torch.dtype
    device: torch.device
    read: Callable[[Any], Tensor]  # gives the module's weight at the moment of the call
    note: str = ""
    tolerance: float | None = None  # None: lambda is constant

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The parameters behind the weight."""
        if self.read is modules.weight_of:
            return modules.weight_sources(self.module)
        return tuple(self.module.parameters())

    @property
    def trains(self) -> bool:
        """Whether any parameter behind the weight gets a gradient; a frozen layer counts in the value alone."""
        return any(source.requires_grad for source in self.sources)

    @property
    def turned(self) -> bool:
        """Whether the loss is that of the columns: the norm of kernel orthogonality takes the smaller Gram matrix."""
        if self.method != "kernel" or self.squared or self.problem.target == OFF_DIAGONAL:
            return False
        return self.problem.rows > polyphase_channels(self.problem)

    def plan(self, options: Options) -> AnyPlan | None:
        """How the loss is computed where the weight is, and with what is asked for; None for SRIP."""
        if self.method == "srip":
            return None
        known = self.device.type in ("cpu", "cuda")
        resolved = engine.resolve(options, self.device).of(self.problem) if known else _CPU
        return engine.choose(self.problem, self.dtype, self.device, resolved).plan

    def cost(self, power_iterations: int) -> float:
        """Estimated seconds of loss and gradient, for comparing layers."""
        if self.method == "srip":
            return 4 * prod(self.problem.shape) * 2 * (power_iterations + 3) / BANDWIDTH
        return engine.choose(self.problem, self.dtype, torch.device("cpu"), _CPU).seconds

    @property
    def floor(self) -> float:
        """Least value of the squared loss over all weights of this shape."""
        return 0.0 if self.method == "srip" or self.turned else least_loss(self.problem)

    @property
    def has_orthogonal(self) -> bool:
        """Whether a convolution of this shape can be orthogonal by rows or by columns."""
        return self.method != "conv" or has_orthogonal(self.problem)


@dataclass(frozen=True, eq=False)
class Bundle:
    """Layers that are computed together: one device, one kind of loss."""

    indices: tuple[int, ...]
    problems: tuple[Problem, ...] | None  # None for SRIP
    options: Options
    groups: tuple[int, ...]
    turned: tuple[bool, ...]
    constant: Weighting
    watch: Watch
    yardstick: Yardstick
    lambdas: Lambdas | None  # of these layers and others, if any is steered
    places: Tensor | None  # of these layers among them, if these are not all

    @property
    def weighting(self) -> Weighting:
        """As it is now; what is steered later does not change it."""
        if self.lambdas is None:
            return self.constant
        values = self.lambdas.values
        return Weighting(values.clone() if self.places is None else values[self.places], self.constant.least)


#: What a call has found out about the layers of a bundle: their losses and what these were computed of.
Found = tuple[Bundle, Tensor, Sequence[Tensor]]


class Selection:
    """The regularised layers of a model at one moment, and everything that follows from them."""

    @torch.inference_mode(False)  # what is kept must serve in training too
    def __init__(self, model: nn.Module, settings: Settings, known: Known | None = None) -> None:
        """``known``: of lambdas that are steered, from an earlier selection or a checkpoint."""
        model = modules.unwrap(model)
        self._settings = settings
        self._bundles: dict[tuple[int, ...], list[Bundle]] = {}
        self._shares: dict[int, list[tuple[int, ...]]] = {}
        self._pasts: dict[int, Past] = {}
        self.layers, self.left_out, self.empty_blocks, self._unusable = _choose(model, settings)
        #: Names of layers that will be regularised as soon as their weights hold numbers.
        self.waiting = [modules.label(name) for name, module, read in self._unusable if _holds_nothing(module, read)]
        self.everything = tuple(range(len(self.layers)))
        self.lambdas = self._steered(known or {})
        # What there is at a step, or on a rank, with nothing to compute. A leaf: reg().backward() always works.
        device = self.layers[0].device if self.layers else None
        self.zero = torch.zeros((), dtype=_sum_dtype(self.layers), device=device, requires_grad=True)
        # What is compared at every call: the tree of modules, and of each layer all that a plan depends on. Every
        # layer's parameters are watched, of those left out too: one may have been tied to another.
        self._tree = [(module._modules, tuple(module._modules.values())) for module in model.modules()]
        self._watched = [module._parameters for _, module in modules.named_layers(model, settings.other_kinds)]
        self._identities = self._identify()
        weights = self.weights()
        self._states = self._look_at(weights)
        self._fully_sharded = under_fully_shard(model)
        #: Layers whose weight an earlier layer has too, at another stride.
        self._again = {index for index, first in enumerate(_ties([id(weight) for weight in weights])) if first != index}
        self.bundles(self.everything)  # now rather than in the first step, which may be one that is compiled

    def weights(self) -> list[Tensor]:
        """Of all layers, as they are now."""
        return [layer.read(layer.module) for layer in self.layers]

    def _look_at(self, weights: list[Tensor]) -> list[tuple[Any, ...]]:
        """What must stay the same; of what cannot be used too: it may be loaded, or converted, later."""
        seen = [_state(layer.module, weight) for layer, weight in zip(self.layers, weights, strict=True)]
        for _, module, read in self._unusable:
            seen.append(() if modules.is_uninitialized(module) else _state(module, read(module)))
        return seen

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
        weights = self.weights()
        return weights if self._look_at(weights) == self._states else None

    def _identify(self) -> list[int]:
        weights = [parameters.get("weight") for parameters in self._watched]
        return [0 if weight is None else id(weight) for weight in weights]  # id(None) is more than torch.compile can

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP manages any parameter of the model."""
        return bool(self._fully_sharded)

    def is_direct(self, index: int, weight: Tensor) -> bool:
        """Whether the op's gradient is the parameter's own."""
        layer = self.layers[index]
        if modules.is_plain(weight) and layer.module in self._fully_sharded:
            raise RuntimeError(
                f"{layer.name} is unsharded: FSDP would drop what is added to its .grad; call model.reshard() before "
                "add_grad_()"
            )
        return layer.method != "srip" and not layer.turned and modules.is_plain(weight) and index not in self._again

    def is_movable(self, index: int, weight: Tensor) -> bool:
        """Whether ``project_()`` moves a weight: not if it is frozen; an error says if it cannot."""
        layer = self.layers[index]
        if not any(source.requires_grad for source in modules.weight_sources(layer.module)):
            return False
        if layer.method == "srip":
            raise ValueError(f"project_() has no step for SRIP, the method of {layer.name}")
        if modules.is_plain(weight) and layer.module in self._fully_sharded:
            raise RuntimeError(f"{layer.name} is unsharded: call model.reshard() before project_()")
        if not modules.is_plain(weight) and not modules.is_spread(weight):
            raise ValueError(
                f"project_() cannot move the weight of {layer.name}, which is computed from others; exclude the layer"
            )
        return True

    def past_of(self, index: int) -> Past:
        """What has become of earlier steps of ``project_()`` of a layer."""
        return self._pasts.setdefault(index, Past())

    def trained_sources(self, index: int) -> list[Tensor]:
        """The parameters that a computed weight's gradient goes to."""
        layer = self.layers[index]
        sources = [source for source in layer.sources if source.requires_grad]
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
            costs = [layer.cost(self._settings.power_iterations) for layer in self.layers]
            self._shares[world] = balanced_shares(costs, world)
        return self._shares[world][rank]

    def bundles(self, indices: tuple[int, ...]) -> list[Bundle]:
        """The chosen layers, put together by device and by kind of loss."""
        if not indices:
            return []
        if indices not in self._bundles:
            kinds: dict[tuple[torch.device, bool], list[int]] = {}
            for index in indices:
                layer = self.layers[index]
                kinds.setdefault((layer.device, layer.method == "srip"), []).append(index)
            self._bundles[indices] = [self._bundle(tuple(members), srip) for (_, srip), members in kinds.items()]
        return self._bundles[indices]

    def _steered(self, known: Known) -> dict[torch.device, Lambdas]:
        """The lambdas by device, if any is steered."""
        if all(layer.tolerance is None for layer in self.layers):
            return {}
        devices = dict.fromkeys(layer.device for layer in self.layers)
        return {
            device: Lambdas([layer for layer in self.layers if layer.device == device], self._settings.every, known)
            for device in devices
        }

    def lambda_values(self) -> dict[str, Tensor]:
        """The layers' lambdas as they are now, 0-dim, by name."""
        steered = self.known()
        return {
            layer.name: steered[layer.name][0]
            if layer.name in steered
            else torch.tensor(layer.weight, dtype=torch.float64, device=layer.device)
            for layer in self.layers
        }

    def known(self) -> Known:
        """All that is to be kept of steered lambdas, by the layers' names."""
        return {name: state for lambdas in self.lambdas.values() for name, state in lambdas.known().items()}

    def load(self, known: Known) -> None:
        """Take over lambdas that are steered."""
        for lambdas in self.lambdas.values():
            lambdas.load(known)

    def steer(self, found: Sequence[Found], group: dist.ProcessGroup | None) -> None:
        """Move the lambdas by what a call has found; with ``group`` each of its processes has found a part of it."""
        for lambdas in self.lambdas.values():
            parts = [
                (bundle.places, bundle.yardstick(losses, weights))
                for bundle, losses, weights in found
                if bundle.lambdas is lambdas
            ]
            lambdas.learn(lambdas.gathered(parts, group))

    @torch.inference_mode(False)
    def _bundle(self, indices: tuple[int, ...], srip: bool) -> Bundle:
        layers = [self.layers[index] for index in indices]
        groups = tuple(layer.problem.groups for layer in layers)
        problems = None
        if not srip:
            problems = tuple(_by_columns(layer.problem) if layer.turned else layer.problem for layer in layers)
        numel = self._settings.normalize == "numel"
        numbers = tuple(layer.weight / (prod(layer.problem.shape) if numel else 1) for layer in layers)
        factors = torch.tensor(numbers, dtype=torch.float64, device=layers[0].device)
        turned = tuple(layer.turned for layer in layers)
        squared = self._settings.squared
        least = None
        if self._settings.normalize == "excess":
            least = factors.new_tensor([layer.floor if squared else sqrt(layer.floor) for layer in layers])
        at_zero = [layer.problem.shape[0] if squared else sqrt(layer.problem.shape[0]) for layer in layers]
        watch = Watch([layer.name for layer in layers], at_zero)
        lambdas = self.lambdas.get(layers[0].device)
        places = None
        if lambdas is not None and lambdas.names != [layer.name for layer in layers]:
            places = torch.tensor([lambdas.names.index(layer.name) for layer in layers], device=layers[0].device)
        return Bundle(
            indices, problems, self._settings.options, groups, turned, Weighting(factors, least), watch,
            Yardstick.of(layers), lambdas, places,
        )  # fmt: skip


def chosen_layers(
    model: nn.Module,
    include: Selector | None,
    exclude: Selector | None,
    preset: Literal["paper-resnet"] | None,
) -> list[Layer]:
    """The layers that an :class:`OrthRegularizer` with these arguments would choose."""
    settings = Settings(include=include, exclude=exclude, preset=preset)
    plain = modules.unwrap(model)
    settings.check_patterns([name for name, _ in modules.named_layers(plain, settings.other_kinds)])
    layers, left_out, _, unusable = _choose(plain, settings)
    for name, module, read in unusable:
        if _holds_nothing(module, read):
            raise RuntimeError(f"{modules.label(name)} cannot be filled: {left_out[name]}")
    return layers


def by_columns(weight: Tensor, groups: int) -> Tensor:
    """The flattened weight of each group turned round, ``(groups*C*k1*..*kn, M/groups)``: its rows are the columns."""
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(1, 2).flatten(0, 1)


def _by_columns(problem: Problem) -> Problem:
    """Of what :func:`by_columns` gives."""
    shape = (problem.groups * prod(problem.shape[1:]), problem.rows)
    return Problem(shape, (), (), None, problem.groups, problem.target)


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


_Unusable = list[tuple[str, nn.Module, Callable[[Any], Tensor]]]


def _holds_nothing(module: nn.Module, read: Callable[[Any], Tensor]) -> bool:
    """Whether the weight is there in name alone."""
    return modules.is_uninitialized(module) or read(module).device.type == "meta"


def _choose(model: nn.Module, settings: Settings) -> tuple[list[Layer], dict[str, str], list[str], _Unusable]:
    """The layers that are regularised, the others with the reason, blocks without any, and weights that cannot be."""
    layers: list[Layer] = []
    left_out: dict[str, str] = {}
    unusable: _Unusable = []
    preset, empty_blocks = paper_resnet(model) if settings.preset else (frozenset(), [])
    adapters = modules.parts_of_adapters(model)
    owner: dict[Hashable, str] = {}
    for name, module in modules.named_layers(model, settings.other_kinds):
        reason = adapters.get(module) or _reason_to_leave_out(name, module, settings, preset)
        read = settings.reader_of(module)
        coefficient = settings.lambda_of(name, module) if reason is None else None
        if not coefficient:
            left_out[name] = reason or ("no pattern of weight matches" if coefficient is None else "weight 0")
            continue
        if modules.is_uninitialized(module):
            left_out[name] = f"a {type(module).__name__} that has not seen an input yet"
            unusable.append((name, module, read))
            continue
        weight = read(module)
        try:
            check_weight(weight)
        except TypeError as error:
            if read is not modules.weight_of and not isinstance(weight, Tensor):
                raise TypeError(
                    f"{modules.label(name)}: weight_of must give a tensor, got {type(weight).__name__}"
                ) from None
            left_out[name] = str(error)
            unusable.append((name, module, read))
            continue
        layer = _layer(name, module, weight, read, coefficient, settings)
        # The same weight at another stride is another convolution.
        geometry = layer.problem[1:] if layer.method == "conv" else layer.problem.groups
        first = owner.setdefault((_identity(module, weight, read), geometry), name)
        if first == name:
            layers.append(layer)
        else:
            left_out[name] = f"tied to {first}"
    if any(layer.device.type != "meta" for layer in layers):  # else the whole model is only a sketch
        without_memory = [layer for layer in layers if layer.device.type == "meta"]
        left_out.update({layer.name: "weight on the meta device, which holds no numbers" for layer in without_memory})
        unusable += [(layer.name, layer.module, layer.read) for layer in without_memory]
        layers = [layer for layer in layers if layer not in without_memory]
    return layers, left_out, empty_blocks, unusable


def _identity(module: nn.Module, weight: Tensor, read: Callable[[Any], Tensor]) -> Hashable:
    """Equal for layers with the same weight."""
    if read is modules.weight_of:
        return modules.identity(module)
    return ((), (id(weight),)) if modules.is_plain(weight) else (read, *map(id, module.parameters()))


def _reason_to_leave_out(name: str, module: nn.Module, settings: Settings, preset: frozenset[nn.Module]) -> str | None:
    custom = isinstance(module, settings.custom_kinds)
    if isinstance(module, modules.quantized_kinds()) and not custom:
        return "quantised: its weight is not trained"
    if settings.exclude is not None and matches(settings.exclude, name, module):
        return "excluded"
    if settings.preset is not None:
        return None if module in preset else f"not in preset {settings.preset}"
    if settings.include is not None:
        return None if matches(settings.include, name, module) else "not included"
    if not modules.is_convolution(module):
        return None if custom else "a Linear layer; include it by name or type"
    if not modules.is_uninitialized(module) and module.in_channels <= modules.FEW_CHANNELS:  # type: ignore[operator]
        return f"{module.in_channels} input channels"
    return None


def _layer(
    name: str,
    module: nn.Module,
    weight: Tensor,
    read: Callable[[Any], Tensor],
    coefficient: Lambda,
    settings: Settings,
) -> Layer:
    kernel_size = getattr(module, "kernel_size", None)
    axes = len(kernel_size) if isinstance(kernel_size, tuple) else max(0, weight.dim() - 2)
    if read is modules.weight_of and weight.dim() != axes + 2:
        raise ValueError(
            f"weight of {modules.label(name)} ({type(module).__name__}) must have {axes + 2} dimensions, "
            f"got {tuple(weight.shape)}; if FullyShardedDataParallel flattened it, use fully_shard (FSDP2), or call "
            "the regularizer within summon_full_params"
        )
    method = settings.method_of(name, module, tuple(weight.shape[2:]))
    padding = None if method == "conv" else 0
    stride, dilation, groups = (getattr(module, attribute, 1) for attribute in ("stride", "dilation", "groups"))
    try:
        problem = problem_of(weight.shape, stride, dilation, groups, padding, settings.target, settings.part)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{modules.label(name)}: {error}") from None
    note = ""
    if read is modules.weight_of and modules.computes_its_own_way(module):
        note = f"the raw weight; {type(module).__name__} may compute with another one, which weight_of can name"
    number, tolerance = (START, settings.tolerance) if isinstance(coefficient, str) else (float(coefficient), None)
    return Layer(
        name, module, number, method, settings.squared, problem, weight.dtype, weight.device, read, note, tolerance
    )
