"""Launches, caches and the single kernel's barrier, all of it measured."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from oracle import Case, loss_and_grad
from plans import chosen, job, problem
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
    needs_single,
    on_device,
    plan_named,
    skip_if_impossible,
    tl,
    triton,
)

from ocnn_fused import engine, explain
from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.device import SPECS, spec_of
from ocnn_fused.backends.model import plan_seconds, seconds_in_list, stages
from ocnn_fused.backends.triton import cooperative, kernels, launch
from ocnn_fused.backends.triton.config import (
    LARGE_TILES,
    SHIPPED,
    SHIPPED_HOPPER,
    WIDE_TILES,
    Config,
    choose_config,
    prefer_single,
    shipped,
    single_configs,
)
from ocnn_fused.backends.triton.fields import PassRow
from ocnn_fused.backends.triton.tables import STAGES
from ocnn_fused.plan import Plan
from ocnn_fused.problem import Options, Precision

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


def launches_of(
    weights: list[torch.Tensor], plans: list[Plan], with_grad: bool | list[bool], programs: int | None = None
) -> Any:
    """By name, of one call whose tables are ready."""
    Call(weights, plans, with_grad, "ieee", BIG)
    with execution() as scheduler, Launches() as launches:
        call = Call(weights, plans, with_grad, "ieee", BIG)
        call.run(programs)
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
@needs_single
@pytest.mark.parametrize("with_grad", [True, False])
def test_the_single_kernel_is_one_launch_and_a_memset(with_grad: bool) -> None:
    weights = [on_device(case) for case, _ in LAYERS]
    plans = [plan_named(*layer) for layer in LAYERS]
    assert launches_of(weights, plans, with_grad, programs=1) == {"single_kernel": 1, "zeros": 1}


@needs_interpreter
@pytest.mark.parametrize("programs", [None, 1])
def test_frozen_weights_are_part_of_the_same_pass(programs: int | None) -> None:
    """Losses have the bits of a pass with all gradients, and so have the gradients that are wanted."""
    skip_if_impossible("single" if programs else None)
    weights, full = mixed_call()
    plans = [plan_named(*layer) for layer in LAYERS]
    for wanted in ([True, False] * 3, [False, True] * 3):
        with_grad = wanted[: len(weights)]
        launches = launches_of(weights, plans, with_grad, programs)
        staged = {f"{name}_kernel": 1 for name in STAGES[1:]}  # no target is free
        assert launches == ({"single_kernel": 1, "zeros": 1} if programs else staged)
        with execution():
            full.run(programs)
            some = Call(weights, plans, with_grad, "ieee", BIG)
            some.run(programs)
        assert torch.equal(some.losses, full.losses)
        assert some.tables.workspace_bytes < full.tables.workspace_bytes
        for needed, grad, expected in zip(with_grad, some.grads(), full.grads(), strict=True):
            assert torch.equal(grad, expected) if needed else grad.numel() == 0


@needs_interpreter
@needs_single
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

    def is_seen(seed: int) -> bool:
        call.losses.fill_(torch.nan)
        with execution("interleaved", seed):
            call.run()
        return bool(call.losses.isnan().any())

    # Not every order shows it.
    assert any(is_seen(seed) for seed in range(60))


# ----------------------------------------------------------------------------------------------------------------------
# The grid barrier
# ----------------------------------------------------------------------------------------------------------------------

PROGRAMS = 4
SEEDS = range(PROGRAMS + 2)  # more than programs


@needs_interpreter
@needs_single
@pytest.mark.parametrize("seed", SEEDS)
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
def wait_but_not_for(arrivals, target, skipped):
    """The barrier of the kernel, except that nobody waits for ``skipped`` arrivals."""
    tl.atomic_add(arrivals, 1)
    if target != skipped:
        while tl.atomic_add(arrivals, 0) < target:
            pass


@triton.jit
def no_barrier_after_evaluate(arrivals, target):
    wait_but_not_for(arrivals, target, 4)


@triton.jit
def no_barrier_after_gram(arrivals, target):
    wait_but_not_for(arrivals, target, 8)


@triton.jit
def no_barrier_after_mix(arrivals, target):
    wait_but_not_for(arrivals, target, 12)


@triton.jit
def no_barrier_after_apply(arrivals, target):
    wait_but_not_for(arrivals, target, 16)


@triton.jit
def all_barriers(arrivals, target):
    wait_but_not_for(arrivals, target, 0)


@needs_interpreter
@needs_single
@pytest.mark.parametrize(
    "barrier",
    [no_barrier_after_evaluate, no_barrier_after_gram, no_barrier_after_mix, no_barrier_after_apply, all_barriers],
    ids=lambda barrier: barrier.fn.__name__,
)
def test_each_missing_barrier_is_seen(barrier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a layer of which every stage needs the one before it, and some programs have less to do than others."""
    assert PROGRAMS == 4  # which the numbers above are multiples of
    monkeypatch.setattr(kernels, "grid_barrier", barrier)
    case = Case((15, 4, 2), groups=3)
    weight, plan = on_device(case), plan_named(case, "toom/row")

    def is_right(seed: int) -> bool:
        call = Call([weight], [plan], True, "ieee", EDGES)
        with execution("interleaved", seed):
            call.run(PROGRAMS)
        return max(errors(call.losses[0], call.grads()[0], weight, case)) <= TOLERANCE

    if barrier is all_barriers:
        assert all(is_right(seed) for seed in range(10))
    else:  # not every order shows it
        assert not all(is_right(seed) for seed in range(100))


def test_programs_that_fit() -> None:
    """Registers, shared memory and warps each limit the grid; nothing fits if one of them is exhausted."""
    fit = cooperative.programs_per_multiprocessor
    assert fit(registers=255, shared_bytes=64 << 10, warps=4, shared_limit=164 << 10, most_warps=64) == 2
    assert fit(registers=128, shared_bytes=0, warps=4, shared_limit=164 << 10, most_warps=64) == 4
    assert fit(registers=32, shared_bytes=0, warps=8, shared_limit=164 << 10, most_warps=48) == 6
    assert fit(registers=255, shared_bytes=200 << 10, warps=4, shared_limit=100 << 10, most_warps=48) == 0
    blackwell = {"registers": 32, "shared_bytes": 0, "warps": 4, "shared_limit": 228 << 10, "most_warps": 64}
    assert fit(**blackwell, tensor_columns=0) == 16
    assert fit(**blackwell, tensor_columns=128) == 4
    assert fit(**blackwell, tensor_columns=512) == 1
    assert fit(**blackwell, tensor_columns=1024) == 0


class CompiledKernel:
    """What is asked of the single kernel, compiled for a device that is not there."""

    n_regs = 128
    metadata = SimpleNamespace(shared=32 << 10, tmem_size=256)
    arg_names = ()

    def __init__(self) -> None:
        self.compiled = 0

    def warmup(self, *arguments: Any, **options: Any) -> CompiledKernel:
        self.compiled += 1
        return self

    def _init_handles(self) -> None:
        pass


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> CompiledKernel:
    kernel = CompiledKernel()
    properties = SimpleNamespace(
        major=10, minor=0, multi_processor_count=148, shared_memory_per_multiprocessor=228 << 10
    )
    monkeypatch.setattr(kernels, "single_kernel", kernel)
    monkeypatch.setattr(cooperative, "interpreted", lambda: False)
    monkeypatch.setattr(cooperative, "_fitting", {})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return kernel


@needs_interpreter
@needs_single
def test_the_grid_is_counted_once_and_nothing_of_the_call_is_kept(blackwell: CompiledKernel) -> None:
    case = Case((8, 16))
    workspaces = []
    for _ in range(2):
        call = Call([on_device(case)], [plan_named(case, "gram/row")], True, "ieee", EDGES)
        call.tables = replace(call.tables, passes=(PassRow(0, 0, *[10**6] * 5),))
        assert cooperative.resident_programs(call) == 2 * 148  # of 256 columns of tensor memory each
        workspaces.append(weakref.ref(call.workspace))
    del call
    gc.collect()
    assert blackwell.compiled == 1
    assert [workspace() for workspace in workspaces] == [None, None]


@needs_interpreter
def test_single_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooperative, "resident_programs", lambda call: None)
    case = Case((8, 16))
    weights, plans = [on_device(case)], [plan_named(case, "gram/row")]
    with execution() as scheduler:
        with pytest.raises(RuntimeError, match="cooperative"):
            backend.run(weights, plans, [True] * len(plans), precision="ieee", launch="single")
        backend.run(weights, plans, [True] * len(plans), precision="ieee", launch="auto")
    assert "single_kernel" not in scheduler.launches


@needs_interpreter
@pytest.mark.parametrize("reason", ["AMD", "nothing fits"])
def test_staged_instead_of_single_has_a_configuration_of_its_own(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small work would be one launch; where that is not possible, its tiles are not used either."""
    if reason == "AMD":
        monkeypatch.setattr(cooperative, "interpreted", lambda: False)
        monkeypatch.setattr(torch.version, "hip", "6.2")
    else:
        monkeypatch.setattr(cooperative, "resident_programs", lambda call: None)
    ran = []
    monkeypatch.setattr(Call, "run", lambda call, programs: ran.append((call.config, programs)))
    case = Case((8, 16))
    backend.run([on_device(case)], [plan_named(case, "gram/row")], [True], precision="tf32")
    assert ran == [(shipped(spec_of(DEVICE))["tf32"][0], None)]


# ----------------------------------------------------------------------------------------------------------------------
# The backend's entry
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch_mode", ["auto", "single", "staged"])
@pytest.mark.parametrize(("precision", "tolerance"), [("ieee", TOLERANCE), ("tf32", 2.0**-7), ("bf16", 2.0**-4)])
def test_run(launch_mode: str, precision: str, tolerance: float) -> None:
    skip_if_impossible(launch_mode)
    weights = [on_device(case) for case, _ in LAYERS]
    with execution():
        plans = [chosen(problem(case), "triton", DEVICE, precision) for case, _ in LAYERS]
        losses, grads = backend.run(weights, plans, [True] * len(plans), precision=precision, launch=launch_mode)
    for loss, grad, weight, (case, _) in zip(losses, grads, weights, LAYERS, strict=True):
        assert max(errors(loss.cpu(), grad.cpu(), weight, case)) <= tolerance


def test_float64_is_served_by_pytorch() -> None:
    case = Case((6, 8))
    weights = [on_device(case), on_device(case, torch.float64), on_device(case, seed=1)]
    with execution():
        jobs = [job(plan_named(case, "gram/row"), weight) for weight in weights]
        losses, grads = backend.prepare(jobs, DEVICE, Options(precision="ieee"))(weights)
    assert losses.dtype == torch.float64
    for loss, grad, weight in zip(losses, grads, weights, strict=True):
        assert grad.dtype == weight.dtype
        limit = 1e-12 if weight.dtype == torch.float64 else TOLERANCE
        assert max(errors(loss.cpu(), grad.cpu(), weight, case)) <= limit


def test_twice_the_same_bits_and_independent_results() -> None:
    case = Case((9, 6, 3))
    weight, plan = on_device(case), plan_named(case, "toom/row")
    with execution():
        first, (grad,) = backend.run([weight], [plan], [True], precision="ieee")
        kept = grad.clone()
        second, (again,) = backend.run([weight], [plan], [True], precision="ieee")
    assert torch.equal(first, second)
    assert torch.equal(kept, again)
    assert torch.equal(grad, kept)
    assert grad.data_ptr() != again.data_ptr()
    assert not grad._is_view()
    assert not first._is_view()


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
    assert (len(launch._tables), len(launch._addresses)) == (2, 1)  # without gradients there is less in them
    Call([weight], [plan], True, "ieee", BIG)
    moved = weight.clone()
    call = Call([moved], [plan], True, "ieee", BIG)
    assert (len(launch._tables), len(launch._addresses)) == (2, 2)
    assert call.weights.tolist() == [moved.data_ptr()]
    Call([moved.t().contiguous().t()], [plan], True, "ieee", BIG)
    assert len(launch._tables) == 3


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.clear_caches()
    monkeypatch.setattr(launch, "MAX_TABLES", 3)
    for rows in range(1, 6):
        case = Case((rows, 8))
        Call([on_device(case)], [plan_named(case, "gram/row")], True, "ieee", BIG)
    assert len(launch._tables) == 3


@needs_interpreter
def test_results_belong_to_the_allocation_that_holds_them() -> None:
    """An allocator, a stream or a CUDA graph knows memory by where its allocation begins."""
    _, call = mixed_call()
    buffer, end = call.grads_buffer, 0
    for grad in call.grads():
        assert grad.untyped_storage().data_ptr() == buffer.data_ptr()
        assert not grad._is_view()
        begin = grad.data_ptr() - buffer.data_ptr()
        assert begin >= end  # they do not overlap
        end = begin + grad.nbytes
    assert end <= buffer.nbytes


def test_compiled_graphs_leave_the_ops_out() -> None:
    for op in (torch.ops.ocnn_fused.orth_loss, torch.ops.ocnn_fused.orth_loss_and_grad):
        assert torch.Tag.cudagraph_unsafe in op.default.tags


class FakeStream:
    """Notes what it waits for, and which tensors were said to be used on it."""

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.held: list[torch.Tensor] = []

    def record_event(self) -> object:
        return ("copied on", self)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The current stream and whether it is being captured, of a device that is not there."""
    state = SimpleNamespace(current=FakeStream(), capturing=False)
    monkeypatch.setattr(launch, "_stream", lambda device: state.current)
    monkeypatch.setattr(launch, "_is_capturing", lambda device: state.capturing)
    monkeypatch.setattr(launch, "_captured", {})
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stream.held.append(tensor))
    launch.clear_caches()
    yield state
    launch.clear_caches()


@needs_interpreter
def test_other_streams_wait_for_tables_and_hold_them(streams: SimpleNamespace) -> None:
    first, second = streams.current, FakeStream()
    case = Case((8, 16))
    weight, plan = on_device(case), plan_named(case, "gram/row")
    Call([weight], [plan], True, "ieee", BIG)
    Call([weight], [plan], True, "ieee", BIG)
    assert (first.waited, first.held) == ([], [])  # its own work comes in order
    streams.current = second
    for _ in range(2):
        call = Call([weight], [plan], True, "ieee", BIG)
    assert second.waited == [("copied on", first)] * 2  # once for the tables, once for the addresses
    used = [call.tables.table, call.tables.constants, call.tables.tiles, call.weights]
    assert [id(tensor) for tensor in second.held] == list(map(id, used))


@needs_interpreter
def test_a_captured_graph_keeps_its_tables(streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_TABLES", 1)
    monkeypatch.setattr(launch, "MAX_ADDRESSES", 1)
    case, other = Case((8, 16)), Case((4, 8))
    weight, plan = on_device(case), plan_named(case, "gram/row")
    Call([weight], [plan], True, "ieee", BIG)
    streams.current, streams.capturing = FakeStream(), True
    call = Call([weight], [plan], True, "ieee", BIG)
    assert (streams.current.waited, streams.current.held) == ([], [])  # a capture may not wait for what precedes it
    kept = [
        weakref.ref(tensor) for tensor in (call.tables.table, call.tables.tiles, call.tables.constants, call.weights)
    ]
    del call
    streams.capturing = False
    Call([on_device(other)], [plan_named(other, "gram/row")], True, "ieee", BIG)  # evicts both
    gc.collect()
    assert (len(launch._tables), len(launch._addresses)) == (1, 1)
    assert all(tensor() is not None for tensor in kept)


@needs_interpreter
def test_weights_that_a_captured_graph_computes(streams: SimpleNamespace) -> None:
    """Their addresses are written by the graph itself, without host memory, and stay out of the cache."""
    case = Case((8, 16))
    weight, plan = on_device(case), plan_named(case, "gram/row")
    streams.capturing = True
    with pytest.raises(RuntimeError, match="call once before the capture"):
        Call([weight], [plan], True, "ieee", BIG)
    streams.capturing = False
    Call([weight], [plan], True, "ieee", BIG)
    streams.capturing = True
    computed = [weight * 2]
    with Launches() as launches:
        call = Call(computed, [plan], True, "ieee", BIG)
    assert call.weights.tolist() == [computed[0].data_ptr()]
    assert +launches.names == {"fill_": 1}
    assert len(launch._addresses) == 1


@needs_interpreter
def test_caches_serve_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them get their tables, each made once, while others are evicted."""
    launch.clear_caches()
    monkeypatch.setattr(launch, "MAX_ADDRESSES", 2)
    case = Case((8, 16))
    weights, plan = [on_device(case, seed=seed) for seed in range(4)], plan_named(case, "gram/row")
    built = []
    build = launch.build_tables

    def slow_build(*arguments: Any) -> Any:
        built.append(arguments)
        time.sleep(0.05)
        return build(*arguments)

    monkeypatch.setattr(launch, "build_tables", slow_build)

    def work(seed: int) -> bool:
        for turn in range(50):
            weight = weights[(seed + turn) % len(weights)]
            if Call([weight], [plan], True, "ieee", BIG).weights.tolist() != [weight.data_ptr()]:
                return False
        return True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(built) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Choices
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [("highest", None, "ieee"), ("high", None, "tf32"), ("medium", None, "bf16")]
    + [("highest", "tf32", "tf32"), ("high", "ieee", "ieee"), ("medium", "tf32", "bf16"), ("highest", "ieee", "ieee")],
)
def test_precision_follows_torch(older: str, newer: str | None, expected: str, matmul_settings: Any) -> None:
    if newer is not None and not hasattr(matmul_settings, "fp32_precision"):
        pytest.skip("this torch has only set_float32_matmul_precision")
    torch.set_float32_matmul_precision(older)
    if newer is not None:
        matmul_settings.fp32_precision = newer
    assert backend.resolve_precision(None, "A100", linear=True) == expected
    assert backend.resolve_precision("tf32x3", "A100", linear=True) == "tf32x3"


def test_large_tiles_need_enough_of_them() -> None:
    small, large = SHIPPED["tf32"]
    assert choose_config(SHIPPED["tf32"], 2 * 108 - 1, 108) == small
    assert choose_config(SHIPPED["tf32"], 2 * 108, 108) == large
    assert choose_config(SHIPPED["ieee"], 10**6, 108) == SHIPPED["ieee"][0]


def test_wide_tiles_need_more_of_them_and_little_padding() -> None:
    configs = SHIPPED_HOPPER["bf16"]
    assert choose_config(configs, 3 * 132 - 1, 132, 0.0) == LARGE_TILES
    assert choose_config(configs, 3 * 132, 132, 0.06) == LARGE_TILES
    assert choose_config(configs, 3 * 132, 132, 0.0) == WIDE_TILES
    assert [config.wide for config in SHIPPED_HOPPER["tf32"]] == [0, 0, 256]
    full, half = (plan_named(Case((side, side, 3, 3)), "toom/row") for side in (256, 128))
    assert backend._wide_padding((full,), WIDE_TILES) == 0
    assert backend._wide_padding((full, half), WIDE_TILES) > 0.05


def test_one_launch_for_little_work_or_for_more_than_one_pass_of_large_tiles() -> None:
    spec = SPECS["A100"]
    little, much = plan_named(Case((16, 16, 3, 3)), "toom/row"), plan_named(Case((512, 512, 3, 3)), "toom/row")
    assert prefer_single([little], spec, "tf32")
    assert not prefer_single([much], spec, "tf32")
    assert not prefer_single([little] * 10_000, spec, "tf32")
    for more in ({"passes": 2}, {"alone": False}):
        assert prefer_single([much], spec, "tf32", **more)
        assert not prefer_single([much], spec, "ieee", **more)  # where all tiles are small


@pytest.mark.parametrize("device", ["A100", "H100", "RTX 4090"])
@pytest.mark.parametrize("precision", get_args(Precision))
def test_a_single_launch_has_the_tiles_of_the_stages(device: str, precision: str) -> None:
    """Large ones for much work: nothing is lost there but where a stage alone would have more warps."""
    configs = shipped(SPECS[device])[precision]
    for alone, together in zip(configs, single_configs(configs), strict=True):
        if precision == "ieee":  # for little work
            assert (together.tile, together.warps) == (32, 4)
        else:
            assert (together.tile, together.wide, together.warps) == (alone.tile, alone.wide, alone.warps)
        assert together.by_products == alone.by_products


@pytest.mark.parametrize(
    ("device", "case", "expected"),
    [
        *((device, Case((256, 256, 3, 3)), "toom/row") for device in SPECS),  # a third of the products
        ("RTX 4090", Case((512, 128, 3, 3)), "toom/column"),
        ("A100", Case((128, 64, 3, 3)), "direct/column"),  # products are cheap next to the instructions of the mix
        ("H100", Case((512, 64, 3, 3)), "direct/column"),
        ("A100", Case((64, 64, 2, 2)), "direct/row"),
    ],
    ids=str,
)
def test_the_model_chooses_and_says_so(device: str, case: Case, expected: str) -> None:
    spec = SPECS[device]
    precision = spec.native_precision("tf32")
    times = {plan.name: seconds_in_list(plan, spec, precision) for plan in candidates(case)}
    assert chosen(problem(case), "triton", device, precision).name == expected
    assert times[expected] == min(times.values())
    first, _, _, *rows = explain(case.shape, device=device, precision="tf32").splitlines()
    assert first.endswith(f"by backend triton on {device}, {precision} (modelled, not measured)")
    (line,) = (line for line in rows if line.endswith("<- chosen"))
    assert line.startswith(expected)
    assert {line.split()[0] for line in rows if "/" in line} >= set(times)
    judged = engine.judge(problem(case), torch.float32, device, Options(backend="triton", precision=precision))
    assert [one.seconds for one in judged if isinstance(one.plan, Plan)] == sorted(times.values())


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize(
    "case", [Case((256, 64, 7, 7), 2), Case((256, 64, 9, 9), 2), Case((512, 64, 5, 5, 5), 2), Case((4, 4, 4, 4, 4))]
)
def test_chosen_plans_fit_the_mix(case: Case, precision: str) -> None:
    assert any(plan.outputs > 64 and not plan.is_diagonal for plan in candidates(case))
    for device, spec in SPECS.items():
        plan = chosen(problem(case), "triton", device, spec.native_precision(precision))
        assert not isinstance(plan, Plan) or plan.is_diagonal or plan.outputs <= 64
        assert "can be mixed" in explain(case.shape, case.stride, device=device, precision=precision)


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
    for mode in ("staged", "single") if cooperative.is_possible() else ("staged",):
        expected = backend.run([weight], [plan], [True], precision="ieee", launch=mode)[0][0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses, _ = backend.run([weight], [plan], [True], precision="ieee", launch=mode)
        graph.replay()
        assert torch.equal(losses[0], expected)
