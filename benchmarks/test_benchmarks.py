"""pytest-benchmark groups: ``pytest benchmarks --benchmark-only`` times fused and reference side by side.

Nothing here asserts a time; each case asserts that the result it timed is right.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import ClassVar

import compare
import contention
import panels
import pytest
import steps
import torch
import training_overhead
from bound import plan_of, products_of
from pytest_benchmark.fixture import BenchmarkFixture
from report import Result, Section, verdict
from shapes import NETWORKS, TARGETS, Layer, wrong_tables
from steps import IMPLEMENTATIONS, Implementation, Settings, check_step, make_weights, run_step
from timing import EAGER, GRAPH, CpuTimer, CudaTimer, Effort, Samples, interleave, make_timer
from torch import Tensor

from ocnn_fused import _extension
from ocnn_fused.plan import Plan

LAYERS = (
    Layer("stem", (64, 3, 7, 7), 2),
    Layer("square", (64, 64, 3, 3)),
    Layer("strided", (128, 64, 3, 3), 2),
    Layer("pointwise", (512, 128, 1, 1)),
    Layer("discriminator", (128, 64, 4, 4), 2),
    Layer("depthwise", (192, 1, 3, 3), groups=192),
    Layer("grouped", (128, 32, 3, 3), groups=4),
)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_step(benchmark: BenchmarkFixture, layer: Layer, implementation: Implementation) -> None:
    weights = make_weights([layer], Settings())
    check_step(weights, [layer], gradient=True)
    benchmark.group = f"{layer.name} {layer.label}"
    losses = benchmark(run_step, implementation, weights, [layer], True)
    assert torch.isfinite(losses[0])
    assert weights[0].grad is not None


def test_tables_add_up() -> None:
    assert wrong_tables() == []


def test_layers_are_distinct() -> None:
    for layers in NETWORKS.values():
        assert len({layer.geometry for layer in layers}) == len(layers)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_bound_does_all_products_of_the_plan(layer: Layer) -> None:
    plan = plan_of(layer, Settings())
    counted = sum(left.numel() * right.shape[-1] for left, right, _ in products_of([layer], Settings()))
    assert counted == (0 if isinstance(plan, Plan) and plan.small else plan.work.multiply_adds)


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[1]
    monkeypatch.setattr(steps, "fused_orth_loss", lambda weight, *_, **__: 1.01 * weight.square().sum())
    with pytest.raises(steps.WrongResultError, match="the loss is off by"):
        check_step(make_weights([layer], Settings()), [layer], gradient=True)


def test_a_missed_target_shows_although_the_layer_also_stands_without_one() -> None:
    samples = {"reference": Samples([2.0]), "fused": Samples([1.0])}
    plain = Result("64x64x3x3", "layer1", 6, "toom/row", samples, {})
    report = verdict([Section("targets", [replace(plain, target_ratio=3.0)]), Section("network", [plain])])
    assert "1 of 2 targets missed" in report
    assert "64x64x3x3: 2.00x, target 3x" in report


# ----------------------------------------------------------------------------------------------------------------------
# The timer of a GPU, on a GPU made of a list of what it was told
# ----------------------------------------------------------------------------------------------------------------------


class FakeCuda:
    """Stands in for ``torch.cuda``: writes down what happens; every recorded event is a millisecond after the last."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock = 0.0
        self.synchronized = False

    def Event(self, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self)

    def synchronize(self) -> None:
        self.synchronized = True
        self.log.append("synchronize")

    def Stream(self) -> FakeStream:  # noqa: N802
        return FakeStream(self, "side")

    def current_stream(self) -> FakeStream:
        return FakeStream(self, "current")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def graph(self, graph: SimpleNamespace) -> Iterator[None]:
        self.log.append("capture")
        yield
        self.log.append("captured")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.clock += 1.0
        self.at = self.cuda.clock
        self.cuda.log.append("event")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.cuda.synchronized, "the device has not come to the events yet"
        return end.at - self.at


def fake_timer() -> tuple[FakeCuda, CudaTimer]:
    cuda = FakeCuda()
    return cuda, CudaTimer(lambda: cuda.log.append("flush"), cuda)


def test_cuda_calls_are_timed_by_events_after_a_flush() -> None:
    cuda, timer = fake_timer()

    def call() -> None:
        cuda.log.append("call")
        cuda.clock += 4.0

    assert timer(call, 3) == pytest.approx(5e-3)
    assert cuda.log == ["flush", "event", "call", "event"] * 3 + ["synchronize"]


def test_a_graph_is_captured_after_a_call_on_another_stream() -> None:
    cuda, timer = fake_timer()

    def call() -> None:
        cuda.log.append("call")

    assert timer.prepare(call, EAGER) is call
    replay = timer.prepare(call, GRAPH)
    before = ["side waits for current", "enter side", "call", "leave side", "current waits for side"]
    assert cuda.log == [*before, "capture", "call", "captured"]
    replay()
    assert cuda.log[-1] == "replay"


def test_cuda_contestants_are_interleaved_like_others() -> None:
    cuda, timer = fake_timer()
    costs = {(mode, which): 10.0 * (1 + index) for index, mode in enumerate(timer.modes) for which in ("a", "b")}

    def spend(cost: float) -> None:
        cuda.clock += cost

    samples = interleave({name: partial(spend, cost) for name, cost in costs.items()}, timer, Effort.exactly(4))
    assert {name: sample.median for name, sample in samples.items()} == pytest.approx(
        {name: (1 + cost) * 1e-3 for name, cost in costs.items()}
    )
    assert all(len(sample.seconds) == 4 for sample in samples.values())


def test_every_mode_of_the_timer_has_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer with two modes, here both on the CPU: rows are measured once, and told apart by their section."""

    class TwoModes(CpuTimer):
        modes: tuple[str, ...] = (EAGER, GRAPH)
        prepared: ClassVar[Counter[str]] = Counter()

        def prepare(self, function: Callable[[], object], mode: str) -> Callable[[], object]:
            self.prepared[mode] += 1
            return function

    monkeypatch.setattr(compare, "TARGETS", TARGETS[:1])
    options = compare.parse(["--shapes", "--repeats", "1", "--no-memory"])
    sections = compare.measure(options, Settings(), TwoModes())
    assert [section.title for section in sections] == [
        "Single shapes with targets",
        "Single shapes with targets, cuda graph",
    ]
    assert TwoModes.prepared[EAGER] == TwoModes.prepared[GRAPH] == len(sections[0].results[0].samples)
    assert sections[0].results[0].samples["fused"] is not sections[1].results[0].samples["fused"]


@pytest.mark.skipif(_extension.module is None, reason="the compiled backend is left out")
def test_panels_and_the_blas_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[bool] = []

    def step(
        implementation: Implementation, weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool
    ) -> Sequence[Tensor]:
        seen.append(panels_allowed())
        return run_step(implementation, weights, layers, gradient)

    monkeypatch.setattr(compare, "TARGETS", TARGETS[4:5])
    monkeypatch.setattr(panels, "run_step", step)
    compare.main(["--panels", "--shapes", "--repeats", "1"])
    assert set(seen) == {True, False}
    assert "| 64x64x3x3 |" in capsys.readouterr().out
    assert panels_allowed()


def panels_allowed() -> bool:
    """Whether panels are allowed now."""
    _extension.module.use_panels(before := _extension.module.use_panels(True))
    return before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, compare.__file__, "--device", "cuda", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == f"error: device 'cuda' needs a GPU, and torch {torch.__version__} sees none\n"
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        make_timer("tpu")


def test_overhead_at_another_batch_scales_the_plain_step_alone() -> None:
    def seconds(value: float) -> Samples:
        return Samples([value, value + 10.0])  # a slow second round, for all alike

    steps_seconds = {"plain": 2.0, "reference": 6.0, "reg()": 2.5, "add_grad_": 2.2}
    alone = {f"{which} alone": Samples([time]) for which, time in (("reference", 4.0), ("reg()", 0.4))}
    samples = {which: seconds(time) for which, time in steps_seconds.items()} | alone
    case = training_overhead.Case("network", (1,), cifar=True, batch=4, wanted_batch=16)
    result = training_overhead.Result(case, {"wall": samples}, None)
    assert result.adds("wall", "reg()") == pytest.approx(0.5)
    assert result.ratios("wall", "reg()") == pytest.approx((0.125, 0.1))
    assert result.share_of_step("wall", "reg()") == pytest.approx(0.4 / (4 * 7.0))  # 7: median of 2 and 12


def test_contention_takes_turns_with_sleeping_and_busy_neighbours() -> None:
    told: list[bool] = []

    class Recorded(contention.Neighbours):
        def disturb(self, disturbing: bool) -> None:
            told.append(disturbing)

    case = contention.layer_case()
    result = contention.measure(case, Recorded([]), rounds=2)
    assert {len(samples.seconds) for samples in result.samples.values()} == {2}
    assert set(result.samples) == {(side, disturbed) for side in IMPLEMENTATIONS for disturbed in (False, True)}
    assert set(told) == {False, True}
    assert "| 64x64x3x3 | fused |" in contention.table([result])


def test_neighbours_are_busy_only_when_told() -> None:
    def is_stopped(process: subprocess.Popen[bytes]) -> bool:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def assert_soon(stopped: bool) -> None:
        end = monotonic() + 10  # a signal waits until its process has a core
        while any(is_stopped(process) != stopped for process in processes) and monotonic() < end:
            sleep(0.01)
        assert all(is_stopped(process) == stopped for process in processes)

    with contention.Neighbours.beside_us(2) as neighbours:
        processes = neighbours.processes
        assert_soon(stopped=True)
        neighbours.disturb(True)
        assert_soon(stopped=False)
        neighbours.disturb(False)
        assert_soon(stopped=True)
    assert all(process.returncode is not None for process in processes)


def test_contention_verdicts() -> None:
    case = contention.Case("layer", contention.Limits(slower=4.0, ahead=6.0), {})

    def verdicts(disturbed: float, reference: float) -> list[bool]:
        samples: dict[tuple[Implementation, bool], Samples] = {
            ("fused", False): Samples([1.0]),
            ("fused", True): Samples([disturbed]),
            ("reference", False): Samples([9.0]),
            ("reference", True): Samples([reference]),
        }
        return [met for met, _ in contention.Result(case, samples).verdicts()]

    assert verdicts(3.0, 30.0) == [True, True]
    assert verdicts(5.0, 29.0) == [False, False]
