"""Real processes with gloo: the gradients of many are those of one.

Each world is started once and runs every check; a test looks up the result of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from ocnn_fused import OrthRegularizer
from ocnn_fused.regularizer.distributed import balanced_shares

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

WORLDS = (2, 4)
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


# ----------------------------------------------------------------------------------------------------------------------
# What runs in every process
# ----------------------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    """Three layers to share, of different cost, and others; no batch statistics, which would differ per rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 6, 2, 2),
        nn.Flatten(),
        nn.Linear(6 * 64, 5),
    ).double()


def batch(part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(part)
    inputs = torch.randn(2, 4, 8, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (2,), generator=generator)


def task(model: nn.Module, part: int) -> Tensor:
    inputs, labels = batch(part)
    return F.cross_entropy(model(inputs), labels)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> list[Tensor]:
    return [whole(parameter.grad) for parameter in model.parameters()]


def alone(parts: int, regularised: float = 1.0, model: nn.Module | None = None, **options: Any) -> list[Tensor]:
    """Gradients of one process that sees all parts of the batch."""
    model = network() if model is None else model
    loss = sum(task(model, part) for part in range(parts)) / parts
    (loss + regularised * OrthRegularizer(model, **options)()).backward()
    return gradients(model)


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def parallel(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(network() if model is None else model, **options)


@check
def gradients_after_averaging() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = alone(world)
    for shard in ("auto", True, False):
        for options in (
            {},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True},
        ):
            model = parallel(**options)
            reg = OrthRegularizer(model, shard=shard)
            assert set(reg.layers) == {"0", "2", "4"}
            for _ in range(2):  # DDP rebuilds its buckets after the first
                model.zero_grad()
                (task(model, rank) + reg()).backward()
                assert_same(gradients(model), expected)


@check
def shares_cover_the_layers() -> None:
    """Three layers: an odd number for two ranks, fewer than four ranks; the mean of the values is the full value."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = parallel()
    reg = OrthRegularizer(model)
    loss = reg()
    full = OrthRegularizer(network())().detach()
    torch.testing.assert_close(reg.value(loss), full)
    assert not reg.value(loss).requires_grad
    touched = [g is not None for g in torch.autograd.grad(loss, model.parameters(), allow_unused=True)]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, touched)
    assert [sum(column) for column in zip(*everyone, strict=True)] == [1, 0, 1, 0, 1, 0, 0, 0]
    if world > 3:
        assert any(not any(row) for row in everyone)
    off = OrthRegularizer(model, shard=False)
    torch.testing.assert_close(off(), full)
    torch.testing.assert_close(off.value(off()), full)
    torch.testing.assert_close(torch.stack([*reg.per_layer().values()]).sum() * 0.01, full)
    assert OrthRegularizer(model.module)().item() == full.item(), f"rank {rank}: no wrapper, no sharing"


@check
def accumulation_without_synchronising() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = 3
    expected = alone(steps * world)
    for shard in ("auto", False):
        for at_every_part in (True, False):
            model = parallel()
            reg = OrthRegularizer(model, shard=shard)
            for index in range(steps):
                last = index == steps - 1
                with nullcontext() if last else model.no_sync():
                    loss = task(model, index * world + rank) / steps
                    if at_every_part:
                        loss = loss + reg() / steps
                    elif last:
                        loss = loss + reg()
                    loss.backward()
            assert_same(gradients(model), expected)


@check
def training_follows_one_process() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, single = parallel(), network()
    results = []
    for net, parts in ((model, (rank,)), (single, range(world))):
        reg = OrthRegularizer(net, weight={"0": 0.1, "*": 0.02}, normalize="numel", squared=False, every=2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        reg.attach(optimizer)
        for _ in range(5):
            optimizer.zero_grad()
            (sum(task(net, part) for part in parts) / len(parts) + reg()).backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in net.parameters()])
    assert_same(*results)


@check
def other_methods_and_computed_weights() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    def build() -> nn.Module:
        model = network()
        weight_norm(model[2])
        return model

    options = {"method": {"4": "srip", "0": "kernel"}, "include": "*"}
    expected = alone(world, model=build(), **options)
    model = parallel(build())
    (task(model, rank) + OrthRegularizer(model, **options)()).backward()
    assert_same(gradients(model), expected)


def add_gradients(model: nn.Module, reg: OrthRegularizer, before: bool, shard: bool) -> None:
    """Of the task by a backward, which averages, and of the regulariser before or after it."""
    if before:
        reg.add_grad_(shard=shard)
    task(model, dist.get_rank()).backward()
    if not before:
        reg.add_grad_()


@check
def gradients_added_directly() -> None:
    """After the averaging every rank adds everything; before it, the rank's share will do."""
    world = dist.get_world_size()
    expected = alone(world)
    for before, shard, view in itertools.product((False, True), (False, True), (False, True)):
        if shard and not before:
            continue  # nobody would average the shares
        model = parallel(gradient_as_bucket_view=view)
        reg = OrthRegularizer(model)
        for _ in range(2):
            model.zero_grad()
            add_gradients(model, reg, before, shard)
            assert_same(gradients(model), expected)


class PartlyUsed(nn.Module):
    """A layer that the forward pass does not use, or only on rank 0."""

    def __init__(self, on_one_rank: bool = False) -> None:
        super().__init__()
        self.net = network()
        self.extra = nn.Conv2d(4, 4, 3, padding=1, bias=False).double()
        self.on_one_rank = on_one_rank

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.extra(inputs) if self.on_one_rank and dist.get_rank() == 0 else inputs)


@check
def a_layer_that_is_not_used() -> None:
    """The loss announces it to DDP on every rank, also where another rank has it and at steps without the loss."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for shard in ("auto", False):
        for options in ({}, {"static_graph": True}):
            model = parallel(PartlyUsed(), **options)
            reg = OrthRegularizer(model, shard=shard, every=2)
            for step in range(4):
                expected = alone(world, 0.0 if step % 2 else 2.0, PartlyUsed())
                model.zero_grad()
                (task(model, rank) + reg()).backward()
                assert_same(gradients(model), expected)
                reg.step()


@check
def a_layer_that_ddp_was_told_is_not_used() -> None:
    """Straight to the gradients, after or before the backward, asked to share out or not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        for before, shard in ((False, False), (True, False), (True, True)):
            model = parallel(PartlyUsed(), **options)
            reg = OrthRegularizer(model)
            for _ in range(3):
                model.zero_grad()
                add_gradients(model, reg, before, shard)
                assert_same(gradients(model), alone(world, model=PartlyUsed()))
    model = parallel(PartlyUsed(), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="ready only once"):  # on every rank, so none waits for another
        (task(model, rank) + OrthRegularizer(model)()).backward()


@check
def a_layer_that_one_rank_uses() -> None:
    rank = dist.get_rank()
    results = []
    for before, shard in ((False, False), (True, True)):
        model = parallel(PartlyUsed(on_one_rank=True), find_unused_parameters=True)
        reg = OrthRegularizer(model)
        if before:
            reg.add_grad_(shard=shard)
        task(model, rank).backward()
        averaged = [parameter.grad.clone() for parameter in model.parameters()]
        if not before:
            reg.add_grad_()
            added = OrthRegularizer(PartlyUsed())
            added.add_grad_()
            expected = [
                grad if parameter.grad is None else grad + parameter.grad
                for grad, parameter in zip(averaged, added.model.parameters(), strict=True)
            ]
            assert_same(gradients(model), expected)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, gradients(model))
        for other in everyone:
            assert_same(gradients(model), other)
        results.append(gradients(model))
    assert_same(*results)


@check
def averaging_by_hand() -> None:
    """Without DDP, ``shard=True`` shares over the default group for who averages the gradients themselves."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()
    (task(model, rank) + OrthRegularizer(model, shard=True)()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    assert_same(gradients(model), alone(world))


@check
def a_group_of_some_ranks() -> None:
    """The world is DDP's group, not all processes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    model = parallel(process_group=groups[rank // 2])
    reg = OrthRegularizer(model)
    loss = task(model, rank % 2) + reg()
    loss.backward()
    assert_same(gradients(model), alone(2))


@check
def compiled_with_data_parallel() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = alone(world)
    for whole_loss in (False, True):
        model = parallel()
        wrapped = model if whole_loss else torch.compile(model, backend="eager")
        reg = OrthRegularizer(wrapped)
        assert set(reg.layers) == {"0", "2", "4"}

        def loss(model: nn.Module = wrapped, reg: OrthRegularizer = reg) -> Tensor:
            return task(model, rank) + reg()

        run_loss = torch.compile(loss, backend="eager") if whole_loss else loss
        for _ in range(2):
            model.zero_grad()
            run_loss().backward()
            assert_same(gradients(model), expected)


@check
def projection_has_the_bits_of_one_process() -> None:
    """Shared out and sent, or computed everywhere; also with several steps, and next to a step of the optimiser."""
    for shard, steps in itertools.product((True, "auto", False), (1, 3)):
        alone, together = network(), network()
        OrthRegularizer(alone, include="*").project_(steps)
        parallel = DistributedDataParallel(together)
        OrthRegularizer(parallel, include="*", shard=shard).project_(steps)
        for expected, weight in zip(alone.parameters(), together.parameters(), strict=True):
            assert torch.equal(expected, weight), (shard, steps)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    OrthRegularizer(model, shard=True).attach(optimizer, project=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 8, 8, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
    for weight in model.parameters():
        gathered = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, weight.detach().contiguous())
        assert all(torch.equal(gathered[0], one) for one in gathered)


@check
def projection_of_pieces() -> None:
    from torch.distributed.fsdp import fully_shard

    alone, model = network(), network()
    OrthRegularizer(alone).project_(2)
    fully_shard(model)
    OrthRegularizer(model).project_(2)
    for expected, weight in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, weight.full_tensor())  # type: ignore[attr-defined]


@check
def fully_sharded_parameters() -> None:
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    expected = alone(world)
    for each_layer in (True, False):
        for reshard in (True, False):  # False leaves whole parameters in place between forward and backward
            for before in (True, False):
                model = network()
                if each_layer:
                    for index in (0, 2, 4):
                        fully_shard(model[index], reshard_after_forward=reshard)
                fully_shard(model, reshard_after_forward=reshard)
                reg = OrthRegularizer(model)
                for _ in range(2):
                    model.zero_grad()
                    penalty = reg() if before else 0.0
                    loss = task(model, rank)
                    (loss + (penalty if before else reg())).backward()
                    assert_same(gradients(model), expected)
                    assert all(hasattr(parameter.grad, "full_tensor") for parameter in model.parameters())
    values = {name: loss.item() for name, loss in OrthRegularizer(network()).per_layer().items()}
    assert {name: loss.item() for name, loss in reg.per_layer().items()} == pytest.approx(values)
    assert "8x4x3x3" in str(reg)


@check
def fully_sharded_in_other_loops() -> None:
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()
    fully_shard(model)
    reg = OrthRegularizer(model)
    steps = 2
    for index in range(steps):
        model.set_requires_gradient_sync(index == steps - 1)
        (task(model, index * world + rank) / steps + reg() / steps).backward()
    assert_same(gradients(model), alone(steps * world))

    model.zero_grad()
    task(model, rank).backward()
    reg.add_grad_()
    assert_same(gradients(model), alone(world))

    model.unshard()
    with pytest.raises(RuntimeError, match=r"reshard\(\)"):
        reg.add_grad_()
    model.reshard()
    with pytest.raises(ValueError, match=r"full_tensor\(\)"):
        OrthRegularizer(model, shard=True)()


@check
def tensor_parallel_layers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6)).double()

    single = build()
    expected = OrthRegularizer(single, include="*")()
    expected.backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    reg = OrthRegularizer(model, include="*")
    for add in (False, True):
        model.zero_grad()
        if add:
            reg.add_grad_()
        else:
            loss = reg()
            torch.testing.assert_close(loss, expected)
            loss.backward()
        for index in (0, 2):
            weight = model[index].weight
            assert weight.grad.placements == weight.placements
            torch.testing.assert_close(whole(weight.grad), single[index].weight.grad, rtol=1e-12, atol=1e-12)


@check
def spread_and_computed_weights_together() -> None:
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Module:
        model = network()
        weight_norm(model[2])
        return model

    single, model = build(), build()
    fully_shard(model[0])
    reg = OrthRegularizer(model)
    OrthRegularizer(single)().backward()
    expected = [parameter.grad for parameter in single.parameters()]
    for scale in (1.0, 2.0, torch.tensor(2.0, dtype=torch.float64)):
        for before in (None, 1.0):
            for parameter in model.parameters():
                parameter.grad = None if before is None else torch.full_like(parameter, before)
            reg.add_grad_(scale)
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                if gradient is not None:
                    added = whole(parameter.grad) - (before or 0.0)
                    torch.testing.assert_close(added, float(scale) * gradient, rtol=1e-12, atol=1e-12)


@check
def layers_of_two_dtypes() -> None:
    """The value has one dtype on every rank, whichever layers are its own."""
    model = network()
    model[2].float()
    expected = OrthRegularizer(model)().detach()
    reg = OrthRegularizer(parallel(model))
    loss = reg()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(reg.value(loss), expected, rtol=1e-6, atol=0)


@check
def a_rank_that_has_no_more_data() -> None:
    """A joined rank computes nothing, so the others must not count on its share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for direct in (False, True):
        model = parallel()
        reg = OrthRegularizer(model, shard=False)
        with model.join(divide_by_initial_world_size=False):
            for index in range(2 if rank == 0 else 1):
                model.zero_grad()
                loss = task(model, rank)
                (loss if direct else loss + reg()).backward()
                if direct:
                    reg.add_grad_()
                assert_same(gradients(model), alone(1 if index else world))


def train_steered(model: nn.Module, parts: list[int], way: str, compiled: bool = False) -> OrthRegularizer:
    """Some steps with lambdas that are steered, on the mean of the task over some parts."""
    reg = OrthRegularizer(model, {"0": "auto", "2": "auto", "*": 0.02}, tolerance=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss() -> Tensor:
        value = sum(task(model, part) for part in parts) / len(parts)
        return value + reg() if way == "loss" else value

    run_loss = torch.compile(loss, backend="eager") if compiled else loss
    for _ in range(6):
        optimizer.zero_grad()
        if way == "before":
            reg.add_grad_(shard=True)
        run_loss().backward()
        if way == "after":
            reg.add_grad_()
        optimizer.step()
    return reg


@check
def steered_lambdas_are_those_of_one_process() -> None:
    """Bit for bit on every rank, whoever computes a layer, and those of one process that sees all data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for way, compiled in (("loss", False), ("before", False), ("after", False), ("loss", True)):
        reg = train_steered(parallel(), [rank], way, compiled)
        alone = train_steered(network(), [*range(world)], "after" if way == "before" else way)
        for state in ("lambda", "excess"):
            found = torch.stack([*reg.state_dict()[state].values()])
            everyone = [torch.empty_like(found) for _ in range(world)]
            dist.all_gather(everyone, found)
            assert all(torch.equal(found, one) for one in everyone), (way, compiled, state)
            expected = torch.stack([*alone.state_dict()[state].values()])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        assert len(found) == 2
        assert 0.01 not in reg.state_dict()["lambda"].values()


@check
def steered_lambdas_of_pieces() -> None:
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()
    for index in (0, 2, 4):
        fully_shard(model[index])
    fully_shard(model)
    alone = train_steered(network(), [*range(world)], "loss").state_dict()["lambda"]
    for name, value in train_steered(model, [rank], "loss").state_dict()["lambda"].items():
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=0)


def run(rank: int, world: int, folder: str) -> None:
    """Every check, in the same order on all ranks; rank 0 writes down what each rank says."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(minutes=5)
    )
    results = {}
    for name, function in CHECKS.items():
        try:
            function()
            error = None
        except Exception:
            error = f"rank {rank}: {traceback.format_exc()}"
        errors: list[Any] = [None] * world
        dist.all_gather_object(errors, error)
        results[name] = "\n".join(filter(None, errors))
        if rank == 0:
            Path(folder, "results.json").write_text(json.dumps(results))
        if results[name]:
            break  # ranks may be out of step now
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# Tests
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=WORLDS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("world")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        # Imported once, not by each process.
        mp.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"])
        mp.start_processes(run, (request.param, str(folder)), nprocs=request.param, start_method="forkserver")
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", CHECKS)
def test_processes(results: dict[str, str], name: str) -> None:
    assert results.get(name, "did not run, because one before it failed") == ""


@pytest.mark.parametrize("world", [1, 2, 3, 7, 30])
def test_shares_are_balanced(world: int) -> None:
    costs = [1.0, 5.0, 2.5, 2.5, 9.0, 0.1, 0.1, 4.0, 4.0, 4.0, 1.0]
    shares = balanced_shares(costs, world)
    assert len(shares) == world
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    # The bound of this greedy rule: no rank is behind by more than one layer that came last to it.
    assert max(loads) <= max(max(costs), 4 / 3 * max(sum(costs) / world, max(costs)))
    assert shares == balanced_shares(costs, world)


def test_equal_costs_go_round() -> None:
    assert balanced_shares([1.0] * 5, 2) == [(0, 2, 4), (1, 3)]
    assert balanced_shares([], 2) == [(), ()]
    assert balanced_shares([3.0, 1.0, 1.0, 1.0], 2) == [(0,), (1, 2, 3)]


def test_sharding_without_processes_is_no_sharding() -> None:
    model = network()
    assert torch.equal(OrthRegularizer(model, shard=True)(), OrthRegularizer(model, shard=False)())


def test_networks_are_equal_and_not_the_same() -> None:
    """What the checks take for granted of each that they build."""
    for one, other in zip(network().parameters(), network().parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
