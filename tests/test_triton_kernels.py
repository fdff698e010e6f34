"""The five stages in Triton against the definition in float64: every kind of plan, tile edge and program order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_support as support
from oracle import Case, loss_and_grad
from triton_support import (
    BIG,
    EDGES,
    TOLERANCE,
    WIDE_EDGES,
    check,
    errors,
    needs_interpreter,
    on_device,
    plan_named,
    run,
    tl,
    triton,
)

from ocnn_fused.backends.device import spec_of
from ocnn_fused.backends.epilogue import Epilogue
from ocnn_fused.backends.model import product_work
from ocnn_fused.backends.triton import fields, kernels
from ocnn_fused.backends.triton.config import MIX_SIZES, WIDE_TILES, Config, shipped
from ocnn_fused.backends.triton.launch import tables_for

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: One case per kind of plan; `name` picks it among the candidates.
KINDS = {
    "toom 2 taps": (Case((18, 5, 2, 2)), "toom/row"),
    "toom 3 taps": (Case((9, 6, 3, 3)), "toom/row"),
    "toom 3 taps, column side": (Case((12, 4, 3, 3)), "toom/column"),
    "toom 4 taps": (Case((9, 3, 4, 4)), "toom/row"),
    "toom 5 taps, 1-D": (Case((8, 5, 5)), "toom/row"),
    "toom 5 taps": (Case((4, 3, 5, 5)), "toom/row"),
    "toom, 3-D": (Case((10, 3, 3, 3, 2)), "toom/row"),
    "toom, strided": (Case((8, 5, 3, 3), 2), "toom/row"),
    "toom, strided, blocks of several residues": (Case((6, 3, 4, 4), 2), "toom/row"),
    "toom, strided stem": (Case((24, 3, 5, 5), 2), "toom/column"),
    "toom, dilated and strided": (Case((8, 4, 5), 2, 3), "toom/row"),
    "toom, grouped": (Case((12, 5, 3), groups=3), "toom/row"),
    "toom on one axis, direct on the other": (Case((9, 3, 7, 2)), "toom/row"),
    "direct": (Case((9, 6, 3, 3)), "direct/row"),
    "direct, column side": (Case((12, 4, 3)), "direct/column"),
    "direct, strided": (Case((6, 5, 4), 3), "direct/row"),
    "direct, 7 taps": (Case((4, 6, 7)), "direct/row"),
    "direct, fewer lags": (Case((6, 4, 5), padding=1), "direct/row"),
    "toom, fewer lags": (Case((6, 4, 5), padding=1), "toom/row"),
    "direct, grouped": (Case((10, 3, 3), groups=2), "direct/row"),
    "lag 0 only": (Case((9, 5, 3, 3), padding=0), "gram/row"),
    "lag 0 only, in place": (Case((9, 8, 2, 1), padding=0), "gram/row"),
    "lag 0 only, column side": (Case((40, 3, 3), padding=0), "gram/column"),
    "lag 0 only, column side, in place": (Case((40, 16, 1, 1)), "gram/column"),
    "linear": (Case((16, 24)), "gram/row"),
    "linear, grouped": (Case((12, 8), groups=2), "gram/row"),
    "depthwise": (Case((20, 1, 3, 3), groups=20), "small/row"),
    "tiny groups, strided": (Case((12, 2, 4), 2, groups=4), "small/row"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan(kind: str) -> None:
    case, name = KINDS[kind]
    check(case, plan_named(case, name))


def test_every_size_of_the_mix_has_tiles_off_the_diagonal() -> None:
    """Which are stored twice, as they are and mirrored."""
    sizes = set()
    for case, name in KINDS.values():
        tables = tables_for([on_device(case)], [plan_named(case, name)], [True], torch.float32, BIG)
        begin, end = tables.passes[0].stage("mix")
        for row, first, second, _ in tables.tiles[begin:end].tolist():
            sizes |= {tables.table[row + fields.M_SIZE.value].item()} if first != second else set()
    assert sizes == set(MIX_SIZES)


#: Largest error in units of the gradient's largest entry.
PRECISION_TOLERANCES = {"ieee": TOLERANCE, "tf32x3": TOLERANCE, "tf32": 8 * 2.0**-11, "bf16": 8 * 2.0**-8}


@pytest.mark.parametrize(
    ("precision", "config"),
    [(precision, config) for precision, configs in shipped(spec_of(support.DEVICE)).items() for config in configs]
    + [pytest.param(precision, WIDE_TILES, marks=needs_interpreter) for precision in ("tf32", "bf16")],
)
def test_every_shipped_configuration(precision: str, config: Config) -> None:
    """More than one tile of each size, in all precisions; on a GPU the compiled code itself."""
    case = Case((136, 20, 2))
    check(case, plan_named(case, "toom/row"), PRECISION_TOLERANCES[precision], precision=precision, config=config)


@pytest.mark.parametrize(("rows", "channels"), [(31, 40), (32, 32), (33, 65), (70, 8)])
@pytest.mark.parametrize("name", ["toom/row", "toom/column", "direct/row"])
def test_wide_tiles(rows: int, channels: int, name: str) -> None:
    """In gram and apply, for products of which nothing but the product is wanted."""
    case = Case((rows, channels, 3))
    check(case, plan_named(case, name), config=WIDE_EDGES)


@pytest.mark.parametrize("kind", ["toom 3 taps, column side", "direct", "toom, strided", "lag 0 only", "depthwise"])
def test_loss_alone_has_the_same_bits(kind: str) -> None:
    case, name = KINDS[kind]
    weight, plan = on_device(case), plan_named(case, name)
    alone, (grad,) = run([weight], [plan], with_grad=False)
    assert grad.numel() == 0
    assert torch.equal(alone, run([weight], [plan])[0])


# ----------------------------------------------------------------------------------------------------------------------
# evaluate, mix and gather by matrix products, as in TF32
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def left_as_they_are(values):
    return values


@pytest.fixture
def by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in float32, but evaluate, mix and gather by products of high and low bits, whose own error then shows."""
    settings = support.Call.settings

    def with_products(self: support.Call, kernel: str) -> dict[str, object]:
        found = settings(self, kernel)
        return found | ({"BY_PRODUCTS": True} if "BY_PRODUCTS" in found else {})

    monkeypatch.setattr(support.Call, "settings", with_products)


@needs_interpreter
@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("toom")])
def test_products_of_high_and_low_bits_are_as_good_as_float32(kind: str) -> None:
    """Emulated as the matrix instructions do it: they drop the low 13 bits of every operand."""
    case, name = KINDS[kind]
    check(case, plan_named(case, name), config=EDGES)


@needs_interpreter
@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("rows", [15, 16, 17, 33])
def test_mix_by_products_at_tile_edges(rows: int) -> None:
    for shape in ((rows, 3, 2), (rows, 2, 4, 4)):
        check(Case(shape), plan_named(Case(shape), "toom/row"), config=EDGES)


@needs_interpreter
@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize(("channels", "stride"), [(1, 1), (7, 1), (33, 1), (40, 1), (8, 2), (5, 2)])
def test_evaluate_and_gather_by_products_at_tile_edges(channels: int, stride: int) -> None:
    """And where residues begin on a boundary, or do not."""
    case = Case((5, channels, 4, 3), stride)
    check(case, plan_named(case, "toom/row"), config=EDGES)


@needs_interpreter
@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize(
    "case",
    [*(Case((rows, 9, 3, 3)) for rows in (2, 4, 6, 7)), Case((3, 8, 6, 6), 2), Case((8, 5, 3, 3), groups=2)],
    ids=str,
)
def test_evaluate_by_products(case: Case) -> None:
    """Also where half of a tile has no rows, of several residues, and of groups."""
    check(case, plan_named(case, "toom/row"), config=EDGES)


@triton.jit
def evaluate_nothing(
    table, constants, tile, weights, workspace,
    PLANE: tl.constexpr, TF32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Leaves NaN in the workspace."""


@needs_interpreter
@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize(
    ("case", "name", "dtype", "served"),
    [
        (Case((6, 5, 3, 3)), "toom/row", torch.float32, True),
        (Case((4, 3, 4, 4)), "toom/row", torch.float32, True),
        (Case((6, 8, 6, 6), 2), "toom/row", torch.float32, True),
        (Case((6, 5, 3, 3)), "toom/row", torch.float16, False),
        (Case((4, 3, 5, 5)), "toom/row", torch.float32, False),  # 25 taps
        (Case((12, 4, 3, 3)), "toom/column", torch.float32, False),
        (Case((6, 3, 6, 6), 2), "toom/row", torch.float32, False),  # residues that begin anywhere
        (Case((6, 8, 2, 2)), "toom/row", torch.float32, False),  # 4 taps
        (Case((6, 5, 3, 3)), "direct/row", torch.float32, False),
    ],
)
def test_which_layers_are_evaluated_by_products(
    case: Case, name: str, dtype: torch.dtype, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "evaluate_tile", evaluate_nothing)
    losses, _ = run([on_device(case, dtype)], [plan_named(case, name)], config=EDGES, with_grad=False)
    assert losses.isfinite().all() == served


@needs_interpreter
@pytest.mark.usefixtures("by_products")
def test_a_list_by_products_with_a_frozen_layer_in_any_order() -> None:
    """Odd channels, stride 2, groups, strides of a weight, and a layer that wants no gradient."""
    cases = [Case((9, 7, 3, 3)), Case((4, 8, 6, 6), 2), Case((9, 5, 3, 3), groups=3)]
    cases += [Case((6, 9, 3, 3)), Case((7, 16))]
    wanted = [True, True, True, False, True]
    weights = [on_device(case, seed=index) for index, case in enumerate(cases)]
    weights[0] = weights[0].contiguous(memory_format=torch.channels_last)
    plans = [plan_named(case, "toom/row" if len(case.shape) > 2 else "gram/row") for case in cases]
    expected: list[torch.Tensor] = []
    for order, seed in (("sequential", 0), ("shuffled", 1), ("interleaved", 1)):
        with support.execution(order, seed):
            call = support.Call(weights, plans, wanted, "ieee", EDGES)
            call.run()
        found = [call.losses, *call.grads()]
        expected = expected or found
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    losses, *grads = expected
    for case, weight, loss, grad, is_wanted in zip(cases, weights, losses, grads, wanted, strict=True):
        if is_wanted:
            assert max(errors(loss, grad, weight, case)) <= TOLERANCE, str(case)
        else:
            assert loss.item() == pytest.approx(loss_and_grad(weight, case)[0], rel=TOLERANCE)
            assert grad.numel() == 0


@needs_interpreter
def test_a_weight_that_is_not_a_number_is_not_lost_by_products() -> None:
    """In TF32, where planes are rounded by their bits."""
    case = Case((6, 8, 3, 3))
    weight = on_device(case)
    weight[2, 3, 1, 1] = torch.nan
    config = replace(EDGES, by_products=True)
    losses, (grad,) = run([weight], [plan_named(case, "toom/row")], precision="tf32", config=config)
    assert losses.isnan().all()
    assert grad.isnan().all(dim=(1, 2, 3)).any()


@needs_interpreter
@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gather_by_products_adds_to_gradients_of_any_dtype(dtype: torch.dtype) -> None:
    case = Case((9, 8, 3, 3))
    weight, plan = on_device(case, dtype), plan_named(case, "toom/row")
    _, (grad,) = run([weight], [plan], config=EDGES)
    target, factors = torch.ones_like(weight), torch.tensor([0.5], dtype=torch.float64)
    with support.execution():
        call = support.Call([weight], [plan], True, "ieee", EDGES, Epilogue(factors, 2.0, [target]))
        call.run()
    expected = 1 + grad.double()
    unit = torch.finfo(dtype).eps
    assert (target.double() - expected).abs().max() <= 2 * unit * expected.abs().max()


@needs_interpreter
@pytest.mark.usefixtures("by_products")
@pytest.mark.parametrize("kind", ["toom 2 taps", "toom 4 taps", "toom, strided", "toom, grouped"])
def test_products_of_high_and_low_bits_have_the_same_bits_in_any_order(kind: str) -> None:
    case, name = KINDS[kind]
    weight, plan = on_device(case), plan_named(case, name)
    expected_losses, expected_grads = run([weight], [plan], config=WIDE_EDGES)
    alone, _ = run([weight], [plan], config=WIDE_EDGES, with_grad=False)
    assert torch.equal(alone, expected_losses)
    for order, seed in (("shuffled", 1), ("interleaved", 1), ("interleaved", 2)):
        losses, grads = run([weight], [plan], config=WIDE_EDGES, order=order, seed=seed)
        assert torch.equal(losses, expected_losses)
        assert torch.equal(grads[0], expected_grads[0])


@needs_interpreter
@pytest.mark.usefixtures("by_products")
def test_a_dropped_low_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "high_bits", left_as_they_are)  # so that all low bits are zero
    case, name = KINDS["toom 3 taps"]
    with pytest.raises(AssertionError):
        check(case, plan_named(case, name), config=EDGES)


# ----------------------------------------------------------------------------------------------------------------------
# Tile edges
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [15, 16, 17, 33])
def test_rows_at_tile_edges(rows: int) -> None:
    check(Case((rows, 3, 2)), plan_named(Case((rows, 3, 2)), "toom/row"), config=EDGES)


@pytest.mark.parametrize("channels", [1, 7, 8, 9, 15, 16, 17])
def test_channels_at_tile_edges(channels: int) -> None:
    for name in ("toom/row", "direct/row"):
        check(Case((5, channels, 2)), plan_named(Case((5, channels, 2)), name), config=EDGES)


@pytest.mark.parametrize("shape", [(33, 17), (17, 33), (40, 16), (16, 40), (33, 8), (31, 24)])
def test_gram_at_tile_edges(shape: tuple[int, int]) -> None:
    for name in ("gram/row", "gram/column"):
        check(Case(shape), plan_named(Case(shape), name), config=EDGES)


@pytest.mark.parametrize("groups", [15, 16, 17])
def test_groups_at_tile_edges(groups: int) -> None:
    case = Case((groups, 1, 2), groups=groups)
    check(case, plan_named(case, "small/row"), config=EDGES)


# ----------------------------------------------------------------------------------------------------------------------
# Program order
# ----------------------------------------------------------------------------------------------------------------------


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_program_order_changes_nothing(kind: str) -> None:
    """Not even a bit."""
    case, name = KINDS[kind]
    weight, plan = on_device(case), plan_named(case, name)
    expected, expected_grads = run([weight], [plan], config=EDGES)
    assert max(errors(expected[0], expected_grads[0], weight, case)) <= TOLERANCE
    for order, seed in (("shuffled", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)):
        losses, grads = run([weight], [plan], config=EDGES, order=order, seed=seed)
        assert torch.equal(losses, expected)
        assert torch.equal(grads[0], expected_grads[0])


# ----------------------------------------------------------------------------------------------------------------------
# Lists of weights
# ----------------------------------------------------------------------------------------------------------------------


def resnet18(width: int) -> list[Case]:
    """ResNet-18's 21 convolutions (20 and the stem), ``width`` channels instead of 64."""
    cases = [Case((width, 3, 7, 7), 2)]
    before = width
    for stage in range(4):
        now, stride = width << stage, 2 if stage else 1
        cases += [Case((now, before, 3, 3), stride)] + [Case((now, now, 3, 3))] * 3
        cases += [Case((now, before, 1, 1), stride)] if stage else []
        before = now
    return [*cases, Case((10, before))]


def test_a_whole_network_of_different_layers() -> None:
    cases = resnet18(2)
    assert len(cases) == 21
    weights = [on_device(case, seed=index) for index, case in enumerate(cases)]
    plans = [support.candidates(case)[index % 2] for index, case in enumerate(cases)]
    losses, grads = run(weights, plans)
    for case, weight, loss, grad in zip(cases, weights, losses, grads, strict=True):
        assert max(errors(loss, grad, weight, case)) <= TOLERANCE, str(case)


def test_mixed_dtypes_in_one_list() -> None:
    case = Case((6, 8, 3))
    weights = [
        on_device(case, dtype, seed) for seed, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))
    ]
    losses, grads = run(weights, [plan_named(case, "toom/row")] * 3)
    for weight, loss, grad in zip(weights, losses, grads, strict=True):
        assert grad.dtype == weight.dtype
        expected_loss, expected_grad = loss_and_grad(weight.float().cpu(), case)
        rounding = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[weight.dtype]
        assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
        assert abs(grad.double().numpy() - expected_grad).max() <= rounding * abs(expected_grad).max()


@pytest.mark.parametrize("name", ["toom/row", "direct/row", "toom/column"])
def test_any_strides_and_alignment(name: str) -> None:
    case = Case((12, 8, 3, 3))
    plan, weight = plan_named(case, name), on_device(case)
    expected = run([weight], [plan])
    channels_last = weight.contiguous(memory_format=torch.channels_last)
    sliced = torch.full((14, 9, 4, 5), torch.nan, device=weight.device)[1:13, 1:, :3, 1:4].copy_(weight)
    shifted = torch.full((weight.numel() + 1,), torch.nan, device=weight.device)[1:].view_as(weight).copy_(weight)
    for other in (channels_last, sliced, shifted):
        before = other.clone()
        losses, grads = run([other], [plan])
        assert torch.equal(other, before)
        assert grads[0].stride() == torch.empty_like(other).stride()
        assert losses[0].item() == pytest.approx(expected[0][0].item(), rel=1e-6)
        assert torch.allclose(grads[0], expected[1][0], rtol=1e-5, atol=1e-6)


def test_channels_last_direct_needs_neither_evaluate_nor_gather() -> None:
    case = Case((8, 16, 3, 3))
    weight = on_device(case).contiguous(memory_format=torch.channels_last)
    (one,) = tables_for([weight], [plan_named(case, "direct/row")], [True], torch.float32, BIG).passes
    assert {stage: len(range(*one.stage(stage))) for stage in ("evaluate", "mix", "gather")} == {
        "evaluate": 0,
        "mix": 0,
        "gather": 0,
    }
    check_losses, grads = run([weight], [plan_named(case, "direct/row")])
    assert max(errors(check_losses[0], grads[0], weight, case)) <= TOLERANCE


@needs_interpreter
def test_products_executed_are_those_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply-adds of every ``tl.dot`` that ran, against the tables' padded count (and so the compiled tiles')."""
    from triton.runtime.interpreter import InterpreterBuilder

    executed = 0
    original = InterpreterBuilder.create_dot

    def counting(self: object, a: object, b: object, *rest: object) -> object:
        nonlocal executed
        executed += a.data.shape[0] * a.data.shape[1] * b.data.shape[1]  # type: ignore[attr-defined]
        return original(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting)
    cases = [(Case((20, 6, 3, 3)), "toom/row"), (Case((18, 5, 3)), "direct/row"), (Case((40, 16)), "gram/column")]
    weights, plans = [on_device(case) for case, _ in cases], [plan_named(*case) for case in cases]
    for config in (EDGES, WIDE_EDGES):
        executed = 0
        run(weights, plans, config=config)
        assert executed == tables_for(weights, plans, [True] * len(weights), torch.float32, config).multiply_adds
        assert executed == sum(sum(product_work(plan, config.tile, config.depth, config.wide)) for plan in plans)


# ----------------------------------------------------------------------------------------------------------------------
# The tests themselves: planted mistakes must be seen
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def too_wide(length):
    return (length + 15) // 8 * 8


@triton.jit
def too_narrow(length):
    return length - 1


@needs_interpreter
@pytest.mark.parametrize("wrong", [too_wide, too_narrow])
def test_a_wrong_mask_is_seen(wrong: triton.JITFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "padded", wrong)
    case, name = KINDS["direct"]
    with pytest.raises(AssertionError):
        check(case, plan_named(case, name))


@triton.jit
def racy_reduce_loss(table, loss_rows, index, partials, losses, LANES: tl.constexpr):
    """All programs add to one number, which is then the sum of what every order of programs would give, or less."""
    tl.store(losses, tl.load(losses) + 1.0)


@needs_interpreter
def test_a_race_is_seen_when_interleaved_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "reduce_loss", racy_reduce_loss)
    case = Case((8, 8))
    weights, plans = [on_device(case)] * 6, [plan_named(case, "gram/row")] * 6

    def total(order: str) -> float:
        with support.execution(order, 1):
            call = support.Call(weights, plans, False, "ieee", BIG)
            call.losses.zero_()
            call.run()
        return call.losses[0].item()

    assert total("sequential") == total("shuffled") == 6
    assert total("interleaved") < 6


original_mix_tile = kernels.mix_tile


@triton.jit
def mix_unless_done(
    table, constants, tile, workspace, partials, with_grad, factors, factor,
    TF32: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Looks whether another program has done the tile, and does it if not: two may look before one has done it."""
    before = tl.load(partials + tl.load(tile + fields.I_SLOT))
    if before != before:
        original_mix_tile(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, BY_PRODUCTS)


@needs_interpreter
@pytest.mark.parametrize("way", ["without products", "by products"])
def test_two_programs_on_one_tile_are_seen_when_interleaved_and_only_then(
    way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A tile is mixed in place, so not twice. Memory holds NaN, as do the partial losses of tiles that are not done."""
    if way == "by products":
        request.getfixturevalue("by_products")
    case, name = KINDS["toom 3 taps"]
    weight, plan = on_device(case), plan_named(case, name)
    tables = tables_for([weight], [plan], [True], torch.float32, EDGES)
    begin, end = tables.passes[0].stage("mix")
    # Several, since by products all of a tile is read at once: one must have written before another reads.
    repeated = tables.tiles[begin:end].repeat_interleave(8, dim=0)
    tiles_of = support.Call.tiles_of
    monkeypatch.setattr(
        support.Call, "tiles_of", lambda call, one, stage: repeated if stage == "mix" else tiles_of(call, one, stage)
    )
    monkeypatch.setattr(kernels, "mix_tile", mix_unless_done)
    _, expected = loss_and_grad(weight, case)

    def is_right(order: str, seed: int) -> bool:
        _, (grad,) = run([weight], [plan], config=EDGES, order=order, seed=seed)
        return bool(abs(grad.double().numpy() - expected).max() <= TOLERANCE * abs(expected).max())

    assert is_right("sequential", 0)
    assert all(is_right("shuffled", seed) for seed in range(3))
    assert not all(is_right("interleaved", seed) for seed in range(6))
