"""Free scale, other targets and the off-diagonal part in the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from oracle import Case
from triton_support import BIG, DEVICE, EDGES, check, errors, execution, on_device, plan_named, run, skip_if_impossible

from ocnn_fused import fused_orth_loss

#: One for each epilogue: mix, lags as outputs, lag 0 alone, tiny groups; rows and columns, one group and several.
PLANS = [
    ("toom/row", Case((20, 6, 3, 3))),
    ("toom/row", Case((18, 3, 3, 3), groups=2)),
    ("toom/column", Case((40, 2, 3, 3), stride=2, groups=2)),
    ("direct/row", Case((19, 4, 5))),
    ("direct/column", Case((40, 3, 5), groups=2)),
    ("gram/row", Case((24, 40))),
    ("gram/row", Case((20, 80, 3), stride=3, groups=2)),
    ("gram/column", Case((40, 8))),
    ("small/row", Case((21, 1, 3, 3), groups=21)),
    ("small/row", Case((12, 2, 3), stride=2, groups=4)),
]

ASKED = [{"target": "free"}, {"target": 0.4}, {"part": "off_diagonal"}]


@pytest.mark.parametrize(("programs", "config"), [(None, BIG), (1, EDGES)], ids=["staged", "single"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize(("name", "case"), PLANS, ids=str)
def test_matches_definition(
    name: str, case: Case, asked: dict[str, object], programs: int | None, config: object
) -> None:
    if name.endswith("column") and "part" in asked:
        pytest.skip("the off-diagonal part has no column side")
    skip_if_impossible("single" if programs else None)
    case = case.with_options(**asked)
    check(case, plan_named(case, name), config=config, programs=programs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case((20, 6, 3, 3), target="free")
    weight = on_device(case, dtype)
    losses, (grad,) = run([weight], [plan_named(case, "toom/row")])
    limit = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert max(errors(losses[0], grad, weight, case)) <= limit


def test_layers_with_different_targets_share_a_launch() -> None:
    made = [(name, case.with_options(**asked)) for name, case in PLANS[:6] for asked in (*ASKED[:2], {})]
    weights = [on_device(case).contiguous(memory_format=torch.contiguous_format) for _, case in made]
    for order in ("sequential", "shuffled"):
        losses, grads = run(weights, [plan_named(case, name) for name, case in made], order=order)
        for loss, grad, weight, (_, case) in zip(losses, grads, weights, made, strict=True):
            assert max(errors(loss, grad, weight, case)) <= 3e-5, case


@pytest.mark.parametrize("launch", ["staged", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backend(dtype: torch.dtype, launch: str) -> None:
    """Through the public function; float64 goes to the PyTorch executor."""
    skip_if_impossible(launch)
    case = Case((16, 6, 3, 3), stride=2, target="free")
    weight = case.random(dtype=dtype).to(DEVICE).requires_grad_()
    with execution():
        loss = fused_orth_loss(weight, 2, target="free", backend="triton", launch=launch, precision="ieee")
        loss.backward()
    assert weight.grad is not None
    assert max(errors(loss, weight.grad.cpu(), weight.detach(), case)) <= (3e-5 if dtype == torch.float32 else 1e-11)
