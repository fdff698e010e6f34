"""The section of docs/replication.md about lambda at each length of training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from .config import Line
from .lengths import GRIDS, OTHER_TOLERANCES, SEEDS, Cell
from .methods import ALL, Method
from .runner import Context
from .scores import Difference, percent, table

SCORE = percent("top-1", "accuracy")


class Found:
    """The accuracies of one cell, by method, weight and seed."""

    def __init__(self, cell: Cell, context: Context) -> None:
        lines = context.lines(cell.config.experiment)
        self.cell = cell
        self.lines: list[Line] = []
        self.values: dict[tuple[Method, float], dict[int, float]] = {}
        for seed in SEEDS:
            for config in [*cell.runs(ALL, seed), *cell.sweep(seed)]:
                if config.key in lines and lines[config.key] not in self.lines:
                    self.lines.append(lines[config.key])
                    accuracy = SCORE.find(lines[config.key].result)
                    self.values.setdefault((config.method, config.weight), {})[seed] = accuracy or 0.0

    def best(self, method: Method) -> float | None:
        """The weight of the grid whose mean is highest, over the seeds that all of those that were run have."""
        found = {weight: self.values[method, weight] for weight in GRIDS[method] if (method, weight) in self.values}
        shared = [seed for seed in SEEDS if all(seed in values for values in found.values())]
        if not shared:
            return None
        return max(found, key=lambda weight: mean(found[weight][seed] for seed in shared), default=None)

    def is_complete(self, method: Method) -> bool:
        """Whether the whole grid was run with all seeds."""
        return all(len(self.values.get((method, weight), {})) == len(SEEDS) for weight in GRIDS[method])

    def of(self, method: Method) -> dict[int, float]:
        """By seed, at the best weight."""
        weight = self.best(method)
        return {} if weight is None else self.values[method, weight]

    def difference(self, one: Method, other: Method) -> Difference | None:
        """Over the seeds that both have."""
        ours, theirs = self.of(one), self.of(other)
        shared = [value - theirs[seed] for seed, value in ours.items() if seed in theirs]
        return Difference(shared) if shared else None

    def shown(self, method: Method) -> str:
        """Mean, number of seeds and weight."""
        values, weight = self.of(method), self.best(method)
        if not values:
            return "not run yet"
        among = f", {weight:g}" if len(GRIDS[method]) > 1 else ""
        missing = len(GRIDS[method]) - sum((method, one) in self.values for one in GRIDS[method])
        return f"{mean(values.values()):.2f} ({len(values)}{among}{f'; {missing} not run' if missing else ''})"


def against_plain(difference: Difference | None) -> str:
    """Whether a difference to plain is above or below nothing, by its 95% interval."""
    if difference is None or difference.half_width is None:
        return "needs three seeds"
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    return "**above**" if low > 0 else "**BELOW**" if high < 0 else "not below"


def against_best(difference: Difference | None, complete: bool) -> str:
    """Whether a difference to the best fixed lambda is above minus one standard error."""
    if difference is None or difference.error is None:
        return "needs three seeds"
    if not complete:
        return "grid not complete"
    return "yes" if difference.mean >= -difference.error else "**NO**"


def _written(difference: Difference | None) -> str:
    return "" if difference is None else difference.write(SCORE)


def verdicts(found: Sequence[Found], steered: Method, fixed: Method) -> str:
    """Cell by cell: plain, the best fixed lambda, the steered one, and both comparisons."""
    rows = []
    for one in found:
        plain, best = one.difference(steered, "plain"), one.difference(steered, fixed)
        rows.append([
            one.cell.title, one.shown("plain"), one.shown(fixed), one.shown(steered),
            _written(plain), against_plain(plain), _written(best), against_best(best, one.is_complete(fixed)),
        ])  # fmt: skip
    header = ["CIFAR-100, ResNet-18", "plain", f"best fixed lambda, {fixed}", steered, "minus plain", "95%",
              "minus best", "within one standard error"]  # fmt: skip
    return table(header, rows)


def grids(found: Sequence[Found]) -> str:
    """Every lambda of the grid, and every tolerance."""
    tolerances = sorted({*GRIDS["ocnn-auto"], *OTHER_TOLERANCES})
    columns: list[tuple[Method, float]] = [("ocnn", weight) for weight in GRIDS["ocnn"]]
    columns += [("ocnn-auto", tolerance) for tolerance in tolerances]
    rows = [
        [one.cell.title, *(f"{mean(one.values[column].values()):.2f} ({len(one.values[column])})"
                           if column in one.values else "" for column in columns)]
        for one in found
    ]  # fmt: skip
    header = [f"lambda {weight:g}" for weight in GRIDS["ocnn"]] + [f"tolerance {one:g}" for one in tolerances]
    return table(["top-1, %", *header], rows)


def lengths(cells: Sequence[Cell], context: Context) -> list[str]:
    found = [Found(cell, context) for cell in cells]
    begun = [one for one in found if one.values]
    if not begun:
        return ["Not run yet."]
    waiting = [one.cell.title for one in found if not one.values]
    others = [[one.cell.title, *(one.shown(method) for method in ALL)] for one in begun]
    lines = [line for one in begun for line in one.lines]
    commands = "\n".join(f"    {100 * line.result['accuracy']:>8.2f}  {line.command}" for line in lines)
    return [
        TEXT,
        verdicts(begun, "ocnn-auto", "ocnn"),
        verdicts(begun, "kernel-auto", "kernel"),
        "The lambdas and tolerances:",
        grids(begun),
        "All methods, each with the best of its grid in brackets:",
        table(["top-1, %", *ALL], others),
        *([f"Not run yet: {'; '.join(waiting)}."] if waiting else []),
        f"<details><summary>Runs</summary>\n\n{commands}\n\n</details>",
    ]


TEXT = """All methods at rate 0.1, which the trials had chosen for each of them. In brackets the number of seeds and,
where a grid was tried, the lambda with the highest mean. It is the best *on the test images*, so "best fixed lambda" is
a flattered opponent, one that nobody can choose in advance. `ocnn-auto` and `kernel-auto` are `weight="auto"` with the
default tolerance. Differences are over pairs with the same seed."""
