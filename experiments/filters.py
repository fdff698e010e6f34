"""Spectrum of one layer, and similarity of filters by depth, of the CIFAR-100 networks (Figure 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ocnn_fused.spectrum import filter_similarity, network_spectra

from .attack import Probe, base
from .classification import load, trained
from .runner import Context, Experiment, Task
from .training import State

#: The first convolution of the third stage, as in the paper.
LAYER = "blocks.4.conv1"
#: The first convolution of each stage.
DEPTHS = ("blocks.0.conv1", "blocks.2.conv1", "blocks.4.conv1", "blocks.6.conv1")
QUANTILES = 201
BINS = 40


@dataclass(frozen=True)
class Filters(Probe):
    experiment: ClassVar[str] = "filters"

    images: int = 32


class FiltersTask(Task):
    """Unit: the spectra, then the similarities of one layer at a time."""

    def __init__(self, config: Filters, context: Context) -> None:
        data = load("cifar100", "test", 32, context)
        self.network = trained(base(config), context, data.classes)
        self.images = self.network.normalize(data.images[: config.images])
        self.units = 1 + len(DEPTHS)
        self.found: dict[str, Any] = {}

    def advance(self, unit: int) -> None:
        if unit == 0:
            spectra = network_spectra(self.network.model, (3, 32, 32), progress=False)
            del spectra["fc"]
            places = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
            self.found["spectrum"] = spectra[LAYER].quantile(1 - places).tolist()
            self.found["largest"] = {name: values.max().item() for name, values in spectra.items()}
            self.found["smallest"] = {name: values.min().item() for name, values in spectra.items()}
            self.found["near_one"] = {name: ((values - 1).abs() < 0.1).double().mean().item()
                                      for name, values in spectra.items()}  # fmt: skip
            return
        name = DEPTHS[unit - 1]
        similarity = filter_similarity(self.network.model, self.images, [name])[name]
        self.found.setdefault("similarity", {})[name] = similarity.mean_magnitude
        self.found.setdefault("histogram", {})[name] = similarity.histogram(BINS)[0].tolist()

    def state(self) -> State:
        return {"found": self.found}

    def load(self, state: State) -> None:
        self.found = state["found"]

    def result(self) -> dict[str, Any]:
        return self.found


FILTERS = Experiment(Filters, FiltersTask, needs=lambda config: [base(config)])
