"""OrthRegularizer: the orthogonality loss of a whole model, in one line of a training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import inf, sqrt
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from . import layers as find
from .autograd import losses_and_grads, orth_losses
from .distributed import Shard, announce, averages_everything, is_data_parallel, mean_over, sharing_group
from .layers import Selector
from .reference import frobenius_norm
from .selection import Layer, Method, Pass, Selection, by_columns
from .srip import srip_loss

__all__ = ["OrthRegularizer"]

Weight: TypeAlias = "float | Callable[[str, nn.Module], float] | Mapping[str, float]"

_METHODS = ("conv", "kernel", "srip")
_UPDATES_WITHOUT_STEP = 3  # of the weights
_CALLS_WITHOUT_STEP = 1000  # more than anybody accumulates, for optimisers whose updates autograd does not see


class OrthRegularizer:
    r"""Orthogonality loss of all convolutions of a model: ``loss = criterion(model(x), y) + reg()``.

    .. math:: R = f(t) \sum_l \lambda_l L(K_l), \quad
              L(K) = \sum_t \lVert Z_t - [t=0] I \rVert_F^2 \text{ (see :func:`fused_orth_loss`)}

    All layers go through one fused pass, each with its own stride, dilation and groups. The model is looked at again at
    every call: replaced layers, frozen parameters, another device or dtype are noticed.

    Layers are Linear, Conv1d/2d/3d and ConvTranspose1d/2d/3d modules, lazy ones once they have seen an input, with the
    weight that they compute (parametrisations, weight norm, spectral norm, pruning), tied weights counted once. A
    transposed convolution is regularised as the adjoint of the convolution with its weight ``(in, out/groups, k..)``:
    loss zero means that it preserves the length of its input. A frozen weight counts in the value and gets no gradient.

    Args:
        model: the model, also wrapped in DataParallel, DistributedDataParallel, AveragedModel or ``torch.compile``.
        weight: lambda; a float, a callable of (name, module), or a mapping from name patterns to floats (the first
            pattern that matches counts, a layer that none matches is left out). A layer of weight 0 is not computed.
        include: which layers: a name pattern (fnmatch), a module type, a predicate of (name, module), or several of
            these. Default: every convolution with more than 3 input channels, no Linear.
        exclude: which layers not, in the same terms.
        method: "conv" (the paper's), "kernel" (``||K K^T - I||^2`` of the flattened weight) or "srip" (its squared
            spectral norm, see :func:`srip_loss`), or a mapping from name patterns to these ("conv" where none matches).
        squared: False takes the norm of each layer instead of its square. For "kernel" it is the norm of the smaller
            Gram matrix's residual, as in Xie et al. and the authors' code: zero can be reached, also with more filters
            than columns, where the rows' norm has a constant under the root that would weaken the gradient.
        normalize: "numel" divides each layer's loss by the number of elements of its weight, as the authors advise
            against the imbalance of layers of different size.
        schedule: a callable from the step number to a factor of the weight, see :mod:`ocnn_fused.schedules`. Steps are
            counted by :meth:`step`.
        every: apply the loss at each n-th step only, n times as strong; in between ``reg()`` is zero. Needs
            :meth:`step` too.
        shard: under DistributedDataParallel, compute on each rank its share of the layers times the world size; the
            averaging of gradients that DDP does anyway then gives the full gradient. "auto": if the model is wrapped in
            DDP. True: over the default process group too (gradients must be averaged over it). False: never.
        preset: "paper-resnet" chooses the layers that the authors' ImageNet scripts regularise: in a block with two
            3x3 convolutions the first, in a bottleneck block all three, and the 1x1 convolutions of the shortcuts;
            every 1x1 by kernel orthogonality; neither stem nor classifier.
        backend, precision, launch: as for :func:`fused_orth_loss`.
        power_iterations: of SRIP.

    Example::

        reg = OrthRegularizer(model, weight=0.1)
        for x, y in data:
            loss = criterion(model(x), y) + reg()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reg.step()              # only needed with a schedule or every > 1

    ``print(reg)`` shows what is regularised, how, at which share of the cost, and what was left out and why.
    """

    def __init__(
        self,
        model: nn.Module,
        weight: Weight = 0.1,
        *,
        include: Selector | None = None,
        exclude: Selector | None = None,
        method: Method | Mapping[str, Method] = "conv",
        squared: bool = True,
        normalize: Literal["none", "numel"] = "none",
        schedule: Callable[[int], float] | None = None,
        every: int = 1,
        shard: Shard = "auto",
        preset: Literal["paper-resnet"] | None = None,
        backend: str | None = None,
        precision: str | None = None,
        launch: str | None = None,
        power_iterations: int = 8,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if normalize not in ("none", "numel"):
            raise ValueError(f"normalize must be 'none' or 'numel', got {normalize!r}")
        if shard not in ("auto", True, False):
            raise ValueError(f"shard must be 'auto', True or False, got {shard!r}")
        if preset not in (None, "paper-resnet"):
            raise ValueError(f"preset must be None or 'paper-resnet', got {preset!r}")
        if preset is not None and include is not None:
            raise ValueError(
                "include must be None with a preset, which chooses the layers itself; exclude may be given"
            )
        if schedule is not None and not callable(schedule):
            raise TypeError(f"schedule must be None or a callable of the step number, got {schedule!r}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a positive int, got {every!r}")
        if isinstance(power_iterations, bool) or not isinstance(power_iterations, int) or power_iterations < 1:
            raise ValueError(f"power_iterations must be a positive int, got {power_iterations!r}")
        if isinstance(weight, Mapping):
            for pattern, value in weight.items():
                _check_weight(f"weight[{pattern!r}]", value)
        elif not callable(weight):
            _check_weight("weight", weight)
        for name in method.values() if isinstance(method, Mapping) else (method,):
            if name not in _METHODS:
                raise ValueError(f"method must be one of {', '.join(map(repr, _METHODS))}, got {name!r}")
        self.model = model
        self.weight = weight
        self.include = find.check_selector("include", include)
        self.exclude = find.check_selector("exclude", exclude)
        self.method = method
        self.squared = squared
        self.normalize = normalize
        self.schedule = schedule
        self.every = every
        self.shard = shard
        self.preset = preset
        self.power_iterations = power_iterations
        self._backend = {"backend": backend, "precision": precision, "launch": launch}
        self._warned: set[str] = set()
        self._steps = 0
        self._calls = 0
        self._updates = 0
        self._version: int | None = None
        self._factor = 1.0
        self._set_factor()
        self._seen: Selection | None = None
        self._check_patterns()
        if not any(find.is_uninitialized(module) for _, module in find.named_layers(find.unwrap(model))):
            self._look()

    # -- the loss ------------------------------------------------------------------------------------------------------

    def __call__(self) -> Tensor:
        """The weighted sum of the layers' losses, a 0-dim tensor with a gradient to the weights.

        float64 if any regularised weight is, else float32. With sharding this is the rank's share times the world size:
        its average over the ranks is the full value (see :meth:`value`).
        """
        selection, weights = self._look()
        self._expect_steps(selection)
        rank, world = self._rank_and_world(weights)
        share = selection.share(rank, world) if self._factor else ()
        total: Tensor | None = None
        for part in selection.passes(share, weights):
            losses = self._losses(part, weights)
            value = torch.dot(losses, part.weights) * (self._factor * world)
            value = value.to(selection.zero.device, selection.zero.dtype)  # the same on every rank
            total = value if total is None else total + value
        total = selection.zero.clone() if total is None else total
        if not is_data_parallel(self.model):
            return total
        others = [weight for index, weight in enumerate(weights) if weight.requires_grad and index not in share]
        return announce(total, others)

    def per_layer(self) -> dict[str, Tensor]:
        """Detached loss of every layer at its current weight, by name: unweighted 0-dim tensors, nothing synchronised.

        Computed anew, loss only, all layers on every rank. Ready for a logger:
        ``log({f"orth/{name}": loss for name, loss in reg.per_layer().items()})``.
        """
        values: dict[int, Tensor] = {}
        with torch.enable_grad():  # parametrize.cached() keeps what is computed here for the model
            selection, weights = self._look()
        with torch.no_grad():
            for part in selection.passes(selection.everything, weights):
                values.update(zip(part.indices, self._losses(part, weights).unbind(), strict=True))
        return {layer.name: values[index] for index, layer in enumerate(selection.layers)}

    def add_grad_(self, scale: float | Tensor = 1.0, *, shard: bool = False) -> None:
        """Add ``scale`` times the gradient of ``reg()`` to the ``.grad`` of the weights: no graph, the least memory.

        Call it instead of adding ``reg()`` to the loss, between ``backward()`` and ``optimizer.step()``; with gradient
        accumulation, once per optimiser step. With a GradScaler, ``scale=scaler.get_scale()`` while the gradients are
        scaled, and 1 once ``scaler.unscale_`` has run. Computed weights (parametrisations, DTensor) and SRIP go through
        autograd, to the parameters behind them. Hooks of the parameters do not run.

        Every rank computes the full gradient, which is right before and after DDP's averaging. ``shard=True`` computes
        the rank's share times the world size: cheaper, and right only *before* the backward that averages. A DDP with
        ``find_unused_parameters`` or ``static_graph`` averages only what was used: there it changes nothing.
        """
        with torch.enable_grad():
            selection, weights = self._look()
        self._expect_steps(selection)
        if not self._factor:
            return
        rank, world = self._rank_and_world(weights) if shard and averages_everything(self.model) else (0, 1)
        wanted = [index for index in selection.share(rank, world) if weights[index].requires_grad]
        direct = tuple(index for index in wanted if selection.is_direct(index, weights[index]))
        through_graph = tuple(sorted(set(wanted) - set(direct)))
        with torch.no_grad():
            for part in selection.passes(direct, weights):
                self._add_direct(part, weights, self._factor * world, scale)
            for part in selection.passes(through_graph, weights):
                leaves = dict.fromkeys(leaf for index in part.indices for leaf in selection.trained_sources(index))
                self._add_through_graph(part, weights, list(leaves), self._factor * world, scale)

    def _add_direct(self, part: Pass, weights: list[Tensor], factor: float, scale: float | Tensor) -> None:
        parameters = [weights[index] for index in part.indices]
        losses, grads = losses_and_grads(parameters, *part.geometry, [True] * len(parameters))  # type: ignore[misc]
        if not self.squared:  # d||R|| = d||R||^2 / (2 ||R||)
            for grad, loss in zip(grads, losses, strict=True):
                grad.mul_(torch.where(loss > 0, 0.5 * loss.rsqrt(), 0.0))
        _accumulate(parameters, grads, [value * factor for value in part.coefficients], scale)

    def _add_through_graph(
        self, part: Pass, weights: list[Tensor], leaves: list[Tensor], factor: float, scale: float | Tensor
    ) -> None:
        with torch.enable_grad():
            value = torch.dot(self._losses(part, weights), part.weights) * factor
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        meshes: dict[Any, list[tuple[Tensor, Tensor]]] = {}  # what is computed together must lie on one, or on none
        for leaf, grad in zip(leaves, found, strict=True):
            if grad is not None:
                meshes.setdefault(getattr(leaf, "device_mesh", None), []).append((leaf, grad))
        for used in meshes.values():
            # Copied: two leaves that are added get one and the same tensor.
            grads = list(torch._foreach_mul([grad for _, grad in used], 1.0))
            _accumulate([leaf for leaf, _ in used], grads, [1.0] * len(used), scale)

    def value(self, loss: Tensor) -> Tensor:
        """The full, detached value of what :meth:`__call__` returned on each rank: its average over the ranks.

        A collective if the layers are shared out (every rank must call it), else just ``loss.detach()``.
        """
        return mean_over(sharing_group(self.model, self.shard), loss.detach())

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count one optimiser step; the schedule and ``every`` go by it. Call it after ``optimizer.step()``.

        As with learning-rate schedulers the count does not depend on how often the loss is computed, so gradient
        accumulation, evaluation and recomputation do not disturb it. Without schedule and ``every`` it is not needed.
        """
        self._steps += 1
        self._set_factor()

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Let ``optimizer.step()`` call :meth:`step`; returns a handle with ``remove()``."""
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has no hooks of its own
        return inner.register_step_post_hook(lambda *_: self.step())

    @property
    def steps(self) -> int:
        """Optimiser steps counted so far."""
        return self._steps

    @property
    def factor(self) -> float:
        """What the weights are multiplied by at this step: the schedule's value, times ``every`` or 0."""
        return self._factor

    def _set_factor(self) -> None:
        factor = 1.0 if self.schedule is None else float(self.schedule(self._steps))
        self._factor = factor * self.every if self._steps % self.every == 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The step count, and the schedule's own state if it has one. Weights are the model's business."""
        save = getattr(self.schedule, "state_dict", None)
        return {"steps": self._steps, "schedule": save() if save is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        if set(state) != {"steps", "schedule"}:
            raise ValueError(f"state must have the keys 'steps' and 'schedule', got {sorted(state)}")
        if state["schedule"] is not None:
            load = getattr(self.schedule, "load_state_dict", None)
            if load is None:
                raise ValueError(f"state has a schedule, but this regularizer's is {self.schedule!r}")
            load(state["schedule"])
        self._steps = int(state["steps"])
        self._set_factor()

    # -- for people ----------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> dict[str, Layer]:
        """What is regularised, by name."""
        return {layer.name: layer for layer in self._look()[0].layers}

    @property
    def left_out(self) -> dict[str, str]:
        """Layers that are not regularised, and why."""
        return dict(self._look()[0].left_out)

    def refresh(self) -> None:
        """Look at the model anew.

        Changes of the model and of this object's attributes are noticed without it. It is for when a predicate or a
        callable weight judges anew, and for looking outside a ``torch.compile(fullgraph=True)`` that is traced again.
        """
        self._seen = None
        self._look()

    def __repr__(self) -> str:
        weight = f"{self.weight:g}" if isinstance(self.weight, (int, float)) else type(self.weight).__name__
        return f"OrthRegularizer({type(find.unwrap(self.model)).__name__}, weight={weight}, method={self.method!r})"

    def __str__(self) -> str:
        from .table import describe

        return describe(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):  # another weight, method, ...: what was worked out from it no longer holds
            self.__dict__["_seen"] = None
        self.__dict__[name] = value
        if name in ("schedule", "every") and "_factor" in self.__dict__:
            self._set_factor()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _rank_and_world(self, weights: list[Tensor]) -> tuple[int, int]:
        group = sharing_group(self.model, self.shard)
        if group is None:
            return 0, 1
        if self.shard is True and not is_data_parallel(self.model) and any(map(find.is_spread, weights)):
            raise ValueError(
                "shard=True needs whole weights on every rank, but some are DTensors, which all ranks must gather "
                "together (full_tensor()); use shard='auto' or False"
            )
        return group.rank(), group.size()

    def _losses(self, part: Pass, weights: list[Tensor]) -> Tensor:
        """Unweighted losses of one pass, 1-D; ``weights`` are those of all layers."""
        chosen = [
            by_columns(_whole(weights[index]), groups) if turned else _whole(weights[index])
            for index, groups, turned in zip(part.indices, part.groups, part.turned, strict=True)
        ]
        if part.geometry is not None:
            stacked = _stack(orth_losses(chosen, *part.geometry), part)
            return stacked if self.squared else frobenius_norm(stacked)
        options: dict[str, Any] = {"squared": self.squared, "power_iterations": self.power_iterations}
        losses = [srip_loss(weight, groups=g, **options) for weight, g in zip(chosen, part.groups, strict=True)]
        return _stack(losses, part)

    def _look(self) -> tuple[Selection, list[Tensor]]:
        """The layers of the model as it is now, found anew only if something changed, and their weights."""
        weights = None if self._seen is None else self._seen.current_weights()
        if weights is not None:
            return self._seen, weights  # type: ignore[return-value]
        with torch.inference_mode(False):  # what is kept must serve in training too
            self._seen = Selection(self)
        self._warn_once(self._seen)
        return self._seen, [find.weight_of(layer.module) for layer in self._seen.layers]

    def _weight_of(self, name: str, module: nn.Module) -> float | None:
        if isinstance(self.weight, Mapping):
            return next((value for pattern, value in self.weight.items() if find.matches(pattern, name, module)), None)
        if not callable(self.weight):
            return self.weight
        value = self.weight(name, module)
        _check_weight(f"weight of {name}", value)
        return value

    def _method_of(self, name: str, module: nn.Module) -> Method:
        if isinstance(self.method, Mapping):
            return next(
                (value for pattern, value in self.method.items() if find.matches(pattern, name, module)), "conv"
            )
        if self.preset is not None and self.method == "conv" and all(k == 1 for k in module.kernel_size):  # type: ignore[union-attr]
            return "kernel"
        return self.method

    def _check_patterns(self) -> None:
        """A pattern that matches no layer is a typing error; lazy layers have their names already."""
        names = [name for name, _ in find.named_layers(find.unwrap(self.model))]
        given = {"include": self.include, "weight": self.weight, "method": self.method}
        for argument, selector in given.items():
            if argument != "include" and not isinstance(selector, Mapping):
                continue
            for pattern in find.patterns(selector):  # type: ignore[arg-type]
                if not any(find.matches(pattern, name, self.model) for name in names):
                    raise ValueError(
                        f"{argument} pattern {pattern!r} matches none of the layers {', '.join(names) or '(none)'}"
                    )

    def _expect_steps(self, selection: Selection) -> None:
        """Who never counts a step stays at the first: a warm-up at zero, ``every=n`` at n times the strength."""
        if torch.compiler.is_compiling():  # first: a graph that has looked at the count is traced again at every step
            return
        if self._steps or (self.schedule is None and self.every == 1) or "step()" in self._warned:
            return
        sources = (source for layer in selection.layers for source in find.weight_sources(layer.module))
        version = sum(source._version for source in sources if not source.is_inference())
        self._calls += 1
        self._updates += self._version not in (None, version)
        self._version = version
        if self._updates == _UPDATES_WITHOUT_STEP or self._calls == _CALLS_WITHOUT_STEP:
            self._warned.add("step()")
            warnings.warn(
                f"the regularizer's step() was never called, but the weights were updated {self._updates} times in "
                f"{self._calls} calls: the schedule stays at step 0, and every=n is n times too strong; call "
                "reg.step() after optimizer.step(), or reg.attach(optimizer) once",
                stacklevel=3,
            )

    def _warn_once(self, selection: Selection) -> None:
        if not selection.layers and "" not in self._warned:
            self._warned.add("")
            warnings.warn("OrthRegularizer found no layer to regularise; print(reg) says why", stacklevel=4)
        impossible = [
            layer for layer in selection.layers if not layer.has_orthogonal and layer.name not in self._warned
        ]
        if not impossible:
            return
        self._warned.update(layer.name for layer in impossible)
        listed = ", ".join(
            f"{layer.name} ({'x'.join(map(str, layer.shape))}, stride {'x'.join(map(str, layer.stride))}): "
            f"at least {layer.floor if self.squared else round(sqrt(layer.floor), 3)}"
            for layer in impossible
        )
        warnings.warn(
            "no orthogonal convolution exists with more filters than input channels times taps and a stride that skips "
            f"input pixels; the loss of these layers cannot reach zero: {listed}",
            stacklevel=4,
        )


def _check_weight(label: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{label} must be a float, a callable of (name, module) or a mapping of patterns, got {value!r}"
        )
    if not 0 <= value < inf:
        raise ValueError(f"{label} must be finite and not negative, got {value!r}")


def _stack(losses: Sequence[Tensor], part: Pass) -> Tensor:
    return torch.stack([loss.to(part.dtype) for loss in losses] if part.mixed else list(losses))


def _whole(weight: Tensor) -> Tensor:
    """The weight in one piece, with a gradient that goes back to where the pieces are."""
    if find.is_plain(weight) or not find.is_spread(weight):
        return weight
    return weight.full_tensor()  # type: ignore[attr-defined]


def _accumulate(
    parameters: Sequence[Tensor], grads: list[Tensor], factors: Sequence[float], scale: float | Tensor
) -> None:
    """``parameter.grad += factor * scale * grad``; ``grads`` are ours, and become the parameter's where it has none."""
    if isinstance(scale, Tensor):
        torch._foreach_mul_(grads, scale)
    else:
        factors = [factor * scale for factor in factors]
    before = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(set(factors)) == 1 and len(before) == len(parameters):  # the common case, in one pass over memory
        torch._foreach_add_(before, grads, alpha=factors[0])
        return
    torch._foreach_mul_(grads, factors)
    added = [grad for parameter, grad in zip(parameters, grads, strict=True) if parameter.grad is not None]
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is None:
            parameter.grad = grad
    if before:
        torch._foreach_add_(before, added)
