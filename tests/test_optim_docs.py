"""Every Python block of docs/optimizer.md runs, in order, in one namespace; and so does the example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from networks import resnet18

from ocnn_fused.optim import promised_norm
from ocnn_fused.optim.coefficients import largest, minimax
from ocnn_fused.optim.update import CUT
from ocnn_fused.problem import problem_of

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "optimizer.md").read_text()


def test_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = resnet18(width=4)
    names = {"model": model, "criterion": torch.nn.CrossEntropyLoss()}
    names["data"] = [(torch.randn(2, 3, 32, 32), torch.tensor([1, 2]))]
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for block in blocks:
        exec(block, names)
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert "excluded" in capsys.readouterr().out


def test_numbers_of_the_page() -> None:
    assert f"After five steps the polynomial is at most {largest(minimax(5)):.3f}." in TEXT
    assert f"`promised_norm` multiplies by {CUT:g} for" in TEXT
    problem = problem_of((4, 4, 3, 3), 1, 1, 1, None)
    assert promised_norm(problem, minimax(5)) == pytest.approx(1.156 * CUT**2, rel=1e-3)


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from optimizer import main

    assert main(["--epochs", "3"]) > 0.9
    assert "the head" in capsys.readouterr().out
