"""OrthRegularizer: the orthogonality loss of a whole model, in one line of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from math import inf, sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import modules
from ..autograd import add_grads_, orth_losses, orth_total
from ..backends.epilogue import Epilogue
from ..problem import Part, Target, check_choice, is_number
from ..projection import Safe, step_
from ..reference import frobenius_norm
from ..spectrum import LayerOptions, Summary, circular_size, input_shapes, singular_values, summary
from ..warn import warn
from .distributed import (
    Shard,
    announce,
    averages_everything,
    is_data_parallel,
    mean_over,
    send_shares,
    sharing_group,
    sharing_pays,
)
from .selection import Bundle, Found, Layer, Selection, by_columns
from .settings import Method, Selector, Settings, Weight, check_positive
from .srip import srip_loss
from .steering import Known
from .table import describe

__all__ = ["OrthRegularizer"]

_SETTINGS = frozenset(field.name for field in fields(Settings))
#: What the weight is called elsewhere.
_ALSO_CALLED = dict.fromkeys(("lambda", "lambd", "lam", "lmbda", "coefficient", "strength"), "weight")
_UPDATES_WITHOUT_STEP = 3  # of the weights
_CALLS_WITHOUT_STEP = 1000  # more than anybody accumulates, for optimisers whose updates autograd does not see


class OrthRegularizer:
    r"""Orthogonality loss of all convolutions of a model: ``loss = criterion(model(x), y) + reg()``.

    .. math:: R = f(t) \sum_l \lambda_l L(K_l), \quad
              L(K) = \sum_t \lVert Z_t - [t=0] I \rVert_F^2 \text{ (see :func:`fused_orth_loss`)}

    All layers go through one fused pass, each with its own stride, dilation and groups. The model is looked at again at
    every call: replaced layers, frozen parameters, another device or dtype are noticed.

    Layers are Linear, Conv1d/2d/3d and ConvTranspose1d/2d/3d modules, lazy ones once they have seen an input and others
    once they have left the meta device, with the weight that they compute (parametrisations, weight norm, spectral
    norm, pruning), tied weights counted once. Quantised layers, which nothing trains, are left out. A
    transposed convolution is regularised as the adjoint of the convolution with its weight ``(in, out/groups, k..)``:
    loss zero means that it preserves the length of its input. A frozen weight counts in the value and gets no gradient.

    Args:
        model: the model, also wrapped in DataParallel, DistributedDataParallel, AveragedModel or ``torch.compile``.
        weight: lambda; a float or "auto", a callable of (name, module) that returns one, or a mapping from name
            patterns to them (the first pattern that matches counts, a layer that none matches is left out). A layer of
            weight 0 is not computed. The default is the paper's for ImageNet, and stays finite at a learning rate of
            0.1 with momentum. With "auto" each layer has a lambda of its own, which is steered after every call until
            the layer is as near to orthogonal as ``tolerance`` says. It needs no counting of steps, and a call at
            unchanged weights moves nothing. ``squared=False`` and ``normalize="numel"`` do not go with it.
        include: which layers: a name or name pattern (fnmatch), a module type, a predicate of (name, module), or
            several of these. Default: every convolution with more than 3 input channels, no Linear.
        exclude: which layers not, in the same terms.
        method: "conv" (the paper's), "kernel" (``||K K^T - I||^2`` of the flattened weight) or "srip" (its squared
            spectral norm, see :func:`srip_loss`), or a mapping from name patterns to these ("conv" where none matches).
        squared: False takes the norm of each layer instead of its square. For "kernel" it is the norm of the smaller
            Gram matrix's residual, as in Xie et al. and the authors' code: zero can be reached, also with more filters
            than columns, where the rows' norm has a constant under the root that would weaken the gradient.
        normalize: "numel" divides each layer's loss by the number of elements of its weight, as the authors advise
            against the imbalance of layers of different size. "excess" counts each layer's loss from the least value
            that its shape allows (see ``print(reg)``), in :meth:`per_layer` too, so that layers can be compared; the
            gradient is the same.
        schedule: a callable from the step number to a factor of the weight, see :mod:`ocnn_fused.schedules`. Steps are
            counted by :meth:`step`. A lambda that is steered makes up for a factor that stays below 1.
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
        weight_of: the weight of modules that compute it in their own way: a mapping from module types to callables of
            the module. ``weight_of={MyConv: lambda m: m.effective_weight()}`` regularises what the callable returns, of
            shape ``(M, C/groups, k1..kn)``, with the module's ``stride``, ``dilation`` and ``groups``, or 1; the type
            need not be a convolution.
        target, part: as for :func:`fused_orth_loss`. ``target="free"`` leaves the scale of each group to training.
        tolerance: how far from orthogonal a layer may be whose weight is "auto": its loss above the least value that
            its shape allows, as a multiple of what random filters of length 1 have on average. 1 keeps the spread of
            the singular values at that of a random start; 0.1 asks for a tenth of the loss.

    Example::

        reg = OrthRegularizer(model)
        for x, y in data:
            loss = criterion(model(x), y) + reg()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reg.step()              # only needed with a schedule or every > 1

    ``print(reg)`` shows what is regularised, how, at which share of the cost, and what was left out and why. The
    arguments are attributes too: assigning to one takes what the argument takes, and counts from then on. Another name
    is refused; a subclass may have attributes of its own, if they are not nearly called as an argument.
    """

    model: nn.Module
    _settings: Settings
    _factor: float
    _applies: bool  # apart from the factor, for torch.compile: a graph that branches on a float is for that float alone
    _seen: Selection | None  # the model as it was at the last look

    def __init__(
        self,
        model: nn.Module,
        weight: Weight = 0.01,
        *,
        include: Selector | None = None,
        exclude: Selector | None = None,
        method: Method | Mapping[str, Method] = "conv",
        squared: bool = True,
        normalize: Literal["none", "numel", "excess"] = "none",
        schedule: Callable[[int], float] | None = None,
        every: int = 1,
        shard: Shard = "auto",
        preset: Literal["paper-resnet"] | None = None,
        backend: str | None = None,
        precision: str | None = None,
        launch: str | None = None,
        power_iterations: int = 8,
        weight_of: Mapping[type, Callable[[Any], Tensor]] | None = None,
        target: Target = 1,
        part: Part = "all",
        tolerance: float = 1.0,
    ) -> None:
        self._warned: set[str] = set()
        self._steps = self._calls = self._updates = 0
        self._version: int | None = None
        self._known: Known = {}
        self._seen = None
        settings = Settings(
            weight, include, exclude, method, squared, normalize, schedule, every, shard, preset,
            backend, precision, launch, power_iterations, weight_of, target, part, tolerance,
        )  # fmt: skip
        self._use(model, settings)

    # -- the loss ------------------------------------------------------------------------------------------------------

    def __call__(self) -> Tensor:
        """The weighted sum of the layers' losses, a 0-dim tensor with a gradient to the weights.

        float64 if any regularised weight is, else float32. With sharding this is the rank's share times the world size:
        its average over the ranks is the full value (see :meth:`value`).
        """
        selection, weights = self._look()
        self._check_use(selection)
        rank, world = self._rank_and_world(weights)
        share = selection.share(rank, world) if self._applies else ()
        total: Tensor | None = None
        found: list[Found] = []
        for bundle in selection.bundles(share):
            value = self._value(bundle, weights, world, selection.is_fully_sharded, found)
            value = value.to(selection.zero.device, selection.zero.dtype)  # the same on every rank
            total = value if total is None else total + value
        self._steer(selection, found, world, torch.is_grad_enabled())
        total = selection.zero.clone() if total is None else total
        if not is_data_parallel(self.model):
            return total
        others = [weight for index, weight in enumerate(weights) if weight.requires_grad and index not in share]
        return announce(total, others)

    def _value(self, bundle: Bundle, weights: list[Tensor], world: int, in_pieces: bool, found: list[Found]) -> Tensor:
        """The weighted sum over the layers of one bundle, times the number of ranks that share the layers.

        ``in_pieces``: FSDP takes a gradient as soon as its module's backward is done, before that of the one node is.
        """
        chosen = _chosen(bundle, weights)
        if bundle.problems is not None and self._settings.squared and not in_pieces:
            # One product after the other: torch.compile follows a float that changes only into a tensor.
            alone = world == 1 or torch.compiler.is_compiling()
            factor = self._factor if alone else self._factor * world
            value, losses = orth_total(chosen, bundle.problems, bundle.options, bundle.weighting, factor)
            world = world if alone else 1
        else:
            losses = self._losses(bundle, chosen)
            value = bundle.weighting.total(losses, self._factor)
        self._note(found, bundle, losses, chosen)
        return value if world == 1 else value * world

    def per_layer(self, what: Literal["loss", "excess", "lambda"] = "loss") -> dict[str, Tensor]:
        """Detached loss of every layer at its current weight, by name: unweighted 0-dim tensors, nothing synchronised.

        Computed anew, loss only, all layers on every rank. Ready for a logger:
        ``log({f"orth/{name}": loss for name, loss in reg.per_layer().items()})``.

        ``what="excess"`` gives how far every layer is from orthogonal instead: 0 is orthogonal, 1 as far as random
        filters of length 1 are on average (see ``tolerance``). ``what="lambda"`` gives the lambdas of the next call,
        without the schedule's factor, and computes nothing.
        """
        check_choice("what", what, ("loss", "excess", "lambda"))
        if what == "excess" and not self._settings.squared:
            raise ValueError("what='excess' needs squared=True: it is measured by the squared loss")
        values: dict[int, Tensor] = {}
        with torch.enable_grad():  # parametrize.cached() keeps what is computed here for the model
            selection, weights = self._look()
        if what == "lambda":
            return selection.lambda_values()
        with torch.no_grad():
            for bundle in selection.bundles(selection.everything):
                chosen = _chosen(bundle, weights)
                losses = self._losses(bundle, chosen)
                measured = bundle.constant.counted(losses) if what == "loss" else bundle.yardstick(losses, chosen)
                values.update(zip(bundle.indices, measured.to(losses.dtype).unbind(), strict=True))
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
        self._check_use(selection)
        if not self._applies:
            return
        rank, world = self._rank_and_world(weights) if shard and averages_everything(self.model) else (0, 1)
        wanted = [index for index in selection.share(rank, world) if weights[index].requires_grad]
        direct = tuple(index for index in wanted if selection.is_direct(index, weights[index]))
        through_graph = tuple(sorted(set(wanted) - set(direct)))
        found: list[Found] = []
        with torch.no_grad():
            for bundle in selection.bundles(direct):
                self._add_direct(bundle, weights, self._factor * world, scale, found)
            for bundle in selection.bundles(through_graph):
                leaves = dict.fromkeys(leaf for index in bundle.indices for leaf in selection.trained_sources(index))
                self._add_through_graph(bundle, weights, list(leaves), self._factor * world, scale, found)
        self._steer(selection, found, world)

    def _add_direct(
        self, bundle: Bundle, weights: list[Tensor], factor: float, scale: float | Tensor, found: list[Found]
    ) -> None:
        parameters = [weights[index] for index in bundle.indices]
        targets = _gradients_of(parameters)
        factors = bundle.weighting.factors
        if isinstance(scale, Tensor):
            factors = factors * scale.to(factors.device)
        else:
            factor *= scale
        squared = self._settings.squared
        grads = targets if squared else [torch.zeros_like(parameter) for parameter in parameters]
        losses = add_grads_(parameters, bundle.problems, bundle.options, Epilogue(factors, factor, grads))  # type: ignore[arg-type]
        if not squared:  # d||R|| = d||R||^2 / (2 ||R||), which is known only when all of R is
            for target, grad, loss in zip(targets, grads, losses, strict=True):
                target.add_(grad * torch.where(loss > 0, 0.5 * loss.rsqrt(), 0.0))
        self._note(found, bundle, losses, parameters)

    def _add_through_graph(
        self,
        bundle: Bundle,
        weights: list[Tensor],
        leaves: list[Tensor],
        factor: float,
        scale: float | Tensor,
        found: list[Found],
    ) -> None:
        with torch.enable_grad():
            chosen = _chosen(bundle, weights)
            losses = self._losses(bundle, chosen)
            value = bundle.weighting.total(losses, factor)
        self._note(found, bundle, losses, chosen)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        meshes: dict[Any, list[tuple[Tensor, Tensor]]] = {}  # what is computed together must lie on one, or on none
        for leaf, grad in zip(leaves, gradients, strict=True):
            if grad is not None:
                meshes.setdefault(getattr(leaf, "device_mesh", None), []).append((leaf, grad))
        for used in meshes.values():
            # Copied: two leaves that are added get one and the same tensor.
            grads = torch._foreach_mul([grad for _, grad in used], scale)
            missing = [(leaf, grad) for (leaf, _), grad in zip(used, grads, strict=True) if leaf.grad is None]
            there = [(leaf.grad, grad) for (leaf, _), grad in zip(used, grads, strict=True) if leaf.grad is not None]
            for leaf, grad in missing:
                leaf.grad = grad
            if there:
                torch._foreach_add_([before for before, _ in there], [grad for _, grad in there])

    @torch.no_grad()
    def project_(self, steps: int = 1, rate: float = 1.0, *, safe: Safe = True) -> None:
        """Move the weights themselves towards orthogonality: ``K -= rate/8 * gradient of L``, ``steps`` times.

        Call it after ``optimizer.step()``, beside ``reg()`` or instead of it: no graph, no ``.grad``, and nothing of it
        goes through the optimiser, as AdamW keeps weight decay apart. ``L`` is the squared loss of each layer; lambda
        only chooses layers here. ``rate`` is multiplied by the schedule, and between the steps of ``every`` nothing
        happens. With a target ``a`` the step is divided by it, and by ``||K||^2 / M`` of each group where it is free.

        At rate 1 this is a Björck step, cut to the kernel's support. It lowers the loss while the largest singular
        value is below about 1.29. ``safe`` checks steps: one that would raise the loss is halved, and left out if it
        still would. A check costs one more pass for the loss. On a CPU a layer's step is checked where it is in doubt:
        the first, each sixteenth, and one before which the rate or the layer's loss is a quarter above what it was when
        a check last found a good step (see :mod:`ocnn_fused.projection`). "always" checks every step, as a GPU does in
        any case, because choosing would mean waiting for it. False checks none, and needs no memory for gradients.

        Under DistributedDataParallel each rank moves its share of the layers and sends them to the others, if
        ``shard`` is True or if it is "auto" and the sending takes less time than it saves; else each moves all of
        them. The bits are the same. Sharded weights (FSDP2) are gathered, moved and kept in their pieces; frozen ones
        stay as they are. Computed weights (parametrisations) cannot be moved, and SRIP has no such step.
        """
        check_positive("steps", steps)
        if not is_number(rate) or not 0 < rate < inf:
            raise ValueError(f"rate must be a positive number, got {rate!r}")
        check_choice("safe", safe, (True, False, "always"))
        selection, weights = self._look()
        self._check_use(selection)
        rate = float(rate) * self._factor / self._settings.every
        if not rate:
            return
        movable = [index for index in selection.everything if selection.is_movable(index, weights[index])]
        shares = self._shares_to_send(selection, movable, weights)
        rank = 0 if shares is None else self._rank_and_world(weights)[0]
        mine = movable if shares is None else shares[rank]
        devices: dict[torch.device, list[int]] = {}
        for index in mine:
            devices.setdefault(selection.layers[index].device, []).append(index)
        for members in devices.values():
            whole = [_whole(weights[index]) for index in members]
            problems = tuple(selection.layers[index].problem for index in members)
            pasts = [selection.past_of(index) for index in members] if safe is True else None
            for _ in range(steps):
                step_(whole, problems, self._settings.options, rate, bool(safe), pasts)
            for index, moved in zip(members, whole, strict=True):
                if modules.is_spread(weights[index]):
                    modules.copy_into_pieces(weights[index], moved)
        if shares is not None:
            group = sharing_group(self.model, self._settings.shard)
            send_shares(group, [[weights[index] for index in share] for share in shares])  # type: ignore[arg-type]

    def _shares_to_send(
        self, selection: Selection, movable: Sequence[int], weights: list[Tensor]
    ) -> list[list[int]] | None:
        """Which rank moves which layers, or None where each moves all of them."""
        world = self._rank_and_world(weights)[1]
        if world == 1 or any(modules.is_spread(weights[index]) for index in movable):
            return None
        if self._settings.shard is not True:
            seconds = sum(selection.layers[index].cost(self._settings.power_iterations) for index in movable)
            if not sharing_pays(seconds, sum(weights[index].nbytes for index in movable), world):
                return None
        chosen = set(movable)
        return [[index for index in selection.share(rank, world) if index in chosen] for rank in range(world)]

    def value(self, loss: Tensor) -> Tensor:
        """The full, detached value of what :meth:`__call__` returned on each rank: its average over the ranks.

        A collective if the layers are shared out (every rank must call it), else just ``loss.detach()``.
        """
        return mean_over(sharing_group(self.model, self._settings.shard), loss.detach())

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count one optimiser step; the schedule and ``every`` go by it. Call it after ``optimizer.step()``.

        As with learning-rate schedulers the count does not depend on how often the loss is computed, so gradient
        accumulation, evaluation and recomputation do not disturb it. Without schedule and ``every`` it is not needed.
        """
        self._count(self._steps + 1)

    def attach(self, optimizer: torch.optim.Optimizer, *, project: bool = False) -> Any:
        """Let ``optimizer.step()`` call :meth:`step`, and before it :meth:`project_` if asked for.

        Returns a handle with ``remove()``.
        """
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has no hooks of its own

        def follow(*_: object) -> None:
            if project:
                self.project_()
            self.step()

        return inner.register_step_post_hook(follow)

    @property
    def steps(self) -> int:
        """Optimiser steps counted so far."""
        return self._steps

    @property
    def factor(self) -> float:
        """What the weights are multiplied by at this step: the schedule's value, times ``every`` or 0."""
        return self._factor

    def _count(self, steps: int) -> None:
        self._factor = self._settings.factor_at(steps)
        self._applies = self._factor != 0
        self._steps = steps

    def state_dict(self) -> dict[str, Any]:
        """The step count, the schedule's own state if it has one, and lambdas that are steered.

        Weights are the model's business.
        """
        save = getattr(self._settings.schedule, "state_dict", None)
        state = {"steps": self._steps, "schedule": save() if save is not None else None}
        known = self._known if self._seen is None else self._seen.known()
        if known:
            state["lambda"] = {name: value for name, (value, _) in known.items()}
            state["excess"] = {name: excess for name, (_, excess) in known.items()}  # at the last call
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken. Without lambdas in it, steered ones stay as they are."""
        if set(state) - {"lambda", "excess"} != {"steps", "schedule"} or ("lambda" in state) != ("excess" in state):
            raise ValueError(
                "state must have the keys 'steps' and 'schedule', with steered lambdas 'lambda' and 'excess' too, "
                f"got {sorted(state)}"
            )
        selection = self._seen or self._look()[0]
        names = state.get("lambda", {}).keys()
        if names and names != selection.known().keys() and not selection.waiting:
            raise ValueError(
                f"state has lambdas of the layers {', '.join(names)}, but those that this regularizer steers are "
                f"{', '.join(selection.known()) or '(none)'}"
            )
        if state["schedule"] is not None:
            load = getattr(self._settings.schedule, "load_state_dict", None)
            if load is None:
                raise ValueError(f"state has a schedule, but this regularizer's is {self._settings.schedule!r}")
            load(state["schedule"])
        self._count(int(state["steps"]))
        loaded = {name: (state["lambda"][name], state["excess"][name]) for name in names}
        self._known = {**self._known, **loaded}
        selection.load(loaded)

    # -- for people ----------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> dict[str, Layer]:
        """What is regularised, by name."""
        return {layer.name: layer for layer in self._look()[0].layers}

    def spectrum(self, input_shape: Iterable[int] | Tensor) -> dict[str, Summary]:
        """What the singular values of every regularised layer are like at its current weight, by name.

        ``input_shape``: of one input of the model, such as (3, 32, 32), or a batch of inputs; a forward pass in eval
        mode finds the size at which it reaches each layer. Each is looked at as the circular layer of that size,
        rounded up to a multiple of its stride. Layers that the input does not reach are missing. No graph; all values
        are computed, which takes seconds for a large network: for logging, see
        :class:`ocnn_fused.spectrum.SpectrumLogger`.
        """
        with torch.enable_grad():  # parametrize.cached() keeps what is computed here for the model
            selection, weights = self._look()
        shapes = input_shapes(self.model, input_shape, {layer.name: layer.module for layer in selection.layers})
        found = {}
        for layer, weight in zip(selection.layers, weights, strict=True):
            if layer.name in shapes:
                shape, problem = shapes[layer.name], layer.problem
                options: LayerOptions = {
                    "stride": problem.stride,
                    "dilation": problem.dilation,
                    "groups": problem.groups,
                    "transposed": getattr(layer.module, "transposed", False),
                }
                whole = _whole(weight.detach())
                size = circular_size(whole, shape[len(shape) - len(problem.stride) :], **options)
                found[layer.name] = summary(singular_values(whole, size, progress=False, **options))
        return found

    @property
    def left_out(self) -> dict[str, str]:
        """Layers that are not regularised, and why."""
        return dict(self._look()[0].left_out)

    def refresh(self) -> None:
        """Look at the model anew.

        Changes of the model and of this object's attributes are noticed without it. It is for when a predicate or a
        callable weight judges anew, and for looking outside a ``torch.compile(fullgraph=True)`` that is traced again.
        """
        self._known, self._seen = self._known_now(), None
        self._look()

    def __repr__(self) -> str:
        weight, method = self._settings.weight, self._settings.method
        shown = repr(weight) if isinstance(weight, str) else type(weight).__name__
        text = f"{weight:g}" if is_number(weight) else shown
        return f"OrthRegularizer({type(modules.unwrap(self.model)).__name__}, weight={text}, method={method!r})"

    def __str__(self) -> str:
        progress = f"step {self._steps}, factor {self._factor:g}"
        return describe(repr(self), self._settings, progress, self._look()[0])

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            return getattr(self._settings, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{_hint(name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "model":
            self._use(value, self._settings)
        elif name in _SETTINGS:
            self._use(self.model, replace(self._settings, **{name: value}))
        else:
            self._check_attribute(name)
            super().__setattr__(name, value)

    def _check_attribute(self, name: str) -> None:
        """Refuse a name that nobody reads, such as ``lamda``: it would change nothing.

        A subclass may have attributes of its own: any name that it declares (a class attribute or an annotation), and
        any other that is not nearly that of an argument.
        """
        if name.startswith("_") or name in self.__dict__ or any(_declares(kind, name) for kind in type(self).__mro__):
            return
        mine, hint = type(self) is OrthRegularizer, _hint(name)
        if mine or hint:
            declare = "" if mine else " Else declare it in the class."
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r} to set{hint}{declare}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None, "_known": self._known_now()}

    def _known_now(self) -> Known:
        """What is to be kept of steered lambdas; of layers that are gone, or not there yet, as it was."""
        return self._known if self._seen is None else {**self._known, **self._seen.known()}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _use(self, model: nn.Module, settings: Settings) -> None:
        """Take over a model and what is asked of it, or say what does not go together and change nothing."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        model = modules.uncompiled(model)
        settings.check_patterns([name for name, _ in modules.named_layers(modules.unwrap(model), settings.other_kinds)])
        factor = settings.factor_at(self._steps)
        known = self._known_now()
        seen = Selection(model, settings, known)
        self.__dict__.update(
            model=model, _settings=settings, _factor=factor, _applies=factor != 0, _seen=seen, _known=known
        )
        self._warn_once(seen)

    def _rank_and_world(self, weights: list[Tensor]) -> tuple[int, int]:
        group = sharing_group(self.model, self._settings.shard)
        if group is None:
            return 0, 1
        if self._settings.shard is True and not is_data_parallel(self.model) and any(map(modules.is_spread, weights)):
            raise ValueError(
                "shard=True needs whole weights on every rank, but some are DTensors, which all ranks must gather "
                "together (full_tensor()); use shard='auto' or False"
            )
        return group.rank(), group.size()

    def _losses(self, bundle: Bundle, chosen: list[Tensor]) -> Tensor:
        """Unweighted losses of one bundle, 1-D; ``chosen`` is what :func:`_chosen` gives."""
        squared = self._settings.squared
        if bundle.problems is not None:
            losses = orth_losses(chosen, bundle.problems, bundle.options)
            losses = losses if squared else frobenius_norm(losses)
        else:
            options: dict[str, Any] = {"squared": squared, "power_iterations": self._settings.power_iterations}
            losses = torch.stack(
                [srip_loss(weight, groups=g, **options) for weight, g in zip(chosen, bundle.groups, strict=True)]
            )
        return losses

    def _note(self, found: list[Found], bundle: Bundle, losses: Tensor, chosen: Sequence[Tensor]) -> None:
        """Add what a call has found to its list, and say once that losses explode or are not finite.

        ``losses`` are counted from 0; ``chosen`` is what they were computed of.
        """
        found.append((bundle, losses, chosen))
        if "growth" in self._warned or not bundle.watch.is_due(bundle.constant.factors.device):
            return
        said = bundle.watch.see(losses, chosen)
        if said:
            self._warned.add("growth")
            warn(said)

    def _steer(self, selection: Selection, found: list[Found], world: int, trains: bool = True) -> None:
        """Let the lambdas that are steered learn from a call, unless it is no step of a training."""
        if not (selection.lambdas and self._applies and trains) or torch._C._are_functorch_transforms_active():
            return
        selection.steer(found, sharing_group(self.model, self._settings.shard) if world > 1 else None)

    def _look(self) -> tuple[Selection, list[Tensor]]:
        """The layers of the model as it is now, found anew only if something changed, and their weights."""
        weights = None if self._seen is None else self._seen.current_weights()
        if weights is not None:
            return self._seen, weights  # type: ignore[return-value]
        self._known = self._known_now()
        self._seen = Selection(self.model, self._settings, self._known)
        self._warn_once(self._seen)
        return self._seen, self._seen.weights()

    def _check_use(self, selection: Selection) -> None:
        """Say once what is not as somebody who uses the loss will expect: weights without numbers, uncounted steps.

        Who never counts a step stays at the first: a warm-up at zero, ``every=n`` at n times the strength.
        """
        if torch.compiler.is_compiling():  # first: a graph that has looked at the count is traced again at every step
            return
        if selection.waiting and "waiting" not in self._warned:
            self._warned.add("waiting")
            warn(
                f"layers left out, because their weights hold no numbers yet: {', '.join(selection.waiting)}; run the "
                "model once if they are lazy, load them if they are on the meta device"
            )
        if self._steps or not self._settings.goes_by_steps or "step()" in self._warned:
            return
        sources = (source for layer in selection.layers for source in layer.sources)
        version = sum(source._version for source in sources if not source.is_inference())
        self._calls += 1
        self._updates += self._version not in (None, version)
        self._version = version
        if self._updates == _UPDATES_WITHOUT_STEP or self._calls == _CALLS_WITHOUT_STEP:
            self._warned.add("step()")
            warn(
                f"the regularizer's step() was never called, but the weights were updated {self._updates} times in "
                f"{self._calls} calls: the schedule stays at step 0, and every=n is n times too strong; call "
                "reg.step() after optimizer.step(), or reg.attach(optimizer) once"
            )

    def _warn_once(self, selection: Selection) -> None:
        if not (selection.layers or selection.waiting or "" in self._warned):
            self._warned.add("")
            warn("OrthRegularizer found no layer to regularise; print(reg) says why")
        if selection.empty_blocks and "preset" not in self._warned:
            self._warned.add("preset")
            warn(
                f"preset {self._settings.preset!r} found no layer in these residual blocks, whose structure it does "
                f"not know: {', '.join(selection.empty_blocks)}; choose with include instead"
            )
        impossible = [layer for layer in selection.layers if not (layer.has_orthogonal or layer.name in self._warned)]
        if not impossible:
            return
        self._warned.update(layer.name for layer in impossible)
        listed = ", ".join(
            f"{layer.name} ({'x'.join(map(str, layer.problem.shape))}, "
            f"stride {'x'.join(map(str, layer.problem.stride))}): " + _least(layer)
            for layer in impossible
        )
        warn(
            "no orthogonal convolution exists with more filters than input channels times taps and a stride that skips "
            f"input pixels; the loss of these layers cannot reach zero: {listed}"
        )


def _declares(kind: type, name: str) -> bool:
    return name in kind.__dict__ or name in getattr(kind, "__annotations__", {})


def _hint(name: str) -> str:
    """The argument that a wrong name is nearest to, as the end of a sentence, or nothing."""
    near = get_close_matches(name, [*_SETTINGS, *_ALSO_CALLED, "model"], n=1, cutoff=0.75)
    return f"; did you mean {_ALSO_CALLED.get(near[0], near[0])!r}?" if near else ""


def _least(layer: Layer) -> str:
    if layer.problem.target <= 0:
        return "no weight but zero"
    return f"at least {layer.floor if layer.squared else sqrt(layer.floor):g}"


def _whole(weight: Tensor) -> Tensor:
    """The weight in one piece, with a gradient that goes back to where the pieces are."""
    if modules.is_plain(weight) or not modules.is_spread(weight):
        return weight
    return weight.full_tensor()  # type: ignore[attr-defined]


def _chosen(bundle: Bundle, weights: list[Tensor]) -> list[Tensor]:
    """What the losses of a bundle are computed of; ``weights`` are those of all layers."""
    return [
        by_columns(_whole(weights[index]), groups) if turned else _whole(weights[index])
        for index, groups, turned in zip(bundle.indices, bundle.groups, bundle.turned, strict=True)
    ]


def _gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their ``.grad``, made of zeros where there is none."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients
