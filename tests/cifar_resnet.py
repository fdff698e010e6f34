"""ResNets for CIFAR with option A shortcuts: every second pixel, and zeros for the channels that are new."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.new = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))
        return (y + shortcut).relu()


class CifarResNet(nn.Module):
    def __init__(self, blocks: int, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                *(
                    Block(width << max(0, stage - (not index)), width << stage, 2 if stage and not index else 1)
                    for index in range(blocks)
                )
            )
            for stage in range(3)
        )
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet20() -> nn.Module:
    return CifarResNet(3)


def resnet56() -> nn.Module:
    return CifarResNet(9)


def tiny() -> nn.Module:
    """Fast to look at."""
    torch.manual_seed(0)
    return CifarResNet(1, width=4)
