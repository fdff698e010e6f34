"""docs/replication.md and its figures, from the lines in experiments/results; what was not run says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from .attack import Attack
from .config import Config, Line
from .figures import attack_curves, inpainting_pictures, lambda_sweep, similarity, spectrum
from .filters import Filters
from .gan import Gan
from .inpainting import GREY, TEXT, Inpainting
from .lengths import SEEDS
from .lengths_table import lengths
from .methods import ALL, METHODS, STEERED, Method
from .plan import CIFAR, CIFAR_LONGER, EXPERIMENTS, FEW, FOLDERS, GRIDS, WIDE, Choice, NotChosen, Plan
from .retrieval import KS, Neighbours, Proxies
from .runner import Context
from .scores import CRITICAL, Difference, Score, number, percent, table

CONCLUSION = Path(__file__).resolve().parent / "conclusion.md"


@dataclass
class Section:
    """Runs of one row of the protocol; pairs of methods have the same seed, or the same value of ``pair``."""

    title: str
    config: Config
    scores: list[Score]
    pair: str = "seed"
    values: Sequence[Any] = SEEDS
    main: int = 0  # index of the score that stands for the row
    lines: dict[Method, dict[Any, Line]] = field(default_factory=dict)

    @property
    def score(self) -> Score:
        return self.scores[self.main]

    def fill(self, runs: Plan) -> None:
        """Take the lines of the runs with the chosen settings."""
        lines = runs.context.lines(self.config.experiment)
        for method in ALL:
            for value in self.values:
                paired = replace(self.config, **{self.pair: value})
                try:
                    config = runs.run_of(paired, method, paired.seed)
                except NotChosen:
                    break
                if config.key in lines:
                    self.lines.setdefault(method, {})[value] = lines[config.key]

    def of(self, score: Score, method: Method) -> dict[Any, float]:
        """By pair."""
        values = {pair: score.find(line.result) for pair, line in self.lines.get(method, {}).items()}
        return {pair: value for pair, value in values.items() if value is not None}

    def difference(self, score: Score, method: Method, other: Method = "plain") -> Difference | None:
        """Over the pairs that both have."""
        ours, theirs = self.of(score, method), self.of(score, other)
        shared = [ours[pair] - theirs[pair] for pair in ours if pair in theirs]
        return Difference(shared) if shared else None


def sections() -> list[Section]:
    accuracy = [percent("top-1", "accuracy"), percent("top-5", "top5")]
    psnr = [number("PSNR, dB", "psnr"), number("PSNR of missing pixels, dB", "psnr_missing")]
    return [
        Section("CIFAR-100, ResNet-18", CIFAR, accuracy),
        Section("CIFAR-100, ResNet-18, five times as long", CIFAR_LONGER, accuracy),
        Section("CIFAR-100, WideResNet", WIDE, accuracy),
        *(Section(f"CIFAR-100, {fraction:.0%} of the labels", config, accuracy) for fraction, config in FEW.items()),
        Section("Tiny-ImageNet, 50 classes", FOLDERS, accuracy),
        Section("Birds (CUB) by nearest neighbours", Neighbours(),
                [percent("nearest", "top1"), percent("among five", "top5")]),
        Section("Cars196, ProxyNCA", Proxies(),
                [percent("NMI", "nmi"), percent("F1", "f1"), *(percent(f"Recall@{k}", f"recall{k}") for k in KS)],
                main=2),
        Section("Inpainting, half of the pixels", Inpainting(), psnr, "image", tuple(GREY)),
        Section("Inpainting, text", Inpainting(), psnr, "image", TEXT),
        Section("GAN on CIFAR-100 images", Gan(),
                [number("Fréchet distance, ResNet-56", "frechet", False),
                 number("class score, ResNet-56", "class_score")]),
        Section("SimBA attack", Attack(),
                [percent("fooled", "fooled", False),
                 number("mean queries", "mean_queries", digits=0),
                 number("queries until 50% are fooled", "median_queries", digits=0),
                 number("queries until 90% are fooled", "queries_to_90", digits=0)], main=1),
    ]  # fmt: skip


def results(section: Section) -> str:
    """One row for each score: means, then differences to plain."""
    present = [method for method in ALL if method in section.lines]
    rows = []
    for score in section.scores:
        cells = []
        for method in present:
            values = [value for value in section.of(score, method).values() if isfinite(value)]
            runs = len(section.lines[method])
            shown = f"{score.write(mean(values))} ({len(values)})" if values else "never"
            cells.append(shown if len(values) in (0, runs) else f"{shown} of {runs}")
        rows.append([score.name, *cells])
        for other in ("plain", "kernel"):
            differences = [
                None if method in ("plain", other) else section.difference(score, method, other) for method in present
            ]
            if other in present and any(differences):
                rows.append([f"— minus {other}", *("" if d is None else d.write(score) for d in differences)])
    return table(["score", *present], rows)


def runs(lines: Iterable[Line], score: Callable[[dict[str, Any]], str]) -> str:
    """Every run with its score and command."""
    text = "\n".join(f"    {score(line.result):>8}  {line.command}" for line in lines)
    return f"<details><summary>Runs</summary>\n\n{text}\n\n</details>"


def choices(plan: Plan) -> str:
    """What was chosen for each method, and among which scores."""
    rows = []
    for experiment, grid in GRIDS.items():
        for method in METHODS:
            try:
                scores = plan.scores(experiment, method)
            except NotChosen:
                rows.append([experiment, method, "not run yet", "", ""])
                continue
            best = max(scores, key=lambda choice: scores[choice])
            rows.append([experiment, method, f"{best.rate:g}", f"{best.weight:g}" if best.weight else "",
                         ", ".join(_trial(choice, score) for choice, score in scores.items())
                         + _edges(grid.settings(method), best)])  # fmt: skip
    return table(["experiment", "method", "rate", "lambda", "score of rate, lambda"], rows)


def _trial(choice: Choice, score: float) -> str:
    shown = f"{choice.rate:g}, {choice.weight:g}" if choice.weight else f"{choice.rate:g}"
    return f"{abs(score):.4g} ({shown})"


def _edges(settings: Sequence[Choice], best: Choice) -> str:
    """Where the best lies at the end of what was tried."""
    found = []
    for name, values, value in (("rate", [setting.rate for setting in settings], best.rate),
                                ("lambda", [setting.weight for setting in settings], best.weight)):  # fmt: skip
        if value in (min(values), max(values)) and min(values) < max(values):
            found.append(f"{'smallest' if value == min(values) else 'largest'} {name}")
    return f"; **{' and '.join(found)} tried**" if found else ""


def glance(found: Sequence[Section]) -> str:
    """The main score of every section: plain, the others against plain, and ocnn against the others."""
    pairs: list[tuple[Method, Method]] = [
        ("kernel", "plain"), ("srip", "plain"), ("ocnn", "plain"), ("ocnn-auto", "plain"), ("ocnn", "kernel"),
        ("ocnn", "srip"),
    ]  # fmt: skip
    rows = []
    for section in found:
        score = section.score
        plain = [value for value in section.of(score, "plain").values() if isfinite(value)]
        cells = [score.write(mean(plain)) if plain else "not run yet"]
        for one, other in pairs:
            difference = section.difference(score, one, other)
            missing = "no pair" if {one, other} <= section.lines.keys() else "not run yet"
            missing = "" if one in STEERED and missing == "not run yet" else missing  # planned for a few rows only
            cells.append(missing if difference is None else difference.write(score))
        verdict = ""
        difference = section.difference(score, "ocnn")
        if difference is not None and difference.error is not None:
            sign = 1 if score.more_is_better else -1
            ratio = sign * difference.mean / difference.error if difference.error else 0.0
            limit = CRITICAL.get(len(difference.values), 2.0)
            verdict = "better" if ratio > limit else "worse" if ratio < -limit else "not distinguishable"
        rows.append(
            [section.title, score.name + ("" if score.more_is_better else " (less is better)"), *cells, verdict]
        )
    differences = [f"{one} minus {other}" for one, other in pairs]
    return table(["row", "score", "plain", *differences, "ocnn against plain, 95%"], rows)


def write(plan: Plan, out: Path) -> None:
    """Write ``replication.md`` and the figures ``replication-*.png`` into a folder."""
    found = sections()
    for section in found:
        section.fill(plan)
    parts = [HEAD, "## At a glance\n\n" + GLANCE + "\n\n" + glance(found)]
    if CONCLUSION.exists():
        parts.append("## What it says\n\n" + CONCLUSION.read_text().strip())
    parts += ["## Lambda at each length of training", *lengths(plan.cells, plan.context)]
    parts.append("## What was chosen\n\n" + CHOSEN + "\n\n" + choices(plan))
    for section in found:
        parts.append(f"## {section.title}")
        if not section.lines:
            parts.append("Not run yet.")
            continue
        parts.append(results(section))
        if section.pair == "image":
            parts.append(by_image(section))
        lines = [line for by_pair in section.lines.values() for line in by_pair.values()]
        parts.append(runs(lines, partial(_shown, section.score)))
        if section.values == TEXT:
            parts += _figure(inpainting_pictures(plan, out), SAMPLE_TEXT)
        if isinstance(section.config, Attack):
            parts += _figure(attack_curves(section.lines, out), CURVES)
    parts += ["## Spectrum and similarity of filters", *filters(plan, out)]
    parts += ["## Lambda", *sweep(plan, out)]
    parts += ["## Time and memory", *cost(plan.context)]
    every = [line for name in EXPERIMENTS for line in plan.context.lines(name).values()]
    seconds = sum(line.timing["processor_seconds"] for line in every)
    versions = ", ".join(sorted({line.torch for line in every}))
    trials = sum(bool(line.config["choosing"]) for line in every)
    parts.append(
        f"## All runs\n\n{len(every)} runs, {trials} of them trials, {seconds / 3600:.1f} processor hours, one thread, "
        f"torch {versions}. Every run is a line of `experiments/results/*.jsonl`."
    )
    (out / "replication.md").write_text("\n\n".join(parts) + "\n")


def _shown(score: Score, result: dict[str, Any]) -> str:
    value = score.find(result)
    return "never" if value is None else score.write(value)


def _figure(path: Path | None, text: str) -> list[str]:
    return [] if path is None else [f"![{path.stem}]({path.name})", text]


def by_image(section: Section) -> str:
    score = section.scores[0]
    images = [image for image in section.values if any(image in lines for lines in section.lines.values())]
    rows = [
        [method, *(score.write(values[image]) if image in values else "" for image in images)]
        for method, values in ((method, section.of(score, method)) for method in section.lines)
    ]
    return f"{score.name}:\n\n" + table(["method", *images], rows)


def filters(plan: Plan, out: Path) -> list[str]:
    section = Section("", Filters(), [])
    section.fill(plan)
    lines = {method: by_seed[0] for method, by_seed in section.lines.items() if 0 in by_seed}
    if not lines:
        return ["Not run yet."]
    depths = list(next(iter(lines.values())).result["similarity"])
    layers = list(next(iter(lines.values())).result["largest"])[1:]

    def middle(result: dict[str, Any]) -> list[str]:
        return [f"{mean(result[name][layer] for layer in layers):.2f}" for name in ("largest", "smallest", "near_one")]

    rows = [
        [method, *(f"{line.result['similarity'][depth]:.3f}" for depth in depths), *middle(line.result)]
        for method, line in lines.items()
    ]
    header = ["method", *(f"similarity, {depth}" for depth in depths), "largest", "smallest", "share within 0.1 of 1"]
    return [
        *_figure(spectrum(lines, out), SPECTRUM),
        *_figure(similarity(lines, out), SIMILARITY),
        SIMILARITY_TABLE,
        table(header, rows),
        runs(lines.values(), lambda result: f"{mean(result['similarity'].values()):.3f}"),
    ]


def sweep(plan: Plan, out: Path) -> list[str]:
    try:
        planned = [config for seed in SEEDS for config in plan.sweep_runs(seed)]
        longer = plan.longer_sweep_runs()
    except NotChosen:
        return ["Not run yet."]
    swept = Sweep(planned, plan.context)
    figure = _figure(lambda_sweep(swept.scores, out), SWEPT.format(rate=planned[0].rate)) if swept.lines else []
    return [*figure, *swept.parts(), "### Five times as long", *Sweep(longer, plan.context).parts()]


class Sweep:
    """Lines of the same training with several lambdas."""

    def __init__(self, planned: Sequence[Config], context: Context) -> None:
        known = context.lines("classification")
        self.planned = planned
        self.lines = [known[config.key] for config in planned if config.key in known]
        self.scores: dict[float, dict[int, float]] = {}  # by lambda and seed
        for line in self.lines:
            self.scores.setdefault(line.config["weight"], {})[line.config["seed"]] = 100 * line.result["accuracy"]

    def parts(self) -> list[str]:
        if not self.lines:
            return ["Not run yet."]
        score, plain = percent("top-1", "accuracy"), self.scores.get(0.0, {})
        lambdas = dict.fromkeys(config.weight for config in self.planned)
        missing = [f"{weight:g}" for weight in lambdas if weight not in self.scores]
        rows = []
        for weight, values in sorted(self.scores.items()):
            shared = [value - plain[seed] for seed, value in values.items() if seed in plain]
            losses = [line.result["orthogonality_loss"] for line in self.lines if line.config["weight"] == weight]
            rows.append([f"{weight:g}", f"{mean(values.values()):.2f} ({len(values)})",
                         Difference(shared).write(score) if weight and shared else "",
                         f"{mean(losses):.3g}"])  # fmt: skip
        return [
            *([f"Not run yet: lambda {', '.join(missing)}."] if missing else []),
            table(["lambda", "top-1, %", "minus plain", "orthogonality loss at the end"], rows),
            runs(self.lines, lambda result: f"{100 * result['accuracy']:.2f}"),
        ]


def cost(context: Context) -> list[str]:
    lines = list(context.lines("cost").values())
    if not lines:
        return ["Not run yet."]
    timing = lines[-1].timing
    plain = timing["step_seconds"]["plain"]
    rows = [
        [method, f"{timing['step_seconds'][method]:.3f}", f"{timing['step_minimum'][method]:.3f}",
         "" if method == "plain" else f"{timing['step_seconds'][method] / plain - 1:+.0%}"]
        for method in METHODS
    ]  # fmt: skip
    peaks = {name: "unknown" if value is None else f"{value / 2**20:.0f} MB"
             for name, value in timing["peak_bytes"].items()}  # fmt: skip
    return [
        COST,
        table(["method", "step, processor s", "minimum", "added"], rows),
        f"Peak memory of the loss and its gradient alone, all layers of ResNet-18: {peaks['fused']} fused, "
        f"{peaks['reference']} with the paper's formula in plain PyTorch.",
        runs(lines, lambda result: ""),
    ]


HEAD = """# Replication

The paper's experiments, small: the [protocol](replication-protocol.md) was committed before the runs. This page is
made from the runs by `python -m experiments table`; do not edit it. A number in brackets is the number of runs (seeds,
or pictures) in a mean. Differences are means over pairs with the same seed or picture, ± their standard error, given
from three pairs on. `DATA` in the commands is the folder of data sets, see `experiments/data.py`."""

GLANCE = """The last column compares `ocnn` with `plain` where there are at least three pairs: "not distinguishable" if
0 lies in the 95% interval of the mean difference (Student's t). Without any effect, one verdict in twenty would still
say better or worse."""

CHOSEN = """On images held back from the training data; the protocol lists the grids. Scores: share right, mean PSNR,
Recall@1, Fréchet distance (less is better). Trials with `choosing=True` are in the JSON lines. **For classification
this is superseded**: 300 steps do not foretell longer trainings, see [above](#lambda-at-each-length-of-training)."""

SAMPLE_TEXT = """A photograph that scikit-learn ships (china.jpg), half of the pixels dropped; the PSNR is that of the
output."""

CURVES = """Share of the images that the network still has right, over queries for each image; one line for each seed.
Each network is attacked on the first 100 test images that it has right itself."""

SPECTRUM = """Singular values of the first convolution of the third stage (32 x 16 x 3 x 3, stride 2), circular, 16x16
pixels."""

SIMILARITY = """Correlation of the guided patterns of two filters, 32 test images, at the first convolution of each
stage."""

SIMILARITY_TABLE = """Mean absolute correlation by depth; and over all convolutions but the first the mean of the
largest and of the smallest singular value, and the share of singular values between 0.9 and 1.1. Seed 0:"""

SWEPT = """Accuracy on the test images at rate {rate:g}, which was chosen together with a lambda; mean and range over
the seeds. Nothing was chosen by it."""

COST = """Forward, backward and regularisation of ResNet-18 (width 64) with 16 images of 32 pixels, one thread, methods
taking turns; medians. The loss does not depend on the batch, so at the usual 128 images the share is an eighth of it.
More in [experiments.md](experiments.md)."""
