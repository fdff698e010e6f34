"""The CIFAR example, on random images and on files in the layout of the two data sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cifar import images, main

pytestmark = pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")
SMALL = ["--width", "4", "--batch", "16"]


def test_loss_falls_on_random_images(capsys: pytest.CaptureFixture[str]) -> None:
    _, first = main([*SMALL, "--epochs", "1"])
    _, last = main([*SMALL, "--epochs", "3"])
    assert last < first
    assert "3.conv1" in capsys.readouterr().out


def test_the_recipe_stays_finite() -> None:
    """Also with a lambda that is far too large: without clipping this one explodes, and a warning says so."""
    large = [*SMALL, "--epochs", "3", "--weight", "10"]
    assert main(large)[1] < 200
    with pytest.warns(UserWarning, match="the orthogonality loss explodes in"):
        assert not main([*large, "--clip", "inf"])[1] < 1e9


@pytest.mark.parametrize(
    ("labels", "classes", "names"), [(1, 10, ["data_batch_1.bin", "data_batch_2.bin"]), (2, 100, ["train.bin"])]
)
def test_files(labels: int, classes: int, names: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    pixels = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8)
    fine = torch.arange(20) * classes // 20
    coarse = torch.full((20, labels - 1), 7)
    records = torch.cat([coarse, fine[:, None], pixels.flatten(1)], 1).to(torch.uint8)
    for name, part in zip(names, records.chunk(len(names)), strict=True):
        (tmp_path / name).write_bytes(part.numpy().tobytes())
    (tmp_path / ("test_batch.bin" if labels == 1 else "test.bin")).write_bytes(records[:10].numpy().tobytes())
    found, found_labels = images(tmp_path, "train")
    assert torch.equal(found_labels, fine)
    assert torch.equal(((found + 1) * 127.5).round().to(torch.uint8), pixels)
    main([*SMALL, "--epochs", "1", "--data", str(tmp_path)])


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"--data must hold data_batch_\*\.bin or train\.bin"):
        main(["--data", str(tmp_path)])


def test_digits_without_scikit_learn_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(\"No module named 'sklearn'\")\n")
    script = Path(__file__).resolve().parents[1] / "examples" / "digits.py"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = (
        "error: this example needs scikit-learn and tqdm (No module named 'sklearn'): pip install scikit-learn tqdm\n"
    )
    assert done.stderr == said
