"""CIFAR-100 with all or few labels, and class folders (Tiny-ImageNet, ImageNet): Tables 1 to 4 and Figure 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import metrics
from .config import Config
from .data import Labelled, cifar100, class_folders
from .methods import Regularization, orthogonality_loss
from .networks import backbone
from .runner import Context, Experiment, Task
from .training import Normalize, State, augmented, batch_indices, cosine, held_back, in_parts, set_rate, update

FOLDERS = "tiny-imagenet-50"


@dataclass(frozen=True)
class Classification(Config):
    """``fraction`` of the training images (less the tenth held back) has labels; the rest is not used."""

    experiment: ClassVar[str] = "classification"

    dataset: Literal["cifar100", "folders"] = "cifar100"
    network: str = "resnet18"
    width: int = 8
    size: int = 32
    fraction: float = 1.0
    steps: int = 600
    batch: int = 64
    decay: float = 5e-4


def load(dataset: str, split: str, size: int, context: Context) -> Labelled:
    if dataset == "cifar100":
        return cifar100(context.data / "cifar-100-binary", split)
    split = "val" if split == "test" else split
    return cached_folders(FOLDERS, split, size, context)


def cached_folders(name: str, split: str, size: int, context: Context) -> Labelled:
    def make() -> dict[str, Any]:
        data = class_folders(context.data / name, split, size)
        return {"images": data.images, "labels": data.labels, "classes": data.classes}

    return Labelled(**context.cached(f"{name}-{split}-{size}", make))


class ClassificationTask(Task):
    def __init__(self, config: Classification, context: Context) -> None:
        self.config, self.units = config, config.steps
        train, held = held_back(load(config.dataset, "train", config.size, context))
        self.normalize = Normalize.of(train.images)
        self.scored = held if config.choosing else load(config.dataset, "test", config.size, context)
        chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(777 + config.seed))
        self.train = train.take(chosen[: round(config.fraction * len(train))])
        self.model = backbone(config.network, train.classes, config.width)
        self.regularization = Regularization(config.method, config.weight, self.model)
        self.optimizer = self.make_optimizer()
        self.losses: list[float] = []

    def make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.SGD(
            self.model.parameters(), config.rate, momentum=0.9, weight_decay=config.decay, nesterov=True
        )

    def set_rates(self, unit: int) -> None:
        set_rate(self.optimizer, self.config.rate * cosine(unit, self.config.steps))

    def advance(self, unit: int) -> None:
        config = self.config
        batch = self.train.take(batch_indices(config.seed, unit, len(self.train), config.batch))
        images = self.normalize(augmented(batch.images, config.size // 8))
        self.set_rates(unit)
        loss = F.cross_entropy(self.model(images), batch.labels)
        self.update(loss)
        self.losses.append(loss.item())

    def update(self, loss: Tensor) -> None:
        update(loss, self.model, self.optimizer, self.regularization)

    def logits(self, images: Tensor) -> Tensor:
        self.model.eval()
        return in_parts(lambda part: self.model(self.normalize(part)), images)

    def result(self) -> dict[str, Any]:
        logits = self.logits(self.scored.images)
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return {
            "accuracy": metrics.accuracy(logits, self.scored.labels),
            "top5": metrics.accuracy(logits, self.scored.labels, 5),
            "training_loss": sum(last) / len(last),
            "orthogonality_loss": orthogonality_loss(self.model),
            "images": len(self.train),
        }

    def state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "regularization": self.regularization.state_dict(),
            "losses": self.losses,
        }

    def load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.regularization.load_state_dict(state["regularization"])
        self.losses = state["losses"]

    def keeps(self) -> dict[str, Tensor] | None:
        return {**self.model.state_dict(), "normalize.mean": self.normalize.mean, "normalize.std": self.normalize.std}


@dataclass
class Trained:
    """A finished network, in eval mode, with its normalisation."""

    model: Any
    normalize: Normalize


def trained(config: Classification, context: Context, classes: int) -> Trained:
    """The network of a finished run."""
    kept = context.kept(config)
    normalize = Normalize(kept.pop("normalize.mean"), kept.pop("normalize.std"))
    model = backbone(config.network, classes, config.width)
    model.load_state_dict(kept)
    return Trained(model.eval(), normalize)


CLASSIFICATION = Experiment(Classification, ClassificationTask)
