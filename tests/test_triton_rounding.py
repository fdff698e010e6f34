"""Operands of TF32 products are rounded to nearest before the matrix instructions drop their low bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import Case, loss_and_grad
from triton_support import BIG, DEVICE, ON_GPU, needs_interpreter, on_device, plan_named, run, tl, triton

from ocnn_fused.backends.triton import kernels
from ocnn_fused.backends.triton.config import Config
from ocnn_fused.backends.triton.launch import tables_for

#: Every way in which an operand of a product comes to be: evaluated or copied, a residual of gram or of mix.
LAYERS = [
    (Case((16, 8, 3, 3)), "toom/row"),
    (Case((24, 4, 3)), "toom/column"),
    (Case((16, 16, 3)), "direct/row"),
    (Case((16, 32)), "gram/row"),
    (Case((32, 16)), "gram/column"),
    (Case((6, 1, 3), groups=6), "small/row"),
]


class Operands:
    """Counts operands of TF32 products, and those of which a matrix instruction would drop something."""

    def __init__(self) -> None:
        self.seen = self.cut = 0

    def add(self, values: np.ndarray) -> None:
        self.seen += values.size
        self.cut += int(np.count_nonzero(np.ascontiguousarray(values).view(np.uint32) & 0x1FFF))


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operands]:
    import interpreter

    found = Operands()
    truncate = interpreter.truncate_to_tf32

    def watched(values: np.ndarray) -> np.ndarray:
        found.add(values)
        return truncate(values)

    monkeypatch.setattr(interpreter, "truncate_to_tf32", watched)
    return found


def run_layers(programs: int | None, config: Config = BIG) -> tuple[float, float]:
    """Largest relative errors of losses and gradients."""
    weights, plans = [on_device(case) for case, _ in LAYERS], [plan_named(*layer) for layer in LAYERS]
    losses, grads = run(weights, plans, precision="tf32", programs=programs, config=config)
    worst = np.zeros(2)
    for weight, (case, _), loss, grad in zip(weights, LAYERS, losses, grads, strict=True):
        expected_loss, expected_grad = loss_and_grad(weight.cpu(), case)
        of_grad = np.abs(grad.double().numpy() - expected_grad).max() / np.abs(expected_grad).max()
        worst = np.maximum(worst, (abs(loss.item() - expected_loss) / expected_loss, of_grad))
    return float(worst[0]), float(worst[1])


@needs_interpreter
@pytest.mark.parametrize(
    ("programs", "config"),
    [(None, BIG), (1, BIG), (None, replace(BIG, by_products=True))],
    ids=["staged", "single", "by products"],
)
def test_products_drop_nothing(programs: int | None, config: Config, operands: Operands) -> None:
    run_layers(programs, config)
    assert operands.seen > 10_000
    assert operands.cut == 0


@triton.jit
def left_as_they_are(values):
    return values


@needs_interpreter
def test_a_missing_rounding_of_planes_is_seen_by_products(operands: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    """mix has a rounding of its own there."""
    monkeypatch.setattr(kernels, "rounded_to_tf32", left_as_they_are)
    case, name = LAYERS[0]
    config = replace(BIG, by_products=True)
    run([on_device(case)], [plan_named(case, name)], precision="tf32", config=config, with_grad=False)
    assert operands.cut > 1000


@needs_interpreter
def test_a_missing_rounding_is_seen(operands: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_error, grad_error = run_layers(None)
    monkeypatch.setattr(kernels, "rounded_to_tf32", left_as_they_are)
    cut_loss_error, cut_grad_error = run_layers(None)
    assert operands.cut > 1000
    # What is cut off always has the sign of the operand, so that the errors of a sum do not cancel.
    assert cut_loss_error > 4 * loss_error
    assert cut_grad_error > 1.5 * grad_error


def test_no_weight_is_its_own_plane() -> None:
    """Neither in place nor, as a weight is not rounded, in a product."""
    for case, name in LAYERS[3:5]:
        weights, plans = [on_device(case)], [plan_named(case, name)]
        (exact,) = tables_for(weights, plans, [True], torch.float32, BIG).passes
        (rounded,) = tables_for(weights, plans, [True], torch.float32, BIG, rounded=True).passes
        assert exact.stage("evaluate") == (0, 0)
        assert rounded.stage("evaluate") != (0, 0)
        assert rounded.stage("gather")[0] == rounded.stage("gather")[1]  # the gradient still is


@triton.jit
def round_all(source, target, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    tl.store(target + lane, kernels.rounded_to_tf32(tl.load(source + lane)))


def rounded_bits(bits: list[int]) -> list[int]:
    source = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.int32)).to(DEVICE).view(torch.float32)
    target = torch.empty_like(source)
    round_all[(1,)](source, target, len(bits))
    return target.view(torch.int32).cpu().numpy().view(np.uint32).tolist()


def test_rounding_by_bits() -> None:
    one = 0x3F800000
    bits = [one, one + 0xFFF, one + 0x1000, one + 0x1FFF, one | 1 << 31, (one + 0x1000) | 1 << 31, 0, 0x7F800000]
    expected = [one, one, one + 0x2000, one + 0x2000, one | 1 << 31, (one + 0x2000) | 1 << 31, 0, 0x7F800000]
    assert rounded_bits(bits) == expected


def test_nan_stays_nan() -> None:
    """Also a GPU's own, all ones, which the sum would carry over into the sign and then to zero."""
    bits = rounded_bits([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001])
    assert np.isnan(np.array(bits, dtype=np.uint32).view(np.float32)).all()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.gpu
def test_compiled_products_round_to_nearest() -> None:
    """On the hardware itself: as small an error as rounding to nearest has, which cutting off would exceed."""
    loss_error, grad_error = run_layers(None)
    assert loss_error < 5e-4
    assert grad_error < 2.0**-7
