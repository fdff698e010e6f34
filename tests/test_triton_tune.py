"""Tuning: an explicit list, a report, and a memory on disk; never unasked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import Case
from triton_support import candidates, execution, on_device, plan_named

from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.triton import model
from ocnn_fused.backends.triton.config import SHIPPED
from ocnn_fused.backends.triton.model import choose_plan, spec_of
from ocnn_fused.ops import plan_for


@pytest.fixture
def tune_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import importlib

    module = importlib.import_module("ocnn_fused.tune")
    monkeypatch.setenv("OCNN_FUSED_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_found", None)
    module._key.cache_clear()
    yield module
    module._key.cache_clear()


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
    assert tune_module.tuned_config(weight.device, "tf32", [plan]) == best
    assert tune_module.tuned_config(weight.device, "bf16", [plan]) is None


def a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    major, minor = capability
    properties = SimpleNamespace(name=name, major=major, minor=minor)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    model._cuda_spec.cache_clear()


@pytest.fixture
def unknown_devices() -> Iterator[None]:
    yield
    model._cuda_spec.cache_clear()


@pytest.mark.usefixtures("unknown_devices")
def test_devices_of_one_model_do_not_share_what_was_measured(tune_module, monkeypatch: pytest.MonkeyPatch) -> None:
    device, config = torch.device("cuda", 0), SHIPPED["tf32"][0]
    names = [("NVIDIA GeForce RTX 3090", (8, 6)), ("NVIDIA RTX A6000", (8, 6)), ("NVIDIA RTX A6000", (8, 9))]
    a_gpu(monkeypatch, *names[0])
    tune_module._remember(tune_module._key(device, "tf32", ()), config)
    assert tune_module.tuned_config(device, "tf32", []) == config
    for other in names[1:]:
        a_gpu(monkeypatch, *other)
        tune_module._key.cache_clear()  # a device does not change its name within a process
        assert tune_module.tuned_config(device, "tf32", []) is None


@pytest.mark.usefixtures("unknown_devices")
@pytest.mark.parametrize(
    ("name", "capability", "spec", "described"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "A100", "A100, tf32"),
        ("NVIDIA RTX A1000", (8, 6), "RTX 4090", "NVIDIA RTX A1000 (sm_86), taken for RTX 4090, tf32"),
        ("NVIDIA H100 PCIe", (9, 0), "H100", "H100, tf32"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "RTX 4090", "RTX 4090, tf32"),
        ("Tesla T4", (7, 5), "T4", "T4, ieee"),
        ("NVIDIA GeForce RTX 2080", (7, 5), "T4", "NVIDIA GeForce RTX 2080 (sm_75), taken for T4, ieee"),
        ("Tesla V100", (7, 0), "GTX 1080 Ti", "Tesla V100 (sm_70), taken for GTX 1080 Ti, ieee"),
        ("NVIDIA B200", (10, 0), "H100", "NVIDIA B200 (sm_100), taken for H100, tf32"),
        ("something new", (13, 0), "RTX 4090", "something new (sm_130), taken for RTX 4090, tf32"),
    ],
)
def test_devices_are_known_by_name_or_by_relation(
    name: str, capability: tuple[int, int], spec: str, described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch, name, capability)
    device = torch.device("cuda", 0)
    assert spec_of(device).name == spec
    plan = plan_named(Case((64, 64, 3, 3)), "toom/row")
    assert plan.explain(device=device).splitlines()[0] == f"{described} (modelled, not measured)"


def test_the_geometry_is_that_of_the_layers(tune_module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lags as the call itself would have, so that what is found is used."""
    cases = [Case((4, 3, 5, 5), 2, dilation=1, padding=2), Case((4, 2, 3), 1, dilation=2, groups=2)]
    plans = []
    monkeypatch.setattr(backend, "run", lambda weights, some, *rest, **options: plans.append(some))
    tune_module.tune(
        [on_device(case) for case in cases],
        [case.stride for case in cases],
        dilations=[case.dilation for case in cases],
        groups=[case.groups for case in cases],
        paddings=[case.padding for case in cases],
        measure=lambda step: step() or 1.0,
        report=lambda line: None,
    )
    for plan, case in zip(plans[0], cases, strict=True):
        assert plan.axes == candidates(case)[0].axes
        assert plan.groups == case.groups


def test_time_is_taken_on_the_device_of_the_weights(tune_module, monkeypatch: pytest.MonkeyPatch) -> None:
    current, recorded = [0], []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(current[-1])

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: object) -> float:
            return 20.0

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert tune_module._cuda_seconds(torch.device("cuda", 1), lambda: None) == pytest.approx(2e-3)
    assert recorded == [1, 1]


def test_an_unreadable_memory_is_no_memory(tune_module, tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text("{")
    assert tune_module.tuned_config(torch.device("cpu"), "tf32", []) is None
