"""Has anything become slower? Compares a run with the kept one, as ratios to what was measured in the same rounds.

    make report OUT=build/benchmarks                       a run
    python benchmarks/check.py                             build/benchmarks against benchmarks/results
    python benchmarks/check.py NEW OLD --above 0.10        any two folders

Times of two days or two machines are not comparable, ratios are: each time of ours is divided by the time of the
reference beside it (for a training step, the plain step; for memory, the reference's). Names every row whose ratio has
risen by more than 15%, and exits non-zero if there is one. Rows measured on other hardware are left out, and said so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contenders import KERNEL, REFERENCE
from record import KEPT, OUT, Row, Rows, load
from report import COMMANDS
from tables import table
from training_overhead import PLAIN

ALLOWED = 0.15
#: Rows that others disturbed are not judged.
QUIET = 0.25
#: What ours are divided by, the first that is there.
BASES = (REFERENCE, f"{REFERENCE} alone", KERNEL, PLAIN, "plain Conv2d")
OURS = ("fused", "reg()", "add_grad_", "project_", "ours", "kernel, fused")


@dataclass(frozen=True)
class Change:
    """One row's ratio, before and now."""

    row: Row
    before: float
    now: float

    @property
    def growth(self) -> float:
        return self.now / self.before - 1


def is_ours(row: Row) -> bool:
    return row.contender.startswith(OURS) and "adds" not in row.contender and row.measure != "added"


def ratios(rows: Sequence[Row]) -> dict[tuple[object, ...], tuple[Row, float]]:
    """Ours over the base of the same subject and measure."""
    found: dict[tuple[object, ...], tuple[Row, float]] = {}
    every = Rows(rows)
    for row in rows:
        if not is_ours(row) or row.p50 <= 0:
            continue
        beside = [
            one
            for one in every.where(section=row.section, measure=row.measure)
            if one.environment == row.environment and (one.subject == row.subject or one.contender == "plain Conv2d")
        ]
        base = next((one for name in BASES for one in beside if one.contender == name), None)
        if base is not None:
            found[(row.command, *row.key)] = row, row.p50 / base.p50
    return found


def compare(new: Sequence[Row], old: Sequence[Row]) -> tuple[list[Change], int]:
    """Changes of the rows that both have, and how many could not be compared."""
    now, before = ratios(new), ratios(old)
    changes, skipped = [], 0
    for key, (row, value) in now.items():
        if key not in before:
            skipped += 1
            continue
        was, old_value = before[key]
        disturbed = max(row.disturbance or 0.0, was.disturbance or 0.0) > QUIET
        if disturbed or row.environment.machine != was.environment.machine:
            skipped += 1
            continue
        changes.append(Change(row, old_value, value))
    return changes, skipped


def regressions(changes: Iterable[Change], above: float) -> list[Change]:
    return sorted((one for one in changes if one.growth > above), key=lambda one: -one.growth)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, nargs="?", default=OUT, help="folder of the run (default: build/benchmarks)")
    parser.add_argument(
        "old", type=Path, nargs="?", default=KEPT, help="folder to compare with (default: kept results)"
    )
    parser.add_argument("--above", type=float, default=ALLOWED, help="growth of a ratio that counts (default: 0.15)")
    options = parser.parse_args(arguments)
    new, old = ([row for name in COMMANDS for row in load(folder, name)] for folder in (options.new, options.old))
    if not new or not old:
        raise SystemExit(f"error: no results in {options.new if not new else options.old}")
    changes, skipped = compare(new, old)
    found = regressions(changes, options.above)
    print(f"{len(changes)} ratios compared, {skipped} not: new, disturbed, or measured on other hardware.")
    if found:
        words = ("command", "section", "subject", "contender", "measure")
        body = [
            {name: getattr(one.row, name) for name in words}
            | {"was": f"{one.before:.3f}", "is": f"{one.now:.3f}", "growth": f"{one.growth:+.0%}"}
            for one in found
        ]
        print(table(body, words))
        raise SystemExit(f"{len(found)} ratios have risen by more than {options.above:.0%}")
    print(f"None has risen by more than {options.above:.0%}.")


if __name__ == "__main__":
    main()
