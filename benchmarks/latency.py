"""Fixed costs: importing the package, the first call, and what a warm call takes beside arithmetic.

    python benchmarks/latency.py

Import and first call run in fresh processes that take turns. A warm call on a 4x4 weight has next to no arithmetic, so
its time is Python, autograd and the dispatch; its loss alone is the least of it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from contenders import FUSED, REFERENCE, calls_of
from harness import Harness, parser_of, run
from record import SECONDS, Row, Rows
from shapes import Layer
from steps import Settings, make_weights
from tables import markdown, milliseconds
from timing import Disturbance

from ocnn_fused import fused_orth_loss

COMMAND = "latency"
TINY = Layer("tiny", (4, 4, 1, 1))
IMPORT, FIRST, WARM = "import", "first call", "warm call"
#: Seconds.
TARGETS = {IMPORT: 0.3, FIRST: 50e-3, WARM: 40e-6}

_TIMED = (
    "from time import perf_counter as now; import torch; torch.set_num_threads(2); a = now(); {work}; print(now() - a)"
)
CALL = (
    "from time import perf_counter as now; import torch, ocnn_fused; torch.set_num_threads(2); "
    "w = torch.randn({shape}, requires_grad=True); "
    "torch.nn.functional.conv2d(w, w, padding={padding}).sum().backward(); "
    "a = now(); ocnn_fused.fused_orth_loss(w).backward(); print(now() - a)"
)
FIRST_CALLS = {"64x64x3x3": (64, 64, 3, 3), "256x256x3x3": (256, 256, 3, 3), "64x64x7x7": (64, 64, 7, 7)}


def child(code: str) -> float:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(harness: Harness, rounds: int) -> None:
    disturbance = Disturbance()
    codes = {(IMPORT, "beyond torch's own"): _TIMED.format(work="import ocnn_fused")}
    for label, shape in FIRST_CALLS.items():
        codes[FIRST, label] = CALL.format(shape=shape, padding=shape[-1] - 1)
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in codes}
    for _ in range(rounds):
        for key, code in codes.items():
            harness.announce(" ".join(key))
            samples[key].append(child(code))
            harness.advance()
    for (section, subject), taken in samples.items():
        harness.add(section, subject, FUSED, section, SECONDS, taken, disturbance.share)
    for gradient, subject in ((False, "loss"), (True, "loss and gradient")):
        settings = Settings(harness.settings.device, torch.float32, harness.settings.threads, gradient)
        weights = make_weights([TINY], settings)
        calls = dict(calls_of((REFERENCE, FUSED), weights, [TINY], settings))
        if not gradient:  # without the harness's own Python around it
            calls[FUSED] = partial(fused_orth_loss, weights[0])
        harness.time(WARM, subject, calls, WARM)


def judged(rows: Rows) -> list[Row]:
    """Those that have a target: of a warm call the loss alone, the least that is beside arithmetic."""
    return [row for row in rows if row.contender == FUSED and row.subject != "loss and gradient"]


def tables(rows: Rows) -> str:
    body = []
    targeted = judged(rows)
    for row in rows:
        target = TARGETS[row.section] if row in targeted else None
        verdict = "" if target is None else f"{target * 1e3:g} ms {'met' if row.p50 <= target else 'missed'}"
        cells = [milliseconds(value) for value in (row.p50, row.minimum)]
        body.append([row.section, row.subject, row.contender, *cells, verdict])
    return markdown(["what", "of", "by", "median ms", "minimum ms", "target"], body, (0, 1, 2, 5))


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Nothing: a table says it all."""
    return []


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(__doc__).parse_args(arguments)
    harness = Harness(COMMAND, options)
    rounds = options.repeats or (2 if options.quick else 7)
    with harness.progress((1 + len(FIRST_CALLS)) * rounds + 2):
        measure(harness, rounds)
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
