"""Which runs there are, in the order of their worth, and how rate and lambda are chosen for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isnan
from statistics import mean
from typing import Any

from .attack import ATTACK, Attack
from .classification import CLASSIFICATION, Classification
from .config import C, Config
from .cost import COST, Cost
from .filters import FILTERS, Filters
from .gan import GAN, Gan
from .inpainting import CHOOSING, GREY, INPAINTING, SAMPLE, TEXT, Inpainting
from .lengths import CELLS, SEEDS, TASK_CLIPPED, TOLERANCE, Cell, runs_of
from .methods import COMPARED, METHODS, STEERED, Method
from .optimizers import OPTIMIZED, OPTIMIZERS, Optimized, Optimizer
from .retrieval import NEIGHBOURS, PROXIES, Neighbours, Proxies
from .runner import Context, Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.config.experiment: experiment
    for experiment in (
        CLASSIFICATION,
        NEIGHBOURS,
        PROXIES,
        INPAINTING,
        GAN,
        ATTACK,
        FILTERS,
        COST,
        TASK_CLIPPED,
        OPTIMIZED,
    )
}

FRACTIONS = (0.1, 0.2, 0.4)
LATER = METHODS[len(COMPARED) :]
#: With these seeds settings are chosen, unless a grid has seeds of its own.
CHOOSING_SEEDS = (100, 101)
#: Lambdas of classification, in the trials and in the sweep.
LAMBDAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
#: The first images, so that every row has results soon.
FIRST_IMAGES = ("barbara", "boat", "house", "cameraman", "peppers")
LONG = 1200  # steps of the networks that others start from or attack
LONGER = 6000
#: Lambdas of the sweep over the longer trainings; the one chosen for them is a row of its own.
LONGER_LAMBDAS = (0.0001, 0.001)


@dataclass(frozen=True)
class Choice:
    rate: float
    weight: float


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
    seeds: tuple[int, ...] = CHOOSING_SEEDS
    images: tuple[str, ...] = ()

    def settings(self, method: Method) -> list[Choice]:
        if method == "plain":
            return [Choice(rate, 0.0) for rate in self.plain_rates]
        return [Choice(rate, weight) for rate in self.rates for weight in self.weights]


GRIDS: dict[str, Grid] = {
    "classification": Grid(  # at 300 steps; superseded by experiments/lengths.py
        Classification(fraction=0.2, steps=300), lambda result: result["accuracy"],
        (0.0125, 0.0175, 0.025, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1), (0.1, 0.2), LAMBDAS,
    ),
    "inpainting": Grid(  # two pictures instead of two seeds
        Inpainting(), lambda result: result["psnr"],
        (0.002, 0.003, 0.005, 0.01, 0.02), (0.007,), (1e-6, 1e-5, 1e-4, 1e-3, 1e-2),
        seeds=CHOOSING_SEEDS[:1], images=tuple(CHOOSING),
    ),
    "proxies": Grid(  # with the networks of Tiny-ImageNet that there are anyway
        Proxies(steps=200), lambda result: result["recall1"],
        (1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 1e-2), (1e-3, 3e-3), (0.001, 0.03, 1.0), seeds=SEEDS[:2],
    ),
    "gan": Grid(
        Gan(steps=200, scored=1000), lambda result: -result["frechet"],
        (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), (1e-3, 4e-3), (3e-4, 3e-3, 3e-2),
    ),
}  # fmt: skip


#: Rates and decays of each optimiser's trials.
OPTIMIZER_GRIDS: dict[Optimizer, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "sgd": ((0.05, 0.1, 0.2, 0.4), (5e-4, 3e-3, 1e-2)),
    "adamw": ((1e-3, 2e-3, 4e-3, 8e-3), (0.01, 0.1, 0.5)),
    "flatten": ((0.01, 0.02, 0.05, 0.1), (0.003, 0.03, 0.3)),
    "operator": ((0.01, 0.02, 0.05, 0.1), (0.003, 0.03, 0.3)),
}


class NotChosen(Exception):
    """Trials are missing."""


@dataclass(frozen=True)
class Stage:
    """Runs that belong together; made when their turn comes, because they depend on what was chosen before."""

    title: str
    make: Callable[[], list[Config]]


@dataclass(frozen=True)
class Row:
    """Configurations that are run with every method and seed."""

    title: str
    configs: tuple[Config, ...]


#: The rows, apart from method, rate, lambda and seed.
CIFAR = Classification(steps=LONG)
CIFAR_LONGER = Classification(steps=LONGER)
WIDE = Classification(network="wideresnet", width=16)
FOLDERS = Classification(dataset="folders", network="resnet18-stem", width=16, size=64, steps=LONG)
FEW = {fraction: Classification(fraction=fraction) for fraction in FRACTIONS}
SWEPT = FEW[0.2]
OPTIMIZER_TRIAL = Optimized(steps=600)
OPTIMIZER_FINALISTS = 4  # settings that are tried with a second seed
OPTIMIZER_ROWS = {
    "ResNet-18, width 8": Optimized(steps=LONG),
    "ResNet-18, width 16": Optimized(steps=LONG, width=16),
    "ResNet-18, width 8, five times as long": Optimized(steps=LONGER),
}


@dataclass(frozen=True)
class Plan:
    """The runs; with ``smoke`` all of them as small as they can be, and a few settings to choose among."""

    context: Context
    smoke: bool = False

    def sized(self, config: C) -> C:
        return small(config) if self.smoke else config

    # -- choosing ------------------------------------------------------------------------------------------------------

    def trials(self, experiment: str, method: Method) -> list[Config]:
        grid = GRIDS[experiment]
        trial = self.sized(replace(grid.trial, method=method, choosing=True))
        if isinstance(trial, Proxies):  # they start from networks, whose settings are chosen
            trial = self.based(trial)
        settings = grid.settings(method)[: 2 if self.smoke else None]
        found = [
            replace(trial, rate=choice.rate, weight=choice.weight, seed=seed)
            for seed in grid.seeds
            for choice in settings
        ]
        if not grid.images:
            return found
        return [replace(one, image=image) for one in found for image in grid.images]  # type: ignore[call-arg]

    def scores(self, experiment: str, method: Method) -> dict[Choice, float]:
        """Mean score of every setting; raises NotChosen if a trial is missing."""
        lines = self.context.lines(experiment)
        scores: dict[Choice, list[float]] = {}
        for trial in self.trials(experiment, method):
            if trial.key not in lines:
                raise NotChosen(f"{experiment}, {method}: {trial.command} was not run")
            score = GRIDS[experiment].score(lines[trial.key].result)
            scores.setdefault(Choice(trial.rate, trial.weight), []).append(-inf if isnan(score) else score)
        return {choice: mean(values) for choice, values in scores.items()}

    def chosen(self, experiment: str, method: Method) -> Choice:
        """Rate and weight of the best trials; experiments without trials take those of classification.

        What is steered takes the rate chosen for the same loss with a fixed lambda.
        """
        if method in STEERED:
            fixed: Method = "kernel" if method == "kernel-auto" else "ocnn"
            return Choice(self.chosen(experiment, fixed).rate, TOLERANCE)
        scores = self.scores(experiment if experiment in GRIDS else "classification", method)
        return max(scores, key=lambda choice: scores[choice])

    def based(self, config: Proxies) -> Proxies:
        choice = self.chosen("classification", config.method)
        return replace(config, base_rate=choice.rate, base_weight=choice.weight)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run_of(self, config: Config, method: Method, seed: int = 0) -> Config:
        """A row's run with the chosen settings."""
        choice = self.chosen(config.experiment, method)
        found = self.sized(replace(config, method=method, rate=choice.rate, weight=choice.weight, seed=seed))
        return self.based(found) if isinstance(found, Proxies) else found

    def sweep_runs(self, seed: int) -> list[Config]:
        """Lambdas, and none, at the rate chosen for ocnn."""
        return self._swept(SWEPT, LAMBDAS, seed)

    def longer_sweep_runs(self) -> list[Config]:
        """The same for the longer trainings: few lambdas, that of their row, and one seed."""
        lambdas = sorted({*LONGER_LAMBDAS, self.chosen("classification", "ocnn").weight})
        return self._swept(CIFAR_LONGER, lambdas, SEEDS[0])

    def _swept(self, config: Classification, lambdas: Sequence[float], seed: int) -> list[Config]:
        base = replace(config, rate=self.chosen("classification", "ocnn").rate, seed=seed)
        swept = [replace(base, method="ocnn", weight=weight) for weight in lambdas]
        return [self.sized(one) for one in (base, *swept)]

    def all_stages(self) -> Iterator[Stage]:
        """Lambda at each length, the rows, and then the optimisers."""
        yield from self.length_stages()
        yield from self.stages()
        yield from self.optimizer_stages()

    @property
    def cells(self) -> list[Cell]:
        """Of lambda at each length of training."""
        return [Cell(self.sized(cell.config)) for cell in (CELLS[:1] if self.smoke else CELLS)]

    def length_stages(self) -> Iterator[Stage]:
        """Lambda at each length of training, in the order of :func:`lengths.runs_of`; then the other networks."""
        seeds = SEEDS[:1] if self.smoke else SEEDS
        for title, configs in runs_of(self.cells, seeds):
            yield Stage(title, lambda configs=configs: configs)  # type: ignore[misc]
        for title, row in (("Tiny-ImageNet", FOLDERS), ("WideResNet", WIDE)):
            yield Stage(f"{title}, steered", lambda row=row: [  # type: ignore[misc]
                self.run_of(row, method, seed) for seed in seeds for method in (*STEERED, *COMPARED)
            ])  # fmt: skip

    # -- optimisers ----------------------------------------------------------------------------------------------------

    def optimizer_trials(self, optimizer: Optimizer) -> list[Optimized]:
        """One for every pair of rate and decay, with the first of the choosing seeds."""
        rates, decays = OPTIMIZER_GRIDS[optimizer]
        trial = replace(OPTIMIZER_TRIAL, optimizer=optimizer, choosing=True, seed=CHOOSING_SEEDS[0])
        settings = [replace(trial, rate=rate, decay=decay) for rate in rates for decay in decays]
        return [self.sized(one) for one in settings[: 2 if self.smoke else None]]

    def second_optimizer_trials(self, optimizer: Optimizer) -> list[Optimized]:
        """The best of these once more, with the other seed."""
        first = self.optimizer_trials(optimizer)
        best = sorted(first, key=self._trial_score, reverse=True)[:OPTIMIZER_FINALISTS]
        return [replace(trial, seed=CHOOSING_SEEDS[1]) for trial in best]

    def _trial_score(self, trial: Optimized) -> float:
        lines = self.context.lines("optimizers")
        if trial.key not in lines:
            raise NotChosen(f"{trial.optimizer}: {trial.command} was not run")
        return float(lines[trial.key].result["accuracy"])

    def optimizer_scores(self, optimizer: Optimizer) -> dict[tuple[float, float], float]:
        """Mean score over both seeds, of the pairs of rate and decay that have both; NotChosen if one is missing."""
        return {
            (trial.rate, trial.decay): mean(self._trial_score(replace(trial, seed=seed)) for seed in CHOOSING_SEEDS)
            for trial in self.second_optimizer_trials(optimizer)
        }

    def optimizer_run(self, config: Optimized, optimizer: Optimizer, seed: int) -> Optimized:
        """A row's run with the rate and decay of the best trials."""
        scores = self.optimizer_scores(optimizer)
        rate, decay = max(scores, key=lambda setting: scores[setting])
        return self.sized(replace(config, optimizer=optimizer, rate=rate, decay=decay, seed=seed))

    def optimizer_stages(self) -> Iterator[Stage]:
        """Choosing for all optimisers, then the rows, one seed of all of them after the other."""

        def choosing(trials: Callable[[Optimizer], list[Optimized]]) -> Stage:
            return Stage("choosing, optimisers", lambda: [one for optimizer in OPTIMIZERS for one in trials(optimizer)])

        def runs(title: str, seeds: Sequence[int]) -> Stage:
            return Stage(title, lambda: [
                self.optimizer_run(OPTIMIZER_ROWS[title], optimizer, seed) for seed in seeds for optimizer in OPTIMIZERS
            ])  # fmt: skip

        yield choosing(self.optimizer_trials)
        yield choosing(self.second_optimizer_trials)
        short, wide, long = OPTIMIZER_ROWS
        seeds = SEEDS[:1] if self.smoke else SEEDS
        yield runs(short, seeds)
        yield runs(wide, seeds)
        for seed in seeds:
            yield runs(long, (seed,))

    def stages(self) -> Iterator[Stage]:
        """All rows once with the four methods, most of them before what needs several seeds; then the rest."""

        def choosing(experiment: str, methods: Sequence[Method]) -> Stage:
            make = lambda: [trial for method in methods for trial in self.trials(experiment, method)]  # noqa: E731
            return Stage(f"choosing, {experiment}", make)

        def runs(row: Row, methods: Sequence[Method], seeds: Sequence[int]) -> Stage:
            return Stage(row.title, lambda: [
                self.run_of(config, method, seed) for seed in seeds for config in row.configs for method in methods
            ])  # fmt: skip

        def sweep(seeds: Sequence[int]) -> Stage:
            return Stage("lambda sweep", lambda: [config for seed in seeds for config in self.sweep_runs(seed)])

        few = Row("few labels", tuple(FEW.values()))
        cifar, wide = Row("CIFAR-100, ResNet-18", (CIFAR,)), Row("CIFAR-100, WideResNet", (WIDE,))
        longer = Row("CIFAR-100, ResNet-18, longer", (CIFAR_LONGER,))
        folders, birds = Row("Tiny-ImageNet", (FOLDERS,)), Row("birds", (Neighbours(),))
        cars, gan = Row("cars", (Proxies(),)), Row("GAN", (Gan(),))
        attack, filters = Row("SimBA", (Attack(),)), Row("spectrum and similarity", (Filters(),))
        shown = (*FIRST_IMAGES, *TEXT, SAMPLE)
        first_images = Row("inpainting", tuple(Inpainting(image=image) for image in shown))
        other_images = Row("inpainting", tuple(Inpainting(image=image) for image in GREY if image not in shown))
        methods, first, others = COMPARED, SEEDS[:1], SEEDS[1:]
        if self.smoke:
            methods = METHODS
        yield choosing("classification", methods)
        for row in (few, cifar, attack, filters, folders, birds):
            yield runs(row, methods, first)
        yield choosing("inpainting", methods)
        for row in (first_images, wide):
            yield runs(row, methods, first)
        yield sweep(first)
        yield Stage("time and memory", lambda: [self.sized(Cost())])
        yield choosing("proxies", methods)
        yield runs(cars, methods, first)
        if not self.smoke:  # what needs several seeds
            for row in (few, cifar, attack):
                yield runs(row, methods, others)
        yield choosing("gan", methods)
        yield runs(gan, methods, first)
        yield runs(longer, methods, first)
        yield Stage("lambda sweep, longer", self.longer_sweep_runs)
        if self.smoke:
            return
        yield runs(longer, methods, others)
        yield runs(other_images, methods, first)
        # The rest.
        yield sweep(others)
        for row in (folders, birds, cars, gan, wide, filters):
            yield runs(row, methods, others)
        yield choosing("classification", LATER)
        for row in (few, cifar, attack, filters):
            yield runs(row, LATER, SEEDS)
        yield choosing("inpainting", LATER)
        for row in (first_images, other_images):
            yield runs(row, LATER, first)


#: Sizes of the smoke test.
# Narrower than 8, a shortcut is a strided 1x1 convolution of fewer than 8 channels. On processors without AVX-512 its
# backward writes past the end of a buffer (torch 2.13, channels_last images).
_SMALL = {
    "steps": 2, "width": 8, "base_steps": 8, "images": 4, "scored": 16, "embedding": 8, "batch": 8, "levels": 2,
    "code": 4,
}  # fmt: skip


def small(config: C) -> C:
    """The same run, as small as it can be."""
    names = {field.name for field in fields(config)}
    changes: dict[str, Any] = {name: value for name, value in _SMALL.items() if name in names}
    if isinstance(config, (Inpainting, Neighbours, Proxies)) or getattr(config, "dataset", "") == "folders":
        changes["size"] = 32
    return replace(config, **changes)
