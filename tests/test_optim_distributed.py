"""Muon in two real processes with gloo: shares that are sent, weights in pieces, and the same weights everywhere."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_regularizer_distributed import alone, batch, network, task, whole
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ocnn_fused.optim import Muon, orthogonal_update

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

WORLD, STEPS = 2, 3
MODES = ("operator", "flatten", "per_tap")
MAKE: Any = partial(Muon, lr=0.05, weight_decay=0.1, auxiliary=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def trained(model: nn.Module, parts: tuple[int, ...], **options: Any) -> list[Tensor]:
    optimizer = MAKE(model, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(task(model, part) for part in parts) / len(parts)).backward()
        optimizer.step()
    return [whole(parameter.detach()) for parameter in model.parameters()]


def assert_same_everywhere(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.contiguous())
        assert all(torch.equal(gathered[0], one) for one in gathered)


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def data_parallel(rank: int) -> None:
    """Every rank has the weights of one process that sees the whole batch."""
    for mode in MODES:
        expected = trained(network(), (0, 1), mode=mode)
        for shard in (True, "auto", False):
            found = trained(DistributedDataParallel(network()), (rank,), mode=mode, shard=shard)
            assert_same_everywhere(found)
            assert_near(found, expected)


def each_rank_computes_its_share(rank: int) -> None:
    """What another rank should have computed is wrong here: only what was sent counts."""
    from ocnn_fused.optim import muon

    counted, original = [], muon.orthogonalize_all

    def counting(tensors: list[Tensor], *arguments: Any) -> Any:
        counted.append(len(tensors))
        return original(tensors, *arguments)

    muon.orthogonalize_all = counting
    try:
        trained(DistributedDataParallel(network()), (rank,), shard=True)
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, counted)
        assert [sum(ranks) for ranks in zip(*everyone, strict=True)] == [3] * STEPS
        assert 0 < counted[0] < 3
    finally:
        muon.orthogonalize_all = original


def averaged_by_hand(rank: int) -> None:
    """Without DDP, ``shard=True`` shares over the default group for parameters too."""
    make = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, 3, 3, generator=make, dtype=torch.float64) for _ in range(3)]
    parameters = [weight.clone().requires_grad_() for weight in weights]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    Muon(parameters, 1.0, shard=True).step()
    expected = [weight - update for weight, update in zip(weights, orthogonal_update(weights), strict=True)]
    assert_near([parameter.detach() for parameter in parameters], expected)


def fully_sharded(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    for mode in MODES:
        for nesterov in (True, False):
            model = network()
            fully_shard(model)
            found = trained(model, (rank,), mode=mode, nesterov=nesterov)
            assert_near(found, trained(network(), (0, 1), mode=mode, nesterov=nesterov))
    optimizer = MAKE(model)
    task(model, rank).backward()
    optimizer.step()
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(hasattr(buffer, "full_tensor") for buffer in buffers)


CHECKS = (data_parallel, each_rank_computes_its_share, averaged_by_hand, fully_sharded)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=timedelta(minutes=5)
    )
    for check in CHECKS:
        check(rank)
        Path(folder, f"{check.__name__}.{rank}").touch()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One world for all checks; a check that fails raises with what it said."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "OMP_NUM_THREADS", "1")
        try:
            mp.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
            mp.start_processes(run, (str(folder),), nprocs=WORLD, start_method="forkserver")
        except mp.ProcessRaisedException as error:
            (folder / "error").write_text(str(error))
    return folder


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_two_processes(folder: Path, name: str) -> None:
    error = folder / "error"
    assert all((folder / f"{name}.{rank}").exists() for rank in range(WORLD)), (
        error.read_text() if error.exists() else "did not run"
    )


def test_parts_of_the_batch_differ() -> None:
    """What the checks take for granted."""
    assert not torch.equal(batch(0)[0], batch(1)[0])
    assert any(gradient.any() for gradient in alone(2, 0.0))
