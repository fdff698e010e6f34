"""How much longer the first call for a weight takes than a later one: planning, tables and workspace.

Run it as ``python benchmarks/first_call.py``; every shape with a target and the random large kernels are measured in a
process of their own, whose torch has computed a small convolution and its loss before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter

import torch
from contenders import CONTENDERS, FUSED
from shapes import TARGETS, Layer, large_kernels
from steps import Settings, make_weights

_WARM_UP = Layer("warm-up", (8, 8, 3, 3))
_LATER_CALLS = 5


def _seconds(layer: Layer, settings: Settings) -> tuple[float, float]:
    """Of the first call and, the median, of later ones; runs in a child."""
    settings.apply()
    CONTENDERS[FUSED].step(make_weights([_WARM_UP], settings), [_WARM_UP], settings.gradient)
    weights = make_weights([layer], settings)
    taken = []
    for _ in range(1 + _LATER_CALLS):
        start = perf_counter()
        CONTENDERS[FUSED].step(weights, [layer], settings.gradient)
        taken.append(perf_counter() - start)
    return taken[0], statistics.median(taken[1:])


def measure(layers: Sequence[Layer], settings: Settings) -> list[tuple[Layer, float, float]]:
    """Layer, first and later seconds, the largest difference first."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "ocnn_fused", "numpy"])
    rows = []
    for layer in layers:
        with ProcessPoolExecutor(1, mp_context=context) as executor:  # one process each
            rows.append((layer, *executor.submit(_seconds, layer, settings).result()))
    return sorted(rows, key=lambda row: row[2] - row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    options = parser.parse_args()
    settings = Settings("cpu", torch.float32, options.threads)
    layers = [*(target.layer for target in TARGETS), *large_kernels()]
    print(f"{'layer':<24}{'first ms':>10}{'later ms':>10}{'more ms':>10}")
    for layer, first, later in measure(layers, settings):
        print(f"{layer.label:<24}{first * 1e3:>10.2f}{later * 1e3:>10.2f}{(first - later) * 1e3:>10.2f}")


if __name__ == "__main__":
    main()
