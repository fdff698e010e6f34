"""The workspace of a long list is bounded: it is computed in several passes."""

from __future__ import annotations

import pytest
import torch
from oracle import Case
from plans import chosen, plan_named, problem
from triton_support import (
    BIG,
    DEVICE,
    EDGES,
    TOLERANCE,
    Call,
    errors,
    execution,
    needs_interpreter,
    needs_single,
    on_device,
    skip_if_impossible,
    tl,
    triton,
)

from ocnn_fused import fused_orth_loss_foreach
from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.triton import kernels
from ocnn_fused.backends.triton.config import SHIPPED
from ocnn_fused.backends.triton.tables import Layout, build_tables, passes_of, workspace_of
from ocnn_fused.plan import Plan

MEGABYTE = 2**20


def contiguous(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, tuple(torch.empty(shape, device="meta").stride()), torch.float32, True)


def resnet34() -> list[tuple[int, ...]]:
    """Shapes of its convolutions behind the first, in order."""
    shapes: list[tuple[int, ...]] = []
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before if block == 0 else width, 3, 3), (width, width, 3, 3)]
            shapes += [(width, before, 1, 1)] if block == 0 and before != width else []
        before = width
    return shapes


def plans_of(shapes: list[tuple[int, ...]]) -> list[Plan]:
    plans = {shape: chosen(problem(Case(shape)), "triton", "A100", "tf32") for shape in set(shapes)}
    return [plans[shape] for shape in shapes]


def passes_within_the_limit(plans: list[Plan]) -> tuple[range, ...]:
    return passes_of(plans, [True] * len(plans), "tf32", backend.workspace_limit())


def test_resnet34_needs_at_most_160_megabytes() -> None:
    shapes = resnet34()
    assert len(shapes) == 35
    plans = plans_of(shapes)
    passes = passes_within_the_limit(plans)
    assert [place for one in passes for place in one] == list(range(35))
    assert len(passes) > 1
    layouts, device = [contiguous(shape) for shape in shapes], torch.device("cpu")
    wanted, config = [True] * len(plans), SHIPPED["tf32"][0]
    tables = build_tables(layouts, plans, wanted, torch.float32, config, device, rounded=True, passes=passes)
    assert tables.workspace_bytes <= 160 * MEGABYTE
    assert len(tables.passes) == len(passes)


@pytest.mark.parametrize("megabytes", ["1", "0.25", "1e6"])
def test_the_limit_is_an_environment_variable(megabytes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCNN_FUSED_WORKSPACE_MB", megabytes)
    plans = plans_of([(64, 64, 3, 3)] * 4 + [(16, 16, 3, 3)] * 4)
    largest = workspace_of(plans[0], 4, True)
    passes = passes_within_the_limit(plans)
    for one in passes:
        assert sum(workspace_of(plans[place], 4, True) for place in one) <= max(float(megabytes) * MEGABYTE, largest)
    assert (len(passes) == 1) == (megabytes == "1e6")


@pytest.mark.parametrize("megabytes", ["0", "-1", "much"])
def test_a_wrong_limit_is_an_error(megabytes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCNN_FUSED_WORKSPACE_MB", megabytes)
    with pytest.raises(ValueError, match=f"OCNN_FUSED_WORKSPACE_MB must be a positive number, got '{megabytes}'"):
        backend.workspace_limit()


@pytest.mark.parametrize(
    ("case", "name"),
    [(Case((20, 6, 3, 3)), "toom/row"), (Case((9, 2, 2)), "toom/column"), (Case((6, 1, 3), groups=6), "small/row")],
    ids=str,
)
@pytest.mark.parametrize("with_grad", [True, False])
def test_the_estimate_is_what_the_tables_take(case: Case, name: str, with_grad: bool) -> None:
    """But for the rounding of regions, and the partial losses."""
    plan = plan_named(case, name)
    tables = build_tables([contiguous(case.shape)], [plan], [with_grad], torch.float32, BIG, torch.device("cpu"))
    assert 0 <= tables.workspace_bytes - workspace_of(plan, 4, with_grad) < 4096


#: Every stage, among them a free target and planes that are the weight itself.
LIST = [
    (Case((6, 4, 3)), "toom/row"),
    (Case((8, 16)), "gram/row"),
    (Case((9, 2, 2), target="free"), "toom/row"),
    (Case((6, 5, 3)), "direct/row"),
    (Case((6, 1, 3), groups=6), "small/row"),
    (Case((7, 3, 3)), "toom/row"),
]


@needs_interpreter
@pytest.mark.parametrize("passes", [(range(2), range(2, 6)), tuple(range(place, place + 1) for place in range(6))])
@pytest.mark.parametrize("programs", [None, 1, 3], ids=["staged", "one program", "three programs"])
def test_passes_give_the_bits_of_one(passes: tuple[range, ...], programs: int | None) -> None:
    """With less memory, and whoever is ahead."""
    skip_if_impossible("single" if programs else None)
    weights, plans = [on_device(case) for case, _ in LIST], [plan_named(*layer) for layer in LIST]
    whole = Call(weights, plans, True, "ieee", EDGES)
    with execution():
        whole.run()
    for seed in range(4):
        call = Call(weights, plans, True, "ieee", EDGES, passes=passes)
        with execution("interleaved" if programs == 3 else "sequential", seed):
            call.run(programs)
        assert call.tables.workspace_bytes < whole.tables.workspace_bytes
        assert torch.equal(call.losses, whole.losses)
        assert all(torch.equal(a, b) for a, b in zip(call.grads(), whole.grads(), strict=True))
    for (case, _), weight, loss, grad in zip(LIST, weights, whole.losses, whole.grads(), strict=True):
        assert max(errors(loss, grad, weight, case)) <= TOLERANCE


@triton.jit
def no_barrier_between_passes(arrivals, target):
    """That of the kernel, except that nobody waits at the fifth: four programs, five barriers in a pass."""
    tl.atomic_add(arrivals, 1)
    if target != 20:
        while tl.atomic_add(arrivals, 0) < target:
            pass


@needs_interpreter
@needs_single
def test_a_missing_barrier_between_passes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass has larger planes, and writes them over the first one's gradients."""
    cases = [Case((15, 4, 2), groups=3), Case((4, 200, 2))]
    weights, plans = [on_device(case) for case in cases], [plan_named(case, "toom/row") for case in cases]

    def result(seed: int) -> list[torch.Tensor]:
        call = Call(weights, plans, True, "ieee", EDGES, passes=(range(1), range(1, 2)))
        with execution("interleaved", seed):
            call.run(4)
        return [call.losses, *call.grads()]

    expected = result(0)
    monkeypatch.setattr(kernels, "grid_barrier", no_barrier_between_passes)
    # Not every order shows it.
    assert any(not torch.equal(a, b) for seed in range(20) for a, b in zip(result(seed), expected, strict=True))


def test_a_call_within_the_limit_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case((6, 4, 3)), Case((8, 16)), Case((9, 2, 2)), Case((6, 1, 3), groups=6)]
    weights = [on_device(case).requires_grad_() for case in cases]
    monkeypatch.setenv("OCNN_FUSED_WORKSPACE_MB", "0.0001")
    passes = []
    run = backend.run
    monkeypatch.setattr(backend, "run", lambda *a, **options: passes.append(options["passes"]) or run(*a, **options))
    with execution():
        losses = fused_orth_loss_foreach(weights, groups=[1, 1, 1, 6], backend="triton", precision="ieee")
    ((*some, last),) = passes
    assert some
    assert last.stop == 4
    losses.sum().backward()
    for case, weight, loss in zip(cases, weights, losses, strict=True):
        assert max(errors(loss.detach().cpu(), weight.grad.cpu(), weight.detach(), case)) <= 3e-5


def test_offsets_that_do_not_fit_are_an_error() -> None:
    case = Case((20, 6, 3))
    far = Layout(case.shape, (2**28, 3, 1), torch.float32, True)
    with pytest.raises(ValueError, match="reaches too far for the Triton backend"):
        build_tables([far], [plan_named(case, "toom/row")], [True], torch.float32, EDGES, DEVICE)
