"""Executes plans by a module of tests/cuda_host through the package's own Python: run.py MODULE RUNS SEED MORE.

RUNS is a pickled list of cuda_support.Run. For each a line says what is wrong, a hash of the results, and what was
issued. MORE is 1 where everything is compared, and 0 where a sanitizer makes that slow. In a process of its own,
because a process can have the compiled extension only once.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from conftest import TOLERANCES, errors
from cuda_support import Run
from plans import job, plan_named
from torch.overrides import TorchFunctionMode

from ocnn_fused import _extension
from ocnn_fused.backends import cuda, lowering
from ocnn_fused.backends.epilogue import Epilogue
from ocnn_fused.backends.job import Executable, losses_dtype
from ocnn_fused.problem import DEFAULT_OPTIONS

GPU = torch.device("cuda", 0)


class OnTheCpu(TorchFunctionMode):
    """What is to be made on a GPU is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.device("cpu") if arg == GPU else arg for arg in args)
        kwargs = {name: torch.device("cpu") if value == GPU else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """The one stream of cuda_host.h, and a handle that nobody looks at."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(lowering, "beside_all_graphs", lambda device, make: make()))
        stack.enter_context(patch.object(torch.cuda, "device", nullcontext))
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)))
        stack.enter_context(patch.object(torch.cuda, "current_blas_handle", lambda: 0))
        stack.enter_context(patch.object(Epilogue, "check", lambda epilogue, count, device: None))
        stack.enter_context(OnTheCpu())
        yield


def prepared(run: Run, weights: Sequence[torch.Tensor], with_grad: bool) -> Executable:
    plan = plan_named(run.case, run.name)
    assert cuda.fits(plan, run.dtype), f"{run} does not fit"
    return cuda.prepare([job(plan, weight, with_grad) for weight in weights], GPU, DEFAULT_OPTIONS)


def said_of(run: Run, counters: Sequence[Any], more: bool) -> tuple[list[str], str, list[int]]:
    """What is wrong, a hash of all results, and how many kernels and products were issued for them."""
    weights = run.weights_laid_out()
    before = [weight.clone() for weight in weights]
    counts = [counter() for counter in counters]
    with pretended_gpu():
        losses, grads = prepared(run, weights, run.with_grad)(weights)
    counts = [counter() - before for counter, before in zip(counters, counts, strict=True)]
    found = []
    if losses.dtype != losses_dtype([run.dtype]) or losses.shape != (run.weights,):
        found.append(f"losses are {losses.dtype} of {tuple(losses.shape)}")
    for weight, loss, grad in zip(weights, losses, grads, strict=True):
        expected = grad if run.with_grad else torch.zeros_like(weight)
        if (expected.dtype, expected.shape) != (weight.dtype, weight.shape):
            found.append(f"a gradient is {grad.dtype} of {tuple(grad.shape)}")
        loss_error, grad_error = errors(loss, expected, weight, run.case)
        for name, error in (("loss", loss_error), *((("gradient", grad_error),) if run.with_grad else ())):
            if not error <= TOLERANCES[run.dtype]:
                found.append(f"error of a {name}: {error}")
    if more and run.with_grad:
        with pretended_gpu():
            alone, _ = prepared(run, weights, False)(weights)
            found += epilogue_problems(run, weights, grads)
        if not torch.equal(alone, losses):
            found.append("the loss without gradient has other bits")
    if not all(map(torch.equal, weights, before)):
        found.append("a weight was changed")
    bits = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in (losses, *grads))
    return found, hashlib.sha256(bits).hexdigest(), counts


def epilogue_problems(run: Run, weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[str]:
    """Gradients times factors, returned, added to other tensors, and to the weights themselves."""
    execute = prepared(run, weights, True)
    factors = torch.linspace(-1.0, -0.25, len(weights), dtype=torch.float64)
    scaled = execute(weights, Epilogue(factors, 0.5))[1]
    targets, own = [torch.ones_like(weight) for weight in weights], run.weights_laid_out()
    execute(weights, Epilogue(factors, 0.5, targets))
    execute(own, Epilogue(factors, 0.5, own))
    found = []
    for weight, grad, factor, *results in zip(weights, grads, factors.tolist(), scaled, targets, own, strict=True):
        expected = 0.5 * factor * grad.double()
        tolerance = 4 * TOLERANCES[run.dtype] * max(1.0, float(grad.double().abs().max()))
        starts = (torch.zeros_like(expected), torch.ones_like(expected), weight.double())
        for name, result, start in zip(("scaled", "added", "added in place"), results, starts, strict=True):
            if not (result.double() - start - expected).abs().max() <= tolerance:
                found.append(f"a gradient is wrong where it is {name}")
    return found


def main(module: str, runs: str, seed: str, more: str) -> None:
    spec = importlib.util.spec_from_file_location("ocnn_fused._C", module)
    assert spec is not None
    assert spec.loader is not None
    _extension.module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_extension.module)
    _extension.module.poison(True)
    native = ctypes.CDLL(module)
    native.cuda_host_seed(ctypes.c_ulong(int(seed)))
    counters = native.cuda_host_launches, native.cuda_host_products
    for run in pickle.loads(Path(runs).read_bytes()):
        print(json.dumps([str(run), *said_of(run, counters, more == "1")]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
