"""The modelled GPU times: documented as computed, and by a model that keeps to its own rules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ocnn_fused.backends import model
from ocnn_fused.backends.device import SPECS
from ocnn_fused.plan import Plan, candidates
from ocnn_fused.problem import problem_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def gpu_model() -> ModuleType:
    folder = str(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("gpu_model", ROOT / "benchmarks" / "gpu_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    try:
        sys.modules["gpu_model"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


@pytest.mark.parametrize("table", ["overhead_table", "stage_table", "network_table"])
def test_the_documented_tables_are_what_the_model_says(table: str, gpu_model: ModuleType) -> None:
    assert getattr(gpu_model, table)("tf32") in (ROOT / "docs" / "gpu.md").read_text()


def plan_of(*shape: int) -> Plan:
    return next(plan for plan in candidates(problem_of(shape, 1, 1, 1, None)) if plan.name == "toom/row")


def test_a_list_takes_no_longer_than_its_layers_one_by_one_without_the_cache() -> None:
    """Each need is summed over the layers; only the cache, which serves every launch once, can make parts faster."""
    spec, plans = SPECS["H100"], [plan_of(512, 512, 3, 3), plan_of(64, 64, 3, 3)]
    for name, needs in model.launches(plans, spec, "tf32").items():
        alone = [model.launches([plan], spec, "tf32")[name] for plan in plans]
        for key in ("products", "instructions", "cache"):
            assert needs[key] == pytest.approx(sum(one[key] for one in alone))
        assert needs["memory"] >= sum(one["memory"] for one in alone) * (1 - 1e-9)


def test_no_more_than_half_of_the_cache_is_found_in_it() -> None:
    spec, plan = SPECS["A100"], plan_of(512, 512, 3, 3)
    stages = {stage.name: stage for stage in model.stages(plan)}
    for name, needs in model.launches([plan], spec, "tf32").items():
        found = stages[name].bytes - needs["memory"] * spec.bandwidth
        assert found == pytest.approx(min(stages[name].carried, spec.l2_bytes // 2), abs=1.0)
    assert stages["evaluate"].carried == 0
    assert stages["gather"].carried > spec.l2_bytes // 2


def test_accumulating_reads_the_gradient_as_well() -> None:
    plan = plan_of(128, 128, 3, 3)
    plain, added = ({s.name: s.bytes for s in model.stages(plan, accumulate=a)} for a in (False, True))
    assert added["gather"] - plain["gather"] == 4 * 128 * 128 * 9
    assert {name for name in plain if plain[name] != added[name]} == {"gather"}
