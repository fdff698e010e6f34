"""Peak extra memory of one step, as the operating system sees it.

Each measurement runs in a process of its own, forked from a server that has imported torch and run nothing. There, a
tiny step of the same kind first starts the thread pools and maps the code it needs; then the resident set is noted, its
high-water mark reset, and one real step taken. The rise of the mark counts everything: tensors, workspaces, gradients
and the scratch memory of oneDNN and BLAS, which no allocator hook of torch would see. Large blocks go back to the
system as soon as they are freed, so that the mark shows what was needed at one time and not how the heap was
fragmented. Code and thread stacks touched for the first time leave a noise of about a megabyte.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from shapes import Layer, distinct
from steps import Implementation, Settings, expand, make_weights, run_step

#: Differences below this are noise.
RESOLUTION = 1 << 20

_TINY = 32
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _status_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _tiny(layer: Layer) -> Layer:
    """The same geometry with few channels and groups."""
    groups = min(layer.groups, _TINY)
    rows, channels = min(layer.shape[0] // layer.groups, _TINY), min(layer.shape[1], _TINY)
    return replace(layer, shape=(rows * groups, channels, *layer.shape[2:]), groups=groups)


def _warm_up_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Tiny versions, each also as an ungrouped layer with enough channels for matrix products."""
    tiny = [_tiny(layer) for layer in layers]
    square = [replace(layer, shape=(_TINY, _TINY, *layer.shape[2:]), groups=1) for layer in layers]
    return tuple(replace(layer, count=1) for layer in distinct([*tiny, *square]))


def _measure(implementation: Implementation, layers: Sequence[Layer], settings: Settings) -> int:
    """Runs in the child: the rise of the high-water mark during one step."""
    torch.set_num_threads(settings.threads)
    tiny = _warm_up_layers(layers)
    run_step(implementation, make_weights(tiny, settings), tiny, settings.gradient)
    matrices = torch.ones(2, _TINY, _TINY, dtype=settings.dtype)
    torch.bmm(matrices, matrices)  # starts the BLAS, which tiny layers go without
    weights = make_weights(layers, settings)
    before = _status_bytes("VmRSS")
    _CLEAR_REFS.write_text("5")
    run_step(implementation, weights, layers, settings.gradient)
    return max(0, _status_bytes("VmHWM") - before)


def peak_extra_bytes(implementation: Implementation, layers: Sequence[Layer], settings: Settings) -> int | None:
    """Peak memory of one step beyond the weights, gradients included; None where the system cannot tell."""
    if settings.device != "cpu" or not _CLEAR_REFS.exists():
        return None
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(128 << 10))  # glibc reads it when the server starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ocnn_fused", "numpy"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as executor:
        return executor.submit(_measure, implementation, expand(layers), settings).result()
