"""Every Python block of docs/spectrum.md runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from networks import resnet18

DOCS = Path(__file__).resolve().parents[1] / "docs"
TEXT = (DOCS / "spectrum.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


class Writer:
    def __init__(self) -> None:
        self.steps: set[int] = set()

    def add_scalar(self, key: str, value: float, step: int) -> None:
        self.steps.add(step)


@pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")
def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    writer = Writer()
    namespace = {
        "torch": torch,
        "model": resnet18(width=4),
        "regularised": resnet18(width=4),
        "images": torch.randn(1, 3, 32, 32),
        "writer": writer,
    }
    assert len(BLOCKS) == 6
    for block in BLOCKS:
        exec(compile(block, "docs/spectrum.md", "exec"), namespace)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json", "report.csv"}
    assert writer.steps == {0, 500, 1000}


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert len(pictures) == 2
    for picture in pictures:
        assert (DOCS / picture).stat().st_size > 10_000
