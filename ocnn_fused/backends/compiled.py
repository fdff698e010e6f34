"""Calls of compiled code (csrc/): torch allocates, compiled code computes between addresses.

Weights of one plan and memory layout are executed together, as a bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from .. import _extension
from ..plan import AnyPlan
from ..problem import Options
from .epilogue import Epilogue
from .job import Executable, Job, LossesAndGrads, Operand, accumulation_dtype, losses_dtype
from .lowering import lower

#: What a profiler sees of the stages of a bucket.
_RANGE = "ocnn_fused: evaluate, gram, mix, apply, gather"

#: Bytes of workspace that a thread keeps between calls.
_MOST_KEPT = 128 << 20


class _OfThread(threading.local):
    """Memory of a thread on the CPU, reused: fresh memory costs more than the stages that write it."""

    workspace: Tensor | None = None


_of_thread = _OfThread()


def prepare(jobs: Sequence[Job[AnyPlan]], device: torch.device, options: Options) -> Executable:
    """What executes the plans of these jobs by compiled code, on a CPU or a CUDA device."""
    members: dict[tuple[AnyPlan, Operand, tuple[int, ...]], list[int]] = {}
    for place, job in enumerate(jobs):
        members.setdefault((job.plan, job.operand, job.problem.shape), []).append(place)
    dtype = losses_dtype([job.operand.dtype for job in jobs])
    buckets = [_Bucket(*key, places, device, dtype) for key, places in members.items()]
    return _Call(buckets, [job.operand.with_grad for job in jobs], dtype, device)


class _Call:
    """All weights of a call, bucket by bucket."""

    def __init__(
        self, buckets: Sequence[_Bucket], wanted: Sequence[bool], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.buckets = buckets
        self.wanted = wanted
        self.dtype = dtype  # of the losses
        self.device = device

    # Plain loops in what every call goes through: each comprehension would cost a call.
    def __call__(self, weights: Sequence[Tensor], epilogue: Epilogue | None = None) -> LossesAndGrads:
        losses = torch.empty(len(weights), dtype=self.dtype, device=self.device)
        if epilogue is not None:
            epilogue.check(len(weights), self.device)
        grads: list[Tensor] = []
        if epilogue is None or not epilogue.targets:
            for weight, wanted in zip(weights, self.wanted, strict=True):
                grads.append(torch.empty_like(weight) if wanted else weight.new_empty(0))
        for bucket in self.buckets:
            bucket.run(weights, grads, losses, epilogue)
        return losses, grads


class _Bucket:
    """Weights of one plan and memory layout, at some places of a list."""

    def __init__(
        self,
        plan: AnyPlan,
        operand: Operand,
        shape: tuple[int, ...],
        places: list[int],
        device: torch.device,
        losses_dtype: torch.dtype,
    ) -> None:
        self.wide = losses_dtype == torch.float64
        self.places = places
        self.operand = operand
        self.shape = torch.Size(shape)
        like = torch.empty_strided(shape, operand.strides, dtype=operand.dtype, device="meta")
        self.grad_strides = torch.empty_like(like).stride()
        self.device = device
        # Kept, because compiled code has only the arrays' addresses.
        self.lowered = lower(plan, accumulation_dtype(operand.dtype), device, whole=device.type != "cpu")
        self.native = _extension.module.Bucket(
            plan=self.lowered.plan,
            tables=self.lowered.tables.data_ptr(),
            constants=self.lowered.constants.data_ptr(),
            dtype=str(operand.dtype).removeprefix("torch."),
            sizes=shape,
            strides=operand.strides,
            grad_strides=self.grad_strides,
            places=places,
        )

    def run(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor], losses: Tensor, epilogue: Epilogue | None
    ) -> None:
        """Write the losses of this bucket's weights; write their gradients, or add them to the epilogue's targets."""
        targets: Sequence[Tensor] = () if epilogue is None or not self.operand.with_grad else epilogue.targets
        adds = bool(targets) and self._can_add(targets)
        read, written, apart = [], [], []
        for place in self.places:
            read.append(weights[place].data_ptr())
            if targets and not adds:
                apart.append(torch.empty_like(weights[place]))
                written.append(apart[-1].data_ptr())
            elif self.operand.with_grad:
                written.append((targets or grads)[place].data_ptr())
        factors, factor, per_target = 0, 1.0, False
        if epilogue is not None:
            factors, factor, per_target = epilogue.factors.data_ptr(), epilogue.factor, epilogue.per_target
        # By position: eleven names would cost a microsecond.
        arguments = read, written, adds, losses.data_ptr(), self.wide, factors, factor, per_target
        shown = torch.profiler.record_function(_RANGE) if profiler._is_profiler_enabled else None
        if shown is not None:
            shown.__enter__()
        if self.device.type == "cuda":
            _run_on_cuda(self.native, self.operand.with_grad, self.device, arguments)
        else:
            # Out of its place meanwhile, because a signal handler may call us in between.
            workspace, _of_thread.workspace = _of_thread.workspace, None
            if workspace is None:
                workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
            while needed := self.native.run(*arguments, workspace.data_ptr(), workspace.nbytes):
                workspace = torch.empty(needed, dtype=torch.uint8, device="cpu")
            _of_thread.workspace = workspace if workspace.nbytes <= _MOST_KEPT else None
        if shown is not None:
            shown.__exit__(None, None, None)
        if targets:
            changed = [targets[place] for place in self.places]
            if apart:
                torch._foreach_add_(changed, apart)
            torch.autograd.graph.increment_version([target for target in changed if not target.is_inference()])

    def _can_add(self, targets: Sequence[Tensor]) -> bool:
        """Whether compiled code can add to these: they lie in memory as gradients of these weights do."""
        some = [targets[place] for place in self.places]
        return all(
            target.dtype == self.operand.dtype and target.shape == self.shape and target.stride() == self.grad_strides
            for target in some
        )


def _run_on_cuda(native: Any, with_grad: bool, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """On the current stream, which nothing waits for."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        blas = torch.cuda.current_blas_handle()
        needed = native.cuda_workspace_bytes(with_grad)
        while needed:
            workspace = torch.empty(needed, dtype=torch.uint8, device=device)
            needed = native.run_cuda(*arguments, workspace.data_ptr(), workspace.nbytes, stream, blas)
