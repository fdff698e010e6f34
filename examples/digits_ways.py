"""Penalty, free scale and projection, with SGD and with AdamW, on the digits: the protocol of docs/experiments.md.

    python examples/digits_ways.py --results docs/data/digits_ways.jsonl            runs what is missing, then prints
    python examples/digits_ways.py --results docs/data/digits_ways.jsonl --print    the tables of what is there

Settings are chosen on the images that are set aside for that, and run once on the others. Every line of the results
file is one setting with one seed, ten folds; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from digits import CHOOSING_SEED, FOLDS, Outcome, Settings, train
from tqdm import tqdm

OPTIMIZERS = ("sgd", "adamw")
SEEDS = 5
#: What is tried on the images set aside: learning rates of the plain network, lambdas, and rates of the projection.
RATES = {"sgd": (0.05, 0.1, 0.2, 0.4), "adamw": (0.001, 0.003, 0.01, 0.03)}
WEIGHTS = {
    "penalty": (0.003, 0.01, 0.03, 0.1),
    "free": (0.003, 0.01, 0.03, 0.1),
    "projection": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
}
#: Points of accuracy that count as equal.
EQUAL = 0.2


@dataclass(frozen=True)
class Job:
    """Ten trainings: one setting, one seed, all folds."""

    settings: Settings
    seed: int

    @property
    def choosing(self) -> bool:
        return self.seed >= CHOOSING_SEED


class Results:
    """Outcomes by job, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[Job, list[Outcome]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            self._keep(json.loads(line))

    def _keep(self, record: dict[str, Any]) -> None:
        names, folds = list(record["condition"]), zip(record["accuracy"], *record["condition"].values(), strict=True)
        self.outcomes[Job(Settings(**record["settings"]), record["seed"])] = [
            Outcome(accuracy, dict(zip(names, ratios, strict=True))) for accuracy, *ratios in folds
        ]

    def add(self, job: Job, outcomes: list[Outcome]) -> None:
        """As it will be read again: what is chosen must not depend on where a run was stopped."""
        record = {
            "settings": asdict(job.settings),
            "seed": job.seed,
            "accuracy": [round(outcome.accuracy, 5) for outcome in outcomes],
            "condition": {
                name: [float(f"{outcome.condition[name]:.4g}") for outcome in outcomes]
                for name in outcomes[0].condition
            },
        }
        self._keep(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def of(self, settings: Settings, choosing: bool) -> list[Outcome]:
        """Seed by seed and fold by fold."""
        return [outcome for seed in seeds(choosing) for outcome in self.outcomes[Job(settings, seed)]]

    def accuracy(self, settings: Settings, choosing: bool) -> float:
        """In percent."""
        return 100 * mean(outcome.accuracy for outcome in self.of(settings, choosing))


def seeds(choosing: bool) -> range:
    return range(CHOOSING_SEED, CHOOSING_SEED + SEEDS) if choosing else range(SEEDS)


def perform(job: Job) -> list[Outcome]:
    return [train(job.settings, job.seed, fold, choosing=job.choosing) for fold in range(FOLDS)]


def run(results: Results, settings: Iterable[Settings], choosing: bool, processes: int) -> None:
    """All jobs of these settings that have no outcome yet."""
    jobs = [Job(one, seed) for one in settings for seed in seeds(choosing)]
    missing = [job for job in dict.fromkeys(jobs) if job not in results.outcomes]
    with ExitStack() as stack:
        perform_all: Callable[..., Iterable[list[Outcome]]] = map
        if processes > 1:
            pool = ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,))
            perform_all = stack.enter_context(pool).map
        torch.set_num_threads(1)  # the network is too small for two
        done = tqdm(perform_all(perform, missing), total=len(missing), unit="job", desc="choosing" * choosing)
        for job, outcomes in zip(missing, done, strict=True):
            results.add(job, outcomes)


# ----------------------------------------------------------------------------------------------------------------------
# The protocol
# ----------------------------------------------------------------------------------------------------------------------


def plain(optimizer: str) -> list[Settings]:
    return [Settings(rate, 0.0, "penalty", optimizer) for rate in RATES[optimizer]]


def best(results: Results, settings: Sequence[Settings]) -> Settings:
    """By mean accuracy on the images set aside; of equal ones the first."""
    return max(settings, key=lambda one: results.accuracy(one, choosing=True))


def rates(results: Results, optimizer: str) -> tuple[float, float]:
    """The plain network's best rate, and twice that."""
    rate = best(results, plain(optimizer)).rate
    return rate, 2 * rate


def tried(optimizer: str, rate: float, way: str) -> list[Settings]:
    return [Settings(rate, weight, way, optimizer) for weight in WEIGHTS[way]]


def chosen(results: Results, optimizer: str) -> list[Settings]:
    """What is run on the other images: at both rates the plain network and each way with the weight that was best."""
    return [
        one
        for rate in rates(results, optimizer)
        for one in (
            Settings(rate, 0.0, "penalty", optimizer),
            *(best(results, tried(optimizer, rate, way)) for way in WEIGHTS),
        )
    ]


def follow_protocol(results: Results, processes: int) -> None:
    run(results, [one for optimizer in OPTIMIZERS for one in plain(optimizer)], True, processes)
    candidates = [
        one
        for optimizer in OPTIMIZERS
        for rate in rates(results, optimizer)
        for way in WEIGHTS
        for one in tried(optimizer, rate, way)
    ]
    run(results, candidates, True, processes)
    run(results, [one for optimizer in OPTIMIZERS for one in chosen(results, optimizer)], False, processes)


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def ratios(outcomes: Sequence[Outcome]) -> list[str]:
    """Mean ratio of the largest to the smallest singular value, of every layer."""
    return [f"{mean(outcome.condition[name] for outcome in outcomes):.4g}" for name in outcomes[0].condition]


def final_table(results: Results) -> str:
    rows = [["setting", "accuracy, %", "difference to plain", "better, worse", "down", "widen", "narrow"]]
    for optimizer in OPTIMIZERS:
        for one in chosen(results, optimizer):
            outcomes = results.of(one, choosing=False)
            cells = ["", ""]
            if one.weight:
                pairs = zip(outcomes, results.of(one.plain, choosing=False), strict=True)
                differences = [100 * (ours.accuracy - theirs.accuracy) for ours, theirs in pairs]
                error = stdev(differences) / len(differences) ** 0.5
                signs = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
                cells = [f"{mean(differences):+.2f} ± {error:.2f}", f"{signs[0]}, {signs[1]}"]
            rows.append([str(one), f"{results.accuracy(one, choosing=False):.2f}", *cells, *ratios(outcomes)])
    return markdown(rows)


def choosing_table(results: Results) -> str:
    """Mean accuracy of all that was tried on the images set aside."""
    rows = [["optimiser, rate", "plain", *(f"{way} {weight:g}" for way in WEIGHTS for weight in WEIGHTS[way])]]
    for optimizer in OPTIMIZERS:
        both = rates(results, optimizer)
        for rate in sorted({*RATES[optimizer], *both}):
            ways = [Settings(rate, 0.0, "penalty", optimizer)]
            ways += [one for way in WEIGHTS for one in tried(optimizer, rate, way)]
            known = [one if Job(one, CHOOSING_SEED) in results.outcomes else None for one in ways]
            cells = ["" if one is None else f"{results.accuracy(one, choosing=True):.2f}" for one in known]
            rows.append([f"{'AdamW' if optimizer == 'adamw' else 'SGD'}, {rate:g}", *cells])
    return markdown(rows)


def equal_accuracy_table(results: Results, optimizer: str = "adamw") -> str:
    """The smallest mean ratio of penalty and projection among settings as accurate as the best penalty."""
    candidates = {
        way: [one for rate in rates(results, optimizer) for one in tried(optimizer, rate, way)]
        for way in ("penalty", "projection")
    }
    level = results.accuracy(best(results, candidates["penalty"]), choosing=True)
    rows = [["way", "smallest ratio at", "accuracy, %", "down", "widen", "narrow"]]
    for way, settings in candidates.items():
        equal = [one for one in settings if results.accuracy(one, choosing=True) >= level - EQUAL]
        if not equal:
            rows.append([way, f"none within {EQUAL} of {level:.2f}", "", "", "", ""])
            continue
        least = min(equal, key=lambda one: mean_ratio(results.of(one, choosing=True)))
        cells = ratios(results.of(least, choosing=True))
        rows.append([way, str(least), f"{results.accuracy(least, choosing=True):.2f}", *cells])
    return markdown(rows)


def mean_ratio(outcomes: Sequence[Outcome]) -> float:
    return mean(mean(outcome.condition.values()) for outcome in outcomes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--results", type=Path, required=True, help="file of JSON lines, continued if it exists")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="trainings at a time")
    parser.add_argument("--print", action="store_true", help="only the tables; everything must be there")
    options = parser.parse_args(arguments)
    results = Results(options.results)
    if not options.print:
        follow_protocol(results, options.processes)
    print("\nOn the images set aside, accuracy in %:\n", choosing_table(results), sep="\n")
    print("\nOn the others:\n", final_table(results), sep="\n")
    print("\nAdamW at equal accuracy, on the images set aside:\n", equal_accuracy_table(results), sep="\n")


if __name__ == "__main__":
    main()
