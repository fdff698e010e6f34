"""The workspace of a long list is bounded: it is computed in pieces."""

from __future__ import annotations

import pytest
import torch
from oracle import Case
from plans import chosen, plan_named, problem
from triton_support import BIG, DEVICE, EDGES, errors, execution, on_device

from ocnn_fused import fused_orth_loss_foreach
from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.job import Job, Operand
from ocnn_fused.backends.triton.config import SHIPPED
from ocnn_fused.backends.triton.tables import Layout, build_tables, workspace_of

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


def jobs_of(shapes: list[tuple[int, ...]]) -> list[Job]:
    plans = {shape: chosen(problem(Case(shape)), "triton", "A100", "tf32") for shape in set(shapes)}
    return [
        Job(problem(Case(shape)), plans[shape], Operand((), torch.float32, True), "tf32")  # strides do not matter
        for shape in shapes
    ]


def test_resnet34_needs_at_most_160_megabytes() -> None:
    shapes = resnet34()
    assert len(shapes) == 35
    jobs = jobs_of(shapes)
    found = backend.pieces(jobs, "tf32")
    assert [place for piece in found for place in piece] == list(range(35))
    assert len(found) > 1
    for piece in found:
        layouts, plans = [contiguous(shapes[place]) for place in piece], [jobs[place].plan for place in piece]
        tables = build_tables(
            layouts, plans, [True] * len(piece), torch.float32, SHIPPED["tf32"][0], torch.device("cpu"), rounded=True
        )
        assert tables.workspace_bytes <= 160 * MEGABYTE


@pytest.mark.parametrize("megabytes", ["1", "0.25", "1e6"])
def test_the_limit_is_an_environment_variable(megabytes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCNN_FUSED_WORKSPACE_MB", megabytes)
    jobs = jobs_of([(64, 64, 3, 3)] * 4 + [(16, 16, 3, 3)] * 4)
    largest = workspace_of(jobs[0].plan, 4, True)
    for piece in backend.pieces(jobs, "tf32"):
        assert sum(workspace_of(jobs[place].plan, 4, True) for place in piece) <= max(
            float(megabytes) * MEGABYTE, largest
        )
    assert (len(backend.pieces(jobs, "tf32")) == 1) == (megabytes == "1e6")


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


def test_pieces_give_the_results_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case((6, 4, 3)), Case((8, 16)), Case((9, 2, 2)), Case((6, 1, 3), groups=6)]
    weights = [on_device(case).requires_grad_() for case in cases]
    monkeypatch.setenv("OCNN_FUSED_WORKSPACE_MB", "0.0001")
    calls = []
    run = backend.run
    monkeypatch.setattr(backend, "run", lambda *a, **options: calls.append(len(a[0])) or run(*a, **options))
    with execution():
        losses = fused_orth_loss_foreach(weights, groups=[1, 1, 1, 6], backend="triton", precision="ieee")
    assert len(calls) > 1
    assert sum(calls) == 4
    losses.sum().backward()
    for case, weight, loss in zip(cases, weights, losses, strict=True):
        assert max(errors(loss.detach().cpu(), weight.grad.cpu(), weight.detach(), case)) <= 3e-5


def test_offsets_that_do_not_fit_are_an_error() -> None:
    case = Case((20, 6, 3))
    far = Layout(case.shape, (2**28, 3, 1), torch.float32, True)
    with pytest.raises(ValueError, match="reaches too far for the Triton backend"):
        build_tables([far], [plan_named(case, "toom/row")], [True], torch.float32, EDGES, DEVICE)
