"""Optimisers on CIFAR-100: SGD, AdamW, and updates that are orthogonal as matrices or as operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import process_time
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from ocnn_fused.optim import Muon

from . import metrics
from .classification import Classification, ClassificationTask
from .runner import Context, Experiment
from .training import State, cosine

Optimizer = Literal["sgd", "adamw", "flatten", "operator"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
#: Of whatever convolutions that see more than the image are not, under the last two.
REST = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
#: How often a training is scored on its way, and on how many of the images.
POINTS = 6
SCORED = 2000


@dataclass(frozen=True)
class Optimized(Classification):
    """A training of the first row's network by one of the optimisers; ``decay`` is that of the optimiser."""

    experiment: ClassVar[str] = "optimizers"

    optimizer: Optimizer = "sgd"


def _sgd(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay, nesterov=True)


def _adamw(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), rate, weight_decay=decay)


def _flatten(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    return Muon(model, rate, 0.9, weight_decay=decay, mode="flatten", auxiliary=REST)


def _operator(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    return Muon(model, rate, 0.9, weight_decay=decay, mode="operator", auxiliary=REST)


MAKE: dict[Optimizer, Callable[[nn.Module, float, float], torch.optim.Optimizer]] = {
    "sgd": _sgd, "adamw": _adamw, "flatten": _flatten, "operator": _operator,
}  # fmt: skip


class OptimizedTask(ClassificationTask):
    """The same training with another optimiser, scored on its way, with the processor time that it took until then."""

    config: Optimized

    def __init__(self, config: Optimized, context: Context) -> None:
        if config.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {config.optimizer!r}")
        super().__init__(config, context)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.spent = 0.0
        self.curve: list[dict[str, float]] = []

    def make_optimizer(self) -> torch.optim.Optimizer:
        return MAKE[self.config.optimizer](self.model, self.config.rate, self.config.decay)

    def set_rates(self, unit: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * cosine(unit, self.config.steps)

    def advance(self, unit: int) -> None:
        began = process_time()
        super().advance(unit)
        self.spent += process_time() - began
        if not self.config.choosing and (unit + 1) * POINTS % self.config.steps < POINTS:
            self.curve.append({"step": unit + 1, "seconds": self.spent, "accuracy": self.accuracy()})

    def accuracy(self) -> float:
        """On the first of the test images."""
        score = metrics.accuracy(self.logits(self.scored.images[:SCORED]), self.scored.labels[:SCORED])
        self.model.train()
        return score

    def result(self) -> dict[str, Any]:
        curve = [{"step": point["step"], "accuracy": point["accuracy"]} for point in self.curve]
        return {**super().result(), "curve": curve}

    def timing(self) -> dict[str, Any]:
        """Processor seconds of the training alone, at each point of the curve."""
        seconds = [round(point["seconds"], 2) for point in self.curve]
        return {"training_seconds": round(self.spent, 2), "curve_seconds": seconds}

    def state(self) -> State:
        return {**super().state(), "spent": self.spent, "curve": self.curve}

    def load(self, state: State) -> None:
        super().load(state)
        self.spent, self.curve = state["spent"], state["curve"]


OPTIMIZED = Experiment(Optimized, OptimizedTask)
