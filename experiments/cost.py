"""What each method adds to a training step in time and memory (Table 9), with the benchmarks' means."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from .config import Config
from .methods import METHODS, Method, Regularization
from .networks import backbone
from .runner import Context, Experiment, Task
from .training import State

# isort: split
from memory import peak_extra_bytes
from shapes import NETWORKS
from steps import Settings


@dataclass(frozen=True)
class Cost(Config):
    """``method`` does not count: all take turns. The network is the paper's width, the images 32 pixels."""

    experiment: ClassVar[str] = "cost"

    width: int = 64
    batch: int = 16
    steps: int = 5


class CostTask(Task):
    """Unit: one round, in which every method takes one step from the same weights."""

    def __init__(self, config: Cost, context: Context) -> None:
        self.units = config.steps
        self.model = backbone("resnet18", 100, config.width)
        self.images = torch.randn(config.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(100, (config.batch,))
        self.methods = {m: Regularization(m, 0.0 if m == "plain" else 0.01, self.model) for m in METHODS}
        self.seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        self.width = config.width
        self.step("ocnn")  # allocates

    def step(self, method: Method) -> float:
        began = process_time()
        loss = F.cross_entropy(self.model(self.images), self.labels)
        (loss + self.methods[method].loss()).backward()
        kept = [parameter.detach().clone() for parameter in self.model.parameters()] if method == "projection" else []
        self.methods[method].after_step()
        spent = process_time() - began
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), kept, strict=False):
                parameter.copy_(value)
        self.model.zero_grad()
        return spent

    def advance(self, unit: int) -> None:
        for turn in range(len(METHODS)):
            method = METHODS[(turn + unit) % len(METHODS)]
            self.seconds[method].append(self.step(method))

    def state(self) -> State:
        return {"seconds": self.seconds}

    def load(self, state: State) -> None:
        self.seconds = state["seconds"]

    def result(self) -> dict[str, Any]:
        return {"weights": sum(parameter.numel() for parameter in self.model.parameters())}

    def timing(self) -> dict[str, Any]:
        layers, settings = NETWORKS["resnet18"], Settings("cpu", threads=1)
        return {
            "step_seconds": {method: median(values) for method, values in self.seconds.items()},
            "step_minimum": {method: min(values) for method, values in self.seconds.items()},
            "peak_bytes": {kind: peak_extra_bytes(kind, layers, settings) for kind in ("fused", "reference")},
        }


COST = Experiment(Cost, CostTask)
