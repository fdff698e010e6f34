"""``pytest benchmarks``: a smoke of every command, and whether what they report can be trusted.

``pytest benchmarks --benchmark-only`` times contenders and commands through pytest-benchmark. Nothing here asserts a
time; each case asserts that the result it timed is right.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, ClassVar

import accuracy
import check
import compare
import contenders
import contention
import definitions
import harness
import latency
import memory
import optimizers
import peers
import promises
import pytest
import ranks
import record
import report
import scaling
import torch
import training_overhead
from bound import plan_of, products_of
from contenders import CONTENDERS, FUSED, REFERENCE, Judge
from pytest_benchmark.fixture import BenchmarkFixture
from record import Environment, Row, Rows
from shapes import NETWORKS, TARGETS, Layer, wrong_tables
from steps import Settings, WrongResultError, make_weights
from tables import milliseconds
from timing import EAGER, GRAPH, CpuTimer, CudaTimer, Effort, interleave, make_timer
from torch import Tensor

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
#: Every kind of layer that a contender may treat in a way of its own, small.
KINDS = (
    Layer("square", (8, 8, 3, 3)),
    Layer("more filters", (24, 4, 3, 3)),
    Layer("strided", (8, 6, 3, 3), 2),
    Layer("patches", (8, 3, 2, 2), 4),
    Layer("even", (6, 5, 4, 4), 2),
    Layer("stem", (10, 3, 7, 7), 2),
    Layer("pointwise", (12, 7, 1, 1), 2),
    Layer("grouped", (12, 4, 3, 3), groups=3),
    Layer("depthwise", (9, 1, 7, 7), groups=9),
    Layer("dilated", (8, 6, 3, 3), 2, dilation=2),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two that wait for each other on a busy machine would make seconds minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command on sizes that take a second."""
    small = {"tiny": (Layer("stem", (8, 3, 3, 3), 2), Layer("block", (8, 8, 3, 3), count=2))}
    monkeypatch.setattr(compare, "NETWORKS", small)
    monkeypatch.setattr(compare, "TARGETS", TARGETS[4:5])
    monkeypatch.setattr(compare, "SMALL", (Layer("small", (8, 8, 3, 3), count=3),))
    monkeypatch.setattr(compare, "PRECISION_LAYERS", (Layer("small", (8, 8, 3, 3)),))
    axes = {name: replace(axis, quick=axis.quick[:3]) for name, axis in scaling.AXES.items()}
    monkeypatch.setattr(scaling, "AXES", axes)
    monkeypatch.setattr(scaling, "THREAD_LAYERS", (Layer("small", (16, 16, 3, 3)),))
    monkeypatch.setattr(memory, "LAYERS", (Layer("small", (64, 64, 3, 3)),))
    monkeypatch.setattr(memory, "LARGEST", Layer("large", (96, 96, 3, 3)))
    monkeypatch.setattr(accuracy, "LAYERS", (Layer("3x3", (8, 8, 3, 3)), Layer("1x1", (12, 4, 1, 1))))
    case = training_overhead.Case("ResNet, 32x32", (1, 1), True, 2, 4, 100, 10)
    monkeypatch.setattr(training_overhead, "CASES", {"resnet18": case})


#: What a smoke of each command is asked for, and the sections that it must keep.
COMMANDS: dict[str, tuple[Callable[..., None], tuple[str, ...], tuple[str, ...]]] = {
    "compare": (
        compare.main,
        ("--shapes", "--network", "tiny", "--foreach", "--precisions"),
        ("shapes", "tiny", "foreach", "precisions"),
    ),
    "training_overhead": (training_overhead.main, (), ("resnet18",)),
    "scaling": (
        scaling.main,
        ("--axis", "channels", "kernel", "layers", "threads"),
        ("channels", "kernel", "layers", "threads"),
    ),
    "memory": (memory.main, (), ("layers",)),
    "accuracy": (accuracy.main, (), ("8x8x3x3, random", "8x8x3x3, near orthogonal")),
    "peers": (peers.main, ("--width", "4", "--batch", "2"), ("width 4, batch 2",)),
    "latency": (latency.main, (), ("import", "first call", "warm call")),
    "contention": (contention.main, (), (contention.LAYER, contention.NETWORK)),
}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("command", COMMANDS)
def test_command(benchmark: BenchmarkFixture, command: str, tmp_path: Path) -> None:
    """Each command from its options to its rows, tables and pictures."""
    main, arguments, sections = COMMANDS[command]
    options = [*arguments, "--quick", "--repeats", "2", "--device", "cpu", "--threads", "1", "--out", str(tmp_path)]
    benchmark.pedantic(main, args=(options,), rounds=1)
    rows = Rows(record.load(tmp_path, command))
    assert set(sections) <= set(rows.names("section"))
    for row in rows:
        assert row.p20 <= row.p50 <= row.p80
        assert row.environment.torch == torch.__version__
        assert row.environment.revision
    module = report.COMMANDS[command]
    text = module.tables(rows)
    assert all(len({line.count("|") for line in table}) == 1 for table in _tables(text))
    assert all(path.stat().st_size > 10_000 for path in module.draw(rows, tmp_path / "figures"))


def test_optimizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of every optimiser that is there, checked and timed, spectra, and the tables of the page."""
    layers = (
        Layer("conv", (32, 16, 3, 3)),
        Layer("strided", (32, 32, 3, 3), 2),
        Layer("deep", (16, 1, 3, 3), groups=16),
    )
    monkeypatch.setattr(optimizers, "MODELS", {"resnet18": layers})
    monkeypatch.setattr(optimizers, "LAYERS", layers)
    options = ["--network", "resnet18", "--repeats", "1", "--device", "cpu", "--threads", "1", "--out", str(tmp_path)]
    optimizers.main(options)
    rows = Rows(record.load(tmp_path, optimizers.COMMAND))
    timed = rows.where(measure=optimizers.STEP).names("contender")
    assert {optimizers.OPERATOR, optimizers.FLAT, "torch AdamW", "torch SGD"} <= set(timed)
    text = (record.ROOT / "docs" / "optimizer.md").read_text()
    written = optimizers.with_tables(text, rows)
    assert "| resnet18" in written or not any(name.endswith("float32") for name in timed)
    assert "| 32x32x3x3 /2" in written
    assert optimizers.with_tables(written, rows) == written


def test_a_muon_that_is_wrong_is_refused() -> None:
    layers = (Layer("conv", (32, 16, 3, 3)),)
    grads = optimizers.gradients(layers)
    flat = next(one for one in optimizers.CONTENDERS if one.name == optimizers.FLAT)
    one = optimizers.prepared(flat, layers, grads)
    one.step()
    optimizers.verify(one, layers, grads)
    one.step()
    with pytest.raises(WrongResultError, match="the update of 32x16x3x3 is off by"):
        optimizers.verify(one, layers, [grads[0].flip(0)])


def _tables(text: str) -> list[list[str]]:
    """Every table's lines."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return [block for block in blocks if block[0].startswith("| ")]


@pytest.mark.usefixtures("_small")
def test_the_pages_are_made_of_kept_rows_alone(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    compare.main(
        ["--network", "tiny", "--foreach", "--quick", "--repeats", "2", "--threads", "1", "--out", str(results)]
    )
    written = report.write_pages(results, docs)
    page = (docs / "benchmarks.md").read_text()
    assert all(len({line.count("|") for line in table}) == 1 for table in _tables(page))
    assert {docs / "benchmarks.md", docs / "scale.md"} <= set(written)
    assert all(f"figures/{path.name}" in page for path in written if path.suffix == ".png")
    median = Rows(record.load(results, "compare")).median(subject="8x8x3x3", contender=FUSED)
    assert f" {milliseconds(median)} " in page
    assert report.write_pages(results, docs) == written
    assert (docs / "benchmarks.md").read_text() == page


def test_an_interrupted_run_keeps_its_rows(tmp_path: Path) -> None:
    """Each row is shown when it is there, and Ctrl-C leaves those that are; older rows of the others stay."""
    old = [row("fused", 1.0, section="shapes", subject="1x1x1x1"), row("fused", 1.0, section="other")]
    record.save(tmp_path, "compare", old)
    command = [sys.executable, "benchmarks/compare.py", "--shapes", "--quick", "--threads", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=record.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    )  # fmt: skip
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        if line.startswith("shapes "):
            shown.append(line)
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 128 + signal.SIGINT
    assert re.search(r"^Interrupted: \d+ rows are kept\.$", rest, re.M)
    assert re.search(r"^\| layer ", rest, re.M)
    subject = shown[0].split()[1].rstrip(",")
    kept = Rows(record.load(tmp_path, "compare"))
    assert len(kept.where(section="shapes", subject=subject, contender=FUSED)) == 1
    assert len(kept.where(section="shapes").names("subject")) < len(TARGETS)
    assert kept.every[:2] == old


def test_a_budget_takes_the_smallest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One job always runs; what cannot fit is named."""
    options = ["--shapes", "--threads", "1", "--repeats", "1", "--contenders", FUSED, "--out", str(tmp_path)]
    compare.main([*options, "--budget", "1e-9"])
    (measured,) = Rows(record.load(tmp_path, "compare")).names("subject")
    assert measured == "16x4x7x7"
    said = capsys.readouterr().out
    left_out = re.search(r"^Left out to end within 1e-09 s: (.*); --budget gives more$", said, re.M)
    assert left_out is not None
    assert set(left_out[1].split(", ")) == {target.layer.label for target in TARGETS} - {measured}


def test_a_round_will_do_where_time_is_limited() -> None:
    """Of calls that become slow, as they do beside busy processes."""
    seconds = 0.0

    def clock() -> float:
        return seconds

    def call() -> None:
        nonlocal seconds
        seconds += 0.01

    for effort, rounds in ((Effort(0.0, 3), 3), (Effort(0.0, 3, limit=0.0), 1)):
        (samples,) = interleave({"call": call}, CpuTimer(clock), effort).values()
        assert len(samples) == rounds


# ----------------------------------------------------------------------------------------------------------------------
# Contenders
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != contenders.COMPILED])
@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: layer.name)
def test_contenders_compute_what_they_claim(name: str, layer: Layer) -> None:
    settings = Settings(dtype=torch.float64)
    if (reason := CONTENDERS[name].refusal(layer)) is not None:
        assert "only" in reason
        return
    Judge(make_weights([layer], settings), [layer], gradient=True).check(CONTENDERS[name])


def test_the_compiled_reference_computes_the_paper_s_loss() -> None:
    layer = KINDS[2]
    Judge(make_weights([layer], Settings()), [layer], gradient=True).check(CONTENDERS[contenders.COMPILED])


@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: layer.name)
def test_the_claimed_loss_is_the_oracle_s(layer: Layer) -> None:
    """The claim that all exact contenders are judged by, against the loops of the tests."""
    from oracle import Case, loss_and_grad  # accuracy.py has made tests/ importable

    [weight] = make_weights([layer], Settings(dtype=torch.float64))
    case = Case(layer.shape, stride=layer.stride, dilation=layer.dilation, groups=layer.groups)
    loss, grad = loss_and_grad(weight.detach(), case)
    mine = definitions.paper(weight, layer)
    assert float(mine.detach()) == pytest.approx(float(loss), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(mine, weight)[0], torch.as_tensor(grad), rtol=1e-10, atol=1e-10)


def test_the_authors_formula_prefers_zero_to_an_orthogonal_kernel() -> None:
    """At stride 2 a padding of 1 never looks at lag 0: what the docs say of it holds for the claim."""
    from oracle import Case

    layer = Layer("strided", (64, 32, 3, 3), 2)
    orthogonal = Case(layer.shape, stride=2).orthogonal(0).double()
    assert float(definitions.paper(orthogonal, layer)) == pytest.approx(0, abs=1e-9)
    zero = torch.zeros_like(orthogonal)
    assert float(definitions.authors(zero, layer)) == pytest.approx(8.0)
    assert float(definitions.authors(orthogonal, layer)) > 9


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[1]
    wrong = replace(CONTENDERS[FUSED], loss=lambda weight, _: 1.01 * CONTENDERS[REFERENCE].loss(weight, layer))
    monkeypatch.setitem(CONTENDERS, FUSED, wrong)
    with pytest.raises(WrongResultError, match="fused, 64x64x3x3: the loss is off by"):
        contenders.calls_of((FUSED,), make_weights([layer], Settings()), [layer], Settings())


def test_a_wrong_gradient_is_refused() -> None:
    layer = LAYERS[1]
    [weight] = weights = make_weights([layer], Settings())
    [loss] = CONTENDERS[FUSED].step(weights, [layer], gradient=True)
    assert weight.grad is not None
    weight.grad[0, 0, 0, 0] *= 2
    weight.grad *= 1.001
    with pytest.raises(WrongResultError, match="the gradient is off by"):
        Judge(weights, [layer], gradient=True).check_outcomes("ours", definitions.paper, [loss])


def test_layers_of_equal_weight_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Layer] = []

    def claim(weight: Tensor, layer: Layer) -> Tensor:
        asked.append(layer)
        return definitions.paper(weight, layer)

    layers = [KINDS[0], KINDS[2], KINDS[0]]
    judge = Judge(make_weights(layers, Settings()), layers, gradient=True)
    for index in range(3):
        judge.expected(claim, index)
    assert asked == layers[:2]
    judge.weights[2].data[0] += 1
    judge.expected(claim, 2)
    assert asked == layers


@pytest.mark.parametrize("name", [REFERENCE, FUSED])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_step(benchmark: BenchmarkFixture, layer: Layer, name: str) -> None:
    weights = make_weights([layer], Settings())
    Judge(weights, [layer], gradient=True).check(CONTENDERS[name])
    benchmark.group = f"{layer.name} {layer.label}"
    losses = benchmark(CONTENDERS[name].step, weights, [layer], True)
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


# ----------------------------------------------------------------------------------------------------------------------
# Rows
# ----------------------------------------------------------------------------------------------------------------------

HERE = Environment.of(Settings())


def row(contender: str, seconds: float, **known: Any) -> Row:
    fields: dict[str, Any] = {
        "command": "compare", "section": "resnet34", "subject": "64x64x3x3", "measure": compare.BOTH, "unit": "s",
        "disturbance": 0.0, "environment": HERE, "details": {"count": 1, "plan": "toom/row"},
    }  # fmt: skip
    return Row.of([seconds] * 3, contender=contender, **(fields | known))


def test_rows_come_back_as_they_were_kept(tmp_path: Path) -> None:
    rows = [row(REFERENCE, 2.0), row(FUSED, 1.0, disturbance=None)]
    record.save(tmp_path, "compare", rows)
    assert record.load(tmp_path, "compare") == rows
    assert len((tmp_path / "compare.csv").read_text().splitlines()) == 3
    kept = json.loads((tmp_path / "compare.json").read_text())[0]
    assert {"p20", "p50", "p80", "disturbance"} <= set(kept)
    assert {"device", "hardware", "torch", "ocnn_fused", "revision"} <= set(kept["environment"])


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    record.save(tmp_path, "compare", [row(FUSED, 1.0), row(FUSED, 5.0, section="vgg16")])
    record.save(tmp_path, "compare", [row(FUSED, 2.0)])
    kept = Rows(record.load(tmp_path, "compare"))
    assert kept.median(section="resnet34") == 2.0
    assert kept.median(section="vgg16") == 5.0
    assert len(kept) == 2


def test_check_names_what_has_become_slower() -> None:
    old = [row(REFERENCE, 10.0), row(FUSED, 1.0)]
    same_machine_slower_day = [row(REFERENCE, 20.0), row(FUSED, 2.1)]
    changes, skipped = check.compare(same_machine_slower_day, old)
    assert (len(changes), skipped) == (1, 0)
    assert check.regressions(changes, 0.15) == []
    changes, _ = check.compare([row(REFERENCE, 10.0), row(FUSED, 1.2)], old)
    [found] = check.regressions(changes, 0.15)
    assert found.growth == pytest.approx(0.2)


def test_check_leaves_out_other_machines_and_disturbed_rows() -> None:
    old = [row(REFERENCE, 10.0), row(FUSED, 1.0)]
    elsewhere = replace(HERE, hardware="another")
    for known in ({"environment": elsewhere}, {"disturbance": 0.5}):
        changes, skipped = check.compare([row(REFERENCE, 10.0, **known), row(FUSED, 2.0, **known)], old)
        assert (changes, skipped) == ([], 1)


def test_check_exits_with_an_error_for_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    record.save(old, "compare", [row(REFERENCE, 10.0), row(FUSED, 1.0)])
    record.save(new, "compare", [row(REFERENCE, 10.0), row(FUSED, 1.5)])
    check.main([str(old), str(old)])
    assert "None has risen" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1 ratios have risen by more than 15%"):
        check.main([str(new), str(old)])
    assert "+50%" in capsys.readouterr().out


def test_promises_say_what_holds_what_does_not_and_what_was_not_measured() -> None:
    whole = {"subject": "resnet34", "details": {"count": 36, "plan": "mixed", "role": "network"}}
    rows = [row(name, seconds, **whole) for name, seconds in ((REFERENCE, 8.0), (FUSED, 1.0), (contenders.KERNEL, 0.5))]
    kept = {command: Rows(rows if command == "compare" else []) for command in report.COMMANDS}
    found = {promise.what: promise for promise in promises.promises(kept)}
    assert found["resnet34, one call: reference / fused"].holds is False
    assert found["resnet50, one call: reference / fused"].holds is None
    assert found["resnet34: all lags / plain kernel orthogonality"].found == "2x"
    assert found["fused is the fastest exact contender"].holds is True
    assert "**does not hold**" in promises.table(kept)


def test_a_row_in_which_another_is_faster_says_so() -> None:
    rows = Rows([row(REFERENCE, 4.0), row(contenders.FOURIER, 1.0), row(FUSED, 2.0)])
    assert "FFT by 2.00x" in compare.exact_table(rows, "resnet34")


def test_disturbance_is_told() -> None:
    assert harness.disturbed([row(FUSED, 1.0)]) == ""
    assert "up to 30% of the CPU during 1 of 2 rows" in harness.disturbed(
        [row(FUSED, 1.0), row(FUSED, 1.0, disturbance=0.3)]
    )


def test_exponents_are_fitted_over_the_larger_sizes() -> None:
    sizes = [16, 32, 64, 128, 256, 512]
    assert scaling.slope(sizes, [size**3 for size in sizes]) == pytest.approx(3)
    assert scaling.slope(sizes, [1, 1, 1, *(size**2 for size in sizes[3:])]) == pytest.approx(2)


def test_a_package_that_is_not_there_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = peers.Peer("absent layers", peers._plain, "no_such_package", "no-such-package")
    monkeypatch.setattr(peers, "PEERS", (peers.PEERS[0], absent))
    peers.main(["--quick", "--repeats", "1", "--width", "4", "--batch", "2", "--threads", "1", "--out", str(tmp_path)])
    rows = Rows(record.load(tmp_path, "peers"))
    assert rows.get(subject="absent layers", measure=peers.MISSING) is not None
    assert "not installed" in peers.tables(rows)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks
# ----------------------------------------------------------------------------------------------------------------------


def test_more_ranks_than_layers_leave_the_largest_alone() -> None:
    layers = [(4.0, 40.0, 1), (1.0, 10.0, 4)]
    assert ranks.beyond(layers, 2) == (40.0, 40.0, 0)
    busiest, mean, idle = ranks.beyond(layers, 8)
    assert (busiest, mean, idle) == (40.0, 10.0, 3)


def test_two_processes_share_the_layers_and_send_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks.processes(2, "ddp")
    shares = [set(one["share"]) for one in found]
    assert not shares[0] & shares[1]
    assert len(shares[0] | shares[1]) == len(ranks.layer_seconds(Effort.exactly(1)))
    for one in found:
        assert one[ranks.WITH] == one[ranks.WITHOUT]
        assert one[ranks.WITH]["bytes"] > 0


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
    assert {name: median(sample) for name, sample in samples.items()} == pytest.approx(
        {name: (1 + cost) * 1e-3 for name, cost in costs.items()}
    )
    assert all(len(sample) == 4 for sample in samples.values())


def test_every_mode_of_the_timer_has_its_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A timer with two modes, here both on the CPU: rows are measured once, and told apart by their section."""

    class TwoModes(CpuTimer):
        modes: tuple[str, ...] = (EAGER, GRAPH)
        prepared: ClassVar[Counter[str]] = Counter()

        def prepare(self, function: Callable[[], object], mode: str) -> Callable[[], object]:
            self.prepared[mode] += 1
            return function

    monkeypatch.setattr(compare, "TARGETS", TARGETS[4:5])
    monkeypatch.setattr(harness, "make_timer", lambda device: TwoModes())
    compare.main(["--shapes", "--repeats", "1", "--threads", "1", "--out", str(tmp_path)])
    kept = Rows(record.load(tmp_path, "compare"))
    assert kept.names("section") == ["shapes", "shapes, cuda graph"]
    assert TwoModes.prepared[EAGER] == TwoModes.prepared[GRAPH] == len(kept.where(section="shapes"))


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
    known = {"subject": "network", "measure": training_overhead.WALL, "details": {"batch": 4, "wanted_batch": 16}}
    rows = Rows([row("plain", 2.0, **known), row("reg() alone", 0.4, **known)])
    assert training_overhead.plain_step(rows, training_overhead.WALL) == pytest.approx(8.0)
    assert training_overhead.share_of_step(rows, training_overhead.WALL, "reg()") == pytest.approx(0.05)


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
    def verdict(disturbed: float, reference: float) -> str:
        known = {"section": contention.LAYER}
        fused = [row(f"{FUSED}, quiet", 1.0, **known), row(f"{FUSED}, disturbed", disturbed, **known)]
        rows = [*fused, row(f"{REFERENCE}, quiet", 9.0, **known), row(f"{REFERENCE}, disturbed", reference, **known)]
        return contention.tables(Rows(rows))

    assert "4x met, ahead 6x met" in verdict(3.0, 30.0)
    assert "4x missed, ahead 6x missed" in verdict(5.0, 29.0)
