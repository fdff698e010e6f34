"""The networks of the experiments; what the benchmarks and the tests have already is taken from there."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(_ROOT / folder) for folder in ("benchmarks", "tests") if str(_ROOT / folder) not in sys.path]

from cifar_resnet import CifarResNet, resnet56  # noqa: E402
from networks import WideBlock, stages  # noqa: E402
from resnet import ResNet  # noqa: E402

__all__ = ["CifarResNet", "Discriminator", "Generator", "HourGlass", "WideResNet", "backbone", "features", "resnet56"]


class WideResNet(nn.Module):
    """Pre-activation blocks in three stages of ``width``, twice and four times as many channels."""

    def __init__(self, classes: int, width: int, blocks: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width // 2, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*chain(*stages(WideBlock, width // 2, width, (blocks,) * 3)))
        self.norm = nn.BatchNorm2d(4 * width)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.conv1(x))).relu()
        return self.fc(x.mean((2, 3)))


def backbone(name: str, classes: int, width: int) -> ResNet | WideResNet:
    """``resnet18`` for images of 32 pixels, ``resnet18-stem`` with ImageNet's stem, or ``wideresnet``."""
    if name in ("resnet18", "resnet18-stem"):
        return ResNet((2, 2, 2, 2), classes, cifar=name == "resnet18", width=width)
    if name == "wideresnet":
        return WideResNet(classes, width)
    raise ValueError(f"network must be resnet18, resnet18-stem or wideresnet, got {name!r}")


def features(model: ResNet | WideResNet | CifarResNet, images: Tensor) -> Tensor:
    """What the network's last layer sees, (N, channels)."""
    last = model.linear if isinstance(model, CifarResNet) else model.fc
    seen: list[Tensor] = []
    with last.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0])):
        model(images)
    return seen[0]


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, kernel // 2, padding_mode="reflect", bias=False),
        nn.BatchNorm2d(width),
        nn.LeakyReLU(0.2),
    )


class HourGlass(nn.Module):
    """Deep image prior's encoder and decoder with skips, narrower than the original's 128 channels."""

    def __init__(self, channels: int, out: int, width: int, levels: int, skip: int = 4) -> None:
        super().__init__()
        self.down, self.skips, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level in range(levels):
            inputs = width if level else channels
            self.down.append(nn.Sequential(_conv(inputs, width, 3, 2), _conv(width, width, 3)))
            self.skips.append(_conv(inputs, skip, 1))
            self.up.append(nn.Sequential(nn.BatchNorm2d(width + skip), _conv(width + skip, width, 3),
                                         _conv(width, width, 1)))  # fmt: skip
        self.out = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for down, skip in zip(self.down, self.skips, strict=True):
            skipped.append(skip(x))
            x = down(x)
        for up, skip in zip(reversed(self.up), reversed(skipped), strict=True):
            x = F.interpolate(x, skip.shape[2:], mode="bilinear", align_corners=False)
            x = up(torch.cat([x, skip], 1))
        return self.out(x).sigmoid()


class Generator(nn.Module):
    """Transposed convolutions from a vector (N, code) to images (N, 3, 32, 32) from -1 to 1."""

    def __init__(self, code: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(code, 4 * width, 4, 1, 0, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, code: Tensor) -> Tensor:
        return self.layers(code[:, :, None, None])


class Discriminator(nn.Module):
    """Strided convolutions from images to one number each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(4 * width), nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, 1, 4),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten()
