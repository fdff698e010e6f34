"""SimBA's pixel attack (Guo et al.) on the CIFAR-100 networks (Table 7): how many queries until the answer changes."""

from __future__ import annotations

from dataclasses import dataclass
from time import process_time
from typing import Any, ClassVar

import torch
from torch import Tensor

from .classification import Classification, load, trained
from .config import Config
from .runner import Context, Experiment, Task
from .training import State


@dataclass(frozen=True)
class Probe(Config):
    """Of a network that is there: ``rate``, ``weight``, ``network``, ``width``, ``base_steps`` are of its training."""

    network: str = "resnet18"
    width: int = 8
    base_steps: int = 1200


@dataclass(frozen=True)
class Attack(Probe):
    experiment: ClassVar[str] = "attack"

    images: int = 100
    steps: int = 1000
    epsilon: float = 0.2  # change of one value of a pixel, which goes from 0 to 1


def base(config: Probe) -> Classification:
    """The run that trained the network."""
    return Classification(
        config.method, config.rate, config.weight, config.seed,
        network=config.network, width=config.width, steps=config.base_steps,
    )  # fmt: skip


class AttackTask(Task):
    """Unit: one direction (a pixel's channel, in an order of its own for each image) tried on every image still right.

    First a step down, then, if that does not lower the probability of the label, a step up. Each look at the network's
    probabilities is a query.
    """

    def __init__(self, config: Attack, context: Context) -> None:
        data = load("cifar100", "test", 32, context)
        self.network = trained(base(config), context, data.classes)
        chosen = self._right(data.images, data.labels, config.images)
        self.labels = data.labels[chosen]
        self.images = data.images[chosen].float() / 255
        size = data.images[0].numel()
        generator = torch.Generator().manual_seed(config.seed)
        self.order = torch.empty(len(chosen), size, dtype=torch.long)
        for own in self.order:
            torch.randperm(size, generator=generator, out=own)
        self.epsilon, self.units = config.epsilon, min(config.steps, size)
        self.queries = torch.ones(len(chosen), dtype=torch.long)
        self.fooled_after = torch.zeros(len(chosen), dtype=torch.long)  # queries; 0: not fooled
        self.fooled_seconds = torch.zeros(len(chosen))
        self.began, self.spent = process_time(), 0.0
        self.last = self.probabilities(self.images, torch.arange(len(chosen)))[0]

    def _right(self, images: Tensor, labels: Tensor, count: int) -> Tensor:
        found: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, len(images), 250):
                part = slice(start, start + 250)
                logits = self.network.model(self.network.normalize(images[part]))
                found.append((logits.argmax(1) == labels[part]).nonzero()[:, 0] + start)
                if sum(map(len, found)) >= count:
                    break
        return torch.cat(found)[:count]

    @torch.no_grad()
    def probabilities(self, images: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Of the label, and whether another class is more probable."""
        logits = self.network.model(self.network.normalize(255 * images))
        labels = self.labels[which]
        return logits.softmax(1).gather(1, labels[:, None])[:, 0], logits.argmax(1) != labels

    def advance(self, unit: int) -> None:
        active = (self.fooled_after == 0).nonzero()[:, 0]
        for sign in (-1, 1):
            if not len(active):
                break
            tried = self.images[active].flatten(1)
            tried[torch.arange(len(active)), self.order[active, unit]] += sign * self.epsilon
            tried = tried.clamp(0, 1).reshape(-1, *self.images.shape[1:])
            probability, fooled = self.probabilities(tried, active)
            self.queries[active] += 1
            better = probability < self.last[active]
            taken = active[better]
            self.images[taken], self.last[taken] = tried[better], probability[better]
            done = active[better & fooled]
            self.fooled_after[done] = self.queries[done]
            self.fooled_seconds[done] = process_time() - self.began + self.spent
            active = active[~better]

    def state(self) -> State:
        names = ("images", "last", "queries", "fooled_after", "fooled_seconds")
        return {"spent": process_time() - self.began + self.spent, **{name: getattr(self, name) for name in names}}

    def load(self, state: State) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def result(self) -> dict[str, Any]:
        count = len(self.labels)  # 0 if the network has none right
        return {
            "images": count,
            "fooled": (self.fooled_after > 0).sum().item() / count if count else None,
            "mean_queries": self.queries.double().mean().item() if count else None,
            "median_queries": self._until(0.5),
            "queries_to_90": self._until(0.9),
            "fooled_after": self.fooled_after.tolist(),
        }

    def _until(self, share: float) -> float | None:
        """Queries per image after which this share is fooled; None if it never is."""
        after = self.fooled_after[self.fooled_after > 0].sort().values
        wanted = -(-round(share * 1000) * len(self.labels) // 1000)
        return float(after[wanted - 1]) if 0 < wanted <= len(after) else None

    def timing(self) -> dict[str, Any]:
        """Processor seconds at which each image was fooled, all images attacked together; 0 for those that were not."""
        return {"fooled_seconds": [round(value, 3) for value in self.fooled_seconds.tolist()]}


ATTACK = Experiment(Attack, AttackTask, needs=lambda config: [base(config)])
