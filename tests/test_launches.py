"""Launches of a training step on a GPU, counted: Triton's by the interpreter, PyTorch's own by its profiler.

On CPU tensors PyTorch runs the operations that it would launch on a GPU. One operation is one launch; one on a list of
tensors (``_foreach_``) is one too, though a GPU takes one per 20 million numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from triton.runtime.interpreter import GridExecutor
from triton_support import execution, needs_interpreter, needs_single

from ocnn_fused import OrthRegularizer, engine
from ocnn_fused.backends import triton
from ocnn_fused.backends.triton import config
from ocnn_fused.backends.triton.tables import STAGES as EVERY_STAGE

_KERNEL = "a kernel of Triton"

#: No target is free here.
STAGES = EVERY_STAGE[1:]

#: Operations that touch no element: they launch nothing.
_NOTHING = {
    "aten::alias", "aten::as_strided", "aten::as_strided_", "aten::chunk", "aten::data", "aten::detach",
    "aten::detach_", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::expand", "aten::expand_as",
    "aten::flatten", "aten::lift_fresh", "aten::narrow", "aten::new_empty", "aten::permute", "aten::reshape",
    "aten::resize_", "aten::resolve_conj", "aten::resolve_neg", "aten::result_type", "aten::select", "aten::set_data",
    "aten::slice", "aten::split", "aten::squeeze", "aten::t", "aten::transpose", "aten::unbind", "aten::unflatten",
    "aten::unsqueeze", "aten::view", "aten::view_as", "aten::_reshape_alias", "aten::_unsafe_view",
}  # fmt: skip


@contextmanager
def marked_launches() -> Iterator[None]:
    """What the interpreter itself calls of PyTorch is no operation of the step."""
    launch = GridExecutor.__call__

    def marked(self: GridExecutor, *arguments: object, **options: object) -> object:
        with record_function(_KERNEL):
            return launch(self, *arguments, **options)

    GridExecutor.__call__ = marked
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


def launches(step: Callable[[], object]) -> Counter[str]:
    """By name, of a step that has run before."""
    with execution():
        step()
    with marked_launches(), execution() as scheduler, profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    counted: Counter[str] = Counter(scheduler.launches)
    for event in found.events():
        if not event.name.startswith("aten::") or event.name in _NOTHING:
            continue
        within = []
        parent = event.cpu_parent
        while parent is not None:
            within.append(parent.name)
            parent = parent.cpu_parent
        if any(name == _KERNEL or name.startswith("aten::_foreach_") for name in within):
            continue
        inner = any(child.name.startswith("aten::") and child.name not in _NOTHING for child in event.cpu_children)
        if event.name.startswith("aten::_foreach_") or not inner:
            counted[event.name] += 1
    return +counted


def network(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(16, 16, 3 if index % 2 else 1, padding=index % 2, bias=False) for index in range(layers)]
    return nn.Sequential(*convolutions)


def step_of(model: nn.Module, reg: OrthRegularizer | None, add: bool = False) -> Callable[[], None]:
    x = torch.ones(1, 16, 3, 3)

    def step() -> None:
        model.zero_grad(set_to_none=not add)  # addresses of gradients are copied to the device when they change
        loss = model(x).sum()
        if reg is not None and not add:
            loss = loss + reg()
        loss.backward()
        if reg is not None and add:
            reg.add_grad_()

    return step


def regularizer(model: nn.Module, launch: str | None = "staged") -> OrthRegularizer:
    reg = OrthRegularizer(
        model, weight=lambda name, _: 1.0 + float(name), backend="triton", launch=launch, precision="tf32"
    )
    reg._warned.add("growth")  # who watches copies the losses in each eighth step
    return reg


def without_accumulation(added: Counter[str], model: nn.Module) -> Counter[str]:
    """What is left without autograd's own additions to gradients that are there: one for each weight."""
    weights = len(list(model.parameters()))
    assert added["aten::add"] == weights + 1, "one more for the sum of both losses"
    return added - Counter({"aten::add": weights})


@needs_interpreter
@pytest.mark.parametrize("layers", [4, 12])
def test_reg_adds_at_most_12_launches_whatever_the_network(layers: int) -> None:
    model = network(layers)
    plain = launches(step_of(model, None))
    added = without_accumulation(launches(step_of(model, regularizer(model))) - plain, model)
    assert added.total() <= 12, added
    assert sum(count for name, count in added.items() if name.endswith("_kernel")) == 5


@needs_interpreter
def test_the_count_sees_what_it_is_for() -> None:
    """A launch for each layer."""
    model = network(12)
    reg = regularizer(model)

    def one_by_one() -> None:
        step_of(model, None)()
        for layer in reg.per_layer().values():
            layer.mul(2)

    assert (launches(one_by_one) - launches(step_of(model, None))).total() > 12


@pytest.fixture
def limited_workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OCNN_FUSED_WORKSPACE_MB", request.param)
    engine.prepare.cache_clear()
    yield
    engine.prepare.cache_clear()


@needs_interpreter
@pytest.mark.parametrize(("limited_workspace", "passes"), [("128", 1), ("0.3", 2)], indirect=["limited_workspace"])
@pytest.mark.usefixtures("limited_workspace")
def test_add_grad_launches_five_kernels_per_pass_and_nothing_else(passes: int) -> None:
    model = network(12)
    plain = launches(step_of(model, None, add=True))
    added = launches(step_of(model, regularizer(model), add=True)) - plain
    assert added == {f"{stage}_kernel": passes for stage in STAGES}


@needs_interpreter
@needs_single
@pytest.mark.parametrize(
    ("limited_workspace", "kernels"),
    [("128", {f"{stage}_kernel": 1 for stage in STAGES}), *((size, {"single_kernel": 1}) for size in ("0.3", "0.05"))],
    indirect=["limited_workspace"],
    ids=["one pass", "two passes", "more"],
)
@pytest.mark.usefixtures("limited_workspace")
@pytest.mark.parametrize("add", [False, True], ids=["reg()", "add_grad_"])
def test_launches_do_not_grow_with_the_passes(
    kernels: dict[str, int], add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself: no launch is asked for, and for no other reason is one preferred to five."""
    monkeypatch.setattr(config, "SINGLE_LOSS", 1e9)
    model = network(12)
    plain = launches(step_of(model, None, add))
    added = launches(step_of(model, regularizer(model, launch=None), add)) - plain
    assert {name: count for name, count in added.items() if name.endswith("_kernel")} == kernels
    added = added if add else without_accumulation(added, model)
    assert added.total() <= 12, added


@needs_interpreter
@needs_single
def test_a_list_of_two_precisions_has_no_more_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions follow one setting of PyTorch, Linear layers another."""
    monkeypatch.setattr(config, "SINGLE_LOSS", 1e9)
    monkeypatch.setattr(triton, "asked_precision", lambda device, linear: "ieee" if linear else "tf32")
    engine.prepare.cache_clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(144, 16, bias=False))
    reg = OrthRegularizer(model, include=["0", "2"], backend="triton")
    assert len(reg.layers) == 2
    reg._warned.add("growth")
    plain = launches(step_of(model, None))
    added = launches(step_of(model, reg)) - plain
    engine.prepare.cache_clear()
    kernels = {name: count for name, count in added.items() if name.endswith("_kernel")}
    assert kernels == {"single_kernel": 1, "gram_kernel": 1, "apply_kernel": 1}
    assert without_accumulation(added, model).total() <= 14, added
