"""pytest-benchmark groups: ``pytest benchmarks --benchmark-only`` times fused and reference side by side.

Nothing here asserts a time; each case asserts that the result it timed is right.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import steps
import torch
from bound import plan_of, products_of
from pytest_benchmark.fixture import BenchmarkFixture
from report import Result, Section, verdict
from shapes import NETWORKS, Layer, wrong_tables
from steps import IMPLEMENTATIONS, Implementation, Settings, check_step, make_weights, run_step
from timing import Samples

LAYERS = (
    Layer("stem", (64, 3, 7, 7), 2),
    Layer("square", (64, 64, 3, 3)),
    Layer("strided", (128, 64, 3, 3), 2),
    Layer("pointwise", (512, 128, 1, 1)),
    Layer("discriminator", (128, 64, 4, 4), 2),
    Layer("depthwise", (192, 1, 3, 3), groups=192),
    Layer("grouped", (128, 32, 3, 3), groups=4),
)


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_step(benchmark: BenchmarkFixture, layer: Layer, implementation: Implementation) -> None:
    weights = make_weights([layer], Settings())
    check_step(weights, [layer], gradient=True)
    benchmark.group = f"{layer.name} {layer.label}"
    losses = benchmark(run_step, implementation, weights, [layer], True)
    assert torch.isfinite(losses[0])
    assert weights[0].grad is not None


def test_tables_add_up() -> None:
    assert wrong_tables() == []


def test_layers_are_distinct() -> None:
    for layers in NETWORKS.values():
        assert len({layer.geometry for layer in layers}) == len(layers)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_bound_does_all_products_of_the_plan(layer: Layer) -> None:
    plan = plan_of(layer, Settings())
    counted = sum(left.numel() * right.shape[-1] for left, right, _ in products_of([layer], Settings()))
    assert counted == (0 if plan.small else plan.cost.multiply_adds)


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[1]
    monkeypatch.setattr(steps, "fused_orth_loss", lambda weight, *_, **__: 1.01 * weight.square().sum())
    with pytest.raises(steps.WrongResultError, match="the loss is off by"):
        check_step(make_weights([layer], Settings()), [layer], gradient=True)


def test_a_missed_target_shows_although_the_layer_also_stands_without_one() -> None:
    samples = {"reference": Samples([2.0]), "fused": Samples([1.0])}
    plain = Result("64x64x3x3", "layer1", 6, "toom/row", samples, {})
    report = verdict([Section("targets", [replace(plain, target_ratio=3.0)]), Section("network", [plain])])
    assert "1 of 2 rows fall short" in report
    assert "64x64x3x3: 2.00x, target 3x" in report
