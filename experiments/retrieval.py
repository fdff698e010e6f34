"""Birds (CUB) by their nearest neighbours in the features of a classification network (Figure 5), and by ProxyNCA on
cars (Table 6): networks start from those of Tiny-ImageNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import Tensor, nn

from . import metrics
from .classification import Classification, cached_folders, load, trained
from .config import Config
from .data import Labelled
from .methods import Regularization
from .networks import features
from .runner import Context, Experiment, Task
from .training import State, augmented, batch_indices, cosine, in_parts, set_rate, update

KS = (1, 2, 4, 8)


def base(config: Neighbours | Proxies) -> Classification:
    """The run whose network is used: same method and seed."""
    rate, weight = (
        (config.rate, config.weight) if isinstance(config, Neighbours) else (config.base_rate, config.base_weight)
    )
    return Classification(
        config.method, rate, weight, config.seed, dataset="folders", network="resnet18-stem",
        width=config.width, size=config.size, steps=config.base_steps,
    )  # fmt: skip


@dataclass(frozen=True)
class Neighbours(Config):
    """``rate`` and ``weight`` are those of the network's own training; here nothing is trained."""

    experiment: ClassVar[str] = "neighbours"

    width: int = 16
    size: int = 64
    base_steps: int = 1200


class NeighboursTask(Task):
    """Unit: one part of the images through the network."""

    PART = 500

    def __init__(self, config: Neighbours, context: Context) -> None:
        self.network = trained(base(config), context, load("folders", "train", config.size, context).classes)
        self.splits = [cached_folders("cub200", split, config.size, context) for split in ("train", "test")]
        self.images = torch.cat([data.images for data in self.splits])
        self.units = -(-len(self.images) // self.PART)
        self.found: list[Tensor] = []

    @torch.no_grad()
    def advance(self, unit: int) -> None:
        part = self.images[unit * self.PART : (unit + 1) * self.PART]
        self.found.append(features(self.network.model, self.network.normalize(part)))

    def state(self) -> State:
        return {"found": self.found}

    def load(self, state: State) -> None:
        self.found = state["found"]

    def result(self) -> dict[str, Any]:
        train, test = torch.cat(self.found).split([len(data) for data in self.splits])
        neighbours = self.splits[0].labels[metrics.nearest(test, train, 5)]
        rates = metrics.hit_rates(neighbours, self.splits[1].labels, (1, 5))
        return {"top1": rates[1], "top5": rates[5]}


@dataclass(frozen=True)
class Proxies(Config):
    """ProxyNCA: classes below the middle of both splits train, the others test; when choosing, the last fifth of the
    training classes scores."""

    experiment: ClassVar[str] = "proxies"

    rate: float = 1e-3
    base_rate: float = 0.1
    base_weight: float = 0.0
    base_steps: int = 1200
    width: int = 16
    size: int = 64
    embedding: int = 64
    steps: int = 600
    batch: int = 64


class Embedding(nn.Module):
    """A network's features, mapped to vectors of length 3, as ProxyNCA's are, and one such proxy per class."""

    def __init__(self, network: Any, size: int, classes: int) -> None:
        super().__init__()
        self.network = network
        self.network.fc = nn.Linear(network.fc.in_features, size)
        self.proxies = nn.Parameter(torch.randn(classes, size) / 8)

    def forward(self, images: Tensor) -> Tensor:
        return 3 * F.normalize(self.network(images), dim=1)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """``-log exp(-d(x, own)) / sum over the other proxies of exp(-d(x, other))``, d the squared distance."""
        minus = -torch.cdist(self(images), 3 * F.normalize(self.proxies, dim=1)).square()
        own = minus.gather(1, labels[:, None])[:, 0]
        others = minus.scatter(1, labels[:, None], -torch.inf)
        return (others.logsumexp(1) - own).mean()


class ProxiesTask(Task):
    def __init__(self, config: Proxies, context: Context) -> None:
        self.config, self.units = config, config.steps
        parts = [cached_folders("cars196", split, config.size, context) for split in ("train", "test")]
        classes = parts[0].classes
        images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
        data = Labelled(images, labels, classes)
        first, end = (classes // 2, classes) if not config.choosing else (classes // 2 * 4 // 5, classes // 2)
        self.train = data.take((data.labels < first).nonzero()[:, 0])
        self.scored = data.take(((data.labels >= first) & (data.labels < end)).nonzero()[:, 0])
        network = trained(base(config), context, load("folders", "train", config.size, context).classes)
        self.normalize = network.normalize
        torch.manual_seed(config.seed)
        self.model = Embedding(network.model, config.embedding, first)
        self.regularization = Regularization(config.method, config.weight, self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), config.rate)

    def advance(self, unit: int) -> None:
        config = self.config
        self.model.train()
        batch = self.train.take(batch_indices(config.seed, unit, len(self.train), config.batch))
        images = self.normalize(augmented(batch.images, config.size // 8))
        set_rate(self.optimizer, config.rate * cosine(unit, config.steps))
        update(self.model.loss(images, batch.labels), self.model, self.optimizer, self.regularization)

    def state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "regularization": self.regularization.state_dict(),
        }

    def load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.regularization.load_state_dict(state["regularization"])

    def result(self) -> dict[str, Any]:
        self.model.eval()
        vectors = in_parts(lambda part: self.model(self.normalize(part)), self.scored.images)
        labels = self.scored.labels
        found = labels[metrics.nearest(vectors, None, max(KS))]
        clusters = KMeans(len(labels.unique()), n_init=1, random_state=0).fit_predict(vectors.numpy())
        return {
            "nmi": metrics.normalized_mutual_information(labels, torch.from_numpy(clusters).long()),
            "f1": metrics.pair_f1(labels, torch.from_numpy(clusters).long()),
            **{f"recall{k}": rate for k, rate in metrics.hit_rates(found, labels, KS).items()},
        }


NEIGHBOURS = Experiment(Neighbours, NeighboursTask, needs=lambda config: [base(config)])
PROXIES = Experiment(Proxies, ProxiesTask, needs=lambda config: [base(config)])
