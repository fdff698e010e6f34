"""``weight="auto"``: a lambda for each layer, steered by how far from orthogonal the layer is.

A layer's *excess* is its loss above the least value that its shape allows, in units of what random filters have: those
whose entries are independent, of mean 0 and variance 1 / fan-in, so that filters have length 1 on average. 0 is
orthogonal, 1 is no better than random, whatever the layer's width, kernel and stride.

After every call that may train, with ``tau`` the layer's tolerance,

    lambda *= clip(excess / tau, 1/e, e) ** RATE

so that lambda falls while the layer is within its tolerance and grows while it is not: the excess settles at ``tau``,
or below it if the layer stays there without any penalty. A call at unchanged weights gives the same bits as the one
before and changes nothing, so that accumulation, evaluation and checkpoints do not count twice.

All of it stays on the device: no number is waited for. The tensors of the state keep their memory, as a CUDA graph that
is replayed needs; what a call computes with is a copy, which its backward may read later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import e, inf, nan, prod, sqrt
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan import least_loss, polyphase_channels, tap_pairs
from ..problem import FREE, OFF_DIAGONAL, Problem
from .settings import Method


class Layer(Protocol):
    """What is asked of a layer here."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def method(self) -> Method: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def tolerance(self) -> float | None: ...


#: Lambda and excess of layers whose lambda is steered, 0-dim, by name.
Known = Mapping[str, tuple[Tensor, Tensor]]

#: Lambda of the first call.
START = 0.01
#: How much of an excess's distance to its tolerance, in logarithms, a lambda takes up at a step.
RATE = 0.01
#: A lambda that has fallen for long must not take as long to come back.
LEAST = 1e-6
#: At most MOST / (1 + the root mean square of ``s^2 - 1``): the loss grows with the fourth power of the weights, and a
#: step with this lambda does not overshoot, at SGD's usual rates, whatever the size of the weights.
MOST = 0.3


def random_excess(problem: Problem) -> float:
    """Mean of the loss, above its least value, over random filters of length 1, or sqrt(target), on average.

    Entries ``N(0, 1/n)``, ``n = C k1..kn``: a product of two filters at a lag where ``p`` pairs of taps meet has the
    mean square ``C p / n^2``, and that of a filter with itself twice that at lag 0, where its mean is subtracted.
    """
    taps = prod(problem.kernel)
    twice = {OFF_DIAGONAL: -1.0, FREE: 1 - 2 / problem.rows}.get(problem.target, 1.0)
    products = problem.rows * tap_pairs(problem) + twice * taps
    loss = problem.groups * problem.rows * products / (problem.channels * taps**2)
    return max(0.0, (problem.target if problem.target > 0 else 1.0) ** 2 * loss - least(problem))


def random_spectral_excess(problem: Problem) -> float:
    """The same for SRIP: the largest ``(s^2 - 1)^2`` of a large random matrix (Marchenko and Pastur)."""
    fan_in = problem.channels * prod(problem.kernel)
    return problem.groups * ((1 + sqrt(problem.rows / fan_in)) ** 2 - 1) ** 2


def least(problem: Problem) -> float:
    """Least value of the loss; for a free target ``a`` that of ``loss / a^2``, which the zero weight does not reach.

    Then ``M - C'`` of the eigenvalues are 0 and the others at best ``a M / C'``.
    """
    if problem.target != FREE:
        return least_loss(problem)
    return problem.groups * problem.rows * max(0.0, problem.rows / polyphase_channels(problem) - 1)


def unit_of(layer: Layer) -> float:
    """The squared loss above its least value that is an excess of 1."""
    return random_spectral_excess(layer.problem) if layer.method == "srip" else random_excess(layer.problem)


@dataclass(frozen=True, eq=False)
class Yardstick:
    """Gives the excesses of some layers from their losses."""

    unit: Tensor  # 1 / what random filters have
    shift: Tensor  # the least loss in that unit, negative
    filters: Tensor | None  # how many, of each layer with a free target; inf elsewhere

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Yardstick:
        units, shifts, filters = [], [], []
        for layer in layers:
            problem, unit = layer.problem, unit_of(layer)
            units.append(1 / unit if unit > 1e-9 else 0.0)  # else the loss is always its least
            shifts.append(0.0 if layer.method == "srip" else -least(problem) * units[-1])
            filters.append(problem.shape[0] if problem.target == FREE else inf)
        unit, shift, count = torch.tensor([units, shifts, filters], dtype=torch.float64, device=layers[0].device)
        return cls(unit, shift, count if min(filters) < inf else None)

    def __call__(self, losses: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """float64, 1-D; ``losses`` are squared and counted from 0."""
        losses = losses.detach().double()
        if self.filters is not None:  # in units of the square of the mean free target
            lengths = torch.stack(torch._foreach_norm([weight.detach() for weight in weights])).double()
            scales = torch.where(self.filters < inf, lengths.square() / self.filters, 1.0)
            losses = losses / scales.square()
        return torch.addcmul(self.shift, losses, self.unit)


class Lambdas:
    """The lambdas of all layers on one device, some of them steered and the others constant."""

    def __init__(self, layers: Sequence[Layer], every: int, known: Known) -> None:
        device = layers[0].device

        def vector(steered: Sequence[float], constant: float) -> Tensor:
            values = [
                constant if layer.tolerance is None else value for layer, value in zip(layers, steered, strict=True)
            ]
            return torch.tensor(values, dtype=torch.float64, device=device)

        count = len(layers)
        tolerances = [layer.tolerance or 1.0 for layer in layers]
        self._steered = [layer.tolerance is not None for layer in layers]
        self.names = [layer.name for layer in layers]
        self.values = torch.tensor([layer.weight for layer in layers], dtype=torch.float64, device=device)
        #: As it was at the last call.
        self.excess = torch.full_like(self.values, nan)
        self.load(known)
        self._tolerances = torch.tensor(tolerances, dtype=torch.float64, device=device)
        #: Root mean square of s^2 - 1 at an excess of 1.
        self._spread = vector([sqrt(unit_of(layer) / _values(layer)) for layer in layers], 0.0)
        self._rates = vector([min(1.0, RATE * every)] * count, 0.0)  # a call speaks for so many steps
        self._least = vector([LEAST] * count, 0.0)
        self._most = vector([MOST] * count, inf)

    def load(self, known: Known) -> None:
        """Take over what there is for layers whose lambda is steered."""
        for place, name in enumerate(self.names):
            if name in known and self._steered[place]:
                self.values[place], self.excess[place] = known[name]

    def known(self) -> Known:
        """Copies of all that is to be kept, by the layers' names."""
        rows = zip(self.names, self._steered, self.values.clone().unbind(), self.excess.clone().unbind(), strict=True)
        return {name: (value, excess) for name, steered, value, excess in rows if steered}

    def gathered(self, parts: Sequence[tuple[Tensor | None, Tensor]], group: dist.ProcessGroup | None) -> Tensor:
        """The excess of every layer, from those of layers at some places; the last one of layers that nobody found.

        With ``group`` a collective, after which all of its processes have the same.
        """
        if group is None and parts and parts[0][0] is None:
            return parts[0][1]
        found = torch.zeros(2, len(self.names), dtype=torch.float64, device=self.values.device)
        for places, excess in parts:
            row = torch.stack([excess, torch.ones_like(excess)])
            found = row if places is None else found.index_copy(1, places, row)
        if group is not None:
            dist.all_reduce(found, group=group)
        return torch.where(found[1] > 0, found[0], self.excess)

    @torch.no_grad()
    def learn(self, excess: Tensor) -> None:
        """Move the lambdas after a call that found these excesses; no synchronisation."""
        known = excess.nan_to_num(nan=0.0).clamp_(min=0.0)
        ratio = (known / self._tolerances).clamp_(1 / e, e)
        changed = (excess != self.excess) & ~excess.isnan()
        self.values.mul_(torch.where(changed, ratio.pow_(self._rates), 1.0))
        limit = self._most / known.sqrt_().mul_(self._spread).add_(1.0)
        self.values.clamp_(min=self._least).clamp_(max=limit)
        self.excess.copy_(excess)


def _values(layer: Layer) -> int:
    """Of how many squares the loss is the sum."""
    return layer.problem.groups if layer.method == "srip" else layer.problem.shape[0]
