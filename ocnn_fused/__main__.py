"""``python -m ocnn_fused``: what can be asked of the package from a shell."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from . import check, info
from .functional import explain
from .regularizer.table import aligned
from .report import CheckpointError, load_checkpoint, measure, read_state_dict, report
from .spectrum.network import InputError


class UsageError(ValueError):
    """Something that the user can put right; the message is one sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 for what the user can put right."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        _COMMANDS[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; nor shall Python complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except InputError as error:
        print(f"error: --input must be the shape of one input, such as 3,224,224; {error}", file=sys.stderr)
        return 2
    except (CheckpointError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ocnn_fused", description="Orthogonality loss of convolutions: look at networks and plans."
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="")
    commands.add_parser("info", help="versions, backends and devices, for bug reports")
    check = commands.add_parser("check", help="whether every backend computes right on this machine; under a minute")
    check.add_argument("--device", help="cpu, cuda or cuda:1; default: the GPU if there is one")
    for name, text in (
        ("report", "an HTML report of a checkpoint, with JSON and CSV beside it"),
        ("spectrum", "singular values of a checkpoint's layers, as a table"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("checkpoint", type=Path, help="of which only tensors are read; nothing in it is run")
        command.add_argument("--model", required=True, metavar="PACKAGE.MODULE:FACTORY", help="your code that makes it")
        command.add_argument("--input", required=True, metavar="C,H,W", help="shape of one input, such as 3,224,224")
        if name == "report":
            command.add_argument("--compare", type=Path, metavar="OTHER", help="a second checkpoint of the same model")
            command.add_argument("--out", type=Path, default=Path("report.html"), help="default: report.html")
    explain = commands.add_parser("explain", help="the plan that is chosen for a layer, and why")
    explain.add_argument("shape", metavar="M,C,K..", help="of the weight, such as 512,256,3,3")
    for name in ("--stride", "--dilation", "--groups"):
        explain.add_argument(name, type=int, default=1)
    return parser


def _info(options: argparse.Namespace) -> None:
    print("\n".join(info.lines()))


def _check(options: argparse.Namespace) -> None:
    check.main(["--device", options.device] if options.device else [])


def _report(options: argparse.Namespace) -> None:
    paths = [options.checkpoint] + ([options.compare] if options.compare else [])
    shape = _numbers("--input", options.input)
    if options.out.suffix in (".json", ".csv") or not options.out.parent.is_dir():
        raise UsageError(f"--out must be an HTML file in a folder that exists, got {options.out}")
    models = _models(options.model, paths)
    other = models[1] if len(models) > 1 else None
    titles = (paths[0].name, paths[-1].name)
    networks = report(models[0], shape, options.out, compare=other, titles=titles, progress=True)
    print(f"{sum(len(network.layers) for network in networks)} layers: {options.out}, .json and .csv beside it")


def _spectrum(options: argparse.Namespace) -> None:
    shape = _numbers("--input", options.input)
    (model,) = _models(options.model, [options.checkpoint])
    network = measure(model, shape, title=options.checkpoint.name, progress=True)
    rows = [("layer", "shape", "largest", "median", "smallest", "within 10% of 1", "loss above least")]
    for layer in network.layers.values():
        numbers = (f"{layer.largest:.4g}", f"{layer.median:.4g}", f"{layer.smallest:.3g}", f"{layer.near_one:.1%}")
        rows.append((layer.name, "x".join(map(str, layer.shape)), *numbers, f"{layer.above_least:.4g}"))
    print("\n".join(aligned(rows)))


def _explain(options: argparse.Namespace) -> None:
    shape = _numbers("shape", options.shape)
    try:
        print(explain(shape, options.stride, dilation=options.dilation, groups=options.groups))
    except ValueError as error:
        raise UsageError(str(error)) from None


_COMMANDS = {"info": _info, "check": _check, "report": _report, "spectrum": _spectrum, "explain": _explain}


def _numbers(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{name} must be positive numbers with commas, such as 3,224,224, got {text!r}")
    return tuple(int(part) for part in parts)


def _models(target: str, checkpoints: Sequence[Path]) -> list[nn.Module]:
    """One per checkpoint. All files are read before any of the user's code is imported."""
    states = [read_state_dict(path) for path in checkpoints]
    module_name, _, factory_name = target.partition(":")
    if not module_name or not factory_name:
        raise UsageError(f"--model must be package.module:factory, got {target!r}")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {target} cannot be imported: {error}") from error
    models = []
    for path, state in zip(checkpoints, states, strict=True):
        model = factory()
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {target} must return a torch.nn.Module, got {type(model).__name__}")
        load_checkpoint(model, state, path)
        models.append(model)
    return models


if __name__ == "__main__":
    sys.exit(main())
