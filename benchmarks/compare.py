"""Side by side with everything a user would pick instead, layer by layer and over whole networks.

    python benchmarks/compare.py                          the shapes with targets, then ResNet-34
    python benchmarks/compare.py --quick                  what of that fits into 100 s, the smallest first
    python benchmarks/compare.py --network vgg16 dcgan    these networks; "all" is every one
    python benchmarks/compare.py --foreach --precisions   50 small layers; our backends and dtypes
    python benchmarks/compare.py --contenders all         also torch.compile, which takes seconds per layer to compile
    python benchmarks/compare.py --large-kernels          60 random layers with kernels of 6 to 1001 taps

Every contender's losses and gradients are compared with what it claims to compute, in float64, before it is timed.
Rows are printed as they are measured; Ctrl-C keeps those that there are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import figures
import torch
from bound import plan_of, products_of, run_products
from contenders import (
    AUTHORS,
    COMPILED,
    CONTENDERS,
    DEEL_LIP,
    FOURIER,
    FUSED,
    FUSED_KERNEL,
    FUSED_TORCH,
    ISONET,
    KERNEL,
    ONE_BY_ONE,
    REFERENCE,
    SRIP,
    Judge,
    calls_of,
)
from definitions import paper
from harness import Harness, parser_of, run
from record import Rows
from shapes import NETWORK_RATIOS, NETWORKS, TARGETS, Layer, large_kernels
from steps import DTYPES, Settings, expand, make_weights, module_of
from tables import milliseconds, number, ratio, table, times, verdict
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer

COMMAND = "compare"
#: What --quick may take in all, so that it ends in a minute or two whatever else the machine does.
QUICK_SECONDS = 100.0
BOTH, LOSS = "loss and gradient", "loss"
BOUND = "bound"
SHAPES, LARGE, FOREACH, PRECISION = "shapes", "large kernels", "foreach", "precisions"
SINGLE = (SHAPES, LARGE)  # sections that are no network
TITLES = {SHAPES: "Single shapes with targets", LARGE: "Random large kernels"}
IN_LOSS, ADD_GRAD, PROJECT = "reg()", "add_grad_", "project_"

EXACT = (REFERENCE, COMPILED, FOURIER, DEEL_LIP, FUSED)
OTHERS = (ISONET, AUTHORS, SRIP, KERNEL, FUSED_KERNEL)
USUAL = tuple(name for name in (*EXACT, *OTHERS) if name != COMPILED)
#: SRIP's Gram matrix is (C*k*k)^2: not where that takes seconds.
SRIP_COLUMNS = 2500
#: 50 small layers, as a network of narrow blocks has them.
SMALL = tuple(Layer(f"small {width}", (width, width, 3, 3), count=10) for width in (32, 40, 48, 56, 64))
PRECISION_LAYERS = (Layer("square 64", (64, 64, 3, 3)), Layer("square 256", (256, 256, 3, 3)))


# ----------------------------------------------------------------------------------------------------------------------
# Measuring
# ----------------------------------------------------------------------------------------------------------------------


def details_of(layer: Layer, settings: Settings) -> dict[str, Any]:
    plan = plan_of(layer, settings)
    return {
        "count": layer.count,
        "role": layer.name,
        "plan": plan.name,
        "multiply_adds": plan.work.multiply_adds,
        "reference_multiply_adds": plan.reference_multiply_adds,
    }


def too_slow(name: str, layer: Layer) -> bool:
    return name == SRIP and layer.shape[1] * layer.shape[-1] ** 2 > SRIP_COLUMNS


def bound_calls(layers: Sequence[Layer], settings: Settings) -> dict[str, Callable[[], object]]:
    """The plans' matrix products alone, ready to be timed; nothing where there are none."""
    products = products_of(layers, settings)
    run_products(products)
    return {BOUND: partial(run_products, products)} if products else {}


def measure_layer(harness: Harness, section: str, layer: Layer, names: Iterable[str]) -> None:
    """One layer on its own, by every contender that serves it."""
    settings, single = harness.settings, replace(layer, count=1)
    harness.announce(f"{section} {layer.label}")
    weights = make_weights([single], settings)
    asked = [name for name in names if not too_slow(name, layer)]
    calls = dict(calls_of(asked, weights, [single], settings))
    calls |= bound_calls([single], settings)
    harness.time(section, layer.label, calls, BOTH if settings.gradient else LOSS, details_of(layer, settings))


class Network(nn.Module):
    """The convolutions of a table, so that a regulariser finds them; it computes nothing."""

    def __init__(self, layers: Sequence[Layer], weights: Sequence[Tensor]) -> None:
        super().__init__()
        for index, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
            convolution = module_of(layer)
            convolution.weight = nn.Parameter(weight.detach().clone())
            self.add_module(f"{index}", convolution)


def model_calls(weights: Sequence[Tensor], layers: Sequence[Layer]) -> dict[str, Callable[[], object]]:
    """Value and gradient of the regulariser of a model, the gradient alone, and a projection, all verified."""
    model = Network(layers, weights)
    parameters = list(model.parameters())
    judge = Judge(parameters, layers, gradient=True)
    reg = OrthRegularizer(model, 1.0, include="*")

    def in_loss() -> None:
        model.zero_grad()
        reg().backward()

    def add_grad() -> None:
        model.zero_grad()
        reg.add_grad_()

    for name, call in ((IN_LOSS, in_loss), (ADD_GRAD, add_grad)):
        call()
        judge.check_outcomes(name, paper, [judge.expected(paper, index)[0] for index in range(len(layers))])
    before = [parameter.detach().clone() for parameter in parameters]
    reg.project_(rate=1e-3)  # short, so that no step is halved
    for index, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
        _, grad = judge.expected(paper, index)
        parameter.grad = (old - parameter.detach()) * 8e3
        assert grad is not None
        error = float((parameter.grad - grad).norm() / grad.norm())
        if not error <= 2e-3:  # what is left of a difference of two nearly equal weights in float32
            raise ValueError(
                f"{PROJECT}: layer {layers[index].label} moved along another direction, off by {error:.1e}"
            )
    model.zero_grad()
    with torch.no_grad():  # singular values of about one, as in a training that projects, which checks few steps there
        for parameter in parameters:
            parameter.mul_(0.5)
    return {IN_LOSS: in_loss, ADD_GRAD: add_grad, PROJECT: reg.project_}


def measure_network(harness: Harness, name: str, layers: Sequence[Layer], section: str | None = None) -> None:
    """All layers of a network: one call of ours against loops of the others, with and without gradient."""
    section = section or name
    every = expand(layers)
    harness.announce(f"{name}, verified")
    whole = {"count": len(every), "plan": "mixed", "role": "network"}
    for gradient, measure in ((True, BOTH), (False, LOSS)):
        settings = replace(harness.settings, gradient=gradient)
        weights = make_weights(every, settings)
        kernels = (KERNEL, FUSED_KERNEL) if gradient else ()
        calls = dict(calls_of((REFERENCE, *kernels, ONE_BY_ONE, FUSED), weights, every, settings))
        if gradient:
            calls |= model_calls(weights, every) if settings.dtype == torch.float32 else {}
            calls |= bound_calls(layers, settings)
        harness.time(section, name, calls, measure, whole)


def measure_precisions(harness: Harness, layers: Sequence[Layer]) -> None:
    """Our backends that serve this device, by dtype; with and without gradient."""
    for layer in layers:
        for dtype in DTYPES.values():
            for gradient, measure in ((True, BOTH), (False, LOSS)):
                settings = replace(harness.settings, dtype=dtype, gradient=gradient)
                weights = make_weights([layer], settings)
                calls = dict(calls_of((FUSED, FUSED_TORCH), weights, [layer], settings))
                if dtype in (torch.float32, torch.float64):
                    calls |= calls_of((REFERENCE,), weights, [layer], settings)
                harness.time(PRECISION, layer.label, calls, measure, {}, settings=settings)


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------


def fastest_exact(rows: Rows) -> str:
    """Of the rows of one subject."""
    exact = [row for row in rows if row.contender in EXACT]
    return min(exact, key=lambda row: row.p50).contender


def _title(section: str) -> str:
    network = section.partition(",")[0]
    count = sum(layer.count for layer in NETWORKS.get(network, ()))
    return f"{section}: {count} convolutions" if count else TITLES.get(section, section)


def _is_network(rows: Rows) -> bool:
    return rows.every[0].details.get("role") == "network"


def _subject(rows: Rows) -> str:
    subject = rows.every[0].subject
    return f"**{subject}, one call**" if _is_network(rows) else subject


def exact_table(rows: Rows, section: str, measure: str = BOTH) -> str:
    """The paper's loss, by everybody who computes it."""
    targets = NETWORK_RATIOS | ({one.layer.label: one.ratio for one in TARGETS} if section == SHAPES else {})
    body = []
    for subject, own in rows.where(section=section, measure=measure).by("subject"):
        details = own.every[0].details
        values = {name: own.median(contender=name) for name in (*EXACT, BOUND)}
        target = 1.0 if section == LARGE else targets.get(subject)  # none may be slower than the reference
        speed_up = ratio(values[REFERENCE], values[FUSED])
        winner = fastest_exact(own)
        body.append(
            {
                "layer": _subject(own),
                "count": str(details.get("count", 1)),
                "plan": details.get("plan", ""),
                **{f"{name} ms": milliseconds(values[name]) for name in EXACT},
                "speed-up": times(speed_up),
                "bound": times(ratio(values[REFERENCE], values[BOUND])),
                "share": number(ratio(values[BOUND], values[FUSED]), "{:.0%}"),
                "fastest": "fused" if winner == FUSED else f"{winner} by {times(ratio(values[FUSED], values[winner]))}",
                "target": "" if target is None or speed_up is None else verdict(speed_up, target),
            }
        )
    if (
        section not in (*SINGLE, FOREACH)
        and len(networks_of(rows.where(section=section, measure=measure)))
        and len(body) > 1
    ):
        totals = _totals(rows, section)
        sums = {f"{name} ms": milliseconds(totals.get(name)) for name in EXACT}
        faster = times(ratio(totals.get(REFERENCE), totals.get(FUSED)))
        body.insert(len(body) - 1, {"layer": f"{section}, sum of layers", **sums, "speed-up": faster})
    return table(body, ("plan", "fastest", "target"))


def others_table(rows: Rows, section: str) -> str:
    """What other regularisers cost, beside ours: they compute something else."""
    body = []
    for _, own in rows.where(section=section, measure=BOTH).by("subject"):
        values = {name: own.median(contender=name) for name in (*OTHERS, FUSED)}
        body.append(
            {
                "layer": _subject(own),
                **{f"{name} ms": milliseconds(values[name]) for name in OTHERS},
                "fused, all lags ms": milliseconds(values[FUSED]),
                "kernel: plain / fused": times(ratio(values[KERNEL], values[FUSED_KERNEL])),
                "all lags / plain kernel": times(ratio(values[FUSED], values[KERNEL])),
            }
        )
    return table(body)


NETWORK_WAYS = (REFERENCE, KERNEL, FUSED_KERNEL, ONE_BY_ONE, FUSED, IN_LOSS, ADD_GRAD, PROJECT)


def networks_of(rows: Rows) -> Rows:
    return Rows(row for row in rows if row.details.get("role") == "network")


def networks_table(rows: Rows) -> str:
    """All layers of a network, by everything that can be called for them."""
    body = []
    for measure in (BOTH, LOSS):
        for subject, own in networks_of(rows).where(measure=measure).by("subject"):
            values = {name: own.median(contender=name) for name in NETWORK_WAYS}
            cells = {f"{name} ms": milliseconds(value) for name, value in values.items()}
            faster = times(ratio(values[REFERENCE], values[FUSED]))
            body.append({"all layers": f"{subject}, {measure}", **cells, "reference / fused": faster})
    return table(body)


def precisions_table(rows: Rows) -> str:
    body = []
    for subject, kept in rows.where(section=PRECISION).by("subject"):
        for dtype, measure in product(DTYPES, (BOTH, LOSS)):
            own = Rows(row for row in kept.where(measure=measure) if row.environment.dtype == dtype)
            if len(own):
                names = (REFERENCE, FUSED_TORCH, FUSED)
                cells = {f"{name} ms": milliseconds(own.median(contender=name)) for name in names}
                body.append({"layer": subject, "dtype": dtype, "measured": measure, **cells})
    return table(body, ("dtype", "measured"))


LEGEND = (
    "Times are medians of loss and gradient. *speed-up*: reference / fused. *bound*: the speed-up if the plan's matrix "
    "products, done by the BLAS, were all the work; *share*: how much of it is reached. *fastest*: of the contenders "
    "that compute the paper's loss. A dash: does not serve this layer, or was not asked for."
)


def sections_of(rows: Rows) -> list[str]:
    return [name for name in rows.names("section") if name not in (PRECISION, FOREACH)]


def tables(rows: Rows) -> str:
    """Markdown of everything measured."""
    parts = []
    for section in sections_of(rows):
        parts += [f"### {_title(section)}", exact_table(rows, section)]
        if section not in SINGLE:
            parts += ["What other regularisers cost there; they compute something else:", others_table(rows, section)]
    if len(networks_of(rows)):
        parts += ["### Whole networks and 50 small layers, every way to call", networks_table(rows)]
    if len(rows.where(section=PRECISION)):
        parts += ["### Our backends by dtype", precisions_table(rows)]
    return "\n\n".join([*parts, LEGEND])


def _totals(rows: Rows, section: str) -> dict[str, float]:
    """Seconds of all layers, for the contenders that serve every one."""
    kept = Rows(row for row in rows.where(section=section, measure=BOTH) if row.details.get("role") != "network")
    layers = len(kept.names("subject"))
    totals = {}
    for name in kept.names("contender"):
        own = kept.where(contender=name)
        if len(own) == layers:
            totals[name] = sum(row.details["count"] * row.p50 for row in own)
    return totals


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Speed-ups per layer, and the contenders' totals per network."""
    drawn = []
    for section in sections_of(rows):
        kept = rows.where(section=section, measure=BOTH)
        bars = []
        for subject, own in kept.by("subject"):
            reference = own.median(contender=REFERENCE)
            speed_up, bound = (ratio(reference, own.median(contender=name)) for name in (FUSED, BOUND))
            count, network = own.every[0].details["count"], _is_network(own)
            times_count = ": all, one call" if network else f"  ×{count}" if count > 1 else ""
            bars.append(figures.Bar(f"{subject}{times_count}", speed_up or 0.0, bound, network))
        path = folder / f"compare-{section.replace(', ', '-').replace(' ', '-')}.png"
        drawn.append(figures.speed_ups(path, _title(section), bars, kept.every[0].environment))
    networks = {
        section: totals for section in sections_of(rows) if section not in SINGLE and (totals := _totals(rows, section))
    }
    if networks:
        names = [name for name in (*EXACT, *OTHERS) if any(name in totals for totals in networks.values())]
        series: dict[str, list[float | None]] = {
            name: [
                100 * totals[name] / totals[REFERENCE] if name in totals and REFERENCE in totals else None
                for totals in networks.values()
            ]
            for name in names
            if name != REFERENCE
        }
        title = "Loss and gradient of all layers, each measured alone; only FFT, deel-lip and fused are exact"
        path, environment = folder / "compare-totals.png", rows.every[0].environment
        y_label = "% of the time of F.conv2d with autograd"
        drawn.append(figures.bars(path, title, list(networks), series, y_label, environment))
    return drawn


# ----------------------------------------------------------------------------------------------------------------------
# Command
# ----------------------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--network", nargs="+", choices=[*NETWORKS, "all"], default=[], help="networks to measure")
    parser.add_argument("--shapes", action="store_true", help="the single shapes with targets")
    parser.add_argument("--large-kernels", action="store_true", help="60 random layers with kernels of 6 to 1001 taps")
    parser.add_argument("--foreach", action="store_true", help="50 small layers in one call and one by one")
    parser.add_argument("--precisions", action="store_true", help="our backends by dtype")
    budget = "seconds: rows that would not fit are left out (default: 100 with --quick, else none)"
    parser.add_argument("--budget", type=float, help=budget)
    parser.add_argument("--loss-only", action="store_true", help="layers without their gradient")
    every = [*CONTENDERS, "all"]
    usual = "per layer (default: all but compiled)"
    parser.add_argument("--contenders", nargs="+", choices=every, default=list(USUAL), help=usual)
    options = parser.parse_args(arguments)
    options.layers = True
    if not any((options.network, options.shapes, options.large_kernels, options.foreach, options.precisions)):
        options.network, options.shapes = ["resnet34"], True
        options.layers = not options.quick  # they are much the same as the shapes
    if options.budget is None:
        options.budget = QUICK_SECONDS if options.quick and not options.repeats else math.inf
    if "all" in options.network:
        options.network = list(NETWORKS)
    if "all" in options.contenders:
        options.contenders = [*EXACT, *OTHERS]
    return options


def layers_of(options: argparse.Namespace) -> list[Layer]:
    """Every distinct layer that the options ask for."""
    every = [target.layer for target in TARGETS] if options.shapes else []
    every += large_kernels() if options.large_kernels else ()
    every += [layer for name in options.network for layer in NETWORKS[name]]
    return list({layer.geometry: layer for layer in every}.values())


@dataclass(frozen=True)
class Job:
    """Rows that are measured together."""

    label: str
    rows: int
    multiply_adds: float  # of the reference
    run: Callable[[], None]


def jobs_of(harness: Harness, options: argparse.Namespace) -> list[Job]:
    """Everything that the options ask for."""

    def work(layers: Iterable[Layer]) -> float:
        return sum(layer.count * plan_of(layer, harness.settings).reference_multiply_adds for layer in layers)

    def single(section: str, layer: Layer, names: Sequence[str]) -> Job:
        run = partial(measure_layer, harness, section, layer, names)
        return Job(layer.label, 1, work([replace(layer, count=1)]), run)

    exact = [name for name in options.contenders if name in EXACT]
    jobs = [single(SHAPES, target.layer, exact) for target in (TARGETS if options.shapes else ())]
    jobs += [single(LARGE, layer, exact) for layer in (large_kernels() if options.large_kernels else ())]
    for name in options.network:
        layers = NETWORKS[name]
        jobs += [single(name, layer, options.contenders) for layer in (layers if options.layers else ())]
        jobs.append(Job(name, 2, work(layers), partial(measure_network, harness, name, layers)))
    if options.foreach:
        label = "50 layers of 32 to 64 channels"
        jobs.append(Job(label, 2, work(SMALL), partial(measure_network, harness, label, SMALL, FOREACH)))
    if options.precisions:
        rows = 2 * len(PRECISION_LAYERS) * len(DTYPES)
        run = partial(measure_precisions, harness, PRECISION_LAYERS)
        jobs.append(Job("precisions", rows, rows * work(PRECISION_LAYERS), run))
    return jobs


def measure(harness: Harness, options: argparse.Namespace) -> None:
    """Everything that the options ask for, or what of it fits into the budget, the smallest first."""
    jobs = jobs_of(harness, options)
    limited = options.budget < math.inf
    if limited:
        jobs.sort(key=lambda job: job.multiply_adds)
    left_out: list[str] = []
    start, before, took = perf_counter(), 0.0, 0.0  # the work of the job before, and its seconds
    with harness.progress(sum(job.rows for job in jobs)):
        for job in jobs:
            begin = perf_counter()
            # It takes longer as it has more work to do than the job before.
            if before and begin - start + took * max(1.0, job.multiply_adds / before) > options.budget:
                left_out.append(job.label)
                continue
            job.run()
            before, took = job.multiply_adds, perf_counter() - begin
    if left_out:
        harness.complete = False
        print(f"Left out to end within {options.budget:g} s: {', '.join(left_out)}; --budget gives more")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write; exits non-zero without reporting anything if a result is wrong."""
    options = parse(arguments)
    harness = Harness(COMMAND, options, gradient=not options.loss_only)
    measure(harness, options)
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
