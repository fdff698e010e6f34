"""``python -m ocnn_fused.check [--device cuda]``: is what this installation computes right, on this machine?

Loss and gradient of thirty layers by every backend that serves the device, in every precision that it has, against the
paper's formula in float64 on the CPU. A line for each, a sentence for each failure, and the exit code says the same.
Takes less than a minute, and needs nothing but the installed package.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from . import info, reference
from .backends import MODULES
from .functional import fused_orth_loss
from .problem import Precision, Problem, problem_of


class Layer(NamedTuple):
    """A weight's shape and how it is used."""

    shape: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: int | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        others = zip(self._fields[1:], self[1:], Layer.__new__.__defaults__ or (), strict=True)
        changed = [f"{name} {value}" for name, value, usual in others if value != usual]
        return ", ".join([f"a weight of shape {self.shape}", *changed])

    @property
    def problem(self) -> Problem:
        return problem_of(self.shape, self.stride, self.dilation, self.groups, self.padding)


#: Every rank, both sides, every algorithm, odd sizes, strides, dilations, groups and dtypes.
LAYERS = (
    Layer((24, 40)),
    Layer((40, 24)),
    Layer((33, 7)),
    Layer((24, 16, 1, 1)),
    Layer((16, 24, 1, 1), 2),
    Layer((16, 8, 2)),
    Layer((16, 16, 3)),
    Layer((24, 8, 4)),
    Layer((12, 8, 5)),
    Layer((10, 8, 7), 2),
    Layer((9, 11, 3), dilation=2),
    Layer((24, 24, 3, 3)),
    Layer((32, 16, 3, 3)),
    Layer((16, 32, 3, 3)),
    Layer((48, 4, 3, 3)),
    Layer((17, 13, 3, 3)),
    Layer((24, 16, 3, 3), 2),
    Layer((16, 16, 3, 3), dilation=2),
    Layer((16, 8, 4, 4), 2),
    Layer((16, 3, 7, 7), 2),
    Layer((12, 8, 5, 5)),
    Layer((16, 8, 3, 3), padding=0),
    Layer((16, 8, 5, 5), padding=1),
    Layer((24, 8, 3, 3), groups=3),
    Layer((24, 1, 3, 3), groups=24),
    Layer((24, 2, 3, 3), 2, groups=12),
    Layer((8, 8, 3, 3, 3)),
    Layer((8, 4, 2, 2, 2), 2),
    Layer((24, 16, 3, 3), dtype=torch.bfloat16),
    Layer((24, 16, 3, 3), dtype=torch.float16),
)

#: Errors allowed: of the loss relative to max(1, loss), of the gradient to its largest entry.
_FLOAT32 = 3e-5
_BY_PRECISION: dict[Precision, float] = {"ieee": _FLOAT32, "tf32x3": _FLOAT32, "tf32": 1e-2, "bf16": 6e-2}
_BY_DTYPE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_weight(layer: Layer) -> Tensor:
    """Filters of about the length one, the same every time."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(layer.shape, generator=generator, dtype=torch.float64, device="cpu")
    return (weight / max(1, weight[0].numel()) ** 0.5).to(layer.dtype)


def errors(layer: Layer, device: torch.device, backend: str, precision: Precision | None) -> tuple[float, float]:
    """Of loss and gradient."""
    weight = make_weight(layer)
    exact = weight.double()
    expected_loss = float(reference.loss_of(exact, layer.problem))
    expected_grad = reference.grad_of(exact, layer.problem)
    leaf = weight.to(device).requires_grad_()
    loss = fused_orth_loss(
        leaf,
        layer.stride,
        dilation=layer.dilation,
        groups=layer.groups,
        padding=layer.padding,
        backend=backend,
        precision=precision,
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    off = float((grad.double().cpu() - expected_grad).abs().max() / expected_grad.abs().max())
    return abs(loss.item() - expected_loss) / max(1.0, expected_loss), off


def precisions(backend: str, device: torch.device) -> list[Precision | None]:
    """Those that a backend computes differently on the device; None alone where nothing can be asked for."""
    if backend != "triton":
        return [None]
    resolve = MODULES[backend].resolve_precision
    return [one for one in get_args(Precision) if resolve(one, device, False) == one]


def failures(device: torch.device, backend: str, precision: Precision | None, worst: list[float]) -> Iterator[str]:
    """A sentence for every layer that is wrong; ``worst`` becomes the largest errors of loss and gradient."""
    for layer in LAYERS:
        rounded = _BY_PRECISION.get(precision, _FLOAT32) if precision else _BY_PRECISION["tf32"]
        if device.type == "cpu" and backend != "triton":
            rounded = _FLOAT32
        limit = max(rounded, _BY_DTYPE.get(layer.dtype, 0.0))
        try:
            found = errors(layer, device, backend, precision)
        except Exception as error:  # of whatever kind: the other layers are checked all the same
            yield f"{layer}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        for place, (what, off) in enumerate(zip(("loss", "gradient"), found, strict=True)):
            worst[place] = max(worst[place], off)
            if not off <= limit:  # NaN too
                yield f"{layer}: the {what} is off by {off:.1e}, {limit:.0e} is allowed"


def run(device: torch.device, backends: Sequence[str] = tuple(MODULES)) -> int:
    """Prints what is found, and returns how many sentences of failure that took."""
    count = checked = 0
    for backend in backends:
        reason = MODULES[backend].unavailable_reason(device)
        if reason is not None:
            print(f"{backend}: not checked: {reason}", flush=True)
            continue
        for precision in precisions(backend, device):
            worst = [0.0, 0.0]
            name = f"{backend} in {precision}" if precision else backend
            for sentence in failures(device, backend, precision, worst):
                print(f"{name}: wrong for {sentence}", flush=True)
                count += 1
            checked += 1
            print(f"{name}: {len(LAYERS)} layers, errors up to {worst[0]:.1e} (loss) and {worst[1]:.1e} (gradient)")
    if not checked:
        print(f"no backend serves {device}")
    return count if checked else 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=usual, help=f"cpu, cuda or cuda:1 (default here: {usual})")
    parser.add_argument("--backend", nargs="+", choices=list(MODULES), default=list(MODULES), help="only these")
    options = parser.parse_args(arguments)
    print("\n".join(info.lines()), flush=True)
    wrong = run(torch.device(options.device), options.backend)
    print("all is well" if not wrong else f"{wrong} failures")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
