"""A small convolutional GAN on CIFAR images; scores are in the features of a public CIFAR-10 ResNet-56, so they are
not the Inception Score and FID of the paper (Table 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import metrics
from .config import Config
from .data import cifar100, state_dict
from .methods import Regularization
from .networks import Discriminator, Generator, features, resnet56
from .runner import Context, Experiment, Task
from .training import Normalize, State, batch_indices, held_back, in_parts, update

WEIGHTS = "resnet56-4bfd9763.th"


@dataclass(frozen=True)
class Gan(Config):
    """Both networks are regularised; ``scored`` images are made and compared with as many real ones."""

    experiment: ClassVar[str] = "gan"

    rate: float = 2e-4
    code: int = 64
    width: int = 32
    steps: int = 600
    batch: int = 64
    scored: int = 2000


class Judge:
    """ResNet-56 and the images that made ones are compared with."""

    def __init__(self, context: Context) -> None:
        self.model = resnet56().eval()
        state_dict(context.data / "cifar10-resnets" / WEIGHTS, self.model)
        scale = 255 * torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, None, :, None, None]
        self.normalize = Normalize(*scale)  # those that the weights were trained with

    def features(self, images: Tensor) -> Tensor:
        """Of images as bytes or as numbers from 0 to 255."""
        return in_parts(lambda part: features(self.model, self.normalize(part)), images)  # type: ignore[arg-type]


class GanTask(Task):
    def __init__(self, config: Gan, context: Context) -> None:
        self.config, self.units = config, config.steps
        folder = context.data / "cifar-100-binary"
        train, held = held_back(cifar100(folder, "train"))
        self.train = train.images
        real = held.images if config.choosing else cifar100(folder, "test").images
        self.judge = Judge(context)
        count, split = min(config.scored, len(real)), "held-back" if config.choosing else "test"

        def make() -> dict[str, Any]:
            return {"features": self.judge.features(real[:count])}

        self.real = context.cached(f"gan-{split}-{count}", make)["features"]
        torch.manual_seed(config.seed)
        self.models = [Generator(config.code, config.width), Discriminator(config.width)]
        self.regularizations = [Regularization(config.method, config.weight, model) for model in self.models]
        self.optimizers = [torch.optim.Adam(model.parameters(), config.rate, (0.5, 0.999)) for model in self.models]

    def make(self, count: int) -> Tensor:
        return self.models[0](torch.randn(count, self.config.code))

    def advance(self, unit: int) -> None:
        config = self.config
        generator, discriminator = self.models
        indices = batch_indices(config.seed, unit, len(self.train), config.batch)
        real = self.train[indices].float() / 127.5 - 1
        made = self.make(len(real))
        wrong = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()
        update(wrong, discriminator, self.optimizers[1], self.regularizations[1])
        seen = F.softplus(-discriminator(made)).mean()
        update(seen, generator, self.optimizers[0], self.regularizations[0])
        discriminator.zero_grad()

    def parts(self) -> list[nn.Module | torch.optim.Optimizer | Regularization]:
        return [*self.models, *self.optimizers, *self.regularizations]

    def state(self) -> State:
        return {str(index): part.state_dict() for index, part in enumerate(self.parts())}

    def load(self, state: State) -> None:
        for index, part in enumerate(self.parts()):
            part.load_state_dict(state[str(index)])

    @torch.no_grad()
    def made_images(self, count: int) -> Tensor:
        torch.manual_seed(100 + self.config.seed)
        self.models[0].eval()
        return torch.cat([self.make(min(500, count - start)) for start in range(0, count, 500)])

    def result(self) -> dict[str, Any]:
        images = (self.made_images(len(self.real)).clamp(-1, 1) + 1) * 127.5
        found = self.judge.features(images)
        probabilities = self.judge.model.linear(found).softmax(1).detach()  # type: ignore[operator, union-attr]
        return {
            "frechet": metrics.frechet_distance(found, self.real),
            "class_score": metrics.class_score(probabilities),
        }

    def keeps(self) -> dict[str, Tensor] | None:
        return {"made": self.made_images(64)}


GAN = Experiment(Gan, GanTask)
