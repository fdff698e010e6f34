"""``make gpu``: everything that a machine with a GPU can tell, in one report that can be attached to an issue.

    python tools/gpu_report.py --out build/gpu            about twenty minutes
    python tools/gpu_report.py --out build/gpu --quick    about five

Runs `python -m ocnn_fused.check`, the tests for GPUs, both benchmarks and the model, one after another; a part that
fails is reported and does not keep the others from running. Exits non-zero if a part failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]

#: Lines of a part's output that are kept: the last ones, where verdicts and tables are.
KEPT = 400


@dataclass(frozen=True)
class Part:
    """A heading and what Python is asked to run for it."""

    name: str
    arguments: tuple[str, ...]


def parts(out: Path, quick: bool) -> list[Part]:
    hurry = ("--quick",) if quick else ()
    compare = ("benchmarks/compare.py", "--device", "cuda", "--precision", "high", "--out", str(out), *hurry)
    overhead = ("benchmarks/training_overhead.py", "--device", "cuda", "--out", str(out), *hurry)
    return [
        Part("Check", ("-m", "ocnn_fused.check", "--device", "cuda")),
        Part("Tests", ("-m", "pytest", "-q", "-m", "gpu", "tests")),
        Part("Fused against reference, measured, TF32", compare),
        Part("Training step, measured", overhead),
        Part("The same, modelled", ("benchmarks/gpu_model.py",)),
    ]


def run(part: Part) -> tuple[bool, str]:
    """Whether it went well, and its section of the report."""
    print(f"{part.name}: python {' '.join(part.arguments)}", flush=True)
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, *part.arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds, lines = perf_counter() - start, done.stdout.splitlines()
    verdict = "passed" if done.returncode == 0 else f"failed with exit code {done.returncode}"
    print(f"  {verdict} in {seconds:.0f} s", flush=True)
    text = "\n".join(lines[-KEPT:])
    heading = f"## {part.name}: {verdict} in {seconds:.0f} s\n\n`python {' '.join(part.arguments)}`"
    return done.returncode == 0, f"{heading}\n\n```text\n{text}\n```\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the report and the picture")
    parser.add_argument("--quick", action="store_true", help="quick, rough measurements")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    results = [run(part) for part in parts(options.out, options.quick)]
    report = options.out / "report.md"
    report.write_text("\n".join(["# ocnn_fused on a GPU\n", *(section for _, section in results)]))
    failed = sum(not well for well, _ in results)
    print(f"Report: {report}")
    raise SystemExit(f"{failed} of {len(results)} parts failed" if failed else 0)


if __name__ == "__main__":
    main()
