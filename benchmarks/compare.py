"""The fused loss against the reference: speed, share of the bound and memory, layer by layer and over a whole network.

Run it as one of::

    python benchmarks/compare.py                          the shapes with targets, then ResNet-34
    python benchmarks/compare.py --network vgg16 dcgan    these networks
    python benchmarks/compare.py --network all --quick    every network, quickly and roughly
    python benchmarks/compare.py --large-kernels          60 random layers with kernels of 6 to 1001 taps
    python benchmarks/compare.py --device cpu             not on the GPU, which is measured where there is one
    python benchmarks/compare.py --panels                 the CPU backend's own products against the BLAS, nothing else
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from bound import plan_of, products_of, run_products
from memory import peak_extra_bytes
from panels import table
from report import LEGEND, Result, Section, Sum, draw, machine, text, verdict, write_csv, write_markdown
from shapes import NETWORK_RATIOS, NETWORKS, TARGETS, Layer, Target, large_kernels
from steps import (
    DTYPES,
    IMPLEMENTATIONS,
    PRECISIONS,
    Settings,
    WrongResultError,
    check_step,
    expand,
    make_weights,
    results_folder,
    run_step,
    usual_device,
)
from timing import EAGER, Disturbance, Effort, Timer, interleave, make_timer
from tqdm import tqdm


class Comparison:
    """Measures layers and networks under one set of settings, each once and in all modes of the timer together."""

    def __init__(self, settings: Settings, effort: Effort, timer: Timer, with_memory: bool) -> None:
        self.settings = settings
        self.effort = effort
        self.timer = timer
        self.with_memory = with_memory
        self._measured: dict[object, dict[str, Result]] = {}

    def layer(self, layer: Layer, mode: str = EAGER) -> Result:
        """One layer on its own."""
        if layer.geometry not in self._measured:
            self._measured[layer.geometry] = self._measure(layer.label, [replace(layer, count=1)], self.effort)
        return replace(self._measured[layer.geometry][mode], role=layer.name, count=layer.count)

    def network(self, name: str, mode: str = EAGER) -> Result:
        """All layers of a network in one call, against a loop of references."""
        if name not in self._measured:
            self._measured[name] = self._measure(f"{name}: one call", NETWORKS[name], self.effort)
        return self._measured[name][mode]

    def _measure(self, name: str, layers: Sequence[Layer], effort: Effort) -> dict[str, Result]:
        """By mode."""
        every, gradient = expand(layers), self.settings.gradient
        weights = make_weights(every, self.settings)
        check_step(weights, every, gradient)
        contestants: dict[str, Callable[[], object]] = {
            implementation: partial(run_step, implementation, weights, every, gradient)
            for implementation in IMPLEMENTATIONS
        }
        if products := products_of(layers, self.settings):
            contestants["bound"] = partial(run_products, products)
            run_products(products)
        prepared = {
            (mode, contestant): self.timer.prepare(call, mode)
            for mode in self.timer.modes
            for contestant, call in contestants.items()
        }
        disturbance = Disturbance()
        samples = interleave(prepared, self.timer, effort)
        disturbed = disturbance.share
        measured = IMPLEMENTATIONS if self.with_memory else ()
        memory = {which: peak_extra_bytes(which, layers, self.settings) for which in measured}
        plans = {plan_of(layer, self.settings).name for layer in layers}
        plan = plans.pop() if len(plans) == 1 else "mixed"
        return {
            mode: Result(name, name, 1, plan, {which: samples[mode, which] for which in contestants}, memory, disturbed)
            for mode in self.timer.modes
        }


class Progress:
    """A bar that counts measurements and names the current one."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, unit="row", dynamic_ncols=True)

    def __call__(self, name: str, measure: Callable[[], Result]) -> Result:
        self._bar.set_description(f"{name:<24}")
        result = measure()
        self._bar.set_postfix_str(f"{result.ratio:.1f}x")
        self._bar.update()
        return result

    def close(self) -> None:
        self._bar.close()


def _title(title: str, mode: str) -> str:
    return title if mode == EAGER else f"{title}, {mode}"


def target_section(
    title: str, targets: Sequence[Target], comparison: Comparison, mode: str, progress: Progress
) -> Section:
    """Single shapes, with their targets where these apply."""
    section = Section(_title(title, mode))
    for target in targets:
        result = progress(target.layer.label, partial(comparison.layer, target.layer, mode))
        if targets_apply(comparison.settings):
            result = replace(result, target_ratio=target.ratio, target_share=target.share)
        section.results.append(result)
    return section


def network_section(name: str, comparison: Comparison, mode: str, progress: Progress) -> Section:
    """Every distinct layer of a network, their sum, and the network in one call."""
    layers = NETWORKS[name]
    section = Section(_title(f"{name}: {sum(layer.count for layer in layers)} convolutions", mode))
    section.results = [progress(layer.label, partial(comparison.layer, layer, mode)) for layer in layers]
    section.sum = Sum.of(name, section.results)
    section.network = progress(name, partial(comparison.network, name, mode))
    if targets_apply(comparison.settings):
        section.network = replace(section.network, target_ratio=NETWORK_RATIOS.get(name))
    return section


def targets_apply(settings: Settings) -> bool:
    """The targets are for loss and gradient in float32 on two CPU threads."""
    return settings == Settings("cpu", torch.float32, 2, True)


def write(directory: Path, sections: Sequence[Section], settings: Settings) -> Path:
    """Markdown, CSV and picture; returns where the picture is."""
    directory.mkdir(parents=True, exist_ok=True)
    where, picture = machine(settings), directory / "compare.png"
    write_markdown(directory / "compare.md", sections, where)
    write_csv(directory / "compare.csv", sections, where)
    draw(picture, sections, where)
    return picture


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=[*NETWORKS, "all"], help="networks to measure")
    parser.add_argument("--shapes", action="store_true", help="measure the single shapes with targets")
    parser.add_argument("--large-kernels", action="store_true", help="measure 60 random layers with large kernels")
    parser.add_argument("--panels", action="store_true", help="compare panels with the BLAS instead (CPU only)")
    parser.add_argument("--loss-only", action="store_true", help="measure the loss without its gradient")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights (default: float32)")
    parser.add_argument("--device", help="device of the weights, cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="highest", help="torch's float32 matmul precision (default: highest)"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds to spend on each row (default: 4)")
    parser.add_argument("--repeats", type=int, help="exact number of rounds per row, instead of --seconds")
    parser.add_argument("--quick", action="store_true", help="half a second and at least two rounds per row, no memory")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--out", type=Path, help="folder for the markdown, the CSV and the picture")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cpu" if options.panels else usual_device())
    options.out = options.out or results_folder(options.device)
    if options.panels and options.device != "cpu":
        parser.error("--panels is about the CPU")
    if not options.network and not options.shapes and not options.large_kernels:
        options.network, options.shapes = ["resnet34"], True
    options.network = list(NETWORKS) if "all" in (options.network or ()) else options.network or []
    return options


def effort_of(options: argparse.Namespace) -> Effort:
    if options.repeats:
        return Effort.exactly(options.repeats)
    return Effort(0.5, min_rounds=2) if options.quick else Effort(options.seconds)


def targets_of(options: argparse.Namespace) -> list[tuple[str, Sequence[Target]]]:
    """Sections of single shapes that the options ask for."""
    sections: list[tuple[str, Sequence[Target]]] = []
    if options.shapes:
        sections.append(("Single shapes with targets", TARGETS))
    if options.large_kernels:  # none may be slower than the reference
        sections.append(("Random large kernels", [Target(layer, 1.0) for layer in large_kernels()]))
    return sections


def layers_of(options: argparse.Namespace) -> list[Layer]:
    """Every distinct layer that the options ask for."""
    every = [target.layer for _, targets in targets_of(options) for target in targets]
    every += [layer for name in options.network for layer in NETWORKS[name]]
    return list({layer.geometry: layer for layer in every}.values())


def measure(options: argparse.Namespace, settings: Settings, timer: Timer) -> list[Section]:
    """All sections that the options ask for."""
    with_memory = not (options.no_memory or options.quick)
    comparison = Comparison(settings, effort_of(options), timer, with_memory)
    rows = sum(len(NETWORKS[name]) + 1 for name in options.network)
    rows += sum(len(targets) for _, targets in targets_of(options))
    progress = Progress(rows * len(timer.modes))
    try:
        sections = []
        for mode in timer.modes:
            sections += [target_section(*section, comparison, mode, progress) for section in targets_of(options)]
            sections += [network_section(name, comparison, mode, progress) for name in options.network]
        return sections
    finally:
        progress.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write; exits non-zero without reporting anything if a fused result is wrong."""
    options = parse(arguments)
    settings = Settings(
        options.device, DTYPES[options.dtype], options.threads, not options.loss_only, options.precision
    )
    settings.apply()
    start = perf_counter()
    try:
        timer = make_timer(settings.device)
        print(", ".join(f"{key}: {value}" for key, value in machine(settings).items()), flush=True)
        if options.panels:
            print(f"\n{table(layers_of(options), settings, effort_of(options), timer)}")
            return
        sections = measure(options, settings, timer)
    except (WrongResultError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    for section in sections:
        print(f"\n{text(section)}")
    picture = write(options.out, sections, settings)
    print(f"\n{LEGEND}\n\n{verdict(sections)}\n\nPicture: {picture}")
    print(f"Tables: {picture.with_suffix('.md')} and .csv\nTook {perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
