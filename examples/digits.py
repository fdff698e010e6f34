"""What the regulariser does to a network: handwritten digits, trained with and without it, seed by seed.

Prints and writes a table of test accuracy and of the largest over the smallest singular value of every regularised
layer, which is 1 for an orthogonal convolution::

    python examples/digits.py                        five seeds, some minutes
    python examples/digits.py --seeds 1 --epochs 3   a quick look
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from ocnn_fused import OrthRegularizer

TEST_IMAGES = 897  # of 1797
BATCH = 64


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images ``(900, 1, 8, 8)`` and labels, test images and labels; always the same split."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(data.target)[order]
    return images[:-TEST_IMAGES], labels[:-TEST_IMAGES], images[-TEST_IMAGES:], labels[-TEST_IMAGES:]


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

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv, norm in zip((self.stem, self.down, self.widen, self.narrow), self.norms, strict=True):
            x = norm(conv(x)).relu()
        return self.head(x.mean((2, 3)))


def singular_values(weight: Tensor, stride: int, size: int) -> Tensor:
    """Singular values of the circular convolution of ``size`` x ``size`` images with ``weight (M, C, k, k)``, exact.

    The Fourier transform makes the operator block diagonal: one ``M x C`` matrix per frequency at stride 1. At stride S
    the ``S*S`` frequencies that fall onto the same frequency of the smaller output stand side by side in its block.
    """
    rows, channels = weight.shape[:2]
    coarse = size // stride
    spectrum = torch.fft.fft2(weight.detach().double(), s=(size, size))
    blocks = spectrum.reshape(rows, channels, stride, coarse, stride, coarse).permute(3, 5, 0, 1, 2, 4)
    return torch.linalg.svdvals(blocks.reshape(coarse, coarse, rows, -1) / stride)


@dataclass(frozen=True)
class Outcome:
    """Of one trained network."""

    accuracy: float
    condition: dict[str, float]  # largest over smallest singular value, by layer


def train(seed: int, weight: float, epochs: int, bar: tqdm[None] | None = None) -> Outcome:
    """Train from scratch; ``weight`` 0 is the plain network, with the same first weights and the same batches."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = digits()
    model = DigitsNet()
    reg = OrthRegularizer(model, weight=weight) if weight else lambda: 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch]) + reg()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if bar is not None:
            bar.update()
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    sizes = {"down": 8, "widen": 4, "narrow": 4}
    condition = {}
    for name, size in sizes.items():
        layer = model.get_submodule(name)
        values = singular_values(layer.weight, layer.stride[0], size)
        condition[name] = (values.max() / values.min()).item()
    return Outcome(accuracy, condition)


def table(outcomes: Mapping[float, Sequence[Outcome]]) -> str:
    """Markdown: mean and deviation over the seeds, and by which factor the worst seed's ratio fell against weight 0."""
    plain = outcomes[0.0]
    weights = [weight for weight in outcomes if weight]

    def spread(values: Sequence[float], pattern: str) -> str:
        return f"{mean(values):{pattern}}" + (f" ± {stdev(values):{pattern}}" if len(values) > 1 else "")

    def ratios(name: str, weight: float) -> list[float]:
        return [outcome.condition[name] for outcome in outcomes[weight]]

    lines = [f"| | plain | {' | '.join(f'lambda = {weight:g}' for weight in weights)} |"]
    lines.append(f"|---|---:|{'---:|' * len(weights)}")
    for name in plain[0].condition:
        cells = [spread(ratios(name, 0.0), ".1f")]
        for weight in weights:
            fell = min(b / a for b, a in zip(ratios(name, 0.0), ratios(name, weight), strict=True))
            cells.append(f"{spread(ratios(name, weight), '.2f')} (at least {fell:.1f}x less)")
        lines.append(f"| {name}: largest / smallest | {' | '.join(cells)} |")
    accuracies = [spread([100 * outcome.accuracy for outcome in outcomes[w]], ".2f") for w in (0.0, *weights)]
    lines.append(f"| test accuracy, % | {' | '.join(accuracies)} |")
    for seed in range(len(plain)):
        cells = [f"{100 * outcomes[weight][seed].accuracy:.2f}" for weight in (0.0, *weights)]
        lines.append(f"| seed {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1], help="lambdas")
    parser.add_argument("--out", type=Path, help="markdown file to write")
    options = parser.parse_args(arguments)
    outcomes: dict[float, list[Outcome]] = {weight: [] for weight in (0.0, *options.weights)}
    with tqdm(total=len(outcomes) * options.seeds * options.epochs, unit="epoch", dynamic_ncols=True) as bar:
        for seed, weight in itertools.product(range(options.seeds), outcomes):
            bar.set_description(f"seed {seed}, lambda {weight:g}")
            outcomes[weight].append(train(seed, weight, options.epochs, bar))
    result = table(outcomes)
    print(f"\n{result}")
    if options.out:
        options.out.write_text(f"{result}\n")


if __name__ == "__main__":
    main()
