"""Muon for whole networks: momentum whose update is orthogonal, an ordinary optimiser for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from ..problem import Options, problem_of
from ..regularizer.selection import chosen_layers
from .coefficients import steps_of
from .update import NO_TARGET, accumulated, matrices_, operators_


class Muon(torch.optim.Optimizer):
    """First version."""

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        mode: str = "operator",
        steps: int = 5,
        auxiliary: dict[str, Any] | None = None,
    ) -> None:
        layers = chosen_layers(model, None, None, None)
        own = [layer.module.weight for layer in layers]
        geometries = [(p.stride, p.dilation, p.groups) for p in (one.problem for one in layers)]
        ids = set(map(id, own))
        rest = [parameter for parameter in model.parameters() if id(parameter) not in ids]
        given = {"params": rest, "update": "auxiliary", **(auxiliary or {})}
        defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "update": mode,
            "steps": steps, "coefficients": "muon" if mode == "flatten" else "minimax",
        }  # fmt: skip
        super().__init__([{"params": own, "geometries": geometries}, given], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            if group["update"] == "auxiliary":
                self._sgd(group)
            else:
                self._orthogonal(group)

    def _directions(self, group: dict[str, Any]) -> list[Tensor]:
        grads = [parameter.grad for parameter in group["params"]]
        buffers = []
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        return list(torch._foreach_lerp(grads, buffers, group["momentum"])) if group["nesterov"] else buffers

    def _orthogonal(self, group: dict[str, Any]) -> None:
        parameters = group["params"]
        updates = [
            direction.to(accumulated(direction), memory_format=torch.contiguous_format)
            for direction in self._directions(group)
        ]
        steps = steps_of(group["coefficients"], group["steps"])
        left = 1.0
        if group["update"] == "operator":
            problems = tuple(
                problem_of(update.shape, *geometry, None, NO_TARGET)
                for update, geometry in zip(updates, group["geometries"], strict=True)
            )
            left = operators_(updates, problems, Options(), steps)
        else:
            matrices_([update.flatten(1) for update in updates], steps)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"] * left)

    def _sgd(self, group: dict[str, Any]) -> None:
        sgd(
            group["params"], [p.grad for p in group["params"]], self._momentum_of(group["params"]),
            weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"], dampening=0.0,
            nesterov=True, maximize=False, foreach=True,
        )  # fmt: skip

    def _momentum_of(self, parameters: list[Tensor]) -> list[Tensor]:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]
