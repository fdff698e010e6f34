"""The figures of docs/replication.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("agg")
from matplotlib import pyplot as plt

from ocnn_fused import plot

from . import metrics
from .config import Line
from .filters import BINS, DEPTHS
from .inpainting import SAMPLE, Inpainting
from .methods import METHODS, Method
from .plan import NotChosen, Plan

COLOURS = dict(
    zip(METHODS, ("tab:gray", "tab:orange", "tab:green", "tab:blue", "tab:purple", "tab:brown"), strict=True)
)


def _save(figure: Any, out: Path, name: str) -> Path:
    path = out / f"replication-{name}.png"
    # Without what changes from one installation to the next.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def spectrum(lines: Mapping[Method, Line], out: Path) -> Path:
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for method, line in lines.items():
        plot.spectra(axis, {method: torch.tensor(line.result["spectrum"])}, color=COLOURS[method])
    axis.legend()
    return _save(figure, out, "spectrum")


def similarity(lines: Mapping[Method, Line], out: Path) -> Path:
    figure, axes = plt.subplots(1, len(DEPTHS), figsize=(13, 3.4), layout="constrained", sharey=True)
    edges = torch.linspace(-1, 1, BINS + 1).numpy()
    for stage, (axis, depth) in enumerate(zip(axes, DEPTHS, strict=True), 1):
        for method, line in lines.items():
            axis.stairs(line.result["histogram"][depth], edges, color=COLOURS[method], label=method)
        axis.set(title=f"stage {stage}: {depth}", xlabel="correlation of two filters", xlim=(-0.3, 1), yscale="log")
    axes[0].set_ylabel("share of pairs")
    axes[0].legend()
    return _save(figure, out, "similarity")


def attack_curves(lines: Mapping[Method, Mapping[int, Line]], out: Path) -> Path | None:
    if not any(line.result["images"] for by_seed in lines.values() for line in by_seed.values()):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for method, by_seed in lines.items():
        for index, line in enumerate(by_seed.values()):
            count = line.result["images"]
            if not count:
                continue
            for axis, values in zip(axes, (line.result["fooled_after"], line.timing["fooled_seconds"]), strict=True):
                after = sorted(value for value in values if value > 0)
                right = [100 * (1 - number / count) for number in range(len(after) + 1)]
                axis.step([0, *after], right, where="post", color=COLOURS[method], lw=1,
                          label=None if index else method)  # fmt: skip
    axes[0].set(xlabel="queries for each image", ylabel="still right (%)", ylim=(0, 101))
    axes[1].set(xlabel="processor seconds, 100 images together")
    axes[0].legend()
    return _save(figure, out, "attack")


def lambda_sweep(scores: Mapping[float, Mapping[int, float]], out: Path) -> Path | None:
    if len(scores) < 3:
        return None
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    plot.lambda_sweep(axis, {weight: list(values.values()) for weight, values in scores.items()}, "top-1 (%)")
    return _save(figure, out, "lambda")


def inpainting_pictures(runs: Plan, out: Path) -> Path | None:
    """Of the photograph that may be shown; the networks' outputs are kept beside the checkpoints."""
    shown: dict[str, tuple[Any, float | None]] = {}
    for method in METHODS:
        try:
            config = runs.run_of(Inpainting(image=SAMPLE), method)
        except NotChosen:
            continue
        if not (runs.context.work / f"{config.key}.kept.pt").exists():
            continue
        kept = runs.context.kept(config)
        if not shown:
            shown = {"picture": (kept["picture"], None), "given": (kept["picture"] * kept["mask"], None)}
        shown[method] = (kept["final"], metrics.psnr(kept["final"], kept["picture"]))
    name = out / "replication-inpainting.png"
    if not shown:  # where the runs were made elsewhere, the picture stays as it is
        return name if name.exists() else None
    figure, axes = plt.subplots(1, len(shown), figsize=(2 * len(shown), 2.3), layout="constrained")
    for axis, (title, (image, psnr)) in zip(axes, shown.items(), strict=True):
        axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        axis.set_title(title if psnr is None else f"{title}, {psnr:.2f} dB")
        axis.set_axis_off()
    return _save(figure, out, "inpainting")
