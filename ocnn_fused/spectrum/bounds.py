r"""Certified bounds: of the largest and smallest singular value over all frequencies, so for every input size.

Both searches rest on one lemma. Let ``g`` be real on a line, a sum of exponentials ``e^{iλt}`` with ``|λ| <= τ``, and
``|g| <= 1``. Then ``g'^2 + τ^2 g^2 <= τ^2`` (Duffin and Schaeffer), so that near a point where ``g = 1``

.. math:: g(t_* + t) \ge \cos(τ t), \qquad |τ t| \le π.

Let the symbol have degree ``n_j`` in ``θ_j``, and let ``θ_*`` lie in a cell with centre ``c`` and half-widths ``δ_j``.

- Largest. ``θ_*`` maximises ``||A(θ)|| = U``, with singular vectors ``u, v``. On the line from ``θ_*`` to ``c``,
  ``t`` from 0 to 1, the function ``Re u^H A v e^{-i n·(θ - θ_*)/2} / U`` has exponents of at most
  ``a = sum_j n_j δ_j / 2`` and is 1 at ``θ_*``: ``||A(c)|| >= U cos a``.
- Smallest. ``θ_*`` minimises the least eigenvalue ``λ`` of the Gram matrix ``G(θ)``, whose entries have exponents of
  ``-n..n``; its eigenvector ``x`` gives ``x^H G x`` between ``λ_*`` and ``U^2``, with its minimum at ``θ_*``. Scaled to
  [-1, 1] and turned upside down it is the lemma's ``g`` with exponents up to ``2a``:
  ``λ(c) <= λ_* + (U^2 - λ_*) sin^2 a``, that is ``λ_* >= (λ(c) - U^2 sin^2 a) / cos^2 a``.

The cell of ``θ_*`` is unknown, but one with ``||A(c)|| < L cos a``, where ``L <= U`` is the largest norm found so far,
is not it. Cells that may be it are divided until the bound is as tight as asked for.

**Why this bounds layers.** The circular layer of any size takes its singular values from ``A(θ)`` at some ``θ``. The
zero-padded layer of any size and padding is a compression ``R A E`` of the layer on the infinite grid (``E`` extends by
zeros, ``R`` restricts), whose norm is ``sup ||A(θ)||``; a compression's norm is not larger. For strides the symbol is
that of the polyphase kernel, whose ``ceil(k/s)`` taps per axis are what counts, and dilation only moves along ``θ``.
"""

from __future__ import annotations

from functools import partial
from math import cos, pi, sin

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .operator import LayerOptions, Symbol, grid, operator_of
from .values import block_values, in_threads

# Cells that a search may look at before it settles for what it has.
_MOST_CELLS = 1 << 15


def upper_bound(layer: Tensor | nn.Module, *, tolerance: float = 0.005, **options: Unpack[LayerOptions]) -> float:
    """At least the largest singular value, whatever the input size, circular or zero-padded; see the module's proof.

    At most ``1 + tolerance`` times the supremum over all frequencies, which is what large inputs come close to; a
    search that has looked at 32768 cells of frequencies stops with the bound that it has proved.
    """
    if tolerance <= 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    return _supremum(operator_of(layer, **options).symbol(), tolerance)[1]


def lower_bound(layer: Tensor | nn.Module, *, tolerance: float = 0.005, **options: Unpack[LayerOptions]) -> float:
    """At most the smallest singular value of the circular layer, whatever its size; 0 where no better bound is proved.

    At least ``1 - tolerance`` times the infimum over all frequencies, if 32768 cells are enough to get there.
    It holds for zero padding in two cases: without padding if the filters are the fewer (``M <= C'``), and with
    padding of the whole kernel less one if the channels are. In between the border can lower the smallest value.
    """
    if tolerance <= 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    operator = operator_of(layer, **options)
    if operator.unseen_zeros:
        return 0.0
    symbol = operator.symbol()
    largest = _supremum(symbol, 0.1)[1]
    cells = _Cells(symbol)
    least, bound = largest**2, 0.0
    while len(cells.centres) and cells.seen <= _MOST_CELLS:
        squares = cells.values(smallest=True) ** 2
        least = min(least, float(squares.min()))
        sine, cosine = sin(cells.reach) ** 2, cos(cells.reach) ** 2
        proved = (squares - largest**2 * sine) / cosine
        bound = max(bound, min(least, float(proved.min())))
        if bound >= least * (1 - tolerance) ** 2:
            break
        cells.divide(proved < least)
    return _below(max(0.0, bound) ** 0.5, largest)


def _supremum(symbol: Symbol, tolerance: float) -> tuple[float, float]:
    """Bounds from below and above of ``sup ||A(θ)||``."""
    cells = _Cells(symbol)
    best, bound = 0.0, float("inf")
    while True:
        norms = cells.values(smallest=False)
        best = max(best, float(norms.max()))
        margin = cos(cells.reach)
        bound = min(bound, float(norms.max()) / margin)
        if bound <= best * (1 + tolerance) or cells.seen > _MOST_CELLS:
            return best, bound * (1 + 1e-12)
        cells.divide(norms >= best * margin)


def _below(value: float, scale: float) -> float:
    """Less than ``value`` by more than rounding may have added: roots of eigenvalues lose digits near zero."""
    return max(0.0, value - 1e-12 * scale - (1e-13 * scale**2 / value if value else 0.0))


class _Cells:
    """Boxes that cover one half of the torus of angles: their centres, and half-widths equal for all."""

    def __init__(self, symbol: Symbol) -> None:
        self._symbol = Symbol(symbol.kernel.detach(), symbol.exact_zeros)
        # The reach must stay below π/2: with 2 * axes * n cells on an axis of degree n it is π/4 in all.
        axes = max(1, len(symbol.degrees))
        counts = tuple(max(1, 2 * axes * degree) for degree in symbol.degrees)
        self.centres = grid(counts, (1,) * len(counts), symbol.kernel.device).angles
        self._gram = self._symbol.gram(len(self.centres))
        self._half_widths = [pi / count for count in counts]
        self.seen = 0

    @property
    def reach(self) -> float:
        """``a = sum_j n_j δ_j / 2``."""
        return sum(n * half / 2 for n, half in zip(self._symbol.degrees, self._half_widths, strict=True))

    def values(self, smallest: bool) -> Tensor:
        """The smallest or largest singular value at every centre."""
        self.seen += len(self.centres)
        threads = self._gram.threads
        results = in_threads(partial(block_values, self._gram), self._gram.pieces(self.centres, threads), threads)
        parts = [part.flatten(1) for part in results]
        values = torch.cat(parts)
        return values.amin(1) if smallest else values.amax(1)

    def divide(self, kept: Tensor) -> None:
        """Each kept cell into two along every axis on which the symbol varies."""
        centres = self.centres[kept]
        for axis, degree in enumerate(self._symbol.degrees):
            if degree:
                self._half_widths[axis] /= 2
                shift = torch.zeros_like(centres[:1])
                shift[0, axis] = self._half_widths[axis]
                centres = torch.cat([centres - shift, centres + shift])
        self.centres = centres
