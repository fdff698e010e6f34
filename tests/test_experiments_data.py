"""Loaders of the experiments: what they return, and what they say about files that are not what they should be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from experiments import tiny
from experiments.data import DataError, cifar100, class_folders, listed, masked_picture, read_image, state_dict
from experiments.gan import WEIGHTS
from experiments.networks import CifarResNet, resnet56


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "data"))


def cut(path: Path, length: int = -100) -> None:
    path.write_bytes(path.read_bytes()[:length])


def test_cifar_is_read_as_published(data: Path) -> None:
    folder = data / "cifar-100-binary"
    train, test = cifar100(folder, "train"), cifar100(folder, "test")
    assert (len(train), len(test)) == tuple(tiny.COUNTS.values())
    assert train.images.shape[1:] == (3, 32, 32)
    # A record by hand: two labels, then red, green and blue planes, row by row.
    content = (folder / "train.bin").read_bytes()
    record = content[3074 * 7 : 3074 * 8]
    assert train.labels[7] == record[1]
    assert train.images[7, 2, 5, 9] == record[2 + 2 * 1024 + 5 * 32 + 9]


def spoil_label(data: Path) -> None:
    path = data / "cifar-100-binary" / "train.bin"
    content = bytearray(path.read_bytes())
    content[3074 * 5 + 1] = 100
    path.write_bytes(content)


def spoil_coarse_label(data: Path) -> None:
    path = data / "cifar-100-binary" / "train.bin"
    content = bytearray(path.read_bytes())
    content[3074 * 3] = 20
    path.write_bytes(content)


def only_python_version(data: Path) -> None:
    folder = data / "cifar-100-binary"
    (folder / "train.bin").rename(folder / "train")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: (data / "cifar-100-binary" / "train.bin").unlink(), r"train\.bin is missing; CIFAR-100's binary"),
        (only_python_version, r"train\.bin is missing; .*train is of the Python version"),
        (
            lambda data: cut(data / "cifar-100-binary" / "train.bin"),
            r"train\.bin is truncated .* records of 3074",
        ),
        (lambda data: cut(data / "cifar-100-binary" / "train.bin", 0), r"train\.bin is truncated .* got 0 bytes"),
        (spoil_label, r"train\.bin: the fine label of record 5 is 100, expected less than 100"),
        (spoil_coarse_label, r"train\.bin: the coarse label of record 3 is 20, expected less than 20"),
    ],
)
def test_wrong_cifar_files_are_named(spoil: Callable[[Path], object], message: str, data: Path) -> None:
    spoil(data)
    with pytest.raises(DataError, match=message):
        cifar100(data / "cifar-100-binary", "train")


def test_class_folders_are_labelled_in_order_of_their_names(data: Path) -> None:
    root = data / "tiny-imagenet-50"
    val = class_folders(root, "val", 16)
    assert val.images.shape == (18, 3, 16, 16)
    assert val.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert val.classes == 3
    torch.testing.assert_close(val.images[6], read_image(root / "val" / "001" / "0000.jpg", size=16))


def test_tiny_imagenets_own_layout(data: Path) -> None:
    root = data / "tiny-imagenet-50"
    for folder in (root / "train").iterdir():  # train/<class>/images/*
        inner = folder / "images"
        inner.mkdir()
        for picture in folder.glob("*.jpg"):
            picture.rename(inner / picture.name)
    images = root / "val" / "images"
    images.mkdir()
    lines = []
    for name in ("002", "000"):
        (root / "val" / name / "0000.jpg").rename(images / f"val_{name}.jpg")
        lines.append(f"val_{name}.jpg\t{name}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines))
    assert class_folders(root, "train", 8).labels.bincount().tolist() == [6, 6, 6]
    assert class_folders(root, "val", 8).labels.tolist() == [2, 0]
    (root / "val" / "val_annotations.txt").write_text("val_002.jpg\tno_such_class\n")
    with pytest.raises(DataError, match=r"val_annotations\.txt, line 1: expected a file and a class of train/"):
        listed(root, "val")


def test_cubs_own_layout_has_its_split(data: Path) -> None:
    train, test = (class_folders(data / "cub200", split, 8) for split in ("train", "test"))
    assert len(train) == len(test) == 12
    assert train.labels.tolist() == test.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    # Split 1 is the training part: in the tiny data the odd pictures.
    torch.testing.assert_close(train.images[0], read_image(data / "cub200" / "images" / "001.Bird" / "1.jpg", size=8))


def flatten(root: Path) -> None:
    for path in list((root / "train").rglob("*.jpg")):
        path.rename(root / "train" / f"{path.parent.name}_{path.name}")
    for folder in list((root / "train").iterdir()):
        if folder.is_dir():
            folder.rmdir()


def empty_class(root: Path) -> None:
    for path in (root / "val" / "001").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"tiny-imagenet-50 is missing; expected a folder with train/ and val/"),
        (lambda root: shutil.rmtree(root / "val"), r"val is missing; expected a folder with one folder of pictures"),
        (flatten, r"train must hold one folder of pictures per class, got the file 000_0000\.jpg"),
        (empty_class, r"val/001 must hold pictures \(\.jpeg, \.jpg, \.png\), got none"),
        (
            lambda root: (root / "val" / "001").rename(root / "val" / "bird"),
            "but 001 is in one only",
        ),
        (lambda root: cut(root / "val" / "001" / "0002.jpg"), r"val/001/0002\.jpg cannot be read as a picture"),
        (lambda root: (root / "val" / "001" / "0002.jpg").write_text("<html>"), r"val/001/0002\.jpg cannot be read"),
    ],
)
def test_wrong_class_folders_are_named(spoil: Callable[[Path], object], message: str, data: Path) -> None:
    root = data / "tiny-imagenet-50"
    spoil(root)
    with pytest.raises(DataError, match=message):
        class_folders(root, "val", 8)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train_test_split.txt", None, r"train_test_split\.txt is missing; CUB_200_2011 has"),
        ("train_test_split.txt", "1 0\n2\n", r"train_test_split\.txt, line 2: expected two words, got '2'"),
        ("train_test_split.txt", "1 0\n", r"train_test_split\.txt must list the pictures of images\.txt, but"),
        ("images.txt", "1 001.Bird/none.jpg\n", "must list the pictures"),
    ],
)
def test_wrong_cub_tables_are_named(name: str, text: str | None, message: str, data: Path) -> None:
    path = data / "cub200" / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        listed(data / "cub200", "train")


def test_masks_are_checked(data: Path) -> None:
    folder = data / "inpainting-text"
    picture, mask = masked_picture(folder, "kate", 32)
    assert picture.shape == (3, 32, 32)
    assert mask.shape == (1, 32, 32)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    Image.new("L", (20, 30)).save(folder / "kate_mask.png")
    with pytest.raises(DataError, match=r"kate_mask\.png must be of the picture's size, \(64, 64\), got \(30, 20\)"):
        masked_picture(folder, "kate", 32)
    (folder / "vase_mask.png").unlink()
    with pytest.raises(DataError, match=r"vase_mask\.png is missing; expected a picture"):
        masked_picture(folder, "vase", 32)
    cut(folder / "library.png", 60)
    with pytest.raises(DataError, match=r"library\.png cannot be read as a picture"):
        masked_picture(folder, "library", 32)


def test_wrong_weights_are_named(data: Path) -> None:
    path = data / "cifar10-resnets" / WEIGHTS
    state_dict(path, resnet56())
    with pytest.raises(DataError, match=rf"{WEIGHTS} has layer1.1.conv1.weight, which the model lacks"):
        state_dict(path, CifarResNet(1))
    cut(path)
    with pytest.raises(DataError, match=rf"{WEIGHTS} is damaged or no torch checkpoint"):
        state_dict(path, resnet56())
    torch.save([1], path)
    with pytest.raises(DataError, match=rf"{WEIGHTS} holds no weights by name, but a list"):
        state_dict(path, resnet56())
    path.unlink()
    with pytest.raises(DataError, match=rf"{WEIGHTS} does not exist"):
        state_dict(path, resnet56())
