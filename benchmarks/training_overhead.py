"""What the regulariser adds to a training step, and the paper's table: parameters, training and test time per epoch.

    python benchmarks/training_overhead.py                   ResNet-18 on CIFAR-size images, ResNet-34 at 224
    python benchmarks/training_overhead.py --only resnet18   one network

A step is forward, backward and SGD with momentum. ``reference`` adds ``F.conv2d`` losses layer by layer, ``kernel`` the
plain losses of the flattened weights, ``reg()`` adds OrthRegularizer's value to the loss, ``add_grad_`` adds its
gradient to ``.grad`` after backward, ``project_`` moves the weights after the optimiser instead. ``reference``,
``reg()`` and ``add_grad_`` take the same layers and leave the same gradient, which is checked before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import figures
import torch
import torch.nn.functional as F
from contenders import CONTENDERS, KERNEL
from harness import Harness, parser_of, run
from record import COUNT, SECONDS, Rows
from resnet import ResNet
from shapes import Layer
from steps import WrongResultError
from tables import table
from timing import Disturbance, turns
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer
from ocnn_fused.reference import orth_loss

COMMAND = "training_overhead"
WEIGHT = 0.01  # lambda; the time does not depend on it
PLAIN, REFERENCE, IN_LOSS, ADD_GRAD, PROJECT = "plain", "reference", "reg()", "add_grad_", "project_"
STEPS = (PLAIN, REFERENCE, KERNEL, IN_LOSS, ADD_GRAD, PROJECT)
TEST = "test"
WALL, PROCESSOR, PARAMETERS = "wall time", "processor time", "parameters"
CLOCKS: dict[str, Callable[[], float]] = {WALL: perf_counter, PROCESSOR: process_time}
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
    images: int  # of an epoch
    test_images: int

    @property
    def size(self) -> int:
        return 32 if self.cifar else 224


CASES = {
    "resnet18": Case("ResNet-18, 32x32", (2, 2, 2, 2), True, 128, 128, 50_000, 10_000),
    "resnet34": Case("ResNet-34, 224x224", (3, 4, 6, 3), False, 4, 256, 1_281_167, 50_000),
}


class Training:
    """A network, a batch, an optimiser, and the ways to take a step."""

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

    def kernel(self) -> Tensor:
        loss = CONTENDERS[KERNEL].loss
        layers = [(layer.weight, Layer("", tuple(layer.weight.shape))) for layer in self.layers]
        return WEIGHT * sum(loss(weight, layer) for weight, layer in layers)  # type: ignore[return-value]

    def value(self, which: str) -> Tensor:
        values: dict[str, Callable[[], Tensor]] = {REFERENCE: self.reference, KERNEL: self.kernel, IN_LOSS: self.reg}
        return values[which]()

    def step(self, which: str) -> None:
        loss = F.cross_entropy(self.model(self.images), self.labels)
        if which in (REFERENCE, KERNEL, IN_LOSS):
            loss = loss + self.value(which)
        loss.backward()
        if which == ADD_GRAD:
            self.reg.add_grad_()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if which == PROJECT:
            self.reg.project_()

    def alone(self, which: str) -> None:
        """What the regulariser does within a step, without the rest of it."""
        if which == ADD_GRAD:
            self.reg.add_grad_()
        elif which == PROJECT:
            self.reg.project_()
        else:
            self.value(which).backward()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def test(self) -> None:
        self.model.eval()
        self.model(self.images)
        self.model.train()

    def check(self) -> None:
        """Raise WrongResultError unless both of our ways give the reference's gradient, without TF32."""
        weights = [layer.weight for layer in self.layers]
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
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


def _alone(which: str) -> str:
    return f"{which} alone"


def _adds(which: str) -> str:
    return f"{which} adds"


def measure(harness: Harness, section: str, case: Case, rounds: int) -> None:
    device = harness.settings.device
    wait: Callable[[], object] = torch.cuda.synchronize if device != "cpu" else lambda: None
    harness.announce(f"{case.name}, check")
    training = Training(case, device)
    training.check()
    contestants: dict[str, Callable[[], None]] = {TEST: training.test}
    for which in STEPS:
        contestants[which] = partial(training.step, which)
        if which != PLAIN:
            contestants[_alone(which)] = partial(training.alone, which)
    samples: dict[str, dict[str, list[float]]] = {clock: {which: [] for which in contestants} for clock in CLOCKS}
    for which, contestant in contestants.items():  # allocates, chooses algorithms
        harness.announce(f"{case.name}, warm-up {which}")
        contestant()
    disturbance = Disturbance()
    for done in range(rounds):
        for which in turns(list(contestants), done):
            harness.announce(f"{case.name}, {which}")
            wait()
            start = {clock: read() for clock, read in CLOCKS.items()}
            contestants[which]()
            wait()
            for clock, read in CLOCKS.items():
                samples[clock][which].append(read() - start[clock])
        harness.advance()
    share = disturbance.share
    details = {
        "batch": case.batch, "wanted_batch": case.wanted_batch, "images": case.images, "test_images": case.test_images,
    }  # fmt: skip
    for clock, taken in samples.items():
        for which, one in taken.items():
            harness.add(section, case.name, which, clock, SECONDS, one, share, details)
        for which in STEPS[1:]:
            differences = [one - plain for one, plain in zip(taken[which], taken[PLAIN], strict=True)]
            harness.add(section, case.name, _adds(which), clock, SECONDS, differences, share, details)
    count = sum(parameter.numel() for parameter in training.model.parameters())
    harness.add(section, case.name, PLAIN, PARAMETERS, COUNT, [count], None, details)


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------


def _need(rows: Rows, clock: str, contender: str) -> float:
    return rows.need(measure=clock, contender=contender).p50


def plain_step(rows: Rows, clock: str) -> float:
    """Seconds of the plain step at the wanted batch: it grows in proportion to the batch."""
    details = rows.every[0].details
    return _need(rows, clock, PLAIN) * details["wanted_batch"] / details["batch"]


def share_of_step(rows: Rows, clock: str, which: str) -> float:
    """Time alone over the plain step at the wanted batch; the regulariser does not see the batch."""
    return _need(rows, clock, _alone(which)) / plain_step(rows, clock)


def steps_table(rows: Rows, clock: str) -> str:
    body = []
    for subject, own in rows.by("subject"):
        name = f"{subject}, {own.every[0].details['batch']}"
        for which in STEPS:
            step = own.need(measure=clock, contender=which)
            cells = {"network, batch": name, "variant": which}
            cells |= {f"step, {clock} s": f"{step.p50:.3f}", "minimum s": f"{step.minimum:.3f}"}
            if which != PLAIN:
                for column, of in (("adds", _adds), ("alone", _alone)):
                    seconds = _need(own, clock, of(which))
                    cells[f"{column} s"] = f"{seconds:.3f}"
                    cells[f"{column} / reference {column}"] = f"{seconds / _need(own, clock, of(REFERENCE)):.3f}"
                cells["alone / plain step"] = f"{share_of_step(own, clock, which):.2%}"
            body.append(cells)
    return table(body, ("variant",))


def epochs_table(rows: Rows) -> str:
    """The paper's table; an epoch is as many steps as its images fill batches."""
    body = []
    for subject, own in rows.by("subject"):
        details = own.every[0].details
        plain = plain_step(own, WALL)
        steps = details["images"] / details["wanted_batch"]
        test = _need(own, WALL, TEST) / details["batch"] * details["test_images"] / 60
        parameters = _need(own, PARAMETERS, PLAIN)
        for which in STEPS:
            adds = 0.0 if which == PLAIN else _need(own, WALL, _alone(which))
            body.append(
                {
                    "network": subject,
                    "batch": f"{details['wanted_batch']}",
                    "variant": which,
                    "parameters": f"{parameters / 1e6:.2f} M",
                    "training, minutes per epoch": f"{(plain + adds) * steps / 60:.1f}",
                    "more than plain": f"{adds / plain:+.2%}" if adds else "",
                    "test, minutes per epoch": f"{test:.1f}",
                }
            )
    return table(body, ("variant",))


LEGEND = (
    "*adds*: the step minus the plain step of the same round, median over the rounds: a small difference of large "
    "numbers. *alone*: value and gradient of the regulariser (for `project_` the move) without the rest of the step, "
    "which is steadier. Per epoch: the plain step is taken to grow in proportion to the batch, the regulariser does "
    "not see it, and an epoch is the images of CIFAR-10 (50,000 and 10,000) or ImageNet (1,281,167 and 50,000). At "
    "test time no variant costs anything. The paper's own table (ResNet-34, ImageNet, batch 256, one GTX 1080 Ti): "
    "49.5 minutes plain, 51.0 (+3%) with kernel orthogonality, 54.1 (+9%) with the paper's loss."
)


def verdict(rows: Rows) -> str:
    lines = [f"Target: ours takes at most {TARGET:g} of the reference's time."]
    for subject, own in rows.by("subject"):
        for which in (IN_LOSS, ADD_GRAD):
            alone = _need(own, WALL, _alone(which)) / _need(own, WALL, _alone(REFERENCE))
            lines.append(f"{subject}, {which} alone: {alone:.3f}, {'met' if alone <= TARGET else 'missed'}.")
    return " ".join(lines)


def tables(rows: Rows) -> str:
    parts = [steps_table(rows, clock) for clock in CLOCKS]
    return "\n\n".join([*parts, epochs_table(rows), LEGEND, verdict(rows)])


def draw(rows: Rows, folder: Path) -> list[Path]:
    networks = dict(rows.by("subject"))
    series: dict[str, list[float | None]] = {
        which: [100 * share_of_step(own, WALL, which) for own in networks.values()] for which in STEPS[1:]
    }
    labels = [f"{name}, batch {own.every[0].details['wanted_batch']}" for name, own in networks.items()]
    path, title, y_label = folder / "training_overhead.png", "Added to a training step", "% of the plain step"
    return [figures.bars(path, title, labels, series, y_label, rows.every[0].environment, pattern="{:.1f}")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per network (default: 5)")
    parser.add_argument("--only", choices=CASES, help="one network")
    parser.add_argument("--batch", type=int, help="another batch than the usual one; tables are extrapolated from it")
    options = parser.parse_args(arguments)
    rounds = options.repeats or (3 if options.quick else options.rounds)
    harness = Harness(COMMAND, options)
    cases = {name: case for name, case in CASES.items() if options.only in (None, name)}
    if options.device != "cpu":  # where it fits
        cases = {name: replace(case, batch=case.wanted_batch) for name, case in cases.items()}
    if options.batch:
        cases = {name: replace(case, batch=options.batch) for name, case in cases.items()}
    with harness.progress(len(cases) * rounds):
        for name, case in cases.items():
            measure(harness, name, case, rounds)
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
