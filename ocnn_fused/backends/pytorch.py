"""The plan executed with ordinary PyTorch calls: any device, no compiler. Slower than the compiled backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..plan import CPU_RATES, Block, Plan
from .lowering import accumulation_dtype, to_tensor

RATES = CPU_RATES

#: Terms of a product that a BLAS adds up at once.
_PIECE = 128


def unavailable_reason(device: torch.device) -> str | None:
    """Never: PyTorch runs wherever the weight is."""
    return None


@torch.no_grad()
def run(
    weights: Sequence[Tensor], plans: Sequence[Plan], with_grad: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    results = [_run_one(*each) for each in zip(weights, plans, with_grad, strict=True)]
    return [loss for loss, _ in results], [grad for _, grad in results]


@lru_cache(maxsize=256)
def _matrices(plan: Plan, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Evaluation matrices, mix and transposed mix on the device."""
    evaluation = tuple(to_tensor(block.evaluation, dtype, device) for block in plan.blocks)
    return evaluation, to_tensor(plan.mix, dtype, device), to_tensor(plan.mix_transposed, dtype, device)


def _taps(block: Block, weight: Tensor) -> Tensor:
    """Taps of a block with those that short phases lack as zeros: ``(G, M, C, k)`` -> ``(G, M, C, residues, taps)``."""
    index = torch.tensor(block.sources, device=weight.device)
    taken = weight[..., index.clamp(min=0)]
    return taken * (index >= 0) if bool((index < 0).any()) else taken


def _gram(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right^T``; a long sum in pieces, because some BLASes add it up in one chain, with all its rounding."""
    pieces = zip(left.split(_PIECE, -1), right.split(_PIECE, -1), strict=True)
    return sum(a @ b.transpose(-1, -2) for a, b in pieces)  # type: ignore[return-value]


def _run_one(weight: Tensor, plan: Plan, with_grad: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(weight.dtype)
    evaluation, mix, mix_transposed = _matrices(plan, dtype, weight.device)
    kernel = weight.reshape(plan.groups, plan.rows, plan.channels, -1).to(dtype)
    column = plan.side == "column"

    # evaluate: planes (P, G, gram side, contraction)
    planes = []
    for block, matrix in zip(plan.blocks, evaluation, strict=True):
        plane = torch.einsum("pm,gicrm->pgirc", matrix, _taps(block, kernel)).flatten(3)
        planes.append(plane.transpose(2, 3) if column else plane)

    # gram
    side = plan.work_rows
    outputs = kernel.new_zeros(plan.outputs, plan.groups, side, side)
    for run in plan.runs:
        left, right = (planes[run.block][first : first + run.count] for first in (run.left, run.right))
        products = _gram(left, right)
        if run.summed:
            outputs[run.out] += products.sum(0)
        else:
            outputs[run.out : run.out + run.count] += products

    # mix: residual, loss, and the gradient with respect to the outputs
    transposed = outputs.transpose(-1, -2)
    residual = torch.einsum("to,ogij->tgij", mix, outputs) + torch.einsum("to,ogij->tgij", mix_transposed, transposed)
    residual[0].diagonal(dim1=-2, dim2=-1).sub_(1)
    squares = residual.double().square().sum((1, 2, 3))
    loss = (squares[0] + 2 * squares[1:].sum() + plan.offset).clamp_min(0).to(dtype)
    if not with_grad:
        return loss, weight.new_empty(0)
    weighted = residual * 4
    weighted[0] /= 2
    adjoint = torch.einsum("to,tgij->ogij", mix, weighted)
    adjoint += torch.einsum("to,tgij->ogij", mix_transposed, weighted.transpose(-1, -2))
    adjoint[torch.tensor(plan.self_paired, device=weight.device)] *= 2

    # apply
    gradients = [torch.zeros_like(plane) for plane in planes]
    for run in plan.runs:
        y = adjoint[run.out : run.out + (1 if run.summed else run.count)]
        firsts, seconds = slice(run.left, run.left + run.count), slice(run.right, run.right + run.count)
        gradients[run.block][firsts] += y @ planes[run.block][seconds]
        if run.left != run.right:
            gradients[run.block][seconds] += y.transpose(-1, -2) @ planes[run.block][firsts]

    # gather: every tap belongs to exactly one residue of one block
    grad = torch.empty_like(kernel)
    for block, matrix, plane in zip(plan.blocks, evaluation, gradients, strict=True):
        plane = (plane.transpose(2, 3) if column else plane).unflatten(3, (block.residues, plan.channels))
        taps = torch.einsum("pm,pgirc->gicrm", matrix, plane)
        index = torch.tensor(block.sources, device=weight.device)
        present = index >= 0
        grad[..., index[present]] = taps[..., present]
    # In the weight's own memory format, as autograd expects.
    return loss, torch.empty_like(weight).copy_(grad.reshape(weight.shape))
