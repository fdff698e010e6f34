"""How many programs of the single kernel can be resident at once; more of them would wait for each other forever."""

from __future__ import annotations

from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import triton.language as tl

from . import kernels
from .availability import interpreted
from .config import Config
from .launch import Call

#: Programs in the interpreter, which runs them one after another: a second one would never arrive at the barrier.
INTERPRETED_PROGRAMS = 1

RESERVED_SHARED = 1024  # bytes that the driver keeps of each program, from sm_80 on
_REGISTERS = 65536  # per multiprocessor
_REGISTER_UNIT = 256  # registers are allocated per warp in such units
_TENSOR_COLUMNS = 512  # of tensor memory per multiprocessor, where there is one (sm_100)


def most_warps(capability: tuple[int, int]) -> int:
    """Warps that a multiprocessor holds."""
    return 48 if capability in ((8, 6), (8, 9), (12, 0)) else 64


#: Programs that fit on a device, by its index, precision and configuration, on which the compiled kernel depends.
_fitting: dict[tuple[int, str, Config], int] = {}


def programs_per_multiprocessor(
    registers: int, shared_bytes: int, warps: int, shared_limit: int, most_warps: int, tensor_columns: int = 0
) -> int:
    """How many programs fit by registers, shared memory, warps and tensor memory; zero if not even one does."""
    per_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    return min(
        _REGISTERS // (per_warp * warps),
        shared_limit // (shared_bytes + RESERVED_SHARED),
        most_warps // warps,
        _TENSOR_COLUMNS // max(tensor_columns, 1),
    )


def tensor_columns(compiled: Any) -> int:
    """Columns of tensor memory that a compiled kernel takes; none on most architectures."""
    return getattr(compiled.metadata, "tmem_size", None) or 0


#: Whether the compiler can be told to leave everything in a loop, since triton 3.5. Without that the single kernel
#: computes in front of its loops what all of its stages need, keeps it in registers, and spills.
_LOOPS_STAY_WHOLE = "disable_licm" in signature(tl.range.__init__).parameters


def is_possible() -> bool:
    """Whether the single kernel compiles without spills, and its grid can be proven to fit, as it cannot on AMD."""
    return _LOOPS_STAY_WHOLE and (interpreted() or torch.version.hip is None)


def resident_programs(call: Call) -> int | None:
    """Grid of the single kernel, at most one program per work item; None if it cannot be launched on this device.

    A grid that is too large is never launched, and if the count were wrong a cooperative launch would be refused by the
    driver: the barrier cannot wait for a program that was not started.
    """
    most_items = max(end - begin for one in call.tables.passes for begin, end in pairwise(one))
    if not is_possible():
        return None
    if interpreted():
        return min(INTERPRETED_PROGRAMS, most_items)
    index = call.device.index if call.device.index is not None else torch.cuda.current_device()
    key = (index, call.precision, call.config)
    if key not in _fitting:
        _fitting[key] = _count_fitting(index, call)
    return min(_fitting[key], most_items) or None


def _count_fitting(index: int, call: Call) -> int:
    """Programs that fit on the whole device, by the compiled kernel's own resources."""
    properties: Any = torch.cuda.get_device_properties(index)
    arguments, options = call.single_launch()
    with torch.cuda.device(index):
        compiled = kernels.single_kernel.warmup(*arguments, grid=(1,), **options)
        compiled._init_handles()
    fitting = programs_per_multiprocessor(
        compiled.n_regs,
        compiled.metadata.shared,
        call.config.warps,
        properties.shared_memory_per_multiprocessor,
        most_warps((properties.major, properties.minor)),
        tensor_columns(compiled),
    )
    return fitting * properties.multi_processor_count
