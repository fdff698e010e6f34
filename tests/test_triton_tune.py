"""Tuning: an explicit list, a report, and a memory on disk; never unasked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import Case
from plans import chosen, problem
from triton_support import DEVICE, candidates, execution, on_device

from ocnn_fused import explain, tune
from ocnn_fused.backends import device as devices
from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.device import SPECS, spec_of
from ocnn_fused.backends.triton import config, tuned
from ocnn_fused.backends.triton import tune as tune_module
from ocnn_fused.backends.triton.config import SHIPPED, shipped

#: What TF32 means on the device: AMD's have none.
PRECISION = spec_of(DEVICE).native_precision("tf32")


@pytest.fixture(autouse=True)
def no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCNN_FUSED_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "_found", None)
    tuned._key.cache_clear()
    yield
    tuned._key.cache_clear()


def test_tuning_under_a_default_device() -> None:
    """Tables are made on the host, wherever tensors are made by default."""
    weight = on_device(Case((8, 24)))
    with execution(), torch.device("meta"):
        tune([weight], precision="ieee", measure=lambda step: float(step() is None), report=lambda line: None)


def test_the_fastest_is_found_reported_and_remembered(tmp_path: Path) -> None:
    case = Case((8, 16))
    weight = on_device(case)
    lines: list[str] = []
    calls = iter([3.0, 1.0, RuntimeError("does not fit")] + [2.0] * 20)

    def measure(step: object) -> float:
        step()  # type: ignore[operator]
        result = next(calls)
        if isinstance(result, Exception):
            raise result
        return result

    with execution():
        best = tune([weight], precision=PRECISION, measure=measure, report=lines.append)
    of_device = shipped(spec_of(DEVICE))[PRECISION]
    tried = list(tune_module.candidates(of_device))
    assert tried[: len(of_device)] == list(of_device)
    assert best == tried[1]
    assert len(lines) == len(tried)
    assert "does not fit" in lines[2]
    assert (tmp_path / "tuned.json").exists()

    tuned._found = None  # as in another process
    plan = chosen(problem(case), "triton", weight.device, PRECISION)
    assert tuned.tuned_config(weight.device, PRECISION, [plan]) == best
    assert tuned.tuned_config(weight.device, "bf16", [plan]) is None


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, tuple[int, int]], None]]:
    """Pretends that there is one, of a given name and capability."""

    def pretend(name: str, capability: tuple[int, int]) -> None:
        properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        devices._cuda_spec.cache_clear()

    yield pretend
    devices._cuda_spec.cache_clear()


def test_devices_of_one_model_do_not_share_what_was_measured(a_gpu: Callable[..., None]) -> None:
    device, config = torch.device("cuda", 0), SHIPPED["tf32"][0]
    names = [("NVIDIA GeForce RTX 3090", (8, 6)), ("NVIDIA RTX A6000", (8, 6)), ("NVIDIA RTX A6000", (8, 9))]
    a_gpu(*names[0])
    tuned.remember(device, "tf32", [], config)
    assert tuned.tuned_config(device, "tf32", []) == config
    for other in names[1:]:
        a_gpu(*other)
        tuned._key.cache_clear()  # a device does not change its name within a process
        assert tuned.tuned_config(device, "tf32", []) is None


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
    name: str,
    capability: tuple[int, int],
    spec: str,
    described: str,
    a_gpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_gpu(name, capability)
    monkeypatch.setattr(backend, "unavailable_reason", lambda device: None)
    device = torch.device("cuda", 0)
    assert devices.spec_of(device).name == spec
    text = explain((64, 64, 3, 3), device=device, backend="triton", precision="tf32")
    assert text.splitlines()[0].endswith(f" by backend triton on {described} (modelled, not measured)")


def test_the_geometry_is_that_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lags as the call itself would have, so that what is found is used."""
    cases = [Case((4, 3, 5, 5), 2, dilation=1, padding=2), Case((4, 2, 3), 1, dilation=2, groups=2)]
    plans = []
    monkeypatch.setattr(backend, "run", lambda weights, some, *rest, **options: plans.append(some))
    with execution():  # older versions of triton need its repairs even to be available with a newer numpy
        tune(
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


def test_time_is_taken_on_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("text", ["{", "[1]", '{"cpu|tf32|": 1}'])
def test_an_unreadable_memory_is_no_memory(text: str, tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text(text)
    assert tuned.tuned_config(torch.device("cpu"), "tf32", []) is None


def test_what_another_version_remembers_is_ignored(tmp_path: Path) -> None:
    """Its settings had other names; what this version finds takes their place."""
    cpu, config = torch.device("cpu"), SHIPPED["tf32"][1]
    tuned.remember(cpu, "bf16", [], config)
    entries = json.loads(tuned.cache_path().read_text())
    entries["cpu|tf32|"] = {"block" if name == "tile" else name: value for name, value in asdict(config).items()}
    tuned.cache_path().write_text(json.dumps(entries))
    tuned._found = None  # as in another process
    assert tuned.tuned_config(cpu, "tf32", []) is None
    assert tuned.tuned_config(cpu, "bf16", []) == config
    tuned.remember(cpu, "tf32", [], config)
    tuned._found = None
    assert tuned.tuned_config(cpu, "tf32", []) == config


def test_large_tiles_are_shallower_with_triton_3_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA: as deep as with later versions, apply would spill on sm_80 and sm_120."""
    for spills_early, depth in ((True, 16), (False, 32)):
        monkeypatch.setattr(config, "_spills_early", lambda early=spills_early: early)
        for name, wanted in (("A100", depth), ("MI250", 32)):
            configs = shipped(SPECS[name])
            assert {large.depth for precision in ("tf32", "bf16") for large in configs.get(precision, ())[1:]} == {
                wanted
            }
            assert all(small.tile <= 64 for of_precision in configs.values() for small in of_precision[:1])
