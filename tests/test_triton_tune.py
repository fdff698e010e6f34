"""Tuning: an explicit list, a report, and a memory on disk; never unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Case
from triton_support import execution, on_device

from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.triton.config import SHIPPED
from ocnn_fused.backends.triton.model import choose_plan, spec_of
from ocnn_fused.ops import plan_for


@pytest.fixture
def tune_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import importlib

    module = importlib.import_module("ocnn_fused.tune")
    monkeypatch.setenv("OCNN_FUSED_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_found", None)
    return module


def test_the_fastest_is_found_reported_and_remembered(tune_module, tmp_path: Path) -> None:
    weight = on_device(Case((8, 16)))
    lines: list[str] = []
    calls = iter([3.0, 1.0, RuntimeError("does not fit")] + [2.0] * 20)

    def measure(step: object) -> float:
        step()  # type: ignore[operator]
        result = next(calls)
        if isinstance(result, Exception):
            raise result
        return result

    with execution():
        best = tune_module.tune([weight], precision="tf32", measure=measure, report=lines.append)
    tried = list(tune_module.candidates(SHIPPED["tf32"]))
    assert tried[: len(SHIPPED["tf32"])] == list(SHIPPED["tf32"])
    assert best == tried[1]
    assert len(lines) == len(tried)
    assert "does not fit" in lines[2]
    assert (tmp_path / "tuned.json").exists()

    tune_module._found = None  # as in another process
    spec = spec_of(weight.device)
    plan = choose_plan(plan_for(weight.shape, [], [], [], 1, "auto", backend), spec, "tf32")
    assert tune_module.tuned_config(spec.name, "tf32", [plan]) == best
    assert tune_module.tuned_config(spec.name, "bf16", [plan]) is None


def test_an_unreadable_memory_is_no_memory(tune_module, tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text("{")
    assert tune_module.tuned_config("A100", "tf32", []) is None
