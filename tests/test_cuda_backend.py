"""The CUDA backend: what it says where it cannot run, its plans, and its results on a GPU if there is one."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TOLERANCES, errors, fused, grad_of
from cuda_support import CSRC
from oracle import Case
from plans import candidates, job, plan_named
from plans import chosen as chosen_by
from plans import problem as problem_of_case
from test_cpu_backend import KINDS

from ocnn_fused import _extension, backends, engine, fused_orth_loss, fused_orth_loss_foreach
from ocnn_fused.backends import cuda
from ocnn_fused.plan import Plan
from ocnn_fused.problem import DEFAULT_OPTIONS

GPU = torch.device("cuda", 0)

missing = cuda.unavailable_reason(torch.device("cuda"))
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(missing is not None, reason=f"backend 'cuda': {missing}")]


# ----------------------------------------------------------------------------------------------------------------------
# Availability
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if the extension were built for sm_80 and PTX of sm_90, on a machine with an A100."""
    monkeypatch.setattr(_extension, "unavailable_reason", None)
    monkeypatch.setattr(_extension, "build_info", {"architectures": ["sm_80", "compute_90"]})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(_extension, "module", SimpleNamespace(has_cuda=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return monkeypatch


def test_available(whole: pytest.MonkeyPatch) -> None:
    assert cuda.unavailable_reason(GPU) is None


def test_other_devices(whole: pytest.MonkeyPatch) -> None:
    assert cuda.unavailable_reason(torch.device("cpu")) == "it serves CUDA devices, not cpu"


def test_without_the_extension(whole: pytest.MonkeyPatch) -> None:
    whole.setattr(_extension, "unavailable_reason", "the compiled extension is not built; run something")
    assert cuda.unavailable_reason(GPU) == "the compiled extension is not built; run something"


def test_built_without_cuda(whole: pytest.MonkeyPatch) -> None:
    whole.setattr(_extension, "module", SimpleNamespace(has_cuda=False))
    assert cuda.unavailable_reason(GPU).startswith("the compiled extension was built without CUDA; ")


def test_rocm(whole: pytest.MonkeyPatch) -> None:
    whole.setattr(torch.version, "hip", "6.2")
    assert cuda.unavailable_reason(GPU) == "it is compiled for NVIDIA GPUs, and this torch is built for ROCm"


def test_without_a_gpu(whole: pytest.MonkeyPatch) -> None:
    whole.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.unavailable_reason(GPU).startswith("torch sees no GPU (")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_architectures_of_the_build(capability: tuple[int, int], whole: pytest.MonkeyPatch) -> None:
    whole.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cuda.unavailable_reason(GPU) is None


def test_architecture_outside_of_the_build(whole: pytest.MonkeyPatch) -> None:
    whole.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert cuda.unavailable_reason(GPU) == (
        "a GPU is sm_75, and the compiled extension is built for sm_80 compute_90; "
        "rebuild it with TORCH_CUDA_ARCH_LIST=7.5"
    )
    whole.setattr(_extension, "build_info", {"architectures": ["sm_90a"]})
    whole.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert cuda.unavailable_reason(GPU) is None
    whole.setattr(torch.cuda, "get_device_capability", lambda device: (9, 2))
    assert "built for sm_90a" in cuda.unavailable_reason(GPU)


def test_order_of_preference() -> None:
    assert list(backends.MODULES) == ["cpu", "triton", "cuda", "torch"]


# ----------------------------------------------------------------------------------------------------------------------
# Plans
# ----------------------------------------------------------------------------------------------------------------------


def chosen(case: Case, precision: str = "ieee", dtype: torch.dtype = torch.float32) -> Plan:
    return chosen_by(problem_of_case(case), "cuda", "A100", precision, dtype)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("toom/row", Case((512, 512, 3, 3))),
        ("toom/column", Case((64, 3, 7, 7), stride=2)),
        ("gram/row", Case((256, 512, 1, 1))),
        ("small/row", Case((512, 1, 3, 3), groups=512)),
    ],
    ids=str,
)
def test_chosen_plans(name: str, case: Case) -> None:
    assert chosen(case).name == name


def test_what_rounds_too_much_is_not_chosen() -> None:
    """Three taps on three axes amplify the rounding of TF32 operands more than a gradient should bear."""
    case = Case((256, 256, 3, 3, 3))
    assert chosen(case).name == "toom/row"
    assert chosen(case, "tf32").algorithm != "toom"
    assert cuda.refusal(plan_named(case, "toom/row"), torch.float32, "A100", "tf32") == "not accurate enough in tf32"


def test_what_does_not_fit_is_not_chosen() -> None:
    """Five taps on three axes in float64 would take more shared memory than there is."""
    long = Case((64, 64, 5, 5, 5))
    assert cuda.fits(plan_named(long, "toom/row"), torch.float32)
    assert not cuda.fits(plan_named(long, "toom/row"), torch.float64)
    assert chosen(long, dtype=torch.float64).algorithm != "toom"
    refusal = cuda.refusal(plan_named(long, "toom/row"), torch.float64, "A100", "ieee")
    assert refusal == "does not fit into shared memory"
    many = Case((40, 2, 3, 3))
    assert not cuda.fits(plan_named(many, "small/row"), torch.float32)
    assert all(cuda.fits(plan, torch.float64) for plan in candidates(many) if not plan.small)


def test_limits_are_those_of_the_kernels() -> None:
    """cuda.fits repeats what kernels.cuh decides; double is what partial losses are added in."""
    declared = dict(
        re.findall(r"constexpr int(?:64_t)? (k\w+) = ([\d <]+);", (CSRC / "cuda" / "kernels.cuh").read_text())
    )
    bytes_of_double = 8
    assert eval(declared["kSharedBytes"]) == cuda._SHARED_BYTES
    assert int(declared["kMixThreads"]) * bytes_of_double == cuda._MIX_SUMS
    assert int(declared["kThreads"]) * bytes_of_double == cuda._SMALL_SUMS


def test_launches_count_the_products() -> None:
    assert cuda.launches(plan_named(Case((8, 9)), "gram/row")) == 4  # product, mix, product, loss
    assert cuda.launches(plan_named(Case((8, 9, 3, 3)), "toom/row")) == 9  # two batches, one of them applied twice
    assert cuda.launches(plan_named(Case((8, 1, 3), groups=8), "small/row")) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Precision
# ----------------------------------------------------------------------------------------------------------------------


def precisions_chosen_for(monkeypatch: pytest.MonkeyPatch, **options: str) -> set[str]:
    """The precisions that a call chooses plans for; as if the CPU, which executes them, were a GPU."""
    seen: set[str] = set()
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(cuda, "refusal", lambda plan, dtype, device, precision: seen.add(precision))
    engine.prepare.cache_clear()
    fused_orth_loss(Case((6, 5, 3)).random(0, torch.float32), backend="cuda", **options)
    return seen


@pytest.mark.parametrize(("setting", "precision"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")])
def test_products_follow_torch(
    setting: str, precision: str, matmul_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS has no bfloat16 products of float32 operands: medium is TF32 there."""
    torch.set_float32_matmul_precision(setting)
    assert precisions_chosen_for(monkeypatch) == precisions_chosen_for(monkeypatch, precision=precision) == {precision}


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="this torch has only set_float32_matmul_precision",
)
@pytest.mark.parametrize(("newer", "expected"), [("tf32", "tf32"), ("ieee", "ieee")])
def test_products_follow_the_newer_setting(
    newer: str, expected: str, matmul_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision("highest" if newer == "tf32" else "high")
    matmul_settings.fp32_precision = newer
    assert precisions_chosen_for(monkeypatch) == {expected}


@pytest.mark.parametrize(
    ("setting", "precision", "message"),
    [
        ("high", "ieee", r"setting 'high', got 'ieee'; torch\.set_float32_matmul_precision\('highest'\) changes it"),
        ("highest", "tf32", r"setting 'highest', got 'tf32'; torch\.set_float32_matmul_precision\('high'\) changes it"),
        ("highest", "tf32x3", "precision must be None, 'ieee' or 'tf32' for backend 'cuda', got 'tf32x3'"),
        ("medium", "bf16", "precision must be None, 'ieee' or 'tf32' for backend 'cuda', got 'bf16'"),
    ],
)
def test_a_precision_that_torch_is_not_set_to(
    setting: str, precision: str, message: str, matmul_settings: Any, whole: pytest.MonkeyPatch
) -> None:
    """Through the public function, as if the CPU were a GPU: the option must reach the backend."""
    whole.setattr(cuda, "unavailable_reason", lambda device: None)
    torch.set_float32_matmul_precision(setting)
    with pytest.raises(ValueError, match=message):
        fused_orth_loss(torch.eye(4), backend="cuda", precision=precision)


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case"), [pytest.param(*kind, marks=on_a_gpu, id=str(kind[1])) for kind in KINDS])
def test_every_kind_of_plan_on_a_gpu(name: str, case: Case, poisoned_memory: None) -> None:
    """The plan itself, whether or not it would be chosen, against the definition; the same bits each time."""
    plan = plan_named(case, name)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if not cuda.fits(plan, dtype):
            continue
        weights = [case.random(seed, dtype).to("cuda") for seed in range(2)]
        execute = cuda.prepare([job(plan, weight) for weight in weights], weights[0].device, DEFAULT_OPTIONS)
        (losses, grads), (again, grads_again) = (execute(weights) for _ in range(2))
        for weight, loss, grad in zip(weights, losses, grads, strict=True):
            assert (grad.dtype, grad.shape) == (dtype, weight.shape)
            assert max(errors(loss, grad, weight, case)) <= TOLERANCES[dtype]
        for one, other in zip((*losses, *grads), (*again, *grads_again), strict=True):
            assert torch.equal(one, other), "not the same bits"


@pytest.mark.parametrize("count", [pytest.param(67, marks=on_a_gpu)])
def test_more_weights_than_a_launch_takes(count: int) -> None:
    case = Case((12, 8, 3, 3))
    weights = [case.random(seed).to("cuda") for seed in range(count)]
    losses = fused_orth_loss_foreach(weights, backend="cuda")
    for weight, loss in zip(weights, losses, strict=True):
        torch.testing.assert_close(loss, fused(weight, case, backend="cuda")[0], rtol=1e-12, atol=0)


#: Plans of every kind; the stem works on the column side.
CAPTURED = [
    Case((40, 30)),
    Case((20, 40, 3, 3)),
    Case((64, 3, 7, 7), stride=2),
    Case((9, 8, 7)),
    Case((33, 1, 3, 3), groups=33),
]


def test_a_column_plan_is_captured() -> None:
    names = {chosen(case).name for case in CAPTURED}
    assert {"toom/row", "toom/column", "small/row"} <= names


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_a_gpu, id=str(case)) for case in CAPTURED])
def test_graph_capture_and_no_waiting(case: Case) -> None:
    """After one call, forward and backward, nothing is copied from the host and nothing waits for the device."""
    weight = case.random(0, torch.float32).to("cuda").requires_grad_()
    other = case.random(1, torch.float32)
    expected_loss, expected_grad = fused(other, case, backend="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = fused_orth_loss(weight, **case.options, backend="cuda")
        return loss.detach(), grad_of(loss, weight)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss, grad = step()
    with torch.no_grad():
        weight.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, expected_loss)
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_a_gpu, id=str(case)) for case in CAPTURED])
def test_compiled_to_graphs(case: Case) -> None:
    """The first call is a graph's warm-up: tables made then must not lie in the graph's memory."""
    case = replace(case, shape=(case.shape[0] + case.groups, *case.shape[1:]))  # that no other test has lowered
    compiled = torch.compile(
        lambda weight: fused_orth_loss(weight, **case.options, backend="cuda"), mode="reduce-overhead"
    )
    for seed in range(4):
        weight = case.random(seed, torch.float32).to("cuda").requires_grad_()
        loss = compiled(weight)
        grad = grad_of(loss, weight)
        assert max(errors(loss, grad, weight, case)) <= TOLERANCES[torch.float32]
