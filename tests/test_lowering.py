"""What compiled code is given: per-axis factors, halves and batches must be the plan itself, exactly."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import torch
from oracle import Case
from plans import chosen, plan_named, problem_with
from torch.utils._python_dispatch import TorchDispatchMode

from ocnn_fused import _extension, engine
from ocnn_fused.backends import lowering, pytorch
from ocnn_fused.backends.job import Operand
from ocnn_fused.plan import Plan, candidates, reduce_axis
from ocnn_fused.problem import Options, problem_of

compiled = pytest.mark.skipif(_extension.module is None, reason="the compiled backend is left out")

#: (kernel, stride, dilation, padding) per axis.
AXES = {
    "Linear": (),
    "1": ((1, 1, 1, None),),
    "3": ((3, 1, 1, None),),
    "3/2": ((3, 2, 1, None),),
    "5 dilated": ((5, 2, 3, None),),
    "7/3": ((7, 3, 1, None),),
    "5, two lags": ((5, 1, 1, 2),),
    "2x5": ((2, 1, 1, None), (5, 1, 1, None)),
    "3x3/2": ((3, 2, 1, None), (3, 2, 1, None)),
    "5x5/3": ((5, 3, 1, None), (5, 3, 1, None)),
    "7x7/2": ((7, 2, 1, None), (7, 2, 1, None)),
    "4x1": ((4, 1, 1, None), (1, 1, 1, None)),
    "3x7, direct along 7": ((3, 1, 1, None), (7, 1, 1, None)),
    "3x7, few lags": ((3, 1, 1, 1), (7, 1, 1, 2)),
    "3x2x3": ((3, 1, 1, None), (2, 1, 1, None), (3, 2, 1, None)),
}


def plans(with_mix: bool = False) -> list[object]:
    found = []
    for name, axes in AXES.items():
        plans = candidates(problem_with(96, 40, tuple(reduce_axis(*axis) for axis in axes)))
        every = [
            plan for plan in plans if isinstance(plan, Plan) and not plan.small and not (with_mix and plan.is_diagonal)
        ]
        found += [pytest.param(plan, id=f"{name}-{plan.name}") for plan in every]
    return found


def exact(matrix: object) -> np.ndarray:
    return np.array(matrix, dtype=object)


def kronecker(matrices: list[np.ndarray]) -> np.ndarray:
    return reduce(np.kron, matrices, exact([[Fraction(1)]]))


def from_halves(even: object, odd: object, points: int, span: int) -> np.ndarray:
    """The matrix that a Factor of csrc/cpu/stages.h stands for, column by column."""
    columns = []
    for column in range(span):
        x = [Fraction(int(index == column)) for index in range(span)]
        sums = [x[q] + (x[span - 1 - q] if q != span - 1 - q else 0) for q in range((span + 1) // 2)]
        differences = [x[q] - x[span - 1 - q] for q in range(span // 2)]
        rows = exact(even) @ exact(sums)
        values = [rows[0]]
        for row, of_odd in zip(rows[1:], odd, strict=True):
            turn = sum((a * b for a, b in zip(of_odd, differences, strict=True)), Fraction(0))
            values += [row + turn, row - turn]
        columns.append(values[:points])
    return exact(columns).T


@pytest.mark.parametrize("plan", plans())
def test_factors_are_the_evaluation(plan: Plan) -> None:
    for block in plan.blocks:
        grid = kronecker([exact(scheme.evaluation) for scheme in block.factors])
        assert sorted(block.plane_of) == list(range(block.planes))
        assert (grid == exact([block.evaluation[plane] for plane in block.plane_of])).all()


@pytest.mark.parametrize("plan", plans(with_mix=True))
def test_factors_are_the_mix(plan: Plan) -> None:
    """Every kept lag, both signs, as the sum over blocks of the product of the axes' mixes."""
    all_lags = list(itertools.product(*(range(-axis.lags, axis.lags + 1) for axis in plan.axes)))
    as_stored, transposed = np.zeros((2, len(all_lags), plan.outputs), dtype=object)
    for block in plan.blocks:
        grid = kronecker([exact(scheme.mix) for scheme in block.factors])
        for lag, row in zip(lowering._lag_of(plan, block), grid, strict=True):
            for (out, is_transposed), value in zip(block.output_of, row, strict=True):
                if lag >= 0:
                    (transposed if is_transposed else as_stored)[lag, out] += value
    half = len(all_lags) // 2
    assert tuple(all_lags[half:]) == plan.lags
    own = np.array(plan.self_paired)
    # The plan splits what is its own transpose evenly.
    assert (as_stored[half:][:, own] == exact(plan.mix)[:, own] + exact(plan.mix_transposed)[:, own]).all()
    assert (as_stored[half:][:, ~own] == exact(plan.mix)[:, ~own]).all()
    assert (transposed[half:][:, ~own] == exact(plan.mix_transposed)[:, ~own]).all()
    # Negative lags are transposes.
    assert (as_stored[half::-1][:, ~own] == exact(plan.mix_transposed)[:, ~own]).all()


@pytest.mark.parametrize("taps", [2, 3, 4, 5])
def test_halves_are_the_matrix(taps: int) -> None:
    scheme = chosen(problem_with(64, 64, (reduce_axis(taps),))).blocks[0].factors[0]
    for matrix in (scheme.evaluation, tuple(zip(*scheme.mix, strict=True))):
        assert (from_halves(*lowering._halves(matrix), len(matrix), len(matrix[0])) == exact(matrix)).all()


@pytest.mark.parametrize("plan", plans())
def test_batches_hold_every_product_once(plan: Plan) -> None:
    pools, runs, output = lowering.batches(plan)
    assert sorted(output) == list(range(plan.outputs))
    for number, pool in enumerate(pools):
        places = [place for where in pool.where.values() for place in where]
        assert sorted(places) == list(range(len(places))), number
        assert {plan.blocks[block].residues for block in pool.where} == {pool.residues}
    issued = sorted(
        (run.block, run.left + j, run.right + j, run.out if run.summed else run.out + j)
        for run in runs
        for j in range(run.count)
    )
    place = {block: (number, where) for number, pool in enumerate(pools) for block, where in pool.where.items()}
    wanted = sorted(
        (place[block][0], place[block][1][left], place[block][1][right], output[out])
        for block, left, right, out in plan.products
    )
    assert issued == wanted


def test_blocks_of_one_width_share_two_batches() -> None:
    plan = chosen(problem_with(128, 64, (reduce_axis(3, 2), reduce_axis(3, 2))))
    assert (plan.name, len(plan.blocks)) == ("toom/row", 4)
    assert [run.count for run in lowering.batches(plan).runs] == [4, 6]


@compiled
def test_a_struct_wants_every_field_by_its_name() -> None:
    for wrong in ({"planes": 4}, {"planes": 4, "residues": 1, "taps": 3}, {"planes": "4", "residues": 1}):
        with pytest.raises(TypeError, match="planes: "):
            _extension.module.PlanPool(**wrong)


@compiled
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": [0, 0]}, "weights"),
        ({"grads": [0, 0]}, "grads"),
        ({"weights": []}, "weights"),
    ],
)
def test_a_bucket_wants_an_address_for_each_place(changed: dict[str, object], message: str) -> None:
    weight, losses = torch.randn(8, 4, 3, 3), torch.empty(1)
    lowered = lowering.lower(plan_named(Case((8, 4, 3, 3)), "toom/row"), torch.float32)
    bucket = _extension.module.Bucket(
        plan=lowered.plan,
        tables=lowered.tables.data_ptr(),
        constants=lowered.constants.data_ptr(),
        dtype="float32",
        sizes=weight.shape,
        strides=weight.stride(),
        grad_strides=weight.stride(),
        places=[0],
    )
    arguments = {
        "weights": [weight.data_ptr()],
        "grads": [],
        "adds": False,
        "losses": losses.data_ptr(),
        "wide": False,
        "factors": 0,
        "factor": 1.0,
        "per_target": False,
        "workspace": 0,
        "workspace_bytes": 0,
    }
    with pytest.raises(ValueError, match=message):
        bucket.run(**{**arguments, **changed})
    assert bucket.run(**arguments) > 0, "it says how much workspace it takes"


class _Allocations(TorchDispatchMode):
    """Tensors on other devices than the CPU that the current thread makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.made += [result] if isinstance(result, torch.Tensor) and result.device.type != "cpu" else []
        return result


@compiled
@pytest.mark.parametrize("small", [False, True])
def test_tables_of_a_gpu_belong_to_no_graph(small: bool) -> None:
    """A CUDA graph owns what its thread allocates meanwhile."""
    plans = candidates(problem_with(2, 1, (reduce_axis(2),)))
    plan = next(plan for plan in plans if isinstance(plan, Plan) and plan.small == small)
    with _Allocations() as allocations:
        lowered = lowering.lower(plan, torch.float32, "meta")
    assert not allocations.made
    assert lowered.tables.device.type == lowered.constants.device.type == "meta"


def test_calls_on_a_gpu_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads its tables as long as it lives, however many other calls are prepared meanwhile."""
    device, options = torch.device("meta"), Options(backend="torch", precision="ieee")
    operand = Operand((9, 9, 3, 1), torch.float32, True)
    monkeypatch.setattr(engine, "_kept", kept := [])
    monkeypatch.setattr(pytorch, "prepare", lambda jobs, device, options: object())
    for rows in range(2, 6):
        engine.prepare((problem_of((rows, 1, 3, 3), 1, 1, 1, None),), (operand,), options, device)
    engine.prepare.cache_clear()
    assert len(kept) == 4


@compiled
def test_tables_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        lowered = lowering.lower(plan_named(Case((20, 6, 3)), "toom/row"), torch.float32)
    assert lowered.tables.device.type == lowered.constants.device.type == "cpu"
