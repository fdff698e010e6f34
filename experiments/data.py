"""Loaders of the public data sets, in the layouts in which they are published; nothing is downloaded.

Below ``--data``:

    cifar-100-binary    the binary version of https://www.cs.toronto.edu/~kriz/cifar.html
    tiny-imagenet-50    class folders in train/ and val/ (ImageNet's layout), or those of Tiny-ImageNet with
                        val_annotations.txt: http://cs231n.stanford.edu/tiny-imagenet-200.zip
    cub200              class folders in train/ and test/, or CUB_200_2011 with images.txt and train_test_split.txt:
                        https://www.vision.caltech.edu/datasets/cub_200_2011/
    cars196             class folders in train/ and test/: Stanford Cars
    inpainting          the eleven grey test images of convolutional sparse coding (Heide et al.), PNG
    inpainting-text     kate, library, vase and their masks, of deep image prior: https://github.com/DmitryUlyanov
    cifar10-resnets     resnet56-4bfd9763.th of https://github.com/akamaster/pytorch_resnet_cifar10
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ocnn_fused.report import CheckpointError, load_checkpoint, read_state_dict

CIFAR_CLASSES, CIFAR_COARSE, CIFAR_SIZE = 100, 20, 32
_RECORD = 2 + 3 * CIFAR_SIZE**2
_SUFFIXES = (".jpeg", ".jpg", ".png")


class DataError(Exception):
    """A file that is missing or is not what it should be; the message names it and what was expected."""


@dataclass(frozen=True)
class Labelled:
    """``images`` (N, 3, H, W) as bytes and ``labels`` (N,)."""

    images: Tensor
    labels: Tensor
    classes: int

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Labelled:
        return Labelled(self.images[indices], self.labels[indices], self.classes)


def cifar100(folder: Path, split: str) -> Labelled:
    """CIFAR-100, binary version: records of coarse label, fine label and 3x32x32 bytes in train.bin and test.bin."""
    path = folder / f"{split}.bin"
    expected = "CIFAR-100's binary version has train.bin and test.bin"
    if not path.is_file():
        if (folder / split).is_file():
            raise DataError(f"{path} is missing; {folder / split} is of the Python version, but {expected}")
        raise DataError(f"{path} is missing; {expected}")
    content = path.read_bytes()
    if not content or len(content) % _RECORD:
        raise DataError(f"{path} is truncated or of another kind: expected records of {_RECORD} bytes, got "
                        f"{len(content)} bytes, {len(content) % _RECORD} too many")  # fmt: skip
    records = torch.from_numpy(np.frombuffer(content, np.uint8).reshape(-1, _RECORD).copy())
    for column, name, count in ((0, "coarse", CIFAR_COARSE), (1, "fine", CIFAR_CLASSES)):
        wrong = (records[:, column] >= count).nonzero()
        if len(wrong):
            index = int(wrong[0])
            raise DataError(f"{path}: the {name} label of record {index} is {int(records[index, column])}, expected "
                            f"less than {count}; CIFAR-10's records, for instance, are of another length")  # fmt: skip
    images = records[:, 2:].reshape(-1, 3, CIFAR_SIZE, CIFAR_SIZE).clone()
    return Labelled(images, records[:, 1].long(), CIFAR_CLASSES)


def read_image(path: Path, mode: str = "RGB", size: int | None = None) -> Tensor:
    """Bytes (C, H, W) of a picture; with a size, its centre square shrunk to that many pixels."""
    if not path.is_file():
        raise DataError(f"{path} is missing; expected a picture")
    try:
        with Image.open(path) as file:
            picture = file.convert(mode)
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's, of broken PNG files the second
        raise DataError(f"{path} cannot be read as a picture (truncated, or of another kind?): {error}") from error
    if size is not None:
        side = min(picture.size)
        left, top = ((length - side) // 2 for length in picture.size)
        picture = picture.resize((size, size), Image.Resampling.BOX, (left, top, left + side, top + side))
    pixels = torch.from_numpy(np.array(picture))
    return pixels.reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; expected a folder with one folder of pictures per class")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not names:
        found = next(iter(sorted(folder.iterdir())), None)
        raise DataError(f"{folder} must hold one folder of pictures per class, got "
                        + (f"the file {found.name}" if found else "nothing"))  # fmt: skip
    return names


def listed(root: Path, split: str) -> tuple[list[tuple[Path, int]], list[str]]:
    """The pictures of a split with their labels, and the names of the classes, which all splits share.

    Class folders ``root/split/class/**``, Tiny-ImageNet's ``val_annotations.txt``, or CUB's ``images.txt``.
    """
    if not root.is_dir():
        raise DataError(f"{root} is missing; expected a folder with train/ and {split}/, or CUB's images.txt")
    if (root / "images.txt").is_file():
        return _listed_by_cub(root, split)
    names = _class_names(root / "train")
    folder = root / split
    if (folder / "val_annotations.txt").is_file():
        return _listed_by_annotations(folder, names), names
    own = _class_names(folder)
    if own != names:
        strange = sorted(set(own) ^ set(names))[0]
        raise DataError(f"{root}: train/ and {split}/ must have the same class folders, but {strange} is in one only")
    items = []
    for label, name in enumerate(names):
        pictures = _pictures(folder / name)
        if not pictures:
            raise DataError(f"{folder / name} must hold pictures ({', '.join(_SUFFIXES)}), got none")
        items += [(path, label) for path in pictures]
    return items, names


def _listed_by_annotations(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    path, labels, items = folder / "val_annotations.txt", {name: label for label, name in enumerate(names)}, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split("\t")
        if len(words) < 2 or words[1] not in labels:
            raise DataError(f"{path}, line {number}: expected a file and a class of train/, got {line[:80]!r}")
        items.append((folder / "images" / words[0], labels[words[1]]))
    return items


def _listed_by_cub(root: Path, split: str) -> tuple[list[tuple[Path, int]], list[str]]:
    tables = {}
    for name in ("images.txt", "train_test_split.txt"):
        path = root / name
        if not path.is_file():
            raise DataError(f"{path} is missing; CUB_200_2011 has images.txt and train_test_split.txt")
        rows = [line.split() for line in path.read_text().splitlines()]
        wrong = next((number for number, row in enumerate(rows, 1) if len(row) != 2), None)
        if wrong is not None:
            raise DataError(f"{path}, line {wrong}: expected two words, got {' '.join(rows[wrong - 1])[:80]!r}")
        tables[name] = dict(rows)
    pictures, splits = tables["images.txt"], tables["train_test_split.txt"]
    if pictures.keys() != splits.keys():
        number = sorted(pictures.keys() ^ splits.keys())[0]
        raise DataError(f"{root / 'train_test_split.txt'} must list the pictures of images.txt, but {number} differs")
    names = sorted({name.partition("/")[0] for name in pictures.values()})
    wanted = "1" if split == "train" else "0"
    items = [
        (root / "images" / name, names.index(name.partition("/")[0]))
        for number, name in pictures.items()
        if splits[number] == wanted
    ]
    return items, names


def class_folders(root: Path, split: str, size: int) -> Labelled:
    """Pictures in class folders, see :func:`listed`, shrunk to ``size`` pixels."""
    items, names = listed(root, split)
    images = torch.stack([read_image(path, size=size) for path, _ in items])
    return Labelled(images, torch.tensor([label for _, label in items]), len(names))


def masked_picture(folder: Path, name: str, size: int) -> tuple[Tensor, Tensor]:
    """A picture and the mask of its known pixels, (3, size, size) and (1, size, size), from 0 to 1."""
    picture, mask = read_image(folder / f"{name}.png"), read_image(folder / f"{name}_mask.png", "L")
    if picture.shape[1:] != mask.shape[1:]:
        raise DataError(f"{folder / name}_mask.png must be of the picture's size, "
                        f"{tuple(picture.shape[1:])}, got {tuple(mask.shape[1:])}")  # fmt: skip
    picture, mask = (read_image(folder / f"{name}{end}.png", mode, size).float() / 255
                     for end, mode in (("", "RGB"), ("_mask", "L")))  # fmt: skip
    return picture, (mask > 0.99).float()  # a pixel that a letter touches is not known


def state_dict(path: Path, model: torch.nn.Module) -> None:
    """Load the public weights of a CIFAR-10 ResNet: under "state_dict", names prefixed by "module."."""
    try:
        load_checkpoint(model, read_state_dict(path), path)
    except CheckpointError as error:
        raise DataError(str(error)) from error
