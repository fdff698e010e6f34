"""ResNets for CIFAR with option A shortcuts: every second pixel, and zeros for the channels that are new."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from networks import BasicBlock, stages
from torch import Tensor, nn


class PaddedPixels(nn.Module):
    """Option A: no weights, so that the names of a block's weights are those of its convolutions and norms alone."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        pixels = x[:, :, :: self.stride, :: self.stride]
        return F.pad(pixels, (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))


def block(channels: int, width: int, stride: int) -> nn.Module:
    return BasicBlock(channels, width, stride, PaddedPixels(channels, width, stride))


class CifarResNet(nn.Module):
    def __init__(self, blocks: int, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1, self.layer2, self.layer3 = stages(block, width, width, (blocks,) * 3)
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet56() -> nn.Module:
    return CifarResNet(9)


def tiny() -> nn.Module:
    """Fast to look at."""
    torch.manual_seed(0)
    return CifarResNet(1, width=4)
