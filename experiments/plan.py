"""Which runs there are, in the order of their worth, and how rate and lambda are chosen for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isnan
from statistics import mean
from typing import Any

from .attack import ATTACK, Attack
from .classification import CLASSIFICATION, Classification
from .config import Config
from .cost import COST, Cost
from .filters import FILTERS, Filters
from .gan import GAN, Gan
from .inpainting import CHOOSING, GREY, INPAINTING, SAMPLE, TEXT, Inpainting
from .methods import COMPARED, METHODS, Method
from .retrieval import NEIGHBOURS, PROXIES, Neighbours, Proxies
from .runner import Context, Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.config.experiment: experiment
    for experiment in (CLASSIFICATION, NEIGHBOURS, PROXIES, INPAINTING, GAN, ATTACK, FILTERS, COST)
}

FRACTIONS = (0.1, 0.2, 0.4)
SEEDS = (0, 1, 2)
LATER = METHODS[len(COMPARED) :]
#: With this seed settings are chosen.
CHOOSING_SEED = 100
#: Lambdas of the sweep.
SWEEP = (0.003, 0.01, 0.03, 0.1, 0.3)
#: The first images, so that every row has results soon.
FIRST_IMAGES = ("barbara", "boat", "house", "cameraman", "peppers")
LONG = 1200  # steps of the networks that others start from or attack


@dataclass(frozen=True)
class Grid:
    """The trials of an experiment: as many for each method.

    ``score``: of a trial's result; the highest mean over the trials of one setting wins.
    """

    trial: Config
    score: Callable[[dict[str, Any]], float]
    plain_rates: tuple[float, ...]
    rates: tuple[float, ...]
    weights: tuple[float, ...]
    images: tuple[str, ...] = ()

    def settings(self, method: Method) -> list[tuple[float, float]]:
        """Pairs of rate and weight."""
        if method == "plain":
            return [(rate, 0.0) for rate in self.plain_rates]
        return [(rate, weight) for rate in self.rates for weight in self.weights]

    def trials(self, method: Method) -> list[Config]:
        found = []
        for rate, weight in self.settings(method):
            trial = replace(self.trial, method=method, rate=rate, weight=weight, seed=CHOOSING_SEED, choosing=True)
            found += [replace(trial, image=image) for image in self.images] or [trial]  # type: ignore[call-arg]
        return found


GRIDS: dict[str, Grid] = {
    "classification": Grid(
        Classification(fraction=0.2, steps=300), lambda result: result["accuracy"],
        (0.025, 0.05, 0.1, 0.2, 0.4, 0.8), (0.05, 0.1, 0.2), (0.01, 0.1),
    ),
    "inpainting": Grid(
        Inpainting(steps=300), lambda result: result["psnr"],
        (0.002, 0.005, 0.01, 0.02, 0.03, 0.05), (0.01, 0.03), (1e-5, 1e-4, 1e-3), tuple(CHOOSING),
    ),
    "proxies": Grid(
        Proxies(steps=200), lambda result: result["recall1"],
        (1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 1e-2), (3e-4, 1e-3, 3e-3), (0.01, 0.1),
    ),
    "gan": Grid(
        Gan(steps=200, scored=1000), lambda result: -result["frechet"],
        (1e-4, 2e-4, 5e-4, 1e-3), (2e-4, 1e-3), (0.001, 0.01),
    ),
}  # fmt: skip


class NotChosen(Exception):
    """Trials are missing."""


@dataclass(frozen=True)
class Choice:
    rate: float
    weight: float


class Chooser:
    """Rate and weight of each method: those of the best trials."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def trials(self, experiment: str, methods: Sequence[Method]) -> list[Config]:
        found = [trial for method in methods for trial in GRIDS[experiment].trials(method)]
        if experiment == "proxies":  # they start from networks, whose settings are chosen
            found = [based(trial, self("classification", trial.method)) for trial in found]  # type: ignore[arg-type]
        return found

    def scores(self, experiment: str, method: Method) -> dict[Choice, float]:
        """Mean score of every setting."""
        lines, scores = self.context.lines(experiment), {}
        for trial in self.trials(experiment, [method]):
            if trial.key not in lines:
                raise NotChosen(f"{experiment}, {method}: {trial.command} was not run")
            score = GRIDS[experiment].score(lines[trial.key].result)
            scores.setdefault(Choice(trial.rate, trial.weight), []).append(-inf if isnan(score) else score)
        return {choice: mean(values) for choice, values in scores.items()}

    def __call__(self, experiment: str, method: Method) -> Choice:
        scores = self.scores(experiment, method)
        return max(scores, key=lambda choice: scores[choice])


def based(config: Proxies, choice: Choice) -> Proxies:
    return replace(config, base_rate=choice.rate, base_weight=choice.weight)


@dataclass(frozen=True)
class Stage:
    """Runs that belong together; made when their turn comes, because they depend on what was chosen before."""

    title: str
    make: Callable[[], list[Config]]


def stages(chosen: Chooser) -> Iterator[Stage]:
    """All rows once with the four methods; then what needs several seeds or images; then the rest."""

    def of(config: Config, methods: Sequence[Method], seeds: Sequence[int], grid: str = "") -> list[Config]:
        found = []
        for seed in seeds:
            for method in methods:
                choice = chosen(grid or config.experiment, method)
                found.append(replace(config, method=method, rate=choice.rate, weight=choice.weight, seed=seed))
        return found

    def trials(experiment: str, methods: Sequence[Method] = COMPARED) -> Stage:
        return Stage(f"choosing, {experiment}", lambda: chosen.trials(experiment, methods))

    def few(methods: Sequence[Method], seeds: Sequence[int]) -> Stage:
        return Stage("few labels", lambda: [
            config for seed in seeds for fraction in FRACTIONS
            for config in of(Classification(fraction=fraction), methods, [seed])
        ])  # fmt: skip

    def on_networks(title: str, config: Config, methods: Sequence[Method], seeds: Sequence[int]) -> Stage:
        return Stage(title, lambda: of(config, methods, seeds, "classification"))

    cifar = Classification(steps=LONG)
    wide = Classification(network="wideresnet", width=16)
    folders = Classification(dataset="folders", network="resnet18-stem", width=16, size=64, steps=LONG)

    def inpaint(images: Sequence[str], methods: Sequence[Method]) -> Stage:
        return Stage("inpainting", lambda: [
            config for image in images for config in of(Inpainting(image=image), methods, [0])
        ])  # fmt: skip

    def sweep(seeds: Sequence[int]) -> Stage:
        def make() -> list[Config]:
            rate = chosen("classification", "ocnn").rate
            settings = [("plain", 0.0), *(("ocnn", weight) for weight in SWEEP)]
            return [Classification(method, rate, weight, seed, fraction=0.2)  # type: ignore[arg-type]
                    for seed in seeds for method, weight in settings]  # fmt: skip

        return Stage("lambda sweep", make)

    def proxies(methods: Sequence[Method], seeds: Sequence[int]) -> Stage:
        return Stage("cars by ProxyNCA", lambda: [
            based(config, chosen("classification", config.method)) for config in of(Proxies(), methods, seeds)  # type: ignore[arg-type]
        ])  # fmt: skip

    def gan(methods: Sequence[Method], seeds: Sequence[int]) -> Stage:
        return Stage("GAN", lambda: of(Gan(), methods, seeds))

    first, others = SEEDS[:1], SEEDS[1:]
    rest = [image for image in GREY if image not in FIRST_IMAGES]
    yield trials("classification")
    yield few(COMPARED, first)
    yield on_networks("CIFAR-100, ResNet-18", cifar, COMPARED, first)
    yield on_networks("SimBA", Attack(), COMPARED, first)
    yield on_networks("spectrum and similarity", Filters(), COMPARED, first)
    yield trials("inpainting")
    yield inpaint([*FIRST_IMAGES, *TEXT, SAMPLE], COMPARED)
    yield on_networks("Tiny-ImageNet", folders, COMPARED, first)
    yield on_networks("birds by neighbours", Neighbours(), COMPARED, first)
    yield sweep(first)
    yield Stage("time and memory", lambda: [Cost()])
    yield trials("proxies")
    yield proxies(COMPARED, first)
    yield trials("gan")
    yield gan(COMPARED, first)
    yield on_networks("CIFAR-100, WideResNet", wide, COMPARED, first)
    # What needs several seeds.
    yield few(COMPARED, others)
    yield on_networks("CIFAR-100, ResNet-18", cifar, COMPARED, others)
    yield on_networks("SimBA", Attack(), COMPARED, others)
    yield inpaint(rest, COMPARED)
    # The rest.
    for config, title in ((wide, "CIFAR-100, WideResNet"), (folders, "Tiny-ImageNet"),
                          (Neighbours(), "birds by neighbours"), (Filters(), "spectrum and similarity")):  # fmt: skip
        yield on_networks(title, config, COMPARED, others)
    yield gan(COMPARED, others)
    yield proxies(COMPARED, others)
    yield sweep(others)
    yield trials("classification", LATER)
    yield few(LATER, SEEDS)
    yield on_networks("CIFAR-100, ResNet-18", cifar, LATER, SEEDS)
    yield on_networks("SimBA", Attack(), LATER, SEEDS)
    yield on_networks("spectrum and similarity", Filters(), LATER, SEEDS)
    yield trials("inpainting", LATER)
    yield inpaint([*FIRST_IMAGES, *rest, *TEXT, SAMPLE], LATER)


#: Sizes of the smoke test.
_SMALL = {
    "steps": 2, "width": 4, "base_steps": 2, "images": 4, "scored": 16, "embedding": 8, "batch": 8, "levels": 2,
    "code": 4,
}  # fmt: skip


def small(config: Config) -> Config:
    """The same run, as small as it can be."""
    names = {field.name for field in fields(config)}
    changes: dict[str, Any] = {name: value for name, value in _SMALL.items() if name in names}
    if isinstance(config, (Inpainting, Neighbours, Proxies)) or getattr(config, "dataset", "") == "folders":
        changes["size"] = 32
    return replace(config, **changes)


def smoke_runs() -> Iterator[Config]:
    """Every experiment with every method and every data set, and one trial of every grid."""
    for method in METHODS:
        weight = 0.0 if method == "plain" else 0.01
        for config in (
            *(Classification(fraction=fraction) for fraction in (*FRACTIONS, 1.0)),
            Classification(dataset="folders", network="resnet18-stem", size=64),
            Classification(network="wideresnet"),
            Neighbours(), Proxies(base_weight=weight), Gan(), Attack(), Filters(), Inpainting(),
            *(Inpainting(image=image) for image in (TEXT[0], SAMPLE)),
        ):  # fmt: skip
            yield small(replace(config, method=method, weight=weight))
    for grid in GRIDS.values():
        yield small(grid.trials("plain")[0])
    yield small(Cost())
