"""The plan executed with ordinary PyTorch calls: any device, no compiler. Slower than the compiled backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan import Block, Plan
from ..problem import FREE, OFF_DIAGONAL, Options
from .cpu import refusal, resolve_precision, seconds
from .job import Executable, Job, accumulation_dtype, is_bilinear, prepare_each
from .lowering import to_tensor

__all__ = ["prepare", "refusal", "resolve_precision", "seconds", "takes", "unavailable_reason"]

takes = is_bilinear

#: Terms of a product that a BLAS adds up at once.
_PIECE = 128


def unavailable_reason(device: torch.device) -> str | None:
    """Never: PyTorch runs wherever the weight is."""
    return None


def prepare(jobs: Sequence[Job[Plan]], device: torch.device, options: Options) -> Executable:
    return prepare_each(jobs, device, _Executor)


class _Executor:
    """A plan with its matrices on a device."""

    def __init__(self, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self.dtype = accumulation_dtype(dtype)
        self.column = plan.side == "column"
        self.evaluation = [to_tensor(block.evaluation, self.dtype, device) for block in plan.blocks]
        self.sources = [torch.tensor(block.sources, device=device) for block in plan.blocks]
        self.mixes = [to_tensor(matrix, self.dtype, device) for matrix in (plan.mix, plan.mix_transposed)]
        # Places, not masks: how many a mask selects, a GPU would have to be asked.
        self.self_paired = torch.tensor([o for o, paired in enumerate(plan.self_paired) if paired], device=device)
        self.present = [_present(block, device) for block in plan.blocks]

    def __call__(self, weight: Tensor, with_grad: bool) -> tuple[Tensor, Tensor]:
        plan = self.plan
        kernel = weight.reshape(plan.groups, plan.rows, plan.channels, -1).to(self.dtype)
        planes = self.evaluate(kernel)
        targets = self.targets(kernel)
        residual = self.mix(self.gram(planes), targets.to(self.dtype))
        squares = residual.double().square().sum((1, 2, 3))
        offset = plan.offset * targets.square().mean()
        loss = (squares[0] + 2 * squares[1:].sum() + offset).clamp_min(0).to(self.dtype)
        if not with_grad:
            return loss, weight.new_empty(0)
        grad = self.gather(self.apply(self.mix_adjoint(residual), planes), kernel)
        # In the weight's own memory format, as autograd expects.
        return loss, torch.empty_like(weight).copy_(grad.reshape(weight.shape))

    def targets(self, kernel: Tensor) -> Tensor:
        """One per group."""
        if self.plan.target == FREE:
            return kernel.double().square().sum((1, 2, 3)) / self.plan.rows
        return torch.full((self.plan.groups,), self.plan.target, dtype=torch.float64, device=kernel.device)

    def evaluate(self, kernel: Tensor) -> list[Tensor]:
        """Planes ``(P, G, gram side, contraction)`` of each block."""
        return [
            self.turned(torch.einsum("pm,gicrm->pgirc", matrix, _taps(kernel, sources)).flatten(3))
            for matrix, sources in zip(self.evaluation, self.sources, strict=True)
        ]

    def gram(self, planes: Sequence[Tensor]) -> Tensor:
        """Outputs ``(O, G, side, side)``."""
        side = self.plan.work_rows
        outputs = planes[0].new_zeros(self.plan.outputs, self.plan.groups, side, side)
        for run in self.plan.runs:
            left, right = (planes[run.block][first : first + run.count] for first in (run.left, run.right))
            products = _gram(left, right)
            if run.summed:
                outputs[run.out] += products.sum(0)
            else:
                outputs[run.out : run.out + run.count] += products
        return outputs

    def mix(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Residual of each lag, ``(T, G, side, side)``."""
        residual = sum(
            torch.einsum("to,ogij->tgij", matrix, of)
            for matrix, of in zip(self.mixes, (outputs, outputs.transpose(-1, -2)), strict=True)
        )
        diagonal = residual[0].diagonal(dim1=-2, dim2=-1)  # type: ignore[index]
        if self.plan.target == OFF_DIAGONAL:
            diagonal.zero_()
        else:
            diagonal.sub_(targets[:, None])
        return residual  # type: ignore[return-value]

    def mix_adjoint(self, residual: Tensor) -> Tensor:
        """The gradient with respect to the outputs."""
        weighted = residual * 4
        weighted[0] /= 2
        adjoint: Tensor = sum(
            torch.einsum("to,tgij->ogij", matrix, of)
            for matrix, of in zip(self.mixes, (weighted, weighted.transpose(-1, -2)), strict=True)
        )  # type: ignore[assignment]
        adjoint[self.self_paired] *= 2
        return adjoint

    def apply(self, adjoint: Tensor, planes: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the planes."""
        gradients = [torch.zeros_like(plane) for plane in planes]
        for run in self.plan.runs:
            y = adjoint[run.out : run.out + (1 if run.summed else run.count)]
            firsts, seconds = slice(run.left, run.left + run.count), slice(run.right, run.right + run.count)
            gradients[run.block][firsts] += y @ planes[run.block][seconds]
            if run.left != run.right:
                gradients[run.block][seconds] += y.transpose(-1, -2) @ planes[run.block][firsts]
        return gradients

    def gather(self, gradients: Sequence[Tensor], kernel: Tensor) -> Tensor:
        """The kernel's gradient: every tap belongs to exactly one residue of one block."""
        grad = torch.empty_like(kernel)
        blocks = zip(self.plan.blocks, self.evaluation, self.present, gradients, strict=True)
        for block, matrix, (residues, places, taps), of in blocks:
            plane = self.turned(of).unflatten(3, (block.residues, self.plan.channels))
            grad[..., taps] = torch.einsum("pm,pgirc->gicrm", matrix, plane)[..., residues, places]
        return grad

    def turned(self, plane: Tensor) -> Tensor:
        """From rows of filters to rows of the Gram side, and back."""
        return plane.transpose(2, 3) if self.column else plane


def _present(block: Block, device: torch.device) -> list[Tensor]:
    """Residue, place in its class and position in the kernel of every tap that a block has."""
    found = [(r, m, tap) for r, row in enumerate(block.sources) for m, tap in enumerate(row) if tap >= 0]
    return [torch.tensor(numbers, device=device) for numbers in zip(*found, strict=True)]


def _taps(kernel: Tensor, sources: Tensor) -> Tensor:
    """``(G, M, C, k)`` -> ``(G, M, C, residues, taps)``; taps that short phases lack are zero."""
    return torch.where(sources >= 0, kernel[..., sources.clamp(min=0)], 0)


def _gram(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right^T``; a long sum in pieces, because some BLASes add it up in one chain, with all its rounding."""
    pieces = zip(left.split(_PIECE, -1), right.split(_PIECE, -1), strict=True)
    return sum(a @ b.transpose(-1, -2) for a, b in pieces)  # type: ignore[return-value]
