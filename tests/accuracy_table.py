"""Errors against the definition in float64, beside the plain formula's own: ``python tests/accuracy_table.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from conftest import BACKENDS, LIMITS, fused, grad_of
from oracle import Case, loss_and_grad, near

from ocnn_fused import reference

HALF = (torch.bfloat16, torch.float16)
SEEDS = {torch.float32: 6, torch.bfloat16: 2, torch.float16: 2}

#: One case per kind of plan, large enough for rounding errors to average out.
CASES = (
    Case((96, 128)),
    Case((64, 96, 1, 1)),
    Case((48, 48, 2, 2)),
    Case((48, 64, 3)),
    Case((64, 64, 3, 3)),
    Case((48, 64, 3, 3)),
    Case((64, 32, 3, 3), stride=2),
    Case((48, 24, 4, 4), stride=2),
    Case((64, 64, 1, 3), dilation=2),
    Case((32, 32, 3, 3), stride=2, dilation=3),
    Case((48, 32, 5, 5), stride=2),
    Case((48, 16, 6, 6), stride=2),
    Case((24, 24, 3, 3, 3)),
    Case((96, 24, 3, 3), groups=4),
    Case((64, 1, 3, 3), groups=64),
    Case((128, 4, 3, 3), groups=32),
    Case((64, 64, 3, 3), padding=0),
    Case((48, 48, 3, 3), padding=1),
    Case((64, 64, 4)),
    Case((48, 48, 4, 4)),
    Case((48, 16, 7, 7), stride=2),
    Case((64, 64, 5)),
    Case((48, 48, 5, 5)),
    Case((48, 48, 5, 5), padding=2),
    Case((24, 24, 7, 7)),
    # More filters than an orthogonal kernel can have: the column side is the cheaper one.
    Case((256, 64)),
    Case((256, 64, 1, 1)),
    Case((64, 3, 7, 7), stride=2),
    Case((64, 3, 4, 4), stride=2),
    Case((96, 24, 3, 3)),
)


@dataclass(frozen=True)
class Row:
    """Errors of one case: root mean square over the seeds, relative to the loss and to the gradient's largest entry."""

    case: Case
    dtype: torch.dtype
    start: str
    backend: str
    quantity: str
    ours: float
    reference: float
    limit: float

    @property
    def margin(self) -> float:
        return self.limit / self.ours if self.ours else float("inf")

    @property
    def passes(self) -> bool:
        return self.ours <= self.limit

    def __str__(self) -> str:
        ratio = self.ours / self.reference if self.reference else float("nan")
        return (
            f"{self.case!s:<24}{str(self.dtype).removeprefix('torch.'):<10}{self.start:<9}{self.backend:<7}"
            f"{self.quantity:<6}{self.ours:>10.2e}{self.reference:>11.2e}{ratio:>8.2f}{self.limit:>11.2e}"
            f"{self.margin:>9.1f}{'' if self.passes else '   <- too large'}"
        )


HEADER = (
    f"{'case':<24}{'dtype':<10}{'start':<9}{'backend':<7}{'':<6}{'ours':>10}{'reference':>11}{'ratio':>8}"
    f"{'limit':>11}{'margin':>9}"
)


def starts(case: Case) -> dict[str, Callable[[int], torch.Tensor]]:
    """Where training begins and where it goes."""
    found: dict[str, Callable[[int], torch.Tensor]] = {"random": case.random}
    if case.has_orthogonal:
        found["near"] = lambda seed: near(case.orthogonal(seed), 1e-3, seed)
    return found


def grad_limit(case: Case, dtype: torch.dtype, start: str, reference_error: float) -> float:
    if dtype in HALF:
        return LIMITS.half_ratio * reference_error
    limits = [LIMITS.grad_ratio * reference_error] if case.class_taps <= LIMITS.ratio_taps else []
    limits += [LIMITS.grad_random] if start == "random" and case.class_taps <= 5 else []
    return min(limits, default=float("inf"))


def loss_limit(dtype: torch.dtype, reference_error: float) -> float:
    if dtype in HALF:
        return LIMITS.half_ratio * reference_error
    return max(LIMITS.loss_ratio * reference_error, LIMITS.loss_relative)


def relative_errors(
    loss: torch.Tensor, gradient: torch.Tensor, expected: tuple[float, np.ndarray]
) -> tuple[float, float]:
    expected_loss, expected_gradient = expected
    difference = abs(gradient.double().cpu().numpy() - expected_gradient).max()
    return abs(loss.item() - expected_loss) / expected_loss, difference / abs(expected_gradient).max()


def measure(case: Case, dtype: torch.dtype, start: str, backends: tuple[str, ...] = BACKENDS) -> Iterator[Row]:
    """Two rows per backend: loss and gradient. The definition is evaluated on the weight as rounded to ``dtype``."""
    squares: dict[str, np.ndarray] = {}
    for seed in range(SEEDS[dtype]):
        weight = starts(case)[start](seed).to(dtype)
        expected = loss_and_grad(weight, case)
        leaf = weight.clone().requires_grad_()
        loss = reference.orth_loss(leaf, **case.options)
        results = {"reference": (loss.detach(), grad_of(loss, leaf))}
        results |= {name: fused(weight, case, backend=name) for name in backends}
        for name, result in results.items():
            squares[name] = squares.get(name, 0) + np.square(relative_errors(*result, expected)) / SEEDS[dtype]
    found = {name: np.sqrt(values) for name, values in squares.items()}
    loss_error, grad_error = found.pop("reference")
    for name, (ours_loss, ours_grad) in found.items():
        limit = grad_limit(case, dtype, start, grad_error)
        yield Row(case, dtype, start, name, "loss", ours_loss, loss_error, loss_limit(dtype, loss_error))
        yield Row(case, dtype, start, name, "grad", ours_grad, grad_error, limit)


def main() -> None:
    print(HEADER)
    for dtype in (torch.float32, *HALF):
        for case in CASES:
            for start in starts(case):
                for row in measure(case, dtype, start):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
