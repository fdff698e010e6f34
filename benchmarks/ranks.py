"""Several processes: what each rank pays for its share of the layers, what is sent for it, and what more ranks would.

Under DistributedDataParallel every rank computes some layers, times the number of ranks, and the averaging of gradients
that happens anyway makes the whole of it. Here real processes (gloo, one thread each) measure the seconds of a rank's
share and count the bytes that are averaged, with and without the regulariser; the shares are also predicted from the
layers' times, measured alone. The same prediction, for as many ranks as nobody has here, is the table of docs/scale.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from contenders import FUSED, calls_of
from harness import Harness
from record import BYTES, COUNT, SECONDS, Rows
from resnet import ResNet
from shapes import NETWORKS, Layer
from steps import Settings, make_weights, module_of
from tables import megabytes, milliseconds, ratio, table, times
from timing import CpuTimer, Disturbance, Effort, interleave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ocnn_fused import OrthRegularizer
from ocnn_fused.regularizer.distributed import balanced_shares

WORLDS = (1, 2, 4)
BEYOND = (8, 64, 512)
ROUNDS = 7
DEPTHS = (2, 2, 2, 2)

SHARE, PREDICTED, WITHOUT, WITH = "share, measured", "share, predicted", "plain step", "step with reg()"


def model_of() -> ResNet:
    torch.manual_seed(0)
    return ResNet(DEPTHS, 10, cifar=True)


class Counted:
    """DDP's averaging, with every byte counted."""

    def __init__(self) -> None:
        self.bytes = self.messages = 0

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.bytes += buffer.nbytes
        self.messages += 1
        return (
            dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )


def _data_parallel(rank: int, world: int) -> dict[str, Any]:
    """One rank: seconds of its share, and bytes averaged without and with the regulariser."""
    model = DistributedDataParallel(model_of())
    sent = Counted()
    # Not the method itself: DDP wants annotations that are not strings, or none.
    model.register_comm_hook(None, lambda _, bucket: sent.average(bucket))
    reg = OrthRegularizer(model, 0.01)
    images, labels = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    found: dict[str, Any] = {}
    for name in (WITHOUT, WITH, WITHOUT, WITH):  # the first of each rebuilds the buckets
        sent.bytes = sent.messages = 0
        loss = F.cross_entropy(model(images), labels)
        (loss + reg() if name == WITH else loss).backward()
        found[name] = {"bytes": sent.bytes, "messages": sent.messages}
        model.zero_grad()
    seconds = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        start = process_time()
        with model.no_sync():
            reg().backward()
        seconds.append(process_time() - start)
        model.zero_grad()
    selection = reg._look()[0]
    return found | {
        "seconds": seconds[2:],
        "share": [selection.layers[index].name for index in selection.share(rank, world)],
    }


def _fully_sharded(rank: int, world: int) -> dict[str, Any]:
    """One rank of FSDP2: collectives of a plain step and of one with the regulariser."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    model: nn.Module = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    reg = OrthRegularizer(model, 0.01)
    found: dict[str, Any] = {}
    with CommDebugMode() as counted:
        reg().backward()
    found["collectives"] = {str(name): count for name, count in counted.get_comm_counts().items()}
    found["layers"] = len(reg.layers)
    found["bytes"] = sum(weight.numel() * weight.element_size() for weight in reg._look()[1])
    return found


def _rank(rank: int, world: int, work: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        found = {"ddp": _data_parallel, "fsdp": _fully_sharded}[work](rank, world)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def processes(world: int, work: str) -> list[dict[str, Any]]:
    """What each of ``world`` real processes found."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, work, folder), nprocs=world)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def layer_seconds(effort: Effort) -> dict[str, float]:
    """Processor time of loss and gradient of every regularised layer of the model, one thread, by name."""
    settings = Settings(threads=1)
    settings.apply()
    layers = {
        name: Layer(name, tuple(layer.problem.shape), layer.problem.stride[0])
        for name, layer in OrthRegularizer(model_of()).layers.items()
    }
    measured: dict[Any, float] = {}
    for layer in layers.values():
        if layer.geometry not in measured:
            single = [replace(layer, count=1)]
            [call] = calls_of((FUSED,), make_weights(single, settings), single, settings).values()
            measured[layer.geometry] = median(interleave({FUSED: call}, CpuTimer(process_time), effort)[FUSED])
    return {name: measured[layer.geometry] for name, layer in layers.items()}


def measure(harness: Harness, section: str) -> None:
    """Real processes, and the prediction for them."""
    alone = layer_seconds(Effort(0.1, 3))
    for world in WORLDS:
        subject = f"{world} rank{'s' * (world > 1)}"
        harness.announce(subject)
        disturbance = Disturbance()
        found = processes(world, "ddp")
        for rank, one in enumerate(found):
            details = {"world": world, "rank": rank, "layers": len(one["share"])}
            predicted = [sum(alone[name] for name in one["share"])]
            for name, seconds, share in ((SHARE, one["seconds"], disturbance.share), (PREDICTED, predicted, None)):
                contender = f"{name}, rank {rank}"
                harness.add(section, subject, contender, "processor time", SECONDS, seconds, share, details)
        for name in (WITHOUT, WITH):
            sizes = [one[name]["bytes"] for one in found]
            harness.add(section, subject, name, "bytes averaged", BYTES, sizes, None, {"world": world})
        harness.advance()
    for one in processes(2, "fsdp"):
        details = {"world": 2, "collectives": one["collectives"], "layers": one["layers"]}
        counted = sum(one["collectives"].values())
        for measure_name, unit, value in (("gathered", BYTES, one["bytes"]), ("collectives", COUNT, counted)):
            harness.add(section, "FSDP2, 2 ranks", "reg()", measure_name, unit, [value], None, details)
    harness.settings.apply()


def processes_table(rows: Rows) -> str:
    """Real processes: measured against predicted, and bytes."""
    body = []
    for subject, own in rows.by("subject"):
        world = own.every[0].details["world"]
        measured = [row for row in own if row.contender.startswith(SHARE)]
        if not measured:
            continue
        slowest = max(row.p50 for row in measured)
        predicted = max(row.p50 for row in own if row.contender.startswith(PREDICTED))
        whole = sum(row.p50 for row in rows.where(subject="1 rank") if row.contender.startswith(SHARE))
        mean = sum(row.p50 for row in measured) / world
        bytes_of = [own.median(contender=name) for name in (WITHOUT, WITH)]
        added = (bytes_of[1] or 0) - (bytes_of[0] or 0) if world > 1 else 0
        body.append(
            {
                "processes": subject,
                "slowest rank's share ms": milliseconds(slowest),
                "predicted ms": milliseconds(predicted),
                "faster than one": times(ratio(whole, slowest)),
                "imbalance": f"{slowest / mean:.2f}",
                "averaged per step MB": megabytes(bytes_of[0]),
                "bytes added by reg()": f"{added:.0f}",
            }
        )
    return table(body)


# ----------------------------------------------------------------------------------------------------------------------
# More ranks than there are
# ----------------------------------------------------------------------------------------------------------------------


def beyond(layers: Sequence[tuple[float, float, int]], world: int) -> tuple[float, float, int]:
    """Busiest rank's seconds, the mean, and ranks with nothing to do.

    ``layers`` are (estimated cost, measured seconds, count): shares are made by the estimates, as the regulariser makes
    them, and what they take is added up from the measured times.
    """
    every = [(estimate, seconds) for estimate, seconds, count in layers for _ in range(count)]
    shares = balanced_shares([estimate for estimate, _ in every], world)
    loads = [sum(every[index][1] for index in share) for share in shares]
    return max(loads), sum(loads) / world, sum(not share for share in shares)


def estimate(layer: Layer) -> float:
    """The regulariser's own estimate of a layer."""
    module = module_of(layer)
    [only] = OrthRegularizer(nn.Sequential(module), include="*").layers.values()
    return only.cost(8)


def beyond_table(compared: Rows, measure_name: str) -> str:
    """From the layers' times that compare.py kept."""
    body = []
    for network in compared.names("section"):
        if network not in NETWORKS:
            continue
        known = {row.subject: row.p50 for row in compared.where(section=network, contender=FUSED, measure=measure_name)}
        layers = [
            (estimate(layer), known[layer.label], layer.count) for layer in NETWORKS[network] if layer.label in known
        ]
        if len(layers) < len(NETWORKS[network]):
            continue
        whole = sum(seconds * count for _, seconds, count in layers)
        for world in (*WORLDS[1:], *BEYOND):
            busiest, mean, idle = beyond(layers, world)
            body.append(
                {
                    "network": network,
                    "ranks": f"{world}",
                    "one rank ms": milliseconds(whole),
                    "busiest rank ms": milliseconds(busiest),
                    "imbalance": f"{busiest / mean:.2f}",
                    "faster": times(whole / busiest),
                    "ranks without a layer": f"{idle}",
                }
            )
    return table(body)
