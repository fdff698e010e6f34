"""The part of docs/optimizer.md about training, from the lines in experiments/results; what was not run says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .config import Line
from .lengths import SEEDS
from .optimizers import OPTIMIZERS, Optimizer
from .plan import OPTIMIZER_GRIDS, OPTIMIZER_ROWS, NotChosen, Plan
from .scores import Difference, percent, table
from .table import runs

PAGE = "optimizer.md"
BEGIN, END = "<!-- training, written by python -m experiments table -->\n", "\n<!-- end -->"
TOP = percent("top-1", "accuracy")
NOT_YET = "Not run yet."

Lines = dict[Optimizer, dict[int, Line]]


def write(plan: Plan, out: Path) -> None:
    """Write the part into the page, or into a file of its own where there is no page."""
    page = out / PAGE
    made = "\n\n".join(parts(plan))
    if not page.exists():
        page.write_text(made + "\n")
        return
    before, found, rest = page.read_text().partition(BEGIN)
    if not found:
        raise ValueError(f"{page} must have the line {BEGIN.strip()}")
    page.write_text(before + BEGIN + "\n" + made + "\n" + END + rest.partition(END)[2])


def parts(plan: Plan) -> list[str]:
    found = [CHOSEN, choices(plan)]
    for title, config in OPTIMIZER_ROWS.items():
        lines: Lines = {}
        known = plan.context.lines("optimizers")
        for optimizer in OPTIMIZERS:
            for seed in SEEDS:
                try:
                    run = plan.optimizer_run(config, optimizer, seed)
                except NotChosen:
                    break
                if run.key in known:
                    lines.setdefault(optimizer, {})[seed] = known[run.key]
        found.append(f"### {title}, {config.steps} steps")
        found += [results(lines), CURVE, curve(lines), runs_of(lines)] if lines else [NOT_YET]
    return found


def choices(plan: Plan) -> str:
    """The rate and decay of each optimiser, and the scores of those that were tried twice."""
    rows = []
    for optimizer in OPTIMIZERS:
        try:
            scores = plan.optimizer_scores(optimizer)
        except NotChosen:
            rows.append([optimizer, NOT_YET, "", ""])
            continue
        best = max(scores, key=lambda setting: scores[setting])
        shown = ", ".join(f"{100 * score:.2f} ({rate:g}, {decay:g})" for (rate, decay), score in scores.items())
        rows.append([optimizer, f"{best[0]:g}", f"{best[1]:g}", shown + _edges(optimizer, best)])
    return table(["optimiser", "rate", "decay", "accuracy on held-back images, % (rate, decay)"], rows)


def _edges(optimizer: Optimizer, best: tuple[float, float]) -> str:
    """Where the best lies at the end of what was tried."""
    found = [
        f"{'smallest' if value == min(values) else 'largest'} {name}"
        for name, values, value in zip(("rate", "decay"), OPTIMIZER_GRIDS[optimizer], best, strict=True)
        if value in (min(values), max(values))
    ]
    return f"; **{' and '.join(found)} tried**" if found else ""


def results(lines: Lines) -> str:
    """One row for each optimiser: accuracy, differences over the seeds, and processor time."""
    rows = []
    plain = [_seconds(line) for line in lines.get("sgd", {}).values()]
    for optimizer, by_seed in lines.items():
        score = [100 * line.result["accuracy"] for line in by_seed.values()]
        seconds = mean(map(_seconds, by_seed.values()))
        rows.append([
            optimizer, f"{mean(score):.2f} ({len(score)})",
            *(_difference(lines, optimizer, other) for other in ("sgd", "flatten")),
            f"{1e3 * seconds / by_seed[min(by_seed)].config['steps']:.1f}",
            f"{seconds / mean(plain) - 1:+.0%}" if plain and optimizer != "sgd" else "",
        ])  # fmt: skip
    header = ["optimiser", "top-1, %", "minus sgd", "minus flatten", "processor ms per step", "against sgd"]
    return table(header, rows)


def _seconds(line: Line) -> float:
    return float(line.timing["training_seconds"])


def _difference(lines: Lines, one: Optimizer, other: Any) -> str:
    ours, theirs = lines[one], lines.get(other, {})
    shared = [100 * (ours[s].result["accuracy"] - theirs[s].result["accuracy"]) for s in ours if s in theirs]
    return Difference(shared).write(TOP) if shared and one != other else ""


def curve(lines: Lines) -> str:
    """Accuracy on the way, by step; in brackets the processor seconds until then."""
    first = next(iter(next(iter(lines.values())).values()))
    steps = [point["step"] for point in first.result["curve"]]
    rows = []
    for optimizer, by_seed in lines.items():
        cells = []
        for place in range(len(steps)):
            accuracy = mean(line.result["curve"][place]["accuracy"] for line in by_seed.values())
            seconds = mean(line.timing["curve_seconds"][place] for line in by_seed.values())
            cells.append(f"{100 * accuracy:.1f} ({seconds:.0f} s)")
        rows.append([optimizer, *cells])
    return table(["optimiser", *(f"step {step}" for step in steps)], rows)


def runs_of(lines: Lines) -> str:
    every: Sequence[Line] = [line for by_seed in lines.values() for line in by_seed.values()]
    return runs(every, lambda result: f"{100 * result['accuracy']:.2f}")


CHOSEN = """What was chosen, on images held back from the training data, twelve trials for each optimiser and the best
four of them once more:"""

CURVE = """On the way, on the first 2000 test images; in brackets the processor seconds of the training until then:"""
