"""Muon for whole networks: momentum whose update is orthogonal, and an ordinary optimiser for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from .. import engine, modules
from ..backends.job import accumulation_dtype
from ..functional import check_weight
from ..problem import IntOrTuple, Options, Problem, check_choice, problem_of
from ..regularizer.distributed import Shard, balanced_shares, send_shares, sharing_group, sharing_pays
from ..regularizer.settings import Selector
from ..regularizer.table import aligned
from .assignment import Assigned, assigned
from .coefficients import Coefficients, Rational
from .update import NO_TARGET, How, Mode, Scale, how_of, orthogonalize_all

Group = dict[str, Any]
#: Makes the optimiser of all parameters whose updates are not orthogonal, from a list of param groups.
MakeOptimizer = Callable[[list[Group]], torch.optim.Optimizer]

#: What ``group["update"]`` can be besides a mode.
AUXILIARY = "auxiliary"
_UPDATES = ("operator", "flatten", "per_tap", AUXILIARY)
#: Layers are compared by what they would cost a CPU, so that ranks with other devices agree on the shares.
_CPU = Options(backend="cpu", precision="ieee")


class Muon(torch.optim.Optimizer):
    r"""Momentum with orthogonal updates for convolutions and Linear layers, and AdamW for the rest.

    .. math:: B \leftarrow \mu B + (1 - \mu) G, \quad D = \mu B + (1 - \mu) G, \quad
              K \leftarrow (1 - \eta \lambda) K - \eta \, \mathrm{orth}(D)

    ``orth`` is :func:`orthogonal_update`, of all layers together: in mode "operator" that of the convolutions
    themselves, with their stride, dilation and groups, by as many fused passes as there are steps.

    Args:
        params_or_model: a model, also wrapped in DistributedDataParallel or compiled; or parameters or param groups.
            Of a model, every convolution that sees more than 3 channels, and every Linear layer but the head (the last
            layer), gets orthogonal updates; everything else goes to ``auxiliary``. ``print(optimizer)`` says which
            parameter went where, and why. Of parameters, all get orthogonal updates; a group says otherwise with
            ``"update"``: a mode, or "auxiliary". ``"stride"``, ``"dilation"`` and ``"groups"`` of a group are those of
            its layers, 1 where they are left out.
        lr: the length of a step, whatever the layer's shape: updates have singular values near 1. A float or a tensor.
        momentum, nesterov: as in the equation; without nesterov ``D = B``.
        weight_decay: decoupled, as in AdamW.
        mode: "operator", "flatten" (the matrix ``M x (C k1..kn)``, as other implementations do) or "per_tap"; see
            :func:`orthogonal_update`, also for steps, coefficients and scale.
        steps, coefficients, scale: of the update.
        auxiliary: makes the optimiser of the other parameters from a list of param groups; a class of torch.optim, or
            ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``. Its settings are those of its own groups.
        include, exclude: of a model, which layers get orthogonal updates, as for :class:`OrthRegularizer`.
        maximize: go uphill; the auxiliary optimiser too.
        shard: under DistributedDataParallel each rank computes its share of the updates and sends them to the others:
            "auto" where that takes less time than it saves, True always (over the default process group too), False
            never. Gradients must be the same on all ranks, as DDP leaves them.
        backend, precision: of the fused passes, as for :func:`ocnn_fused.fused_orth_loss`.

    It is one optimiser with several param groups: schedulers, GradScaler, ``state_dict`` and hooks see all of them. Its
    own state is one momentum buffer for each parameter. Sharded weights (FSDP2, DTensor) are gathered for the update.
    A parameter without a gradient is left alone; one whose gradient is zero, NaN or of low rank is treated as
    :func:`orthogonal_update` says.

    Example::

        optimizer = Muon(model, lr=0.02, weight_decay=0.01)
        for x, y in data:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        params_or_model: nn.Module | Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        mode: Mode = "operator",
        steps: int | None = None,
        coefficients: Coefficients | None = None,
        scale: Scale = "unit",
        auxiliary: MakeOptimizer = torch.optim.AdamW,
        include: Selector | None = None,
        exclude: Selector | None = None,
        maximize: bool = False,
        shard: Shard = "auto",
        backend: str | None = None,
        precision: str | None = None,
    ) -> None:
        _check_numbers(lr, momentum, weight_decay)
        for name, value in (("nesterov", nesterov), ("maximize", maximize)):
            check_choice(name, value, (True, False))
        check_choice("shard", shard, ("auto", True, False))
        how_of(mode, steps, coefficients, scale, backend, precision)
        if not callable(auxiliary):
            raise TypeError(f"auxiliary must be a callable that makes an optimiser of param groups, got {auxiliary!r}")
        self._make_auxiliary = auxiliary
        self._auxiliary: torch.optim.Optimizer | None = None
        self._backend, self._precision = backend, precision
        self._model = params_or_model if isinstance(params_or_model, nn.Module) else None
        self._shard: Shard = shard
        self._assigned: list[Assigned] = []
        self._shares: dict[tuple[tuple[Problem, ...], int], list[list[int]] | None] = {}
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "update": mode,
            "steps": steps, "coefficients": coefficients, "scale": scale, "maximize": maximize,
        }  # fmt: skip
        if self._model is None:
            if include is not None or exclude is not None:
                raise ValueError("include and exclude choose layers of a model, but parameters were given")
            super().__init__(params_or_model, defaults)  # type: ignore[arg-type]
        else:
            self._assigned = assigned(self._model, include, exclude)
            super().__init__(_groups(self._assigned), defaults)

    # -- param groups --------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, with ``"update"`` "auxiliary" to the auxiliary optimiser; each setting is checked."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        update = param_group.setdefault("update", self.defaults["update"])
        check_choice("update", update, _UPDATES)
        param_group.setdefault("maximize", self.defaults["maximize"])
        if update == AUXILIARY:
            self._add_to_auxiliary(param_group)
            return
        merged = {**self.defaults, **param_group}
        _check_numbers(*(merged[name] for name in ("lr", "momentum", "weight_decay")))
        self._how(merged)
        super().add_param_group(param_group)
        try:
            param_group["geometries"] = _geometries(param_group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _add_to_auxiliary(self, group: Group) -> None:
        """The group is one and the same of both optimisers, so that whoever changes its rate changes it in both."""
        if self._auxiliary is None:
            self._auxiliary = self._make_auxiliary([group])
            if not isinstance(self._auxiliary, torch.optim.Optimizer):
                raise TypeError(f"auxiliary must make an optimiser, got {type(self._auxiliary).__name__}")
            if group["maximize"] and "maximize" not in self._auxiliary.defaults:
                raise ValueError(f"maximize must be False: {type(self._auxiliary).__name__} has no such setting")
        else:
            self._auxiliary.add_param_group(group)
        own, self.defaults = self.defaults, {}
        try:
            super().add_param_group(group)
        finally:
            self.defaults = own
        self._link()

    def _link(self) -> None:
        """Give the auxiliary optimiser its groups and the state, which loading has replaced."""
        if self._auxiliary is not None:
            self._auxiliary.param_groups = [group for group in self.param_groups if group["update"] == AUXILIARY]
            self._auxiliary.state = self.state

    def _how(self, group: Group) -> How:
        return how_of(
            group["update"], group["steps"], group["coefficients"], group["scale"], self._backend, self._precision
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups; a closure is called first, with gradients enabled, and its value returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._link()
        for group in self.param_groups:
            if group["update"] != AUXILIARY:
                self._step(group)
        if self._auxiliary is not None:
            self._auxiliary.step()
        return loss

    def _step(self, group: Group) -> None:
        """Parameters that lie together are updated together."""
        how = self._how(group)
        kinds: dict[Any, list[int]] = {}
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise TypeError(f"gradients must be dense, got layout {parameter.grad.layout} for params[{place}]")
            kind = parameter.device, parameter.dtype, getattr(parameter, "device_mesh", None)
            kinds.setdefault(kind, []).append(place)
        for places in kinds.values():
            parameters = [group["params"][place] for place in places]
            problems = tuple(
                [_problem(parameters[index], group["geometries"][place]) for index, place in enumerate(places)]
            )
            directions = self._directions(parameters, group)
            wholes = [_whole(direction, is_new=group["nesterov"]) for direction in directions]
            updates, factors = self._orthogonalize(wholes, problems, how)
            if modules.is_spread(parameters[0]):
                wholes = updates
                updates = directions if group["nesterov"] else [direction.clone() for direction in directions]
                for update, whole in zip(updates, wholes, strict=True):
                    modules.copy_into_pieces(update, whole)
            _move_(parameters, updates, factors, group)

    def _directions(self, parameters: list[Tensor], group: Group) -> list[Tensor]:
        """The momentum of each parameter, moved on; with nesterov new tensors."""
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        grads: list[Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        return list(torch._foreach_lerp(grads, buffers, group["momentum"])) if group["nesterov"] else buffers

    def _orthogonalize(
        self, tensors: list[Tensor], problems: tuple[Problem, ...], how: How
    ) -> tuple[list[Tensor], list[float]]:
        """Each rank its share, where that pays; the bits are the same on all ranks."""
        group = None
        if not torch.compiler.is_compiling():
            group = sharing_group(nn.Module() if self._model is None else self._model, self._shard)
        shares = None if group is None else self._shares_of(problems, tensors, how, group.size())
        if group is None or shares is None:
            return orthogonalize_all(tensors, problems, how)
        mine, updates = shares[group.rank()], list(tensors)
        if mine:
            chosen = [tensors[place] for place in mine]
            found, factors = orthogonalize_all(chosen, tuple(problems[place] for place in mine), how)
            torch._foreach_mul_(found, factors)
            for place, update in zip(mine, found, strict=True):
                updates[place] = update
        send_shares(group, [[updates[place] for place in share] for share in shares])
        return updates, [1.0] * len(tensors)

    def _shares_of(
        self, problems: tuple[Problem, ...], tensors: list[Tensor], how: How, world: int
    ) -> list[list[int]] | None:
        """Which rank computes which tensors, or None where each computes all of them."""
        if world == 1:
            return None
        if (problems, world) not in self._shares:
            costs = [
                _passes(how) * engine.choose(problem, tensor.dtype, torch.device("cpu"), _CPU).seconds
                for problem, tensor in zip(problems, tensors, strict=True)
            ]
            pays = self._shard is True or sharing_pays(sum(costs), sum(tensor.nbytes for tensor in tensors), world)
            shares = [list(share) for share in balanced_shares(costs, world)] if pays else None
            self._shares[problems, world] = shares
        return self._shares[problems, world]

    # -- state ---------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, with the same groups of the same layers."""
        for index, (ours, theirs) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            for name in ("update", "geometries"):
                if ours.get(name) != theirs.get(name):
                    raise ValueError(
                        f"state_dict must have {name} {ours.get(name)!r} in group {index}, got {theirs.get(name)!r}"
                    )
        super().load_state_dict(state_dict)
        self._link()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **super().__getstate__(), "_model": None}

    # -- for people ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        names = {id(one.parameter): one for one in self._assigned}
        rows: list[tuple[str, ...]] = [("parameter", "shape", "stride", "dilation", "groups", "update", "why")]
        for number, group in enumerate(self.param_groups):
            own = group["update"] != AUXILIARY
            update = group["update"] if own else type(self._auxiliary).__name__
            for place, parameter in enumerate(group["params"]):
                known = names.get(id(parameter))
                numbers = group["geometries"][place] if own else ("", "", "")
                rows.append((
                    known.name if known else f"group {number}, {place}", _times(parameter.shape), *map(_times, numbers),
                    f"{update}, rate {float(group['lr']):g}", known.reason if known else "given",
                ))  # fmt: skip
        settings = ", ".join(f"{name}={value!r}" for name, value in self.defaults.items())
        return "\n".join([f"{type(self).__name__}({settings})", *aligned(rows)])


def _groups(found: Sequence[Assigned]) -> list[Group]:
    """The param groups of a model: those with orthogonal updates, and the others."""
    own = [one for one in found if one.geometry is not None]
    rest = [one.parameter for one in found if one.geometry is None]
    groups: list[Group] = []
    if own:
        groups.append({"params": [one.parameter for one in own], "geometries": [one.geometry for one in own]})
    if rest:
        groups.append({"params": rest, "update": AUXILIARY})
    return groups


def _geometries(group: Group) -> list[tuple[Any, ...]]:
    """Stride, dilation and groups of each parameter of a group, checked; plain tuples, which every checkpoint takes."""
    shared = tuple(group.pop(name, 1) for name in ("stride", "dilation", "groups"))
    given = group.get("geometries", [shared] * len(group["params"]))
    if len(given) != len(group["params"]):
        raise ValueError(f"geometries must be one for each of {len(group['params'])} parameters, got {len(given)}")
    found = []
    for place, (parameter, geometry) in enumerate(zip(group["params"], given, strict=True)):
        label = f"params[{place}] of shape {tuple(parameter.shape)}"
        if not 2 <= parameter.dim() <= 5:
            raise ValueError(
                f"{label} cannot have an orthogonal update: it must have 2 (Linear) to 5 (Conv3d) dimensions; give it "
                'to a group with {"update": "auxiliary"}, or give Muon the model'
            )
        check_weight(parameter, label)
        stride, dilation, groups = geometry
        stride, dilation = _for_axes(stride, parameter), _for_axes(dilation, parameter)
        problem = problem_of(parameter.shape, stride, dilation, groups, None)
        found.append((problem.stride, problem.dilation, problem.groups))
    return found


def _for_axes(value: IntOrTuple, parameter: Tensor) -> IntOrTuple:
    """A Linear layer among convolutions has no axes."""
    return 1 if parameter.dim() == 2 else value


def _problem(parameter: Tensor, geometry: tuple[Any, ...]) -> Problem:
    return Problem(tuple(parameter.shape), geometry[0], geometry[1], None, geometry[2], NO_TARGET)


def _passes(how: How) -> int:
    """By which a layer's cost is multiplied, where layers are shared out."""
    return len(how.steps.fractions if isinstance(how.steps, Rational) else how.steps)


def _whole(direction: Tensor, is_new: bool) -> Tensor:
    """A contiguous tensor in the dtype of updates, which may be written to; a DTensor's in one piece."""
    if modules.is_spread(direction):
        direction, is_new = direction.full_tensor(), False  # type: ignore[attr-defined]
    dtype = accumulation_dtype(direction.dtype)
    if is_new and direction.dtype == dtype and direction.is_contiguous():
        return direction
    copied = torch.empty(direction.shape, dtype=dtype, device=direction.device)
    return copied.copy_(direction)


def _move_(parameters: list[Tensor], updates: list[Tensor], factors: list[float], group: Group) -> None:
    """Decay, and a step against the updates times their factors."""
    lr, decay = group["lr"], group["weight_decay"]
    if decay:
        torch._foreach_mul_(parameters, 1 - lr * decay)
    sign = 1 if group["maximize"] else -1
    if isinstance(lr, Tensor) or len(set(factors)) > 1:
        torch._foreach_mul_(updates, [sign * factor for factor in factors])
        if isinstance(lr, Tensor):
            torch._foreach_mul_(updates, lr)
            torch._foreach_add_(parameters, updates)
        else:
            torch._foreach_add_(parameters, updates, alpha=lr)
    else:
        torch._foreach_add_(parameters, updates, alpha=sign * lr * factors[0])


def _check_numbers(lr: object, momentum: object, weight_decay: object) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one, got shape {tuple(lr.shape)}")
    else:
        _check_range("lr", lr, inf)
    _check_range("momentum", momentum, 1.0)
    _check_range("weight_decay", weight_decay, inf)


def _check_range(name: str, value: object, below: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        wanted = "finite and not negative" if below == inf else f"at least 0 and less than {below:g}"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _times(numbers: Any) -> str:
    return str(numbers) if isinstance(numbers, (int, str)) else "x".join(map(str, numbers)) or "-"
