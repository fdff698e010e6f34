"""Notices a loss that explodes or is not a number, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from operator import le

import torch
from torch import Tensor

from ..modules import label

#: How many times its first value a loss may have, or the loss of a weight that is zero, whichever is more.
GROWTH = 100

#: On a GPU each n-th call: a copy costs a launch there, and what has exploded stays so.
_EACH = 8


class Watch:
    """Of the losses of some layers, which come in always the same order."""

    def __init__(self, names: Sequence[str], at_zero: Sequence[float]) -> None:
        self._names, self._at_zero = names, at_zero
        self._limits: list[float] = []
        self._first: list[float] = []
        self._calls = 0
        self._on_its_way: tuple[Tensor, torch.cuda.Event] | None = None  # a copy for the host, and when it is there

    def is_due(self, device: torch.device) -> bool:
        """Whether to look at this call's losses."""
        if torch.compiler.is_compiling():  # first: a graph that has looked at the count is traced again at every step
            return False
        self._calls += 1
        return device.type == "cpu" or self._calls % _EACH == 1

    def see(self, losses: Tensor, weights: Sequence[Tensor]) -> str:
        """What is wrong with losses that are not finite or too large, in words, or nothing.

        ``weights``: those of the losses, which are looked at only if something is wrong. On a GPU the losses are some
        that came before.
        """
        device = losses.device
        if (
            type(losses) is not Tensor
            or torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
        ):
            return ""
        if device.type == "cpu":
            return self._judge(losses.tolist(), weights)
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return ""
        said = ""
        if self._on_its_way is not None:
            copy, arrived = self._on_its_way
            if not arrived.query():
                return ""
            said = self._judge(copy.tolist(), weights)
        self._on_its_way = losses.detach().to("cpu", non_blocking=True), torch.cuda.Event()
        self._on_its_way[1].record(torch.cuda.current_stream(device))
        return said

    def _judge(self, values: list[float], weights: Sequence[Tensor]) -> str:
        if not self._limits:
            self._first = values
            self._limits = [
                GROWTH * max(zero, first if isfinite(first) else 0.0)
                for zero, first in zip(self._at_zero, values, strict=True)
            ]
        if all(map(le, values, self._limits)):
            return ""
        broken, grown = [], []
        rows = zip(self._names, self._first, values, self._limits, weights, strict=True)
        for name, first, now, limit, weight in rows:
            if now <= limit:
                continue
            if not (isfinite(now) or bool(weight.detach().isfinite().all())):
                broken.append(label(name))
            else:
                grown.append(f"{label(name)} ({first:.3g} at first, now {now:.3g})")
        sentences = []
        if broken:
            sentences.append(
                f"the weight of {_listed(broken)} holds NaN or inf, so the orthogonality loss is not finite; look for "
                "what put it there, such as a gradient that was not finite or a damaged checkpoint"
            )
        if grown:
            sentences.append(
                f"the orthogonality loss explodes in {_listed(grown)}: it grows with the fourth power of the weights; "
                "lower lambda or the learning rate, clip gradients, or begin with schedules.Warmup"
            )
        return ". ".join(sentences)


def _listed(parts: list[str]) -> str:
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
