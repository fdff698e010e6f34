"""Tiny real data in the public layouts, for tests and ``--smoke``: scikit-learn's digits and photographs.

Only the weights of the ResNet-56 are not real: they are those that a new network starts with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from .gan import WEIGHTS
from .inpainting import CHOOSING, GREY, TEXT
from .networks import resnet56

COUNTS = {"train": 200, "test": 60}


def make(folder: Path) -> Path:
    """Fill ``folder``, about a megabyte, and return it."""
    _cifar(folder / "cifar-100-binary")
    _class_folders(folder / "tiny-imagenet-50", ("train", "val"), 3, 6)
    _cub(folder / "cub200", 3, 8)
    _class_folders(folder / "cars196", ("train", "test"), 10, 4)
    _inpainting(folder)
    (folder / "cifar10-resnets").mkdir(parents=True)
    weights = {f"module.{name}": value for name, value in resnet56().state_dict().items()}
    torch.save({"state_dict": weights}, folder / "cifar10-resnets" / WEIGHTS)
    return folder


def _cifar(folder: Path) -> None:
    """Digits of 8x8 pixels, each four times as large, in three colours."""
    folder.mkdir(parents=True)
    digits = load_digits()
    images = np.kron(digits.images * 15, np.ones((1, 4, 4))).astype(np.uint8)
    tints = np.stack([images, images // 2, 255 - images], 1).reshape(len(images), -1)
    coarse = digits.target[:, None] // 5
    records = np.concatenate([coarse, digits.target[:, None], tints], 1).astype(np.uint8)
    start = 0
    for split, count in COUNTS.items():
        (folder / f"{split}.bin").write_bytes(records[start : start + count].tobytes())
        start += count


def crops(kind: int, count: int, size: int) -> list[Image.Image]:
    """Parts of the two photographs; a kind is a strip of one of them."""
    photograph = load_sample_images().images[kind % 2]
    top = 20 + 40 * (kind // 2)
    lefts = np.linspace(0, photograph.shape[1] - size, count).astype(int)
    return [Image.fromarray(photograph[top : top + size, left : left + size]) for left in lefts]


def _class_folders(root: Path, splits: tuple[str, ...], classes: int, each: int) -> None:
    for kind in range(classes):
        pictures = crops(kind, each * len(splits), 64)
        for index, split in enumerate(splits):
            folder = root / split / f"{kind:03d}"
            folder.mkdir(parents=True)
            for number, picture in enumerate(pictures[index :: len(splits)]):
                picture.save(folder / f"{number:04d}.jpg")


def _cub(root: Path, classes: int, each: int) -> None:
    """As CUB_200_2011 is published."""
    images: list[str] = []
    splits: list[str] = []
    for kind in range(classes):
        folder = f"{kind + 1:03d}.Bird"
        (root / "images" / folder).mkdir(parents=True)
        for number, picture in enumerate(crops(kind, each, 64)):
            picture.save(root / "images" / folder / f"{number}.jpg")
            images.append(f"{len(images) + 1} {folder}/{number}.jpg")
            splits.append(f"{len(images)} {number % 2}")
    (root / "images.txt").write_text("\n".join(images) + "\n")
    (root / "train_test_split.txt").write_text("\n".join(splits) + "\n")


def _inpainting(root: Path) -> None:
    for name in ("inpainting", "inpainting-text"):
        (root / name).mkdir(parents=True)
    for kind, file in enumerate([*GREY.values(), *CHOOSING.values()]):
        crops(kind % 10, 1, 64)[0].save(root / "inpainting" / f"{file}.png")
    digit = np.kron(load_digits().images[0] > 8, np.ones((8, 8)))
    for kind, name in enumerate(TEXT):
        crops(kind, 1, 64)[0].save(root / "inpainting-text" / f"{name}.png")
        Image.fromarray((255 * (1 - digit)).astype(np.uint8)).save(root / "inpainting-text" / f"{name}_mask.png")
