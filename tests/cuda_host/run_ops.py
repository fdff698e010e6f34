"""Runs the ops of csrc/cuda/orth_cuda.cu, compiled for the CPU, on CPU tensors: run_ops.py LIBRARY.

In a process of its own, because loading the library makes the package believe that it was built with CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from conftest import TOLERANCES
from oracle import Case
from plans import plan_named

from ocnn_fused.backends import cuda, lowering
from ocnn_fused.backends.job import accumulation_dtype
from ocnn_fused.plan import Plan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

CASES = [
    ("gram/row", Case((20, 30)), DTYPES, 2),
    ("gram/column", Case((90, 5, 1, 1), groups=3), (torch.float64,), 2),
    ("gram/row", Case((20, 6, 2, 2), stride=2), DTYPES, 1),
    ("toom/row", Case((20, 17, 3, 3)), DTYPES, 2),
    ("toom/row", Case((12, 5, 3, 3), stride=2, groups=2), (torch.float64,), 3),
    ("toom/row", Case((5, 4, 3)), (torch.float64,), 67),  # more weights than a launch takes
    ("toom/column", Case((40, 3, 7, 7), stride=2), (torch.float64, torch.float16), 2),
    ("direct/row", Case((9, 8, 7)), (torch.float64, torch.float32), 2),
    ("direct/row", Case((9, 5, 3, 7), stride=(1, 2)), (torch.float64,), 1),
    ("direct/column", Case((60, 4, 7), groups=2), (torch.float64,), 1),
    ("small/row", Case((33, 1, 3, 3), groups=33), DTYPES, 2),
    ("small/row", Case((8, 2, 3), groups=4), (torch.float64,), 65),
    ("toom/row", Case((4, 500, 3, 3)), (torch.float64,), 1),
    ("toom/row", Case((12, 5, 3, 3), stride=2, groups=2, target="free"), DTYPES, 3),
    ("toom/row", Case((12, 5, 3, 3), part="off_diagonal"), (torch.float64,), 2),
    ("toom/column", Case((40, 3, 7, 7), stride=2, target="free"), (torch.float64, torch.float16), 2),
    ("gram/column", Case((90, 5, 1, 1), groups=3, target=0.5), (torch.float64,), 2),
    ("direct/row", Case((9, 8, 7), target="free"), (torch.float64,), 65),
    ("small/row", Case((8, 2, 3), groups=4, target="free"), DTYPES, 2),
]


def execute(
    weights: Sequence[torch.Tensor],
    plan: Plan,
    with_grad: bool,
    factors: torch.Tensor | None = None,
    factor: float = 1.0,
    per_target: bool = False,
    targets: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As on a GPU, whatever the device of the weights."""
    lowered = lowering.lower(plan, accumulation_dtype(weights[0].dtype))
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    compiled = torch.classes.ocnn_fused.Plan(*lowered)
    places = list(range(len(weights)))
    return torch.ops.ocnn_fused.execute.default.redispatch(
        key, weights, compiled, with_grad, factors, places, factor, per_target, list(targets)
    )


def check_epilogue(weights: Sequence[torch.Tensor], plan: Plan, grads: Sequence[torch.Tensor]) -> None:
    """Gradients times factors, added to other tensors and to the weights themselves."""
    factors = torch.linspace(-1.0, -0.25, len(weights), dtype=torch.float64)
    scaled = execute(weights, plan, True, factors, 0.5)[1]
    targets = [torch.randn_like(weight) for weight in weights]
    before = [target.clone() for target in targets]
    assert not execute(weights, plan, True, factors, 0.5, targets=targets)[1]
    own = [weight.clone() for weight in weights]
    execute(own, plan, True, factors, 0.5, targets=own)
    zipped = zip(weights, grads, factors.tolist(), scaled, targets, before, own, strict=True)
    for weight, grad, factor, times, target, start, moved in zipped:
        expected = 0.5 * factor * grad.double()
        tolerance = 4 * TOLERANCES[weight.dtype] * max(1.0, float(grad.double().abs().max()))
        assert (times.double() - expected).abs().max() <= tolerance
        assert (target.double() - start.double() - expected).abs().max() <= tolerance
        assert (moved.double() - weight.double() - expected).abs().max() <= tolerance


def layouts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight in several orders of memory."""
    order = tuple(reversed(range(weight.dim())))
    return {
        "contiguous": weight,
        "reversed": weight.permute(order).contiguous().permute(order),
        "gaps": torch.stack([weight, torch.full_like(weight, torch.nan)], -1)[..., 0],
    }


def check(name: str, case: Case, dtype: torch.dtype, count: int, layout: str) -> None:
    from conftest import errors

    plan = plan_named(case, name)
    assert cuda.fits(plan, dtype)
    weights = [layouts(case.random(seed, dtype))[layout] for seed in range(count)]
    losses, grads = execute(weights, plan, True)
    alone, nothing = execute(weights, plan, False)
    assert not nothing
    assert len(losses) == len(grads) == len(alone) == count
    check_epilogue(weights, plan, grads)
    for weight, loss, grad, loss_alone in zip(weights, losses, grads, alone, strict=True):
        assert loss.shape == ()
        assert loss.dtype == accumulation_dtype(dtype)
        assert (grad.dtype, grad.shape) == (dtype, weight.shape)
        assert torch.equal(loss, loss_alone)
        worst = max(errors(loss, grad, weight, case))
        assert worst <= TOLERANCES[dtype], (name, str(case), dtype, layout, worst)


def times(stage: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How often a stage runs for seven equal weights."""
    case = Case(shape)
    weights = [case.random(seed, dtype) for seed in range(7)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        execute(weights, plan_named(case, "gram/row"), True)
    return sum(event.name == f"ocnn_fused::{stage}" for event in profile.events())


def check_batches() -> None:
    """Small equal weights share their launches, also where the weight itself could serve as planes; large ones do not.

    The library was compiled to work on 16 KB at once, and to copy weights of up to 1 KB.
    """
    for dtype in (torch.float32, torch.float16):
        assert [times(stage, (8, 8), dtype) for stage in ("evaluate", "gram", "mix", "gather")] == [1, 1, 1, 1]
    assert [times(stage, (16, 17), torch.float32) for stage in ("evaluate", "gram", "mix", "gather")] == [0, 7, 7, 0]
    print("batches passed")


if __name__ == "__main__":
    torch.ops.load_library(sys.argv[1])
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    for name, case, dtypes, count in CASES:
        for dtype in dtypes:
            for layout in ("contiguous", "reversed", "gaps") if count < 60 else ("contiguous",):
                check(name, case, dtype, count, layout)
        print(name, case, "passed", flush=True)
    check_batches()
