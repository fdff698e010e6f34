"""How many programs of the single kernel can be resident at once; more of them would wait for each other forever."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from . import kernels
from .availability import interpreted
from .config import Config
from .launch import Call

#: Programs in the interpreter, which runs them one after another: a second one would never arrive at the barrier.
INTERPRETED_PROGRAMS = 1

_RESERVED_SHARED = 1024  # bytes that the driver keeps of each program, from sm_80 on
_REGISTERS = 65536  # per multiprocessor
_REGISTER_UNIT = 256  # registers are allocated per warp in such units
_MOST_WARPS = {(8, 6): 48, (8, 9): 48, (12, 0): 48}
_MOST_WARPS_ELSEWHERE = 64


def programs_per_multiprocessor(
    registers: int, shared_bytes: int, warps: int, shared_limit: int, most_warps: int
) -> int:
    """How many programs fit by registers, by shared memory and by warps; zero if not even one does."""
    per_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    return min(_REGISTERS // (per_warp * warps), shared_limit // (shared_bytes + _RESERVED_SHARED), most_warps // warps)


def resident_programs(call: Call) -> int | None:
    """Grid of the single kernel, at most one program per work item; None if it cannot be launched on this device.

    A grid that is too large is never launched, and if the count were wrong a cooperative launch would be refused by the
    driver: the barrier cannot wait for a program that was not started.
    """
    tables = call.tables
    most_items = max(end - begin for begin, end in zip((0, *tables.ends[:-1]), tables.ends, strict=True))
    if interpreted():
        return min(INTERPRETED_PROGRAMS, most_items)
    if torch.version.hip is not None:
        return None  # how many programs fit is not reported there in a form that proves it
    index = call.device.index if call.device.index is not None else torch.cuda.current_device()
    return min(_fitting_programs(index, call.precision, call.config, _Holder(call)), most_items) or None


class _Holder:
    """Keeps a call out of the cache key: the compiled kernel depends on precision and configuration alone."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)


@lru_cache(maxsize=64)
def _fitting_programs(index: int, precision: str, config: Config, holder: _Holder) -> int:
    """Programs that fit on the whole device, by the compiled kernel's own resources."""
    properties: Any = torch.cuda.get_device_properties(index)
    arguments, options = holder.call.single_launch()
    with torch.cuda.device(index):
        compiled = kernels.single_kernel.warmup(*arguments, grid=(1,), **options)
        compiled._init_handles()
    fitting = programs_per_multiprocessor(
        compiled.n_regs,
        compiled.metadata.shared,
        config.warps,
        properties.shared_memory_per_multiprocessor,
        _MOST_WARPS.get((properties.major, properties.minor), _MOST_WARPS_ELSEWHERE),
    )
    return fitting * properties.multi_processor_count
