"""Small networks with the layers of well-known ones, written out so that no model package is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


def projection(channels: int, width: int, stride: int) -> nn.Sequential:
    """A block's shortcut: the input itself or, where that has another shape, a 1x1 convolution of it."""
    if stride == 1 and channels == width:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = projection(channels, width, stride) if shortcut is None else shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.downsample(x)).relu()


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = projection(channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return (self.bn3(self.conv3(y)) + self.downsample(x)).relu()


def stages(
    block: Callable[[int, int, int], nn.Module], channels: int, width: int, depths: Sequence[int], expansion: int = 1
) -> Iterator[nn.Sequential]:
    """Of so many blocks (channels, width, stride) each: every one twice as wide as that before, at half the size."""
    for stage, depth in enumerate(depths):
        blocks = []
        for index in range(depth):
            blocks.append(block(channels, width << stage, 2 if stage and not index else 1))
            channels = (width << stage) * expansion
        yield nn.Sequential(*blocks)


class ResNet(nn.Module):
    """ImageNet ResNet with torchvision's names; ``width`` 64 is the original."""

    def __init__(self, block: type[nn.Module], depths: tuple[int, ...], width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        expansion = 4 if block is Bottleneck else 1
        self.stages = [f"layer{stage + 1}" for stage in range(len(depths))]
        for name, stage in zip(self.stages, stages(block, width, width, depths, expansion), strict=True):
            setattr(self, name, stage)
        self.fc = nn.Linear((width << (len(depths) - 1)) * expansion, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.fc(x.mean((2, 3)))


def resnet18(width: int = 64) -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2), width)


def resnet34(width: int = 64) -> nn.Module:
    return ResNet(BasicBlock, (3, 4, 6, 3), width)


def resnet50(width: int = 64) -> nn.Module:
    return ResNet(Bottleneck, (3, 4, 6, 3), width)


class WideBlock(nn.Module):
    """Pre-activation block of a WideResNet."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False) if channels != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(x).relu()
        return self.conv2(self.bn2(self.conv1(y)).relu()) + self.shortcut(y)


def wide_resnet(base: int = 4, widen: int = 4) -> nn.Module:
    widths = [base * widen << stage for stage in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, base, 3, 1, 1, bias=False),
        *(
            WideBlock(channels, width, stride)
            for channels, width, stride in zip([base, *widths], widths, (1, 2, 2), strict=False)
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], 10),
    )


def mobilenet(width: int = 8) -> nn.Module:
    """Inverted residuals without the residual: expand, depthwise, project."""

    def block(channels: int, out: int, stride: int) -> list[nn.Module]:
        hidden = 4 * channels
        return [
            nn.Conv2d(channels, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        ]

    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1, bias=False),
        *block(width, 2 * width, 1),
        *block(2 * width, 3 * width, 2),
        nn.Conv2d(3 * width, 4 * width, 3, padding=2, dilation=2, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class UNet(nn.Module):
    """Two levels; transposed convolutions of kernel 2 and 4, one of them grouped, bring the size back."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, 3, 2, 1)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up1 = nn.ConvTranspose2d(4 * width, width, 4, 2, 1, groups=2)
        self.leave = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x).relu()
        second = self.down1(first).relu()
        x = self.up2(self.down2(second).relu()).relu()
        x = self.up1(torch.cat([x, second], 1)).relu()
        return self.leave(torch.cat([x, first], 1))


def unet(width: int = 8) -> nn.Module:
    return UNet(width)


def network_1d(width: int = 8) -> nn.Module:
    """A wave network: dilated, strided, and a transposed convolution back."""
    return nn.Sequential(
        nn.Conv1d(4, width, 7, 2, 3),
        nn.ReLU(),
        nn.Conv1d(width, width, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv1d(width, 2 * width, 4, 4),
        nn.ReLU(),
        nn.ConvTranspose1d(2 * width, width, 8, 4, 2),
    )


def network_3d(width: int = 4) -> nn.Module:
    """A video network with factorised kernels, as R(2+1)D has them."""
    return nn.Sequential(
        nn.Conv3d(4, width, 3, (1, 2, 2), 1),
        nn.ReLU(),
        nn.Conv3d(width, 2 * width, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
        nn.ReLU(),
        nn.Conv3d(2 * width, 2 * width, (3, 1, 1), padding=(1, 0, 0)),
        nn.ReLU(),
        nn.ConvTranspose3d(2 * width, width, 2, 2),
    )
