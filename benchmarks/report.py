"""``make report``: runs the commands and writes docs/benchmarks.md, docs/scale.md and the tables of README and
docs/optimizer.md from their rows.

    make report                                                  everything, into benchmarks/results and docs/
    python benchmarks/report.py                                  the pages alone, from the kept results
    python benchmarks/report.py --run resnet34 memory            these parts again, then the pages
    python benchmarks/report.py --run --out build/benchmarks     a run for check.py; docs/ stays as it is

No number of these pages is typed by hand: tables and pictures come from benchmarks/results/*.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import accuracy
import compare
import contention
import latency
import memory
import optimizers
import peers
import promises
import ranks
import scaling
import training_overhead
from contenders import CONTENDERS, FUSED, REFERENCE
from harness import DISTURBED, run
from record import KEPT, ROOT, Rows, load
from shapes import NETWORKS, TARGETS
from tables import markdown, milliseconds, ratio, table, times

DOCS = ROOT / "docs"
COMMANDS = {
    module.COMMAND: module
    for module in (compare, training_overhead, scaling, memory, accuracy, peers, contention, latency)
}


@dataclass(frozen=True)
class Part:
    """What `make report` runs as one process: a command and its arguments."""

    command: str
    arguments: tuple[str, ...] = ()


#: Each takes less than four minutes on two cores.
PARTS: dict[str, Part] = {
    "shapes": Part("compare", ("--shapes", "--quick", "--contenders", "all")),
    "resnet34": Part("compare", ("--network", "resnet34", "--quick")),
    "resnet50": Part("compare", ("--network", "resnet50", "--quick")),
    "wideresnet28_10": Part("compare", ("--network", "wideresnet28_10", "--quick")),
    "convnext_t": Part("compare", ("--network", "convnext_t", "--quick")),
    "large": Part("compare", ("--large-kernels", "--quick", "--contenders", "reference", "FFT", "fused")),
    "foreach": Part("compare", ("--foreach", "--precisions", "--quick")),
    "training18": Part("training_overhead", ("--only", "resnet18", "--quick", "--batch", "32")),
    "training34": Part("training_overhead", ("--only", "resnet34", "--quick")),
    "growth": Part("scaling", ("--axis", "channels", "kernel", "layers", "--seconds", "0.5")),
    "threads": Part("scaling", ("--axis", "threads", "ranks", "--seconds", "3")),
    "memory": Part("memory"),
    "accuracy": Part("accuracy"),
    "peers": Part("peers"),
    "contention": Part("contention", ("--quick",)),
    "latency": Part("latency"),
    "optimizers": Part(
        "optimizers", ("--only", "steps", "--network", "resnet18", "mobilenetv2", "convnext_t", "--quick")
    ),
    "optimizers34": Part("optimizers", ("--only", "steps", "--network", "resnet34", "--quick")),
    "flatness": Part("optimizers", ("--only", "flatness")),
}


def run_part(name: str, out: Path, threads: int) -> None:
    part = PARTS[name]
    command = [sys.executable, str(ROOT / "benchmarks" / f"{part.command}.py"), *part.arguments]
    command += ["--out", str(out), "--threads", str(threads)]
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    start = perf_counter()
    done = subprocess.run(command, cwd=ROOT)
    print(f"{name}: {'done' if done.returncode == 0 else 'FAILED'} in {perf_counter() - start:.0f} s", flush=True)
    if done.returncode:
        raise SystemExit(f"error: {name} failed")


# ----------------------------------------------------------------------------------------------------------------------
# Pages
# ----------------------------------------------------------------------------------------------------------------------

GENERATED = "<!-- Written by benchmarks/report.py from benchmarks/results/*.json; do not edit. -->"

INTRODUCTION = """# Benchmarks

Side by side with everything a user would pick instead. Every table and picture of this page is made by `make report`
from the rows in [benchmarks/results](../benchmarks/results), each of which says where it was measured, with which
versions, at which commit, with which spread, and how much of the machine others used meanwhile. How it is measured:
[benchmarks/README.md](../benchmarks/README.md)."""

ABOUT: dict[str, tuple[str, str]] = {
    "compare": (
        "Layers and networks",
        "Each contender's losses and gradients were compared with what it claims to compute, in float64, before it was "
        "timed. *Exact* contenders compute the paper's loss, up to a constant.",
    ),
    "training_overhead": (
        "A training step, and the paper's table",
        "The same step plain, with the paper's formula, with plain kernel orthogonality, and with ours.",
    ),
    "scaling": ("Growth", "Fitted exponents of the time beside those of the arithmetic."),
    "memory": ("Memory", "Each row was measured in a process of its own."),
    "accuracy": ("Accuracy", "What fewer products cost in digits."),
    "peers": (
        "Hard orthogonality",
        "What other packages pay to keep a layer orthogonal, or 1-Lipschitz, by construction: the same network of six "
        "3x3 convolutions, trained for the same steps. `reg()` and `project_` start from exactly orthogonal kernels "
        "and pull towards them; they do not enforce. A package that is not installed is named as such.",
    ),
    "contention": (
        "A busy neighbour",
        "Quiet and disturbed turns alternate; a neighbour is a process that does nothing but count.",
    ),
    "latency": ("Fixed costs", "Import, first call and a warm call."),
}


def machines(kept: dict[str, Rows]) -> str:
    """Every machine and commit that rows were measured on."""
    seen: dict[str, set[str]] = {}
    worst: dict[str, float] = {}
    for rows in kept.values():
        for row in rows:
            where = row.environment
            key = f"{where.machine}, torch {where.torch}, Python {where.python}"
            seen.setdefault(key, set()).add(where.revision)
            worst[key] = max(worst.get(key, 0.0), row.disturbance or 0.0)
    lines = [
        f"- {key}; commits {', '.join(sorted(revisions))}; others used at most {worst[key]:.0%} of the CPU during a row"
        for key, revisions in seen.items()
    ]
    return "\n".join(lines) or "Nothing has been kept yet: run `make report`."


CAVEAT = """Ratios against `F.conv2d` depend on the machine. With AVX-512 oneDNN computes `F.conv2d` twice as fast as
with AVX2, while the BLAS that torch brings does not gain as much, so the same code shows smaller ratios there. *Bound*
is what the plan's products allow on the machine at hand; a backend with products of its own can exceed it."""


#: Beside the first table.
LOSS_ONLY = """About the loss alone: ResNet-34's products are 11.5 G multiply-adds, and those of the reference's
forward, without the zeros of its padding, 6.3 times as many. Where oneDNN has AVX-512 they run at 290 to 340 GFLOP/s
here, and ours at 390 to 400; 460, twice what one thread reaches in our products alone, would make it 9x to 10x. Ten
times is beyond this processor with AVX-512. With AVX2 alone it showed 10.1x
(`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/compare.py --network resnet34`)."""


def contenders_table() -> str:
    marks = {True: "yes", False: ""}
    body = [[one.name, one.formula, marks[one.exact], marks[one.ours]] for one in CONTENDERS.values()]
    return markdown(["contender", "computes", "exact", "ours"], body, (0, 1, 2, 3))


def disturbed_note(rows: Rows) -> str:
    loud = [row for row in rows if (row.disturbance or 0.0) > DISTURBED]
    if not loud:
        return ""
    worst = max(row.disturbance or 0.0 for row in loud)
    return (
        f"\n\nIn {len(loud)} of {len(rows)} rows others used more than {DISTURBED:.0%} of the CPU, at most {worst:.0%}."
    )


def page(kept: dict[str, Rows], pictures: dict[str, list[Path]]) -> str:
    parts = [
        GENERATED,
        INTRODUCTION,
        "## Measured on",
        machines(kept),
        CAVEAT,
        "## What should hold, and whether it does",
        promises.table(kept),
        LOSS_ONLY,
    ]
    for command, module in COMMANDS.items():
        rows = kept[command]
        if not len(rows):
            continue
        title, about = ABOUT[command]
        parts += [f"## {title}", f"`python benchmarks/{command}.py`. {about}"]
        parts += [contenders_table()] if command == "compare" else []
        text = module.tables(rows)
        parts += [f"![{path.stem}](figures/{path.name})" for path in pictures[command]]
        parts.append(text + disturbed_note(rows))
    return "\n\n".join(parts) + "\n"


SCALE = """# Scale beyond one machine

Under DistributedDataParallel each rank computes some of the layers, times the number of ranks; the averaging of
gradients that happens in every step anyway turns the shares into the whole. So nothing is sent for the regulariser,
and its time falls until the busiest rank has a single layer, the most expensive one: from there on more ranks change
nothing.

The table adds up the layers' times measured by `compare.py` (loss and gradient, in one process) over the shares that
the regulariser makes for so many ranks. *Imbalance* is the busiest rank over the mean."""

REAL = """## Checked against real processes

Processes of one thread each on this machine, connected by gloo, train a ResNet-18 on 32x32 images; times are processor
time, because there may be more processes than cores. *Predicted* is the sum of the share's layers, each measured alone.
The bytes are counted by a communication hook: with and without `reg()` the same gradients are averaged."""

SHARDED = """## FSDP2

With `fully_shard` there is no such sharing: a weight is in pieces, and all ranks gather it together. Every rank
computes every layer, so the time does not fall with the ranks, and the weights are gathered once more per step:
{bytes:.1f} MB for the {layers} layers of that ResNet-18, in {count:.0f} collectives of forward and backward, counted
with 2 real processes.
In a step of large images or batches that is little beside the gathering that FSDP2 does anyway (once or twice in every
step); where it matters, `every=n` pays it at every n-th step only."""


def scale_page(kept: dict[str, Rows]) -> str:
    rows = kept["scaling"].where(section=scaling.RANKS)
    parts = [GENERATED, SCALE, ranks.beyond_table(kept["compare"], compare.BOTH)]
    if len(rows):
        parts += [REAL, ranks.processes_table(rows)]
        gathered, counted = (rows.get(measure=name) for name in ("gathered", "collectives"))
        if gathered is not None and counted is not None:
            parts.append(SHARDED.format(bytes=gathered.p50 / 1e6, layers=gathered.details["layers"], count=counted.p50))
    return "\n\n".join(parts) + "\n"


#: Rows of the README's tables: section, subject, name; the first table has those with a sentence for a name.
SHOWN: dict[str, tuple[tuple[str, str, str], ...]] = {
    "short": (
        ("resnet34", "64x64x3x3", "one 64x64x3x3 layer"),
        ("resnet34", "512x512x3x3", "one 512x512x3x3 layer"),
        ("resnet34", "resnet34", "ResNet-34, all 36 convolutions in one call"),
    ),
    "long": (
        *(("resnet34", layer.label, layer.label) for layer in NETWORKS["resnet34"]),
        ("resnet34", "resnet34", "**ResNet-34, one call**"),
        ("resnet50", "resnet50", "**ResNet-50, one call**"),
        ("wideresnet28_10", "wideresnet28_10", "**WideResNet-28-10, one call**"),
        ("convnext_t", "convnext_t", "**ConvNeXt-T, one call**"),
        *((compare.SHAPES, target.layer.label, target.layer.label) for target in TARGETS),
    ),
}


def readme_table(rows: Rows, which: str) -> str:
    """Of the README; without what was not measured, each layer once."""
    body: dict[str, dict[str, str]] = {}
    for section, subject, name in SHOWN[which]:
        own = rows.where(section=section, subject=subject, measure=compare.BOTH)
        reference, fused = own.median(contender=REFERENCE), own.median(contender=FUSED)
        if reference is None or fused is None or name in body:
            continue
        long = which == "long"
        count = str(own.every[0].details["count"]) if section == "resnet34" else ""
        body[name] = {
            "loss and gradient": name,
            **({"in ResNet-34": count} if long else {}),
            "`F.conv2d` and autograd, ms": milliseconds(reference),
            "ocnn_fused, ms": milliseconds(fused),
            "speed-up": times(reference / fused),
            **({"bound": times(ratio(reference, own.median(contender=compare.BOUND)))} if long else {}),
        }
    return table(list(body.values()))


def with_tables(readme: str, rows: Rows) -> str:
    """The README with its tables made anew, each between two comments."""
    for which in SHOWN:
        begin, end = f"<!-- {which} table, written by make report -->\n", "\n<!-- end -->"
        before, found, rest = readme.partition(begin)
        if not found:
            raise SystemExit(f"error: README.md must have the line {begin.strip()}")
        readme = before + begin + "\n" + readme_table(rows, which) + "\n" + end + rest.partition(end)[2]
    return readme


def write_pages(results: Path, docs: Path) -> list[Path]:
    """The pages from the kept rows; returns what was written."""
    kept = {command: Rows(load(results, command)) for command in COMMANDS}
    pictures = {
        command: module.draw(kept[command], docs / "figures") if len(kept[command]) else []
        for command, module in COMMANDS.items()
    }
    texts = {docs / "benchmarks.md": page(kept, pictures), docs / "scale.md": scale_page(kept)}
    if docs == DOCS:
        texts[ROOT / "README.md"] = with_tables((ROOT / "README.md").read_text(), kept["compare"])
        page_of_optimizers, measured = DOCS / "optimizer.md", Rows(load(results, optimizers.COMMAND))
        texts[page_of_optimizers] = optimizers.with_tables(page_of_optimizers.read_text(), measured)
    for path, text in texts.items():
        path.write_text(text)
    return [*texts, *(path for drawn in pictures.values() for path in drawn)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = f"run these parts first, without a name all of them: {', '.join(PARTS)}"
    parser.add_argument("--run", nargs="*", metavar="PART", help=which)
    parser.add_argument("--out", type=Path, default=KEPT, help="folder of the rows (default: benchmarks/results)")
    parser.add_argument("--docs", type=Path, help="folder of the pages (default: docs, for the kept rows alone)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    options = parser.parse_args(arguments)
    unknown = set(options.run or ()) - set(PARTS)
    if unknown:
        parser.error(f"--run takes {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    for name in (options.run or PARTS) if options.run is not None else ():
        run_part(name, options.out, options.threads)
    docs = options.docs or (DOCS if options.out.resolve() == KEPT else options.out)
    for path in write_pages(options.out, docs):
        print(f"Wrote {path}")


if __name__ == "__main__":
    run(main)
