"""What the regulariser does to a network: handwritten digits with few labels, trained with and without it.

Prints and writes a table of test accuracy and of the largest over the smallest singular value of every regularised
layer, which is 1 for an orthogonal convolution::

    python examples/digits.py                        five seeds, some minutes
    python examples/digits.py --seeds 1 --epochs 3   a quick look
    python examples/digits.py --ways penalty free projection --optimizer adamw --rates 0.003
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold, train_test_split
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    sys.exit(f"error: this example needs scikit-learn and tqdm ({missing}): pip install scikit-learn tqdm")

from ocnn_fused import OrthRegularizer
from ocnn_fused.spectrum import condition_number

FOLDS = 10  # a network learns from one of them and is tested on the nine others
EPOCHS = 60
CHOOSING_SEED = 100  # the first of those with which settings are chosen
BATCH = 32


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images ``(1200, 1, 8, 8)`` and their labels, then 597 more and theirs; always the same, all classes alike.

    The settings below were chosen on the 597, so that nothing that the table shows was seen before.
    """
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    other, main = train_test_split(range(len(labels)), train_size=597, stratify=data.target, random_state=0)
    return images[main], labels[main], images[other], labels[other]


class DigitsNet(nn.Module):
    """Four convolutions for 8x8 images; the first sees one channel only and is not regularised by default."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
        self.widen = nn.Conv2d(2 * width, 3 * width, 3, padding=1, bias=False)
        self.narrow = nn.Conv2d(3 * width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (width, 2 * width, 3 * width, width))
        self.head = nn.Linear(width, 10)
        # Singular values of about 1 in the mean, where the loss leaves them. Before a batch norm the size of a weight
        # counts as a learning rate only: a loss that changed it would be judged by the rate that fits it.
        for conv in (self.stem, self.down, self.widen, self.narrow):
            nn.init.xavier_normal_(conv.weight)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv, norm in zip((self.stem, self.down, self.widen, self.narrow), self.norms, strict=True):
            x = norm(conv(x)).relu()
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True)
class Settings:
    """How a network is trained; weight 0 is the plain one.

    ``weight`` is lambda of the loss, with the target 1 or a free one, or the rate of the projection after every step.
    """

    rate: float
    weight: float
    way: str = "penalty"
    optimizer: str = "sgd"

    def __str__(self) -> str:
        ways = {"penalty": "lambda", "free": "free scale, lambda", "projection": "projection"}
        way = f"{ways[self.way]} {self.weight:g}" if self.weight else "plain"
        return f"{'AdamW, ' if self.optimizer == 'adamw' else ''}rate {self.rate:g}, {way}"

    @property
    def plain(self) -> Settings:
        return replace(self, weight=0.0, way="penalty")

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=1e-2)
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9, weight_decay=1e-3)


@dataclass(frozen=True)
class Outcome:
    """Of one trained network."""

    accuracy: float
    condition: dict[str, float]  # largest over smallest singular value, by layer


def train(settings: Settings, seed: int, fold: int, epochs: int = EPOCHS, choosing: bool = False) -> Outcome:
    """Train from scratch; the same seed and fold give the same images, first weights and batches with all settings.

    ``choosing`` takes the images on which settings are chosen.
    """
    images, labels = digits()[2:] if choosing else digits()[:2]
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(images, labels)
    test, own = (torch.from_numpy(indices) for indices in list(folds)[fold])
    torch.manual_seed(FOLDS * seed + fold)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = images.to(device), labels.to(device)
    model = DigitsNet().to(device)  # moved, so that the first weights are the same everywhere
    target = "free" if settings.way == "free" else 1.0
    reg = OrthRegularizer(model, weight=settings.weight, target=target) if settings.weight else None
    optimizer = settings.optimizer_of(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in own[torch.randperm(len(own))].split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            if reg is not None and settings.way != "projection":
                loss = loss + reg()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if reg is not None and settings.way == "projection":
                reg.project_(rate=settings.weight)
        schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).double().mean().item()
    # Circular layers of the sizes that the images have there; a training that diverged is as far from 1 as can be.
    sizes = {"down": 8, "widen": 4, "narrow": 4}
    layers = {name: model.get_submodule(name) for name in sizes}
    condition = dict.fromkeys(sizes, inf)
    with torch.no_grad():
        for name, layer in layers.items():
            if layer.weight.isfinite().all():
                condition[name] = condition_number(layer, sizes[name]).item()
    return Outcome(accuracy, condition)


def spread(values: Sequence[float], pattern: str) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):{pattern}}" + (f" ± {stdev(values):{pattern}}" if len(values) > 1 else "")


def table(outcomes: Mapping[Settings, Sequence[Outcome]], folds: int = FOLDS) -> str:
    """Markdown: every setting against the plain one of the same optimiser and rate, and all outcomes seed by seed.

    Ratios are mean and standard deviation, with the least factor by which they fell in any training; the difference of
    the accuracies has its standard error.
    """

    def accuracies(settings: Settings) -> list[float]:
        return [100 * outcome.accuracy for outcome in outcomes[settings]]

    def ratio(name: str, settings: Settings) -> str:
        values, plain = ([outcome.condition[name] for outcome in outcomes[s]] for s in (settings, settings.plain))
        fell = min(b / a for b, a in zip(plain, values, strict=True))
        return spread(values, ".2f") + (f" (at least {fell:.1f}x less)" if settings.weight else "")

    def difference(settings: Settings) -> str:
        if not settings.weight:
            return ""
        plain = accuracies(settings.plain)
        differences = [a - b for a, b in zip(accuracies(settings), plain, strict=True)]
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        return f"{mean(differences):+.2f} ± {error:.2f}; {better} better, {worse} worse"

    rows = {"": [str(settings) for settings in outcomes]}
    for name in next(iter(outcomes.values()))[0].condition:
        rows[f"{name}: largest / smallest"] = [ratio(name, settings) for settings in outcomes]
    rows["test accuracy, %"] = [f"{mean(accuracies(settings)):.2f}" for settings in outcomes]
    rows["difference to plain"] = [difference(settings) for settings in outcomes]
    for seed in range(len(next(iter(outcomes.values()))) // folds):
        own = slice(seed * folds, (seed + 1) * folds)
        rows[f"seed {seed}"] = [f"{mean(accuracies(settings)[own]):.2f}" for settings in outcomes]
    lines = [f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()]
    lines.insert(1, f"|---|{'---:|' * len(outcomes)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2], help="learning rates")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.01], help="lambdas, or rates of the projection")
    parser.add_argument("--ways", nargs="+", default=["penalty"], choices=["penalty", "free", "projection"])
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adamw"])
    parser.add_argument("--choose", action="store_true", help="on the images set aside for that, with other seeds")
    parser.add_argument("--out", type=Path, help="markdown file to write")
    options = parser.parse_args(arguments)
    outcomes: dict[Settings, list[Outcome]] = {}
    for rate in options.rates:
        outcomes[Settings(rate, 0.0, "penalty", options.optimizer)] = []
        for way, weight in product(options.ways, options.weights):
            outcomes[Settings(rate, weight, way, options.optimizer)] = []
    first = CHOOSING_SEED if options.choose else 0
    runs = list(product(range(first, first + options.seeds), range(FOLDS), outcomes))
    # The network is too small for two threads: rather two trainings at a time.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        each = ((s, seed, fold, options.epochs, options.choose) for seed, fold, s in runs)
        results = pool.map(train, *zip(*each, strict=True))
        for (_, _, settings), outcome in zip(runs, tqdm(results, total=len(runs), unit="training"), strict=True):
            outcomes[settings].append(outcome)
    result = table(outcomes)
    print(f"\n{result}")
    if options.out:
        options.out.write_text(f"{result}\n")


if __name__ == "__main__":
    main()
