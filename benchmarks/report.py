"""Results as a table for the terminal, markdown, CSV and a picture."""

from __future__ import annotations

import csv
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from memory import RESOLUTION
from steps import Implementation, Settings
from timing import Samples

import ocnn_fused
from ocnn_fused.backends import choose

MEGABYTE = 1e6
#: If other processes use more than this share of the CPU, times are not to be trusted.
DISTURBED = 0.05
REFERENCE_COLOUR, LAYER_COLOUR, TOTAL_COLOUR = "#9a9a9a", "#4c78a8", "#e4572e"


@dataclass(frozen=True)
class Result:
    """Measured times and memory of one layer, or of a network in one call."""

    name: str  # what the row is about: a label of a layer, or a network
    role: str  # where in a network it stands
    count: int
    plan: str
    samples: dict[str, Samples]  # reference, fused and, where the plan has matrix products, bound
    memory: dict[Implementation, int | None]
    disturbance: float | None = None  # share of the machine that others used during the timing
    target_ratio: float | None = None
    target_share: float | None = None

    def ratio_to(self, name: str) -> float | None:
        """How many times faster than the reference: medians."""
        return self.samples["reference"].median / self.samples[name].median if name in self.samples else None

    def ratio_of_minima(self, name: str) -> float | None:
        return self.samples["reference"].minimum / self.samples[name].minimum if name in self.samples else None

    @property
    def ratio(self) -> float:
        return self.samples["reference"].median / self.samples["fused"].median

    @property
    def share(self) -> float | None:
        """Time of the plan's matrix products alone over the time of the fused call."""
        return self.samples["bound"].median / self.samples["fused"].median if "bound" in self.samples else None

    def shortfalls(self) -> list[str]:
        """What this result should have reached and has not, one phrase each."""
        missed = []
        ratio = self.target_ratio or 1.0
        if self.ratio < ratio:
            missed.append(f"{self.ratio:.2f}x, target {ratio:g}x")
        if self.target_share and self.share is not None and self.share < self.target_share:
            missed.append(f"{self.share:.0%} of the bound, target {self.target_share:.0%}")
        reference, fused = self.memory.get("reference"), self.memory.get("fused")
        if reference is not None and fused is not None and fused > reference + RESOLUTION:
            missed.append(f"peak memory {fused / MEGABYTE:.1f} MB, reference {reference / MEGABYTE:.1f} MB")
        return missed


@dataclass(frozen=True)
class Sum:
    """The layers of a network measured one by one, each as often as the network has it."""

    network: str
    reference: float
    fused: float

    @property
    def ratio(self) -> float:
        return self.reference / self.fused

    @staticmethod
    def of(network: str, results: Sequence[Result]) -> Sum:
        def total(name: str) -> float:
            return sum(result.count * result.samples[name].median for result in results)

        return Sum(network, total("reference"), total("fused"))


@dataclass
class Section:
    """Results that belong together: a network's layers with its totals, or the list of single shapes."""

    title: str
    results: list[Result] = field(default_factory=list)
    sum: Sum | None = None
    network: Result | None = None

    @property
    def all_results(self) -> list[Result]:
        return [*self.results, *([self.network] if self.network else [])]


def machine(settings: Settings) -> dict[str, str]:
    """Where and how the numbers were measured."""
    on_cpu = settings.device == "cpu"
    return {
        "device": settings.device if on_cpu else f"{settings.device} ({torch.cuda.get_device_name(settings.device)})",
        "cpu": _cpu_model(),
        "torch": torch.__version__,
        "ocnn_fused": ocnn_fused.__version__,
        "backend": choose(torch.device(settings.device)),
        "threads": str(settings.threads),
        "dtype": settings.dtype_name if on_cpu else f"{settings.dtype_name} (precision {settings.precision})",
        "measured": "loss and gradient" if settings.gradient else "loss only",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------

HEADER = (
    "layer", "count", "plan", "reference ms", "fused ms", "speed-up", "of minima", "bound", "share",
    "ref. MB", "fused MB", "target",
)  # fmt: skip

LEGEND = (
    "Times are medians. speed-up: reference time / fused time; of minima: the same for the fastest samples.\n"
    "bound: the speed-up if the plan's matrix products, done by the BLAS, were all the work; share: how much of it is\n"
    "reached. MB: peak memory of one step beyond the weights. target: what the row should reach; every row should be\n"
    "at least as fast as the reference and need no more memory. On a GPU, eager times contain the host's: Python and\n"
    "launches that the device waits for. Times as CUDA graphs are the device's alone."
)


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def _megabytes(value: int | None) -> str:
    return _number(None if value is None else value / MEGABYTE, "{:.1f}")


def _target(result: Result) -> str:
    parts = [f"{result.target_ratio:g}x"] if result.target_ratio else []
    parts += [f"{result.target_share:.0%}"] if result.target_share else []
    return " ".join([*parts, "missed" if result.shortfalls() else "met"])


def _cells(result: Result) -> tuple[str, ...]:
    return (
        result.name,
        str(result.count),
        result.plan,
        _milliseconds(result.samples["reference"].median),
        _milliseconds(result.samples["fused"].median),
        f"{result.ratio:.2f}x",
        _number(result.ratio_of_minima("fused"), "{:.2f}x"),
        _number(result.ratio_to("bound"), "{:.1f}x"),
        _number(result.share, "{:.0%}"),
        _megabytes(result.memory.get("reference")),
        _megabytes(result.memory.get("fused")),
        _target(result),
    )


def _sum_cells(total: Sum) -> tuple[str, ...]:
    times = (_milliseconds(total.reference), _milliseconds(total.fused), f"{total.ratio:.2f}x")
    return (f"{total.network}: sum of layers", "", "", *times, *[""] * (len(HEADER) - 6))


def _table(section: Section) -> list[tuple[str, ...]]:
    rows = [_cells(result) for result in section.results]
    rows += [_sum_cells(section.sum)] if section.sum else []
    rows += [_cells(section.network)] if section.network else []
    return [HEADER, *rows]


def _aligned(table: Sequence[tuple[str, ...]], left: Sequence[int]) -> list[list[str]]:
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if index in left else cell.rjust(width) for cell in column])
    return [list(row) for row in zip(*columns, strict=True)]


_LEFT = (0, 2, len(HEADER) - 1)


def text(section: Section) -> str:
    """The section for a terminal."""
    header, *rows = ("  ".join(row).rstrip() for row in _aligned(_table(section), _LEFT))
    return "\n".join([section.title, header, "-" * len(header), *rows])


def verdict(sections: Sequence[Section]) -> str:
    """Which results miss their target, or the speed or the memory of the reference."""
    results = [result for section in sections for result in section.all_results]
    missed = [f"  {result.name}: {'; '.join(result.shortfalls())}" for result in results if result.shortfalls()]
    lines = [f"{len(missed)} of {len(results)} targets missed:" if missed else f"All {len(results)} targets met."]
    lines += dict.fromkeys(missed)  # a layer may stand in several sections
    disturbed = [share for result in results if (share := result.disturbance or 0.0) > DISTURBED]
    if disturbed:
        lines.append(
            f"Other processes used up to {max(disturbed):.0%} of the CPU during {len(disturbed)} of {len(results)} "
            "rows; rerun on an idle machine."
        )
    return "\n".join(lines)


def write_markdown(path: Path, sections: Sequence[Section], where: dict[str, str]) -> None:
    lines = [", ".join(f"{key}: {value}" for key, value in where.items()), "", LEGEND]
    for section in sections:
        header, *rows = _aligned(_table(section), _LEFT)
        rule = ["-" * len(cell) if index in _LEFT else "-" * (len(cell) - 1) + ":" for index, cell in enumerate(header)]
        lines += ["", f"## {section.title}", "", *(f"| {' | '.join(row)} |" for row in (header, rule, *rows))]
    path.write_text("\n".join([*lines, "", verdict(sections), ""]))


def write_csv(path: Path, sections: Sequence[Section], where: dict[str, str]) -> None:
    """One row per result and contestant; seconds and bytes."""
    rows = [
        {
            "section": section.title,
            "layer": result.name,
            "role": result.role,
            "count": result.count,
            "plan": result.plan,
            "implementation": name,
            **where,
            "rounds": len(samples.seconds),
            "p20": samples.percentile(20),
            "p50": samples.median,
            "p80": samples.percentile(80),
            "minimum": samples.minimum,
            "ratio": result.ratio_to(name),
            "ratio_of_minima": result.ratio_of_minima(name),
            "share_of_bound": result.share if name == "fused" else None,
            "disturbance": result.disturbance,
            "peak_extra_bytes": result.memory.get(name),  # type: ignore[call-overload]
        }
        for section in sections
        for result in section.all_results
        for name, samples in result.samples.items()
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


# ----------------------------------------------------------------------------------------------------------------------
# Picture
# ----------------------------------------------------------------------------------------------------------------------


def _bars(section: Section) -> list[tuple[str, float, str]]:
    """Label, speed-up and colour of each bar, top to bottom."""
    bars = []
    for result in section.results:
        label = f"{result.name}  ×{result.count}" if result.count > 1 else result.name
        bars.append((label, result.ratio, LAYER_COLOUR))
    if section.network:
        bars.append((section.network.name, section.network.ratio, TOTAL_COLOUR))
    return bars


def draw(path: Path, sections: Sequence[Section], where: dict[str, str]) -> None:
    """Speed-up over the reference, one horizontal bar per layer, one panel per section."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [_bars(section) for section in sections]
    heights = [len(bars) + 1.5 for bars in panels]
    size = (9, 1.0 + 0.3 * sum(heights))
    figure, axes = pyplot.subplots(
        len(panels), squeeze=False, figsize=size, height_ratios=heights, layout="constrained"
    )
    for section, bars, axis in zip(sections, panels, axes[:, 0], strict=True):
        labels, ratios, colours = zip(*bars, strict=True)
        drawn = axis.barh(range(len(bars)), ratios, color=colours, height=0.7)
        axis.bar_label(drawn, labels=[f"{ratio:.1f}x" for ratio in ratios], padding=4, fontsize=9)
        axis.axvline(1, color=REFERENCE_COLOUR, linewidth=1.2, linestyle="--")
        axis.set_yticks(range(len(bars)), labels, fontsize=9)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.1 * max(1.0, *ratios))
        axis.set_title(section.title, loc="left", fontsize=10, fontweight="bold")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[-1, 0].set_xlabel("times faster than F.conv2d with autograd (dashed line: equally fast)")
    hardware = f"{where['cpu']}, {where['threads']} threads" if where["device"] == "cpu" else where["device"]
    setting = f"{hardware}, {where['dtype']}, torch {where['torch']}"
    figure.suptitle(f"Orthogonality loss, {where['measured']}\n{setting}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
