"""ResNet-18 and -34, of the blocks that the tests have, so that no model package is needed."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from networks import BasicBlock


class ResNet(nn.Module):
    """Two 3x3 convolutions per block. ``cifar``: a 3x3 stem of stride 1 and no pooling after it."""

    def __init__(self, depths: tuple[int, ...], classes: int, cifar: bool, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False) if cifar else nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if cifar else nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                blocks.append(BasicBlock(channels, width << stage, 2 if stage and not index else 1))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.bn1(self.conv1(x)).relu()))
        return self.fc(x.mean((2, 3)))
