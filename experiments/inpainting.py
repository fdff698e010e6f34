"""Inpainting by deep image prior, half of the pixels dropped or text removed (Table 5)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import metrics
from .config import Config
from .data import masked_picture, read_image
from .methods import Regularization
from .networks import HourGlass
from .runner import Context, Experiment, Task
from .training import State, set_rate, update

#: The paper's names of the eleven grey images, and their files.
GREY = {
    "barbara": "barbara", "boat": "boat", "house": "house", "lena": "Lena512", "peppers": "peppers256",
    "cameraman": "Cameraman256", "couple": "couple", "finger": "fingerprint", "hill": "hill", "man": "man",
    "montage": "montage",
}  # fmt: skip
#: On these, which are not among the eleven, settings are chosen; they are taken as grey images too.
CHOOSING = {"plane": "image_F16_512rgb", "baboon": "image_Baboon512rgb"}
TEXT = ("kate", "library", "vase")
#: A photograph that scikit-learn ships, for the picture in the documentation.
SAMPLE = "china"


@dataclass(frozen=True)
class Inpainting(Config):
    """The seed decides the mask, the network's input and its first weights: the same for all methods."""

    experiment: ClassVar[str] = "inpainting"

    rate: float = 0.01
    image: str = "barbara"
    size: int = 128
    width: int = 16
    levels: int = 4
    code: int = 8
    steps: int = 800
    noise: float = 0.03


def sample_photograph() -> Path:
    from sklearn import datasets

    return Path(datasets.__file__).parent / "images" / f"{SAMPLE}.jpg"


def picture_and_mask(config: Inpainting, context: Context) -> tuple[Tensor, Tensor]:
    """The picture (C, H, W) from 0 to 1 and the mask (1, H, W) of its known pixels."""
    if config.image in TEXT:
        return masked_picture(context.data / "inpainting-text", config.image, config.size)
    if config.image == SAMPLE:
        picture = read_image(sample_photograph(), "RGB", config.size)
    else:
        files = {**GREY, **CHOOSING}
        if config.image not in files:
            raise ValueError(f"image must be one of {', '.join([*files, *TEXT, SAMPLE])}, got {config.image!r}")
        picture = read_image(context.data / "inpainting" / f"{files[config.image]}.png", "L", config.size)
    mask = torch.rand(1, *picture.shape[1:], generator=torch.Generator().manual_seed(config.seed)) < 0.5
    return picture.float() / 255, mask.float()


class InpaintingTask(Task):
    def __init__(self, config: Inpainting, context: Context) -> None:
        self.config, self.units = config, config.steps
        if config.choosing != (config.image in CHOOSING):
            raise ValueError(f"choosing must be {config.image in CHOOSING} for the image {config.image}")
        self.picture, self.mask = picture_and_mask(config, context)
        self.code = 0.1 * torch.rand(1, config.code, config.size, config.size)
        self.model = HourGlass(config.code, len(self.picture), config.width, config.levels)
        self.regularization = Regularization(config.method, config.weight, self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), config.rate)

    def reconstruct(self, noise: float = 0.0) -> Tensor:
        code = self.code + noise * torch.randn_like(self.code) if noise else self.code
        return self.model(code.contiguous(memory_format=torch.channels_last))[0]

    def advance(self, unit: int) -> None:
        config = self.config
        set_rate(self.optimizer, config.rate)
        # The mean instead of the paper's sum: lambda and rate do not depend on the picture's size then.
        wrong = ((self.reconstruct(config.noise) - self.picture) * self.mask).square()
        update(wrong.sum() / (self.mask.sum() * len(self.picture)), self.model, self.optimizer, self.regularization)

    def state(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "regularization": self.regularization.state_dict(),
        }

    def load(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.regularization.load_state_dict(state["regularization"])

    @torch.no_grad()
    def final(self) -> Tensor:
        """Of the network in training mode, as deep image prior's: its norms take the statistics of this picture."""
        return self.reconstruct().clamp(0, 1)

    def result(self) -> dict[str, Any]:
        final = self.final()
        return {
            "psnr": metrics.psnr(final, self.picture),
            "psnr_missing": metrics.psnr(final, self.picture, 1 - self.mask),
            "psnr_known": metrics.psnr(final, self.picture, self.mask),
        }

    def keeps(self) -> dict[str, Tensor] | None:
        return {"final": self.final(), "picture": self.picture, "mask": self.mask}


INPAINTING = Experiment(Inpainting, InpaintingTask)
