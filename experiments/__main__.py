"""Command line.

python -m experiments run classification method=ocnn weight=0.01 --data DATA    one run, compared with its line
python -m experiments queue --data DATA      every run of the protocol that has no line yet, the most valuable first
python -m experiments queue --smoke          every experiment in seconds, on tiny data unless --data is given
python -m experiments table                  docs/replication.md, its figures and docs/optimizer.md, from the lines
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import sleep

import torch

from . import plan
from .config import configured
from .data import DataError
from .runner import RESULTS, Context, Stopped, StopSignal, claimed, run

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m experiments", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="one run")
    one.add_argument("experiment", choices=sorted(plan.EXPERIMENTS))
    one.add_argument("settings", nargs="*", help="name=value")
    queue = commands.add_parser("queue", help="all runs of the protocol")
    help_ = "only the rows, lambda at each length of training, or the comparison of optimisers"
    queue.add_argument("--part", choices=("all", "rows", "lengths", "optimizers"), default="all", help=help_)
    for command in (one, queue):
        command.add_argument("--data", type=Path, help="folder with the data sets, see experiments/data.py")
        help_ = "folder for checkpoints and caches; a file named stop in it ends the runs"
        command.add_argument("--work", type=Path, default=ROOT / "build" / "experiments", help=help_)
        command.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
        command.add_argument("--smoke", action="store_true", help="tiny networks, two steps")
    table = commands.add_parser("table", help="docs/replication.md")
    table.add_argument("--results", type=Path, default=RESULTS)
    table.add_argument("--work", type=Path, default=ROOT / "build" / "experiments", help="where pictures are kept")
    table.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)
    if options.command == "table":
        from . import optimizer_table
        from .table import write

        runs = plan.Plan(Context(Path(), options.work, options.results))
        write(runs, options.out)
        optimizer_table.write(runs, options.out)
        return 0
    if options.data is None and not options.smoke:
        parser.error("--data must name the folder with the data sets; --smoke does without")
    torch.set_num_threads(1)  # the networks are small; and sums have one order
    warnings.filterwarnings("ignore", "no orthogonal convolution exists")
    try:
        if options.smoke:
            return _smoke(options)
        context = Context(options.data, options.work, options.results, StopSignal(options.work / "stop"))
        if options.command == "run":
            config = configured(plan.EXPERIMENTS[options.experiment].config, options.settings)
            print(run(config, context, plan.EXPERIMENTS).result)
            return 0
        runs = plan.Plan(context)
        parts = {
            "rows": runs.stages,
            "lengths": runs.length_stages,
            "optimizers": runs.optimizer_stages,
            "all": runs.all_stages,
        }
        return _queue(parts[options.part], context)
    except Stopped as stopped:
        print(f"stopped; the same command continues (checkpoint {stopped})")
        return 3
    except (DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _queue(stages: Callable[[], Iterable[plan.Stage]], context: Context) -> int:
    """In the order of the plan; what waits for runs of another process is tried again after all the rest."""
    while not all([_is_done(stage, context) for stage in stages()]):  # noqa: C419 - every stage, in turn
        sleep(5)
    return 0


def _is_done(stage: plan.Stage, context: Context) -> bool:
    """Run what has no line yet; False if another process works on some of it, or on what it depends on."""
    try:
        configs = stage.make()
    except plan.NotChosen:
        return False
    done = True
    for number, config in enumerate(configs, 1):
        if context.stop():
            raise Stopped("between runs")
        if config.key in context.lines(config.experiment):
            continue
        with claimed(context, config) as ours:
            done = done and ours
            if ours and config.key not in context.lines(config.experiment):  # it may have been finished meanwhile
                line = run(config, context, plan.EXPERIMENTS, f"[{stage.title} {number}/{len(configs)}]")
                short = {name: round(value, 4) for name, value in line.result.items() if isinstance(value, float)}
                print(f"{stage.title}: {config.command}\n    {short}", flush=True)
    return done


def _smoke(options: argparse.Namespace) -> int:
    """Everything, in a folder that is thrown away, and the table of it."""
    from . import optimizer_table, tiny
    from .table import write

    with tempfile.TemporaryDirectory() as folder:
        data = options.data or tiny.make(Path(folder) / "data")
        runs = plan.Plan(Context(data, Path(folder) / "work", Path(folder) / "results", progress=False), smoke=True)
        _queue(runs.all_stages, runs.context)
        write(runs, Path(folder))
        optimizer_table.write(runs, Path(folder))
        report = "".join((Path(folder) / name).read_text() for name in ("replication.md", optimizer_table.PAGE))
        if "not run yet" in report.lower():
            print(f"error: something was not run:\n{report}", file=sys.stderr)
            return 1
        print(f"{len(report.splitlines())} lines of a table, {len(list(Path(folder).glob('*.png')))} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
