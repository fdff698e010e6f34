"""The compiled backend: every kind of plan and tile edge, the same bits each time, no memory kept or left unwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BACKENDS, TOLERANCES, assert_matches_definition, errors, fused
from oracle import Case
from plans import job, plan_named

from ocnn_fused import _extension, fused_orth_loss, fused_orth_loss_foreach
from ocnn_fused.backends import cpu
from ocnn_fused.backends.job import Job
from ocnn_fused.plan import Plan
from ocnn_fused.problem import DEFAULT_OPTIONS

pytestmark = pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled backend is left out")

#: Name of the plan that each case must exercise, so that a change of the cost model cannot empty this list.
KINDS = [
    ("gram/row", Case((40, 70))),
    ("gram/column", Case((300, 40))),
    ("gram/row", Case((48, 64, 1, 1), stride=2)),
    ("gram/row", Case((48, 24, 2, 2), stride=2)),
    ("gram/column", Case((300, 5, 3, 3), padding=0)),
    ("toom/row", Case((50, 70, 2, 2))),
    ("toom/row", Case((70, 72, 3, 3))),
    ("toom/row", Case((40, 48, 4, 4))),
    ("toom/row", Case((40, 48, 5, 5))),
    ("toom/row", Case((70, 60, 3, 3), stride=2)),
    ("toom/row", Case((40, 24, 7, 7), stride=2)),
    ("toom/column", Case((100, 3, 7, 7), stride=2)),
    ("toom/column", Case((130, 40, 3, 3))),
    ("toom/row", Case((50, 70, 3))),
    ("toom/row", Case((24, 30, 3, 3, 3))),
    ("toom/row", Case((40, 48, 3, 3), stride=2, dilation=2)),
    ("toom/row", Case((96, 60, 3, 3), groups=2)),
    ("toom/row", Case((40, 48, 5, 5), padding=2)),
    ("toom/row", Case((40, 40, 2, 7))),
    # Sides of more than 256.
    ("toom/row", Case((257, 260, 2, 2))),
    ("toom/row", Case((257, 262, 3, 3))),
    ("toom/row", Case((257, 70, 3, 3), stride=2)),
    ("toom/row", Case((257, 36, 4, 4), padding=2)),
    ("toom/row", Case((260, 20, 5, 5), padding=2)),
    ("toom/row", Case((257, 270, 3))),
    ("toom/row", Case((257, 4, 3, 3, 3), padding=(2, 1, 2))),
    ("toom/column", Case((300, 258, 3, 3))),
    ("direct/row", Case((40, 48, 7))),
    ("direct/row", Case((24, 24, 6, 7))),
    ("direct/column", Case((100, 8, 7, 1))),
    ("direct/column", Case((300, 8, 7), groups=3)),
    ("small/row", Case((33, 1, 3, 3), groups=33)),
    ("small/row", Case((128, 4, 3, 3), groups=32)),
    ("small/row", Case((40, 1, 5, 5), stride=2, groups=20)),
    ("small/row", Case((64, 1, 3), dilation=2, groups=64)),
]


@pytest.mark.parametrize(("name", "case"), KINDS, ids=str)
def test_every_kind_of_plan(name: str, case: Case, poisoned_memory: None) -> None:
    """The plan itself, whether or not it would be chosen, in every dtype, with every fresh byte a NaN."""
    plan = plan_named(case, name)
    for dtype, limit in TOLERANCES.items():
        weight = case.random(dtype=dtype)
        (loss,), (grad,) = execute(job(plan, weight), weight)
        assert max(errors(loss, grad, weight, case)) <= limit
        (alone,), _ = execute(job(plan, weight, with_grad=False), weight)
        assert torch.equal(alone, loss), "the loss without gradient is another"


def execute(one: Job[Plan], weight: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return cpu.prepare([one], torch.device("cpu"), DEFAULT_OPTIONS)([weight])


def test_the_profiler_sees_the_stages() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused(Case((8, 8, 3, 3)).random(), Case((8, 8, 3, 3)), backend="cpu")
    (name,) = (event.name for event in profile.events() if event.name.startswith("ocnn_fused"))
    assert all(stage in name for stage in ("evaluate", "gram", "mix", "apply", "gather"))


@pytest.mark.parametrize(
    "case",
    [
        Case((70, 72, 3, 3)),
        Case((64, 40, 3, 3), stride=2),
        Case((130, 40, 3, 3)),
        Case((40, 50, 5, 4)),
        Case((96, 20, 3), groups=3),
        Case((96, 20, 3), groups=3, target="free"),
        Case((130, 40, 3, 3), target="free"),
        Case((64, 40, 3, 3), stride=2, part="off_diagonal"),
        Case((40, 70)),
        Case((300, 40), target="free"),
        Case((48, 24, 2, 2), stride=2, part="off_diagonal"),
        Case((96, 21, 2, 2), stride=2, groups=3),
        Case((300, 5, 3, 3), padding=0),
        Case((530, 900)),  # a contraction in several chunks
    ],
    ids=str,
)
def test_both_ways_to_multiply_agree_with_the_definition(case: Case, poisoned_memory: None) -> None:
    """In chunks that stay in the caches, and stage by stage."""
    assert _extension.module.use_panels(True)
    try:
        for wanted in (True, False):
            _extension.module.use_panels(wanted)
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                assert_matches_definition(case.random(dtype=dtype), case, backend="cpu")
    finally:
        assert not _extension.module.use_panels(True)


@pytest.mark.parametrize("side", ["row", "column"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_lag_0_of_weights_in_any_order(side: str, dtype: torch.dtype, poisoned_memory: None) -> None:
    """Turned, channels last, every second filter, every second channel: matrices in memory or not."""
    flat, kernel = Case((37, 50)), Case((37, 11, 3, 3), padding=0)
    turned = torch.empty(50, 37, dtype=dtype).t().copy_(flat.random(dtype=dtype))
    assert_matches_definition(turned, flat, side=side, backend="cpu")
    weight = kernel.random(dtype=dtype)
    assert_matches_definition(weight.to(memory_format=torch.channels_last), kernel, side=side, backend="cpu")
    spread = torch.empty(74, 22, 3, 3, dtype=dtype)
    for view in (spread[::2, :11], spread[:37, ::2]):
        assert_matches_definition(view.copy_(weight), kernel, side=side, backend="cpu")


def assert_same_as_in_one_piece(case: Case, side: str, dtype: torch.dtype) -> None:
    weight = case.random(dtype=dtype)
    loss, gradient = fused(weight, case, side=side, backend="cpu")
    expected_loss, expected_gradient = fused(weight.double(), case, side=side, backend="torch")
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(loss.double(), expected_loss, rtol=tolerance, atol=0)
    error = (gradient.double() - expected_gradient).norm() / expected_gradient.norm()
    assert error <= tolerance
    alone = fused_orth_loss(weight, **case.options, side=side, backend="cpu")
    assert torch.equal(alone, loss), "the loss without gradient is another"


@pytest.mark.parametrize(
    ("case", "side"),
    [
        (Case((20, 6000, 7)), "row"),  # a long contraction is cut ...
        (Case((200, 400, 7)), "column"),  # ... on the column side too
        (Case((448, 64, 3, 3), groups=7), "auto"),  # groups that do not fit into the workspace at once
        (Case((5120, 64, 7), groups=80), "auto"),
        (Case((3072, 300), groups=12), "row"),
        (Case((9000, 100), groups=30), "column"),
    ],
    ids=str,
)
def test_work_in_pieces(case: Case, side: str, poisoned_memory: None) -> None:
    """What does not fit into the bounded workspace is cut; the result is that of the plan executed in one piece."""
    assert_same_as_in_one_piece(case, side, torch.float64)


#: More than fits a core's cache at once.
LARGE = [
    (Case((24, 800, 3, 3, 3)), "row"),  # a contraction in several chunks
    (Case((800, 24, 3, 3, 3)), "column"),
    (Case((16, 500, 7, 6), stride=2), "row"),  # that begin in one residue and end in another
    (Case((2000, 10, 3, 3), groups=40), "row"),  # more groups than are worked on at once
    (Case((130, 120, 5, 5)), "row"),
    (Case((250, 300, 3, 3)), "row"),  # sums of products in several chunks
    (Case((512, 256, 3, 3)), "column"),
    (Case((515, 130, 3, 3), stride=2), "row"),
    (Case((260, 800, 3, 3)), "row"),
    (Case((300, 600, 3, 3)), "column"),
]


@pytest.mark.parametrize(("case", "side"), LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_layers(case: Case, side: str, dtype: torch.dtype, poisoned_memory: None) -> None:
    assert_same_as_in_one_piece(case, side, dtype)


EDGES = (1, 2, 3, 15, 16, 17, 31, 33)


@pytest.mark.parametrize("rows", EDGES)
@pytest.mark.parametrize("side", ["row", "column"])
def test_sizes_around_lanes_and_tiles(rows: int, side: str, poisoned_memory: None) -> None:
    for channels in (*EDGES, 63, 64, 65):
        for case in (
            Case((rows, channels)),
            Case((rows, channels, 3)),
            Case((rows, channels, 2, 3)),
            Case((rows, channels, 2, 3), stride=(1, 2)),
            Case((rows, channels, 3, 1, 2)),
            Case((2 * rows, channels, 2), groups=2),
        ):
            for dtype in (torch.float64, torch.float32):  # vectors of both lengths
                assert_matches_definition(case.random(dtype=dtype), case, side=side, backend="cpu")


@pytest.mark.parametrize("groups", [1, 15, 16, 17, 33])
@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (2, 1), (1, 3), (4, 4)])
def test_group_counts_around_lanes(groups: int, rows: int, channels: int, poisoned_memory: None) -> None:
    for case in (
        Case((groups * rows, channels, 3, 3), groups=groups),
        Case((groups * rows, channels, 4, 1), stride=2, groups=groups),
        Case((groups * rows, channels), groups=groups),
    ):
        assert_matches_definition(case.random(), case, backend="cpu")


@pytest.mark.parametrize(("name", "case"), KINDS, ids=str)
def test_same_input_same_bits(name: str, case: Case) -> None:
    weight = case.random(dtype=torch.float32)
    first = fused(weight, case, backend="cpu")
    others = [(other, other.random(dtype=torch.float32)) for _, other in KINDS[::7]]
    for repeat in range(5):
        if repeat >= 2:  # other sizes in between leave their numbers in the workspace
            for other, values in others:
                fused(values, other, backend="cpu")
        again = fused(weight.clone(), case, backend="cpu")
        assert all(map(torch.equal, again, first))


def capability_names(capability: str) -> set[str]:
    """What torch calls it; without long vectors before 2.8 by another name."""
    return {"DEFAULT", "NO AVX"} if capability == "default" else {capability.upper()}


def run_python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter that sees the same modules."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


REPORT = """
import json, torch
from conftest import fused
from oracle import Case
from plans import job, plan_named
torch.set_num_threads({threads})
cases = [Case((70, 72, 3, 3)), Case((100, 3, 7, 7), stride=2), Case((64, 1, 3, 3), groups=64), Case((40, 70)),
         Case((300, 40, 3, 3), stride=2)]
results = [fused(case.random(dtype=torch.float32), case, backend="cpu") for case in cases]
assert torch.get_num_threads() == {threads}
tasks = len(__import__("os").listdir("/proc/self/task"))
losses, norms = [loss.item() for loss, _ in results], [gradient.norm().item() for _, gradient in results]
print(json.dumps(dict(losses=losses, norms=norms, tasks=tasks)))
"""


def test_number_of_threads_is_respected() -> None:
    """One thread starts none; more give the same result up to the order in which a BLAS adds."""
    one, two, nine = (json.loads(run_python(REPORT.format(threads=threads))) for threads in (1, 2, 9))
    for more in (two, nine):
        assert one["losses"] == pytest.approx(more["losses"], rel=1e-6)
        assert one["norms"] == pytest.approx(more["norms"], rel=1e-6)
    assert one["tasks"] < two["tasks"] < nine["tasks"]


MEMORY = """
import torch
from ocnn_fused import fused_orth_loss_foreach
torch.set_num_threads(1)
shapes = [(128, 128, 3, 3), (64, 3, 7, 7), (128, 128, 1, 1), (256, 1, 3, 3), (48, 48, 5, 5)]
weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def call():
    fused_orth_loss_foreach(weights, 1, groups=[1, 1, 1, 256, 1], backend="cpu").sum().backward()
for _ in range(5):
    call()
before = resident()
for _ in range(60):
    call()
print(resident() - before)
"""


def test_repeated_calls_keep_no_memory() -> None:
    """A leak of one gradient per call would be 60 times a megabyte."""
    assert int(run_python(MEMORY)) < 8 << 20


#: Each measurement has a process of its own, forked from one that has imported everything but computed nothing.
PEAKS = """
import os, torch
from ocnn_fused import fused_orth_loss, reference
from test_cpu_backend import BOUNDED
torch.set_num_threads(1)
def ours(weight, stride=1):
    fused_orth_loss(weight, stride, backend="cpu").backward()
def plain(weight, stride=1):
    reference.orth_loss(weight, stride).backward()
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def measure(call, shape, stride):
    weight = torch.randn(shape, requires_grad=True)
    for warm in (ours, plain):
        warm(torch.randn(32, 32, 3, 3, requires_grad=True))
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = status("VmRSS")
    call(weight, stride)
    print(status("VmHWM") - before, flush=True)
for shape, stride in BOUNDED:
    for call in (ours, plain):
        if os.fork() == 0:
            measure(call, shape, stride)
            os._exit(0)
        os.wait()
"""

#: Shapes and strides.
BOUNDED = (((256, 256, 3, 3), 1), ((256, 128, 3, 3), 2), ((128, 512, 3, 3), 1), ((1024, 512, 1, 1), 1))


@pytest.fixture(scope="module")
def peaks() -> dict[tuple[object, ...], tuple[int, int]]:
    """Extra memory in kB, ours and the reference's."""
    found = list(map(int, run_python(PEAKS).split()))
    return dict(zip(BOUNDED, zip(found[::2], found[1::2], strict=True), strict=True))


@pytest.mark.parametrize("layer", BOUNDED, ids=str)
def test_workspace_is_bounded(layer: tuple[object, ...], peaks: dict[tuple[object, ...], tuple[int, int]]) -> None:
    """Peak extra memory of loss and gradient is no higher than the reference's."""
    ours, plain = peaks[layer]
    print(f"peak extra memory of {layer}: {ours} kB, reference {plain} kB")
    assert 0 < ours <= plain


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_narrower_vectors(capability: str) -> None:
    """Code for machines with other instructions computes the same."""
    code = """
from conftest import assert_matches_definition
from test_cpu_backend import KINDS, LARGE, assert_same_as_in_one_piece
import torch
for _, case in KINDS[::3]:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert_matches_definition(case.random(dtype=dtype), case, backend="cpu")
for case, side in LARGE[-3:]:
    assert_same_as_in_one_piece(case, side, torch.float64)
print(torch.backends.cpu.get_cpu_capability())
"""
    if capability == "avx2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this machine has no AVX2")
    assert run_python(code, ATEN_CPU_CAPABILITY=capability).strip() in capability_names(capability)


@pytest.mark.parametrize("sizes", [(3,), (1, 3)], ids=str)
def test_expanded_weight_is_read_not_written(sizes: tuple[int, ...]) -> None:
    """A weight whose rows are one and the same memory gets a gradient with memory of its own."""
    row = torch.randn(1, *sizes, 3, dtype=torch.float64)
    weight = row.expand(4, *sizes, 3)
    case = Case(tuple(weight.shape))
    _, gradient = assert_matches_definition(weight, case, backend="cpu")
    assert gradient.untyped_storage().nbytes() >= gradient.numel() * 8


def test_foreach_with_poisoned_memory(poisoned_memory: None) -> None:
    weights = [case.random(dtype=torch.float32).requires_grad_() for _, case in KINDS]
    options = {
        "strides": [case.stride for _, case in KINDS],
        "dilations": [case.dilation for _, case in KINDS],
        "groups": [case.groups for _, case in KINDS],
        "paddings": [case.padding for _, case in KINDS],
    }
    losses = fused_orth_loss_foreach(weights, **options, backend="cpu")
    assert losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(losses.sum(), weights))
