"""Launches, caches and the single kernel's barrier, all of it measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import Case, loss_and_grad
from torch.utils._python_dispatch import TorchDispatchMode
from triton_support import (
    BIG,
    DEVICE,
    EDGES,
    TOLERANCE,
    Call,
    candidates,
    errors,
    execution,
    needs_interpreter,
    on_device,
    plan_named,
    tl,
    triton,
)

from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.triton import cooperative, kernels, launch
from ocnn_fused.backends.triton.config import PRECISIONS, SHIPPED, Config, choose_config, resolve_precision
from ocnn_fused.backends.triton.model import SPECS, choose_plan, explain, plan_seconds, prefer_single, stages
from ocnn_fused.plan import Plan

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: A list with every stage in it: Toom-Cook on both sides, direct, a Gram in place, tiny groups.
LAYERS = [
    (Case((6, 4, 3)), "toom/row"),
    (Case((9, 2, 2)), "toom/column"),
    (Case((6, 5, 3)), "direct/row"),
    (Case((8, 16)), "gram/row"),
    (Case((6, 1, 3), groups=6), "small/row"),
]


def mixed_call(with_grad: bool = True, config: Config = BIG) -> tuple[list[torch.Tensor], Call]:
    weights = [on_device(case) for case, _ in LAYERS]
    return weights, Call(weights, [plan_named(*layer) for layer in LAYERS], with_grad, "ieee", config)


def worst_error(weights: list[torch.Tensor], call: Call) -> float:
    losses, grads = call.losses.cpu(), [grad.cpu() for grad in call.grads()]
    return max(
        max(errors(loss, grad, weight, case))
        for loss, grad, weight, (case, _) in zip(losses, grads, weights, LAYERS, strict=True)
    )


# ----------------------------------------------------------------------------------------------------------------------
# Number of launches
# ----------------------------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts what a call launches: Triton's kernels by name, and torch's own, which are all ops that write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        allocates = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_strided)
        writes = not allocates and not func.is_view and func.overloadpacket is not torch.ops.aten.detach
        self.names[func.overloadpacket.__name__] += writes
        return result


def launches_of(weights: list[torch.Tensor], plans: list[Plan], with_grad: bool, programs: int | None = None) -> Any:
    """By name, of one call whose tables are ready."""
    Call(weights, plans, with_grad, "ieee", BIG)
    with execution() as scheduler, Launches() as launches:
        call = Call(weights, plans, with_grad, "ieee", BIG)
        call.run(programs)
        call.loss_of_each()
        call.grads()
    return +launches.names + scheduler.launches


@needs_interpreter
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    ("with_grad", "stages"),
    [(True, ("evaluate", "gram", "mix", "apply", "gather")), (False, ("evaluate", "gram", "mix"))],
    ids=["gradient", "loss"],
)
def test_staged_launches_do_not_grow_with_the_list(copies: int, with_grad: bool, stages: tuple[str, ...]) -> None:
    weights = [on_device(case) for case, _ in LAYERS] * copies
    plans = [plan_named(*layer) for layer in LAYERS] * copies
    assert launches_of(weights, plans, with_grad) == {f"{name}_kernel": 1 for name in stages}


@needs_interpreter
@pytest.mark.parametrize(("with_grad", "stages"), [(True, ("gram", "apply")), (False, ("gram",))])
def test_stages_without_work_are_not_launched(with_grad: bool, stages: tuple[str, ...]) -> None:
    """Without evaluate there is nobody to clear the counters but a memset."""
    case = Case((8, 16))
    launches = launches_of([on_device(case)], [plan_named(case, "gram/row")], with_grad)
    assert launches == {"zero_": 1, **{f"{name}_kernel": 1 for name in stages}}


@needs_interpreter
@pytest.mark.parametrize("with_grad", [True, False])
def test_the_single_kernel_is_one_launch_and_a_memset(with_grad: bool) -> None:
    weights = [on_device(case) for case, _ in LAYERS]
    plans = [plan_named(*layer) for layer in LAYERS]
    assert launches_of(weights, plans, with_grad, programs=1) == {"single_kernel": 1, "zeros": 1}


@needs_interpreter
def test_single_kernel_in_one_program() -> None:
    weights, call = mixed_call()
    with execution():
        call.run(1)
    assert worst_error(weights, call) <= TOLERANCE


# ----------------------------------------------------------------------------------------------------------------------
# The reduction of the loss, by the program that finishes last
# ----------------------------------------------------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize("with_grad", [True, False])
def test_losses_have_the_same_bits_whoever_finishes_last(with_grad: bool) -> None:
    weights, sequential = mixed_call(with_grad, EDGES)
    with execution():
        sequential.run()
    for seed in range(4):
        _, call = mixed_call(with_grad, EDGES)
        with execution("interleaved", seed):
            call.run()
        assert torch.equal(call.losses, sequential.losses)
    for loss, weight, (case, _) in zip(sequential.losses, weights, LAYERS, strict=True):
        expected, _ = loss_and_grad(weight.cpu(), case)
        assert abs(loss.item() - expected) <= TOLERANCE * max(1.0, expected)


@triton.jit
def arrive_without_atomics(counter):
    arrived = tl.load(counter)
    tl.store(counter, arrived + 1)
    return arrived


@triton.jit
def arrive_one_early(counter):
    return tl.atomic_add(counter, 1) + 1


@triton.jit
def never_cleared(arrivals, count, LANES):
    pass


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("arrive", arrive_without_atomics),
        ("arrive", arrive_one_early),
        ("clear_arrivals", never_cleared),
    ],
    ids=["lost arrivals", "reduced too early", "counters not cleared"],
)
def test_a_wrong_reduction_is_seen(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is then not written at all, or sums what is not written yet; both are NaN here."""
    monkeypatch.setattr(kernels, name, fault)
    _, call = mixed_call(with_grad=False, config=EDGES)
    with execution("interleaved", 1):
        call.run()
    assert call.losses.isnan().any()


# ----------------------------------------------------------------------------------------------------------------------
# The grid barrier
# ----------------------------------------------------------------------------------------------------------------------

PROGRAMS = 4


@needs_interpreter
@pytest.mark.parametrize("seed", range(PROGRAMS + 2))
def test_single_kernel_interleaved(seed: int) -> None:
    """All programs at once, more seeds than programs; the bits of the staged kernels."""
    weights, staged = mixed_call(config=EDGES)
    with execution():
        staged.run()
    _, single = mixed_call(config=EDGES)
    with execution("interleaved", seed):
        single.run(PROGRAMS)
    assert torch.equal(single.losses, staged.losses)
    assert all(torch.equal(a, b) for a, b in zip(single.grads(), staged.grads(), strict=True))
    assert worst_error(weights, single) <= TOLERANCE


@triton.jit
def no_barrier(arrivals, target):
    tl.debug_barrier()


@needs_interpreter
def test_a_missing_barrier_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "grid_barrier", no_barrier)
    weights, call = mixed_call(config=EDGES)
    with execution("interleaved", 1):
        call.run(PROGRAMS)
    assert not worst_error(weights, call) <= TOLERANCE


def test_programs_that_fit() -> None:
    """Registers, shared memory and warps each limit the grid; nothing fits if one of them is exhausted."""
    fit = cooperative.programs_per_multiprocessor
    assert fit(registers=255, shared_bytes=64 << 10, warps=4, shared_limit=164 << 10, most_warps=64) == 2
    assert fit(registers=128, shared_bytes=0, warps=4, shared_limit=164 << 10, most_warps=64) == 4
    assert fit(registers=32, shared_bytes=0, warps=8, shared_limit=164 << 10, most_warps=48) == 6
    assert fit(registers=255, shared_bytes=200 << 10, warps=4, shared_limit=100 << 10, most_warps=48) == 0


@needs_interpreter
def test_single_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooperative, "resident_programs", lambda call: None)
    case = Case((8, 16))
    weights, plans = [on_device(case)], [plan_named(case, "gram/row")]
    with execution() as scheduler:
        with pytest.raises(RuntimeError, match="cooperative"):
            backend.run(weights, plans, True, launch="single")
        backend.run(weights, plans, True, launch="auto")
    assert "single_kernel" not in scheduler.launches


# ----------------------------------------------------------------------------------------------------------------------
# The backend's entry
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch_mode", ["auto", "single", "staged"])
def test_run(launch_mode: str) -> None:
    weights = [on_device(case) for case, _ in LAYERS]
    with execution():
        losses, grads = backend.run(
            weights, [plan_named(*layer) for layer in LAYERS], True, precision="ieee", launch=launch_mode
        )
    for loss, grad, weight, (case, _) in zip(losses, grads, weights, LAYERS, strict=True):
        assert max(errors(loss.cpu(), grad.cpu(), weight, case)) <= TOLERANCE


def test_float64_is_served_by_pytorch() -> None:
    case = Case((6, 8))
    weights = [on_device(case), on_device(case, torch.float64), on_device(case, seed=1)]
    with execution():
        losses, grads = backend.run(weights, [plan_named(case, "gram/row")] * 3, True, precision="ieee")
    assert [loss.dtype for loss in losses] == [torch.float32, torch.float64, torch.float32]
    for loss, grad, weight in zip(losses, grads, weights, strict=True):
        assert grad.dtype == weight.dtype
        limit = 1e-12 if weight.dtype == torch.float64 else TOLERANCE
        assert max(errors(loss.cpu(), grad.cpu(), weight, case)) <= limit


def test_twice_the_same_bits_and_independent_results() -> None:
    case = Case((9, 6, 3))
    weight, plan = on_device(case), plan_named(case, "toom/row")
    with execution():
        first, (grad,) = backend.run([weight], [plan], True, precision="ieee")
        kept = grad.clone()
        second, (again,) = backend.run([weight], [plan], True, precision="ieee")
    assert torch.equal(first[0], second[0])
    assert torch.equal(kept, again)
    assert torch.equal(grad, kept)
    assert grad.data_ptr() != again.data_ptr()
    assert not grad._is_view()
    assert not first[0]._is_view()


def test_bad_options_are_named() -> None:
    case = Case((8, 16))
    weights, plans = [on_device(case)], [plan_named(case, "gram/row")]
    with pytest.raises(ValueError, match="launch must be one of"):
        backend.run(weights, plans, True, launch="twice")
    with pytest.raises(ValueError, match="precision must be None or one of"):
        backend.run(weights, plans, True, precision="fp8")


# ----------------------------------------------------------------------------------------------------------------------
# Caches
# ----------------------------------------------------------------------------------------------------------------------


def test_tables_are_kept_and_addresses_follow_the_weights() -> None:
    launch.clear_caches()
    case = Case((8, 16))
    plan = plan_named(case, "gram/row")
    weight = on_device(case)
    Call([weight], [plan], True, "ieee", BIG)
    weight.mul_(0.5)  # in place, as an optimizer does
    Call([weight], [plan], False, "ieee", BIG)
    assert (len(launch._tables), len(launch._addresses)) == (1, 1)
    moved = weight.clone()
    call = Call([moved], [plan], True, "ieee", BIG)
    assert (len(launch._tables), len(launch._addresses)) == (1, 2)
    assert call.weights.tolist() == [moved.data_ptr()]
    Call([moved.t().contiguous().t()], [plan], True, "ieee", BIG)
    assert len(launch._tables) == 2


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.clear_caches()
    monkeypatch.setattr(launch, "MAX_TABLES", 3)
    for rows in range(1, 6):
        case = Case((rows, 8))
        Call([on_device(case)], [plan_named(case, "gram/row")], True, "ieee", BIG)
    assert len(launch._tables) == 3


# ----------------------------------------------------------------------------------------------------------------------
# Choices
# ----------------------------------------------------------------------------------------------------------------------


def test_precision_follows_torch() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", "ieee"), ("high", "tf32"), ("medium", "bf16")):
            torch.set_float32_matmul_precision(setting)
            assert resolve_precision(None) == expected
            assert resolve_precision("tf32x3") == "tf32x3"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def newer_setting() -> Iterator[Any]:
    """Settings of products by backend, put back as they were."""
    setting = torch.backends.cuda.matmul
    before = getattr(setting, "fp32_precision", None)
    if before is None:
        pytest.skip("this torch has only set_float32_matmul_precision")
    yield setting
    setting.fp32_precision = before


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [("highest", "tf32", "tf32"), ("high", "ieee", "ieee"), ("medium", "tf32", "bf16"), ("highest", "ieee", "ieee")],
)
def test_precision_follows_the_newer_setting_too(older: str, newer: str, expected: str, newer_setting: Any) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(older)
    try:
        newer_setting.fp32_precision = newer
        assert resolve_precision(None) == expected
        assert resolve_precision("tf32x3") == "tf32x3"
    finally:
        torch.set_float32_matmul_precision(before)


def test_large_tiles_need_enough_of_them() -> None:
    small, large = SHIPPED["tf32"]
    assert choose_config(SHIPPED["tf32"], 2 * 108 - 1, 108) == small
    assert choose_config(SHIPPED["tf32"], 2 * 108, 108) == large
    assert choose_config(SHIPPED["ieee"], 10**6, 108) == SHIPPED["ieee"][0]


def test_one_launch_for_little_work_only() -> None:
    spec = SPECS["A100"]
    little, much = plan_named(Case((16, 16, 3, 3)), "toom/row"), plan_named(Case((512, 512, 3, 3)), "toom/row")
    assert prefer_single([little], spec, "tf32")
    assert not prefer_single([much], spec, "tf32")
    assert not prefer_single([little] * 10_000, spec, "tf32")


@pytest.mark.parametrize(
    ("device", "case", "expected"),
    [
        *((device, Case((256, 256, 3, 3)), "toom/row") for device in SPECS),  # a third of the products
        ("A100", Case((128, 64, 3, 3)), "toom/column"),
        ("H100", Case((128, 64, 3, 3)), "direct/column"),  # its products are cheap next to the traffic of planes
        ("RTX 4090", Case((64, 64, 2, 2)), "toom/row"),
        ("A100", Case((64, 64, 2, 2)), "direct/row"),
    ],
    ids=str,
)
def test_the_model_chooses_and_says_so(device: str, case: Case, expected: str) -> None:
    spec = SPECS[device]
    precision = spec.native_precision("tf32")
    best = candidates(case)[0]
    times = {plan.name: plan_seconds(plan, spec, precision) for plan in (best, *best.alternatives)}
    assert choose_plan(best, spec, precision).name == expected
    assert times[expected] == min(times.values())
    text = explain(best, device)
    assert text.startswith(f"{device}, {precision} (modelled, not measured)")
    (line,) = (line for line in text.splitlines() if line.endswith("<- chosen"))
    assert line.startswith(expected)
    assert {line.split()[0] for line in text.splitlines()[2:]} == set(times)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "case", [Case((256, 64, 7, 7), 2), Case((256, 64, 9, 9), 2), Case((512, 64, 5, 5, 5), 2), Case((4, 4, 4, 4, 4))]
)
def test_chosen_plans_fit_the_mix(case: Case, precision: str) -> None:
    plan = candidates(case)[0]
    assert any(one.outputs > 64 and not one.is_diagonal for one in (plan, *plan.alternatives))
    for device, spec in SPECS.items():
        chosen = choose_plan(plan, spec, spec.native_precision(precision))
        assert chosen.is_diagonal or chosen.outputs <= 64
        assert "can be mixed" in explain(plan, device, precision)


def test_a_plan_is_modelled_once() -> None:
    """Choosing one launch or several must not cost host time at every call."""
    plan_seconds.cache_clear()
    plans = [plan_named(Case((64, 64, 3, 3)), "toom/row"), plan_named(Case((64, 32)), "gram/row")]
    for _ in range(3):
        prefer_single(plans, SPECS["A100"], "tf32")
    assert plan_seconds.cache_info().misses == len(plans)


def test_counted_work_of_a_plan() -> None:
    """25 points of 3x3: 12 pairs and a self-paired product, of which 3 of 4 tiles, forward; 25 products back."""
    work = {stage.name: stage for stage in stages(plan_named(Case((128, 64, 3, 3)), "toom/row"))}
    unit = 128 * 128 * 64
    assert work["gram"].products == 12 * unit + 3 * unit // 4
    assert work["apply"].products == 25 * unit
    assert list(work) == ["evaluate", "gram", "mix", "apply", "gather"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_cuda_graph_replays() -> None:
    case = Case((64, 64, 3, 3))
    weight, plan = on_device(case), plan_named(case, "toom/row")
    for mode in ("staged", "single"):
        expected = backend.run([weight], [plan], True, precision="ieee", launch=mode)[0][0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses, _ = backend.run([weight], [plan], True, precision="ieee", launch=mode)
        graph.replay()
        assert torch.equal(losses[0], expected)
