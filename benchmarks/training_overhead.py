"""What the regulariser adds to a training step: without it, with the paper's formula and with ours, taking turns.

    python benchmarks/training_overhead.py            ResNet-18 on CIFAR-size images, ResNet-34 at 224
    python benchmarks/training_overhead.py --quick    fewer rounds

A step is forward, backward and SGD with momentum. ``reference`` adds ``F.conv2d`` losses layer by layer, ``reg()``
adds OrthRegularizer's value to the loss, ``add_grad_`` adds its gradient to ``.grad`` after backward. All take the same
layers and leave the same gradient, which is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from report import DISTURBED, machine
from resnet import ResNet
from steps import Settings, WrongResultError, results_folder, usual_device
from timing import Disturbance, Samples
from torch import Tensor, nn
from tqdm import tqdm

from ocnn_fused import OrthRegularizer
from ocnn_fused.reference import orth_loss

WEIGHT = 0.01  # lambda; the time does not depend on it
PLAIN, REFERENCE, IN_LOSS, ADD_GRAD = STEPS = ("plain", "reference", "reg()", "add_grad_")
Clock = Literal["wall", "processor"]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": perf_counter, "processor": process_time}
#: Ours should add at most this share of what the reference adds.
TARGET = 0.1
GRADIENT_TOLERANCE = 1e-4  # relative, per weight


@dataclass(frozen=True)
class Case:
    """One network and batch; ``wanted_batch`` is what the table extrapolates to, if it is too much to measure."""

    name: str
    depths: tuple[int, ...]
    cifar: bool
    batch: int
    wanted_batch: int

    @property
    def size(self) -> int:
        return 32 if self.cifar else 224


CASES = (
    Case("ResNet-18, 32x32", (2, 2, 2, 2), True, 128, 128),
    Case("ResNet-34, 224x224", (3, 4, 6, 3), False, 4, 256),
)


class Training:
    """A network, a batch, an optimiser, and the four ways to take a step."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        torch.manual_seed(0)
        classes = 10 if case.cifar else 1000
        self.model = ResNet(case.depths, classes, case.cifar).to(device)
        self.images = torch.randn(case.batch, 3, case.size, case.size, device=device)
        self.labels = torch.randint(classes, (case.batch,), device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.reg = OrthRegularizer(self.model, WEIGHT)
        self.layers: list[nn.Conv2d] = [self.model.get_submodule(name) for name in self.reg.layers]  # type: ignore[misc]

    def reference(self) -> Tensor:
        return WEIGHT * sum(orth_loss(layer.weight, layer.stride) for layer in self.layers)  # type: ignore[return-value]

    def step(self, which: str) -> None:
        loss = F.cross_entropy(self.model(self.images), self.labels)
        if which == REFERENCE:
            loss = loss + self.reference()
        elif which == IN_LOSS:
            loss = loss + self.reg()
        loss.backward()
        if which == ADD_GRAD:
            self.reg.add_grad_()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def alone(self, which: str) -> None:
        """Value and gradient of the regulariser, the same as within a step."""
        if which == ADD_GRAD:
            self.reg.add_grad_()
        else:
            (self.reference() if which == REFERENCE else self.reg()).backward()
        self.optimizer.zero_grad()

    def check(self) -> None:
        """Raise WrongResultError unless both of our ways give the reference's gradient, without TF32."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            self._check()

    def _check(self) -> None:
        weights = [layer.weight for layer in self.layers]
        expected = torch.autograd.grad(self.reference(), weights)
        in_loss = torch.autograd.grad(self.reg(), weights)
        self.reg.add_grad_()
        added = [weight.grad for weight in weights if weight.grad is not None]
        self.optimizer.zero_grad()
        for which, grads in ((IN_LOSS, in_loss), (ADD_GRAD, added)):
            for name, grad, wanted in zip(self.reg.layers, grads, expected, strict=True):
                error = float((grad - wanted).norm() / wanted.norm())
                if not error <= GRADIENT_TOLERANCE:
                    raise WrongResultError(f"{which}: the gradient of {name} is off by {error:.2e} (relative)")


@dataclass(frozen=True)
class Result:
    """Seconds by clock and contestant: a step, or the regulariser alone.

    What the regulariser adds is the median over the rounds of the difference to the plain step of the same round: a
    small difference of large numbers. Alone is its value and gradient without the rest of the step.
    """

    case: Case
    samples: dict[Clock, dict[str, Samples]]
    disturbance: float | None

    def adds(self, clock: Clock, which: str) -> float:
        plain = self.samples[clock][PLAIN]
        return float(np.median(np.subtract(self.samples[clock][which].seconds, plain.seconds)))

    def alone(self, clock: Clock, which: str) -> float:
        return self.samples[clock][_alone(which)].median

    def share_of_step(self, clock: Clock, which: str) -> float:
        """Time alone over the plain step at the wanted batch.

        Rule: the plain step grows in proportion to the batch, the regulariser does not see it.
        """
        plain = self.samples[clock][PLAIN].median * self.case.wanted_batch / self.case.batch
        return self.alone(clock, which) / plain

    def ratios(self, clock: Clock, which: str) -> tuple[float, float]:
        """Ours over the reference's: what is added, and alone."""
        added = self.adds(clock, which) / self.adds(clock, REFERENCE)
        return added, self.alone(clock, which) / self.alone(clock, REFERENCE)


def _alone(which: str) -> str:
    return f"{which} alone"


def measure(case: Case, rounds: int, bar: tqdm[None], device: str = "cpu") -> Result:
    wait: Callable[[], object] = torch.cuda.synchronize if device != "cpu" else lambda: None
    training = Training(case, device)
    bar.set_description(f"{case.name}, check")
    training.check()
    contestants: dict[str, Callable[[], None]] = {}
    for which in STEPS:
        contestants[which] = partial(training.step, which)
        if which != PLAIN:
            contestants[_alone(which)] = partial(training.alone, which)
    samples: dict[Clock, dict[str, Samples]] = {clock: {which: Samples() for which in contestants} for clock in CLOCKS}
    for which, contestant in contestants.items():  # allocates, chooses algorithms
        bar.set_description(f"{case.name}, warm-up {which}")
        contestant()
        bar.update()
    disturbance = Disturbance()
    names = list(contestants)
    for index in range(rounds):
        first = index % len(names)
        for which in names[first:] + names[:first]:
            bar.set_description(f"{case.name}, {which}")
            wait()
            start = {clock: read() for clock, read in CLOCKS.items()}
            contestants[which]()
            wait()
            for clock, read in CLOCKS.items():
                samples[clock][which].seconds.append(read() - start[clock])
            bar.update()
    return Result(case, samples, disturbance.share)


def table(results: Sequence[Result], clock: Clock) -> str:
    """Markdown."""
    lines = [
        f"| network, batch | variant | step, {clock} s | minimum | adds s | adds / reference adds | alone s "
        "| alone / reference alone | alone / plain step |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        case = result.case
        at = f" at batch {case.wanted_batch}" if case.wanted_batch != case.batch else ""
        for which in STEPS:
            samples = result.samples[clock][which]
            cells = [f"{case.name}, {case.batch}", which, f"{samples.median:.2f}", f"{samples.minimum:.2f}"]
            if which == PLAIN:
                cells += [""] * 5
            else:
                ratios = result.ratios(clock, which)
                added, alone = (f"{ratio:.3f}" for ratio in ratios) if which != REFERENCE else ("", "")
                cells += [f"{result.adds(clock, which):.2f}", added, f"{result.alone(clock, which):.3f}", alone]
                cells.append(f"{result.share_of_step(clock, which):.2%}{at}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


LEGEND = (
    "adds: the step minus the plain step of the same round, median over the rounds. alone: value and gradient of the\n"
    "regulariser without the rest of the step. At another batch than the measured one, the plain step is assumed to\n"
    "grow in proportion to the batch. wall: elapsed time; processor: time of all threads, which other processes\n"
    "disturb less."
)


def verdict(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        for which in (IN_LOSS, ADD_GRAD):
            for clock in CLOCKS:
                added, alone = result.ratios(clock, which)
                words = [f"{ratio:.3f} ({'met' if ratio <= TARGET else 'missed'})" for ratio in (added, alone)]
                lines.append(f"{result.case.name}, {which}, {clock} time: adds {words[0]}, alone {words[1]}")
        if (result.disturbance or 0) > DISTURBED:
            lines.append(
                f"{result.case.name}: other processes used {result.disturbance:.0%} of the CPU; "
                "rerun on an idle machine"
            )
    return "\n".join([f"Target: at most {TARGET:g} of the reference's time.", *lines])


def write_csv(path: Path, results: Sequence[Result], where: dict[str, str]) -> None:
    """One row per sample, so that every figure can be computed again."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["network", "batch", "clock", "contestant", "round", "seconds", "disturbance", *where])
        for result in results:
            for clock, contestants in result.samples.items():
                for which, samples in contestants.items():
                    for index, seconds in enumerate(samples.seconds):
                        row = [result.case.name, result.case.batch, clock, which, index, seconds, result.disturbance]
                        writer.writerow([*row, *where.values()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per network (default: 5)")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--only", choices=("resnet18", "resnet34"), help="one network")
    parser.add_argument("--device", default=usual_device(), help="cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument("--out", type=Path, help="folder for the markdown and the CSV")
    options = parser.parse_args(arguments)
    options.out = options.out or results_folder(options.device)
    rounds = 2 if options.quick else options.rounds
    torch.set_num_threads(options.threads)
    where = machine(Settings(options.device, threads=options.threads))
    print(", ".join(f"{key}: {value}" for key, value in where.items()), flush=True)
    cases = [case for case in CASES if options.only in (None, case.name.split(",")[0].lower().replace("-", ""))]
    if options.device != "cpu":  # where it fits
        cases = [replace(case, batch=case.wanted_batch) for case in cases]
    with tqdm(total=len(cases) * (2 * len(STEPS) - 1) * (rounds + 1), unit="step", dynamic_ncols=True) as bar:
        try:
            results = [measure(case, rounds, bar, options.device) for case in cases]
        except WrongResultError as error:
            raise SystemExit(f"error: {error}") from error
    tables = "\n\n".join(table(results, clock) for clock in CLOCKS)
    report = f"{tables}\n\n{LEGEND}\n\n{verdict(results)}\n"
    print(f"\n{report}")
    options.out.mkdir(parents=True, exist_ok=True)
    heading = ", ".join(f"{key}: {value}" for key, value in where.items())
    (options.out / "training_overhead.md").write_text(f"{heading}\n\n{report}")
    write_csv(options.out / "training_overhead.csv", results, where)
    print(f"Tables: {options.out / 'training_overhead.md'} and .csv")


if __name__ == "__main__":
    main()
