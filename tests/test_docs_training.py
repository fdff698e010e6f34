"""Every Python block of docs/training.md runs, in order, in one namespace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import resnet18
from torch.utils.data import DataLoader, TensorDataset

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "training.md").read_text()
BLOCKS = [dedent(block) for _, block in re.findall(r"^( *)```python\n(.*?)^\1```", TEXT, re.MULTILINE | re.DOTALL)]
#: A framework and the word by which its block is known.
FRAMEWORKS = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerator"}


class Logger:
    def __init__(self) -> None:
        self.logged: dict[str, torch.Tensor] = {}

    def log(self, values: dict[str, torch.Tensor]) -> None:
        self.logged.update(values)


def namespace() -> dict[str, Any]:
    """What the blocks take for granted."""
    torch.manual_seed(0)
    model = resnet18(width=4)
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    return {
        "torch": torch,
        "F": torch.nn.functional,
        "StdConv2d": type("StdConv2d", (torch.nn.Conv2d,), {}),  # timm's
        "model": model,
        "x": x,
        "y": y,
        "data": [(x, y)],
        "criterion": torch.nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "logger": Logger(),
        "device": "cpu",
    }


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_blocks_without_a_framework(capsys: pytest.CaptureFixture[str]) -> None:
    names = namespace()
    plain = [block for block in BLOCKS if not any(word in block for word in FRAMEWORKS.values())]
    assert len(plain) >= 10
    assert any("find_unused_parameters" in block for block in plain)
    for block in plain:
        exec(block, names)
        names["optimizer"].zero_grad()
    assert "left out" in capsys.readouterr().out
    assert all(value.isfinite() for value in names["logger"].logged.values())
    assert "orth/layer1.0.conv1" in names["logger"].logged


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_block_of_a_framework(framework: str, tmp_path: Path) -> None:
    if not (find_spec(framework) and find_spec("accelerate" if framework == "transformers" else framework)):
        pytest.skip(f"needs {framework}")
    names = namespace()
    names.update(dataset=[], loader=DataLoader(TensorDataset(names["x"], names["y"])))
    from ocnn_fused import OrthRegularizer

    names["OrthRegularizer"] = OrthRegularizer
    if framework == "lightning":
        import lightning

        names["lightning"] = lightning
    elif framework == "transformers":
        from transformers import TrainingArguments

        names["arguments"] = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    else:
        from accelerate import Accelerator

        names["accelerator"] = Accelerator(cpu=True)
    [block] = [block for block in BLOCKS if FRAMEWORKS[framework] in block]
    exec(block, names)
