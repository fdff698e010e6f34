"""The host's part of a step on a GPU: what Python, Triton's launcher and the packing of arguments take for a ResNet-34.

    python tests/stub_driver/host_time.py [ROUNDS]      the device does nothing, and needs no time for it

Everything up to the driver is real, and the driver is the stub. Allocations are those of the CPU, of which large ones
take longer than those of a GPU's caching allocator do.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import pretend
import torch
from resnet import ResNet

from ocnn_fused import OrthRegularizer
from ocnn_fused.backends import triton as backend


def milliseconds(step: Callable[[], object], rounds: int) -> str:
    for _ in range(min(5, rounds)):
        step()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        step()
        times.append(1e3 * (perf_counter() - start))
    return f"median {median(times):.3f} ms, least {min(times):.3f} ms of {rounds}"


def main(rounds: int = 200) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pretend.build(folder)
        stub = pretend.gpu(folder, "sm_80")
        backend.unavailable_reason = lambda device: None  # type: ignore[assignment]
        stub.stub_declare(0, 1 << 63)  # all memory is the device's
        model = ResNet((3, 4, 6, 3), 1000, cifar=False)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for launch in (None, "staged"):
            reg = OrthRegularizer(model, backend="triton", precision="tf32", launch=launch)
            for step in (reg, reg.add_grad_):
                step()
                stub.stub_clear()
                step()
                launched = len(stub.stub_launches().decode().splitlines())
                label = f"{'reg()' if step is reg else 'add_grad_'}, {launch or 'by itself'}: {launched} launches"
                print(f"{label:<40}{milliseconds(step, rounds)}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
