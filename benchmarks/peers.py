"""What a user of hard orthogonality pays instead: a training step of one network, its convolutions by each package.

    make peers                                 installs orthogonium, deel-torchlip and geotorch, without dependencies
    python benchmarks/peers.py                 all that are installed; the others are named as missing
    python benchmarks/peers.py --width 64      a wider network

For each: seconds added to the plain step, the largest and smallest singular value of any convolution after some steps
of training, and whether a layer of it trains in bfloat16 and under torch.compile(fullgraph=True), tried and not
claimed. Convolutions have circular padding, for which the singular values are exact.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import figures
import torch
import torch.nn.functional as F
from harness import Harness, parser_of, run
from record import COUNT, SECONDS, Rows
from steps import WrongResultError
from tables import milliseconds, number, table
from timing import Disturbance, turns
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer, init
from ocnn_fused.spectrum import singular_values

COMMAND = "peers"
SIZE, CLASSES = 32, 10
STEP, ADDED, LARGEST, SMALLEST = "training step", "added", "largest singular value", "smallest singular value"
BF16, COMPILE, MISSING = "bfloat16", "torch.compile", "missing"
PLAIN, IN_LOSS = "plain Conv2d", "ours: reg()"
RATE = 0.05
#: lambda of the soft contenders: strong, so that the values reached are those of a network that is held orthogonal.
WEIGHT = 0.05


@dataclass(frozen=True)
class Peer:
    """How a network gets its convolutions, and what is done in its training step beyond the usual."""

    name: str
    convolution: Callable[..., nn.Module]  # in channels, out channels, stride
    package: str | None = None  # that must be installed: "import name"
    distribution: str | None = None
    regularised: str | None = None  # "reg()", "add_grad_" or "project_"
    ours: bool = False

    @property
    def missing(self) -> bool:
        return self.package is not None and importlib.util.find_spec(self.package.partition(".")[0]) is None

    @property
    def label(self) -> str:
        return f"{self.name} {version(self.distribution)}" if self.distribution and not self.missing else self.name


def _plain(channels: int, width: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 3, stride, 1, bias=False, padding_mode="circular")


def _torch_orthogonal(channels: int, width: int, stride: int) -> nn.Module:
    return nn.utils.parametrizations.orthogonal(_plain(channels, width, stride))


def _geotorch(channels: int, width: int, stride: int) -> nn.Module:
    layer = _plain(channels, width, stride)
    import_module("geotorch").orthogonal(layer, "weight")
    return layer


def _orthogonium(channels: int, width: int, stride: int) -> nn.Module:
    make = import_module("orthogonium.layers").AdaptiveOrthoConv2d
    return make(channels, width, 3, stride=stride, padding=1, bias=False, padding_mode="circular")


def _torchlip(channels: int, width: int, stride: int) -> nn.Module:
    make = import_module("deel.torchlip").SpectralConv2d
    return make(channels, width, 3, stride=stride, padding=1, bias=False, padding_mode="circular")


def _orthogonal_start(channels: int, width: int, stride: int) -> nn.Module:
    layer = _plain(channels, width, stride)
    init.orthogonal_(layer.weight, stride)
    return layer


PEERS = (
    Peer(PLAIN, _plain),
    Peer("torch parametrizations.orthogonal", _torch_orthogonal),
    Peer("orthogonium AOC", _orthogonium, "orthogonium", "orthogonium"),
    Peer("deel-torchlip SpectralConv2d", _torchlip, "deel", "deel-torchlip"),
    Peer("geotorch.orthogonal", _geotorch, "geotorch", "geotorch"),
    Peer(IN_LOSS, _orthogonal_start, regularised="reg()", ours=True),
    Peer("ours: add_grad_", _orthogonal_start, regularised="add_grad_", ours=True),
    Peer("ours: project_", _orthogonal_start, regularised="project_", ours=True),
)


class Network(nn.Module):
    """Six 3x3 convolutions, two of them strided, as a residual network without its shortcuts has them."""

    def __init__(self, convolution: Callable[..., nn.Module], width: int) -> None:
        super().__init__()
        plan = [(3, width, 1), (width, width, 1), (width, 2 * width, 2)]
        plan += [(2 * width, 2 * width, 1), (2 * width, 4 * width, 2), (4 * width, 4 * width, 1)]
        self.convolutions: Any = nn.ModuleList(convolution(*one) for one in plan)  # each with what a Conv2d has
        self.classifier = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x).relu()
        return self.classifier(x.mean((2, 3)))


class Training:
    """One peer's network, the same batch for all, and a step."""

    def __init__(self, peer: Peer, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.peer = peer
        self.model = Network(peer.convolution, width)
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(batch, 3, SIZE, SIZE, generator=generator)
        self.labels = torch.randint(CLASSES, (batch,), generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.reg = OrthRegularizer(self.model, WEIGHT, include="convolutions.*") if peer.regularised else None
        self.check()

    def check(self) -> None:
        """Raises unless every layer is the circular convolution with the weight that it shows."""
        x = self.images[:1]
        for index, layer in enumerate(self.model.convolutions):
            with torch.no_grad():
                y = layer(x)
                wanted = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), layer.weight, stride=layer.stride)
            error = float((y - wanted).norm() / wanted.norm())
            if not error <= 1e-4:
                raise WrongResultError(
                    f"{self.peer.name}: layer {index} is not the convolution with its weight, off by {error:.1e}"
                )
            x = y

    def step(self) -> None:
        loss = F.cross_entropy(self.model(self.images), self.labels)
        if self.peer.regularised == "reg()":
            loss = loss + self.reg()  # type: ignore[misc]
        loss.backward()
        if self.peer.regularised == "add_grad_":
            self.reg.add_grad_()  # type: ignore[union-attr]
        # For all of them: layers whose largest singular value is above 10, as torch's, would diverge at once.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.peer.regularised == "project_":
            self.reg.project_()  # type: ignore[union-attr]

    @torch.no_grad()
    def values(self) -> tuple[float, float]:
        """Largest and smallest singular value of any convolution but the first, which widens 3 channels."""
        size, found = SIZE, []
        for layer in self.model.convolutions:
            stride = layer.stride[0]
            if layer.in_channels > 3:
                values = singular_values(layer.weight.detach(), size, stride=stride, progress=False)
                found.append((float(values.max()), float(values.min())))
            size //= stride
        return max(high for high, _ in found), min(low for _, low in found)


def trains_in_bfloat16(peer: Peer, width: int) -> str:
    """ "yes", or the first words of what went wrong."""

    def try_it() -> None:
        layer = peer.convolution(width, width, 1).to(torch.bfloat16)
        reg = OrthRegularizer(nn.Sequential(layer), WEIGHT) if peer.regularised else None
        x = torch.randn(2, width, 8, 8, dtype=torch.bfloat16)
        loss = layer(x).float().square().mean()
        (loss + reg() if reg is not None else loss).backward()

    return _tried(try_it)


def compiles(peer: Peer, width: int, backend: str) -> str:
    """The same for torch.compile with no graph break."""

    def try_it() -> None:
        torch.compiler.reset()
        layer = peer.convolution(width, width, 1)
        reg = OrthRegularizer(nn.Sequential(layer), WEIGHT) if peer.regularised else None

        def loss_of(x: Tensor) -> Tensor:
            loss = layer(x).square().mean()
            return loss + reg() if reg is not None else loss

        torch.compile(loss_of, fullgraph=True, backend=backend)(torch.randn(2, width, 8, 8)).backward()

    return _tried(try_it)


def _tried(call: Callable[[], None]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return f"no: {type(error).__name__}"
    return "yes"


def measure(harness: Harness, peers: Sequence[Peer], width: int, batch: int, steps: int, rounds: int) -> None:
    section = f"width {width}, batch {batch}"
    backend = "aot_eager" if harness.options.quick else "inductor"
    trainings = {}
    for peer in peers:
        if peer.missing:
            harness.add(section, peer.name, peer.name, MISSING, COUNT, [1], None, {"package": peer.distribution})
            harness.advance()
            continue
        harness.announce(f"{peer.label}, training")
        trainings[peer] = Training(peer, width, batch)
        for _ in range(steps):
            trainings[peer].step()
    for peer, training in trainings.items():
        harness.announce(f"{peer.label}, values")
        answers = {BF16: trains_in_bfloat16(peer, 16), COMPILE: compiles(peer, 16, backend)}
        for name, value in zip((LARGEST, SMALLEST), training.values(), strict=True):
            harness.add(section, peer.label, peer.name, name, "1", [value], None, answers | {"steps": steps})
        harness.advance()
    samples: dict[Peer, list[float]] = {peer: [] for peer in trainings}
    disturbance = Disturbance()
    for done in range(rounds):
        for peer in turns(list(trainings), done):
            harness.announce(f"{peer.label}, step")
            start = perf_counter()
            trainings[peer].step()
            samples[peer].append(perf_counter() - start)
    share = disturbance.share
    plain = next(taken for peer, taken in samples.items() if peer.name == PLAIN)
    for peer, taken in samples.items():
        details = {"ours": peer.ours}
        harness.add(section, peer.label, peer.name, STEP, SECONDS, taken, share, details)
        differences = [one - base for one, base in zip(taken, plain, strict=True)]
        harness.add(section, peer.label, peer.name, ADDED, SECONDS, differences, share, details)


def tables(rows: Rows) -> str:
    parts = []
    for section, kept in rows.by("section"):
        plain = kept.need(contender=PLAIN, measure=STEP).p50
        body = []
        for subject, own in kept.by("subject"):
            if own.get(measure=MISSING):
                body.append({"convolutions": subject, "training step ms": "not installed: `make peers`"})
                continue
            added, values = own.need(measure=ADDED).p50, own.need(measure=LARGEST)
            cells = {
                "convolutions": subject,
                "training step ms": milliseconds(own.median(measure=STEP)),
                "added ms": f"{added * 1e3:+.1f}",
                "of the plain step": f"{added / plain:+.0%}",
                LARGEST: f"{values.p50:.4f}",
                SMALLEST: number(own.median(measure=SMALLEST), "{:.4f}"),
                BF16: values.details[BF16],
                f"{COMPILE}(fullgraph)": values.details[COMPILE],
            }
            if subject == PLAIN:
                cells["added ms"] = cells["of the plain step"] = ""
            body.append(cells)
        parts += [f"#### {section}", table(body, (BF16, f"{COMPILE}(fullgraph)"))]
    return "\n\n".join(parts)


def draw(rows: Rows, folder: Path) -> list[Path]:
    section = rows.names("section")[-1]
    kept = rows.where(section=section, measure=ADDED)
    subjects = [name for name in kept.names("subject") if name != PLAIN]
    values: list[float | None] = [(kept.median(subject=name) or 0.0) * 1e3 for name in subjects]
    labels = [name.replace(" ", "\n", 1).replace("parametrizations.", "parametrizations\n.") for name in subjects]
    title = f"Added to a training step of one network, {section}"
    return [
        figures.bars(
            folder / "peers.png", title, labels, {"added": values}, "ms", rows.every[0].environment, pattern="{:+.1f}"
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, help="channels of the first convolutions (default: 32, with --quick 8)")
    parser.add_argument("--batch", type=int, help="images of a step (default: 64, with --quick 8)")
    options = parser.parse_args(arguments)
    if options.device != "cpu":
        raise ValueError("peers.py compares on the CPU: use --device cpu")
    width, batch = options.width or (8 if options.quick else 32), options.batch or (8 if options.quick else 64)
    rounds = options.repeats or (3 if options.quick else 9)
    harness = Harness(COMMAND, options)
    with harness.progress(len(PEERS)):
        measure(harness, PEERS, width, batch, 5 if options.quick else 20, rounds)
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
