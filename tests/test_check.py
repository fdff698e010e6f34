"""``python -m ocnn_fused.check`` passes, and a wrong coefficient in any backend makes it fail."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from ocnn_fused import check, engine
from ocnn_fused.backends import lowering, pytorch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Any:
    engine.prepare.cache_clear()
    yield
    engine.prepare.cache_clear()


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-m", "ocnn_fused.check", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\ncpu: {len(check.LAYERS)} layers, errors up to " in done.stdout
    assert "\ntriton: not checked: it serves GPUs" in done.stdout
    assert done.stdout.endswith("all is well\n")


def test_thirty_layers() -> None:
    assert len(set(check.LAYERS)) == 30


def wrong(matrix: Any) -> Any:
    """With its first coefficient that is neither zero nor one changed a little, if it has any."""
    rows = [list(row) for row in matrix]
    for row in rows:
        for index, value in enumerate(row):
            if value not in (0, 1):
                row[index] = value + Fraction(1, 100)
                return tuple(map(tuple, rows))
    return matrix


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_wrong_coefficient_fails(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.run(CPU, [backend]) == 0
    add, to_tensor = lowering._Constants.add, lowering.to_tensor
    monkeypatch.setattr(lowering._Constants, "add", lambda self, *matrices: add(self, *map(wrong, matrices)))
    monkeypatch.setattr(pytorch, "to_tensor", lambda matrix, *rest: to_tensor(wrong(matrix), *rest))
    engine.prepare.cache_clear()
    assert check.run(CPU, [backend]) > 0
    assert f"{backend}: wrong for a weight of shape (24, 24, 3, 3): the gradient is off by" in capsys.readouterr().out


def test_an_error_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(check, "fused_orth_loss", broken)
    assert check.run(CPU, ["torch"]) == 30
    assert "torch: wrong for a weight of shape (24, 40): RuntimeError: out of memory\n" in capsys.readouterr().out


def test_no_backend_is_a_failure() -> None:
    assert check.run(CPU, ["cuda"]) == 1


@pytest.mark.slow
def test_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One precision, repaired as in all tests; and with a wrong coefficient."""
    tables = pytest.importorskip("ocnn_fused.backends.triton.tables")
    from triton_support import execution

    few = [layer for layer in check.LAYERS if layer.shape in ((24, 40), (16, 16, 3), (24, 24, 3, 3), (24, 1, 3, 3))]
    monkeypatch.setattr(check, "LAYERS", few)
    monkeypatch.setattr(check, "precisions", lambda backend, device: ["ieee"])
    with execution():
        assert check.run(CPU, ["triton"]) == 0, capsys.readouterr().out
        matrix = tables._Builder.matrix
        monkeypatch.setattr(tables._Builder, "matrix", lambda self, of, *rest: matrix(self, wrong_by_far(of), *rest))
        from ocnn_fused.backends.triton import launch

        launch.clear_caches()
        engine.prepare.cache_clear()
        assert check.run(CPU, ["triton"]) > 0
        launch.clear_caches()


def wrong_by_far(matrix: Any) -> Any:
    return tuple(tuple(value * 2 if value not in (0, 1) else value for value in row) for row in matrix)


def test_the_report_of_a_gpu_has_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails is reported, and the others run all the same."""
    import gpu_report

    every = gpu_report.parts(tmp_path, quick=True)
    assert all((gpu_report.ROOT / part.arguments[0]).is_file() for part in every if part.arguments[0] != "-m")
    codes = {"good": "print('fine')", "bad": "raise SystemExit('not fine')"}
    parts = [gpu_report.Part(name, ("-c", code)) for name, code in codes.items()]
    monkeypatch.setattr(gpu_report, "parts", lambda out, quick: parts)
    with pytest.raises(SystemExit, match="1 of 2 parts failed"):
        gpu_report.main(["--out", str(tmp_path)])
    report = (tmp_path / "report.md").read_text()
    assert "## good: passed" in report
    assert "## bad: failed with exit code 1" in report
    assert "not fine" in report
