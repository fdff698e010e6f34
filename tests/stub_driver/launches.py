"""Launches the Triton kernels on a device that is not there: everything up to the driver is real (see libcuda.c).

    python launches.py FOLDER sm_90 tf32      FOLDER holds libcuda.so.1

Prints one line of JSON: the launches that would have reached the device, and what came of planted mistakes. In a
process of its own, because Triton has one driver, and here it compiles, where tests interpret.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend
import torch
import triton
from oracle import Case
from plans import plan_named
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ocnn_fused.backends.device import SPECS
from ocnn_fused.backends.triton import cooperative, kernels
from ocnn_fused.backends.triton.config import Config, shipped, single_configs
from ocnn_fused.backends.triton.launch import Call
from ocnn_fused.backends.triton.tables import STAGES

FOLDER, TARGET, PRECISION = sys.argv[1:4]
stub = pretend.gpu(Path(FOLDER), TARGET)

#: Every stage: a mix, a free target, tiny groups, planes that are the weight itself.
LAYERS = [
    ("toom/row", Case((70, 40, 3, 3))),
    ("toom/row", Case((16, 8, 3, 3), stride=2, target="free")),
    ("small/row", Case((24, 1, 3, 3), groups=24)),
    ("gram/row", Case((24, 40))),
]


POINTERS = {"table", "constants", "tiles", "weights", "workspace", "partials", "grads", "targets", "losses"}
POINTERS |= {"arrivals", "factors"}


class DeviceMemory(TorchDispatchMode):
    """What is allocated inside counts as memory of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel():
                storage = tensor.untyped_storage()
                stub.stub_declare(storage.data_ptr(), storage.nbytes())
        return result


def make_call(config: Config, passes: tuple[range, ...] | None = None) -> Call:
    weights = [case.random(dtype=torch.float32) for _, case in LAYERS]
    return Call(weights, [plan_named(case, name) for name, case in LAYERS], True, PRECISION, config, passes=passes)


def expected(call: Call, kernel: str) -> dict[str, int]:
    """What each of a kernel's parameters should be, by name; counters are memory of the launch's own."""
    tables, stage = call.tables, kernel.removesuffix("_kernel")
    begin, _ = (0, 0) if stage == "single" else tables.passes[0].stage(stage)
    return {
        "table": tables.table.data_ptr(),
        "constants": tables.constants.data_ptr(),
        "tiles": tables.tiles[begin:].data_ptr(),
        "weights": call.weights.data_ptr(),
        "workspace": call.workspace.data_ptr(),
        "partials": call.partials.data_ptr(),
        "grads": call.grads_buffer.data_ptr(),
        "losses": call.losses.data_ptr(),
        "targets": call.targets.data_ptr(),
        "with_grad": call.scaling[0],
        "factors": call.scaling[1].data_ptr(),
        "factor": int.from_bytes(struct.pack("<f", call.scaling[2]), "little"),
        "loss_rows": tables.loss_rows,
        "count": tables.count,
        "pass_rows": tables.pass_rows,
        "passes": len(tables.passes),
    }


def launches(call: Call) -> list[dict[str, Any]]:
    """Those written down since the last time, with the parameters that are not what they should be."""
    found = []
    for line in stub.stub_launches().decode().splitlines():
        name, grid, threads, shared, cooperative_, registers, *parameters = line.split()
        wanted = expected(call, name)
        function = getattr(kernels, name)
        names = [parameter.name for parameter in function.params if not parameter.is_constexpr]
        wrong = []
        for parameter, text in zip(names, parameters, strict=False):
            size, value = map(int, text.split(":"))
            if size != (8 if parameter in POINTERS else 4) or (parameter in wanted and value != wanted[parameter]):
                wrong.append(f"{parameter}: {text}, wanted {wanted.get(parameter)}")
        # Beyond those: memory for scratch and profiles, of which the kernels use none.
        extra = [int(text.split(":")[1]) for text in parameters[len(names) :]]
        found.append(
            {
                "kernel": name,
                "grid": int(grid),
                "threads": int(threads),
                "shared": int(shared),
                "cooperative": bool(int(cooperative_)),
                "registers": int(registers),
                "wrong": wrong,
                "missing": max(0, len(names) - len(parameters)),
                "extra": extra,
            }
        )
    stub.stub_clear()
    return found


def outcome(action: Callable[[], Any]) -> str:
    """The name of what was raised and its message, or what was returned."""
    try:
        return repr(action())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    configs = shipped(SPECS["A100"])[PRECISION]
    report: dict[str, Any] = {"triton": triton.__version__}
    with DeviceMemory():
        call = make_call(configs[0])
        call.run()
        report["tiles"] = {stage: len(range(*call.tables.passes[0].stage(stage))) for stage in STAGES}
        report["staged"] = launches(call)

        if cooperative.is_possible():
            single = make_call(single_configs(configs)[0], passes=(range(3), range(3, 4)))
            programs = cooperative.resident_programs(single)
            single.run(programs)
            report["programs"] = programs
            report["fitting"] = next(iter(cooperative._fitting.values()))
            report["single"] = launches(single)
            arguments, settings = single.single_launch()
            too_many = (report["fitting"] + 1,)
            report["too many programs"] = outcome(lambda: kernels.single_kernel[too_many](*arguments, **settings))

        # Planted: each mistake is one that a launch could make.
        kernel, names = kernels.mix_kernel, kernels.mix_kernel.arg_names
        tiles = call.tiles_of(call.tables.passes[0], "mix")
        right, options = call.stage_arguments("mix", tiles, torch.zeros(9, dtype=torch.int32)), call.settings("mix")

        def with_(**values: Any) -> list[Any]:
            return [values.get(name, value) for name, value in zip(names, right, strict=False)]

        def launched(arguments: Sequence[Any]) -> str:
            return outcome(lambda: kernel[(1,)](*arguments, **options))

        foreign = ctypes.create_string_buffer(4096)  # memory that is not the device's
        elsewhere = SimpleNamespace(data_ptr=lambda: ctypes.addressof(foreign), dtype=torch.int64)
        report["an argument less"] = launched(right[:-1])
        report["an argument more"] = launched((*right, 1))
        report["a float for a count"] = launched(with_(loss_rows=1.5))
        report["memory of the host"] = launched(with_(table=elsewhere))
        # Of the same kind, so that only the values tell.
        stub.stub_clear()
        launched(with_(partials=call.losses, losses=call.partials))
        report["exchanged"] = launches(call)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
