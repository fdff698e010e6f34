"""A training problem that every framework must solve to the same weights as a loop written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer, schedules

IMAGES, STEPS, RATE = 24, 3, 0.1
#: Step after step another weight, so that a step counted wrongly shows.
OPTIONS = {"weight": 0.3, "schedule": schedules.Warmup(4, start=0.5)}

#: Of the examples' network: one of its layers has 24 filters more than input channels.
LEAST_DIGITS_LOSS = 24


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(IMAGES, 4, 6, 6, dtype=torch.float64, generator=generator), torch.arange(IMAGES) % 5


def network() -> nn.Sequential:
    """Three layers to share out between two processes; no batch statistics, which would differ between them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 5, 2, 2),
        nn.Flatten(),
        nn.Linear(5 * 36, 5),
    ).double()


def by_hand(clip: float | None = None, task: float = 1.0) -> dict[str, Tensor]:
    """Weights after STEPS steps of SGD over the images in order, ``task`` times their loss plus the regulariser."""
    model = network()
    reg = OrthRegularizer(model, **OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for images, labels in zip(*(part.chunk(STEPS) for part in data()), strict=True):
        loss = task * F.cross_entropy(model(images), labels) + reg()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        reg.step()
    return model.state_dict()


def assert_same(weights: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    start = network().state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], **tolerance)
        assert not torch.equal(weight, start[name]), f"{name} was not trained"
