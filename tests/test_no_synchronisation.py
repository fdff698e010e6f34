"""On a GPU nothing may ask the device for a number; and what outlives a call must not belong to a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import unusable_gpu
from oracle import Case
from plans import plan_named
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ocnn_fused import OrthRegularizer, engine, fused_orth_loss, fused_orth_loss_foreach, ops
from ocnn_fused.backends import device as devices
from ocnn_fused.backends import job
from ocnn_fused.backends.pytorch import _Executor
from ocnn_fused.optim import Muon

_aten = torch.ops.aten


class NoSynchronisation(TorchDispatchMode):
    """Refuses what a GPU would have to be waited for: numbers for the host, and sizes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_) and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in tree_iter(args[1])
        )
        waits = func.overloadpacket in (_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.equal)
        if masks or waits:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case((6, 4, 3, 3)), "toom/row"),
        (Case((9, 2, 5), 2), "toom/column"),
        (Case((6, 5, 4), 3), "direct/row"),
        (Case((8, 16)), "gram/row"),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_grad", [True, False])
def test_plans_in_pytorch_do_not_wait(case: Case, name: str, with_grad: bool) -> None:
    """As float64 weights are computed beside the others of a list."""
    execute = _Executor(plan_named(case, name), torch.float64, torch.device("cpu"))
    weight = case.random()
    with torch.no_grad(), NoSynchronisation():
        execute(weight, with_grad)


@pytest.mark.parametrize("mode", ["operator", "flatten", "per_tap"])
def test_orthogonal_updates_do_not_wait(mode: str) -> None:
    """Nor does a whole step of the optimiser, whose auxiliary part is torch's own."""
    cases = [Case((6, 4, 3, 3)), Case((8, 1, 3, 3), groups=8), Case((8, 16))]
    weights = [case.random().requires_grad_() for case in cases]
    groups = [{"params": [weight], "groups": case.groups} for weight, case in zip(weights, cases, strict=True)]
    optimizer = Muon(groups, mode=mode, backend="torch", weight_decay=0.1)  # type: ignore[arg-type]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with NoSynchronisation():
        optimizer.step()


def test_waiting_is_seen() -> None:
    for wait in (lambda x: x[x > 0], lambda x: x.sum().item(), lambda x: bool((x > 0).all())):
        with pytest.raises(AssertionError, match="waits for the device"), NoSynchronisation():
            wait(torch.ones(3))


@pytest.mark.parametrize(
    "options", [{}, {"target": "free"}, {"method": {"0": "srip"}}, {"normalize": "excess"}], ids=str
)
@pytest.mark.parametrize("direct", [True, False])
def test_steering_does_not_wait(options: dict[str, Any], direct: bool) -> None:
    """From the first call on, and where lambdas, excesses and the state are asked for; only printing waits."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Conv2d(6, 8, 3, 2)).requires_grad_()
    reg = OrthRegularizer(model, {"0": "auto", "1": "auto"}, backend="torch", **options)
    reg._warned.add("growth")  # to notice an explosion a CPU looks at its numbers, where a GPU sends them on
    before = reg.state_dict()["lambda"]
    with NoSynchronisation():
        for _ in range(2):
            if direct:
                reg.add_grad_()
            else:
                reg().backward()
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
        state = reg.state_dict()
        reg.per_layer("lambda")
        reg.per_layer("excess")
    assert all(state["lambda"][name] != value for name, value in before.items())


def test_default_device_moves_no_table() -> None:
    """Where tensors are made by default is nobody's business but the caller's."""
    weights = [torch.randn(6, 4, 3), torch.randn(5, 7), torch.randn(4, 1, 3, 3)]
    for backend in ("cpu", "torch"):
        expected = fused_orth_loss_foreach(weights, groups=[1, 1, 4], backend=backend)
        with torch.device("meta"):
            shifted = [weight.clone() for weight in weights]
            actual = fused_orth_loss_foreach([w[: w.shape[0]] for w in shifted], groups=[1, 1, 4], backend=backend)
        assert torch.equal(actual, expected)


def test_what_outlives_a_graph_is_made_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives a graph what one thread, or one stream, allocates; the device is that of the weights."""
    entered: list[torch.device] = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            entered.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Guard)
    gpu = torch.device("cuda", 1)
    assert devices.beside_all_graphs(gpu, threading.get_ident) != threading.get_ident()
    assert devices.beside_all_graphs(torch.device("cpu"), threading.get_ident) == threading.get_ident()
    assert entered == [gpu]


def test_all_tables_are_made_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Fourier plans too, which PyTorch executes on a GPU."""
    made: list[str] = []

    def beside(device: torch.device, make: Callable[[], dict[object, object]]) -> dict[object, object]:
        executors = make()
        made.extend(type(executor).__module__ for executor in executors.values())
        return executors

    monkeypatch.setattr(job, "beside_all_graphs", beside)
    engine.prepare.cache_clear()
    for shape in ((6, 4, 3), (8, 8, 31, 31)):
        fused_orth_loss(torch.randn(shape), backend="torch")
    engine.prepare.cache_clear()
    assert made == ["ocnn_fused.backends.pytorch", "ocnn_fused.backends.fourier"]


def test_capture_is_asked_of_the_weights_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("ocnn_fused.backends.triton.launch")
    current = [0]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    assert launch._is_capturing(torch.device("cuda", 1))
    assert not launch._is_capturing(torch.device("cuda", 0))


def test_a_driver_that_torch_cannot_use_is_no_reason_to_skip(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    assert unusable_gpu("13.0", False, driver, None) is None  # no driver at all
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  450.80.02\n")
    assert "450.80.02" in str(unusable_gpu("13.0", False, driver, None))
    assert unusable_gpu("13.0", True, driver, None) is None
    assert unusable_gpu(None, False, driver, None) is None  # a CPU build of torch
    assert unusable_gpu("13.0", False, driver, "") is None  # the GPU was hidden on purpose


def test_outputs_of_ops_have_storages_of_their_own() -> None:
    buffer = torch.arange(6.0)
    first, second = map(ops._apart, (buffer[:2], buffer[2:]))
    assert first.tolist() + second.tolist() == buffer.tolist()
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in (first, second))
    assert second.data_ptr() == buffer[2:].data_ptr(), "nothing is copied"
