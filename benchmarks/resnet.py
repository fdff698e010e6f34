"""ResNet-18 and -34, of the blocks that the tests have, so that no model package is needed."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from networks import BasicBlock, stages


class ResNet(nn.Module):
    """Two 3x3 convolutions per block. ``cifar``: a 3x3 stem of stride 1 and no pooling after it."""

    def __init__(self, depths: tuple[int, ...], classes: int, cifar: bool, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False) if cifar else nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if cifar else nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(*chain(*stages(BasicBlock, width, width, depths)))
        self.fc = nn.Linear(width << (len(depths) - 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.bn1(self.conv1(x)).relu()))
        return self.fc(x.mean((2, 3)))
