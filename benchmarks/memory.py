"""Peak extra memory of one step, as the operating system sees it.

    python benchmarks/memory.py            the layers of ResNet-34, networks, and a 4096x4096x3x3 weight
    python benchmarks/memory.py --quick    without the last, whose step takes a minute

Each measurement runs in a process of its own, forked from a server that has imported torch and run nothing. There, a
tiny step of the same kind first starts the thread pools and maps the code it needs; then the resident set is noted, its
high-water mark reset, and one real step taken. The rise of the mark counts everything: tensors, workspaces, gradients
and the scratch memory of oneDNN and BLAS, which no allocator hook of torch would see. Large blocks go back to the
system as soon as they are freed, so that the mark shows what was needed at one time and not how the heap was
fragmented. Code and thread stacks touched for the first time leave a noise of about a megabyte. On a GPU it is the
peak of torch's allocator.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import figures
import torch
from contenders import CONTENDERS, FUSED, KERNEL, REFERENCE
from harness import Harness, parser_of, run
from record import Rows
from shapes import NETWORKS, Layer, distinct
from steps import Settings, expand, make_weights
from tables import markdown, megabytes, number, ratio

COMMAND = "memory"
#: Differences below this are noise.
RESOLUTION = 1 << 20
#: ResNet-34's largest layer should need at most this share of the reference's memory.
TARGET = 0.6
#: And a huge layer at most so many times its weight, whatever its size: the gradient, a copy of the weight, and 13
#: outputs and 12 transposes of a ninth each are 4.8. The reference took 11.1 times (6.71 GB), once; it takes minutes.
HUGE_TARGET = 5.0
LARGEST, HUGE = Layer("largest", (512, 512, 3, 3)), Layer("huge", (4096, 4096, 3, 3))
LAYERS = (*NETWORKS["resnet34"], Layer("expand", (2048, 512, 1, 1)), Layer("7x7", (64, 64, 7, 7)))
NAMES = (REFERENCE, KERNEL, FUSED)

_TINY = 32
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _status_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _tiny(layer: Layer) -> Layer:
    """The same geometry with few channels and groups."""
    groups = min(layer.groups, _TINY)
    rows, channels = min(layer.shape[0] // layer.groups, _TINY), min(layer.shape[1], _TINY)
    return replace(layer, shape=(rows * groups, channels, *layer.shape[2:]), groups=groups)


def _warm_up_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Tiny versions, each also as an ungrouped layer with enough channels for matrix products."""
    tiny = [_tiny(layer) for layer in layers]
    square = [replace(layer, shape=(_TINY, _TINY, *layer.shape[2:]), groups=1) for layer in layers]
    return tuple(replace(layer, count=1) for layer in distinct([*tiny, *square]))


def _measure(name: str, layers: Sequence[Layer], settings: Settings) -> int:
    """Runs in the child: the rise of the high-water mark during one step."""
    torch.set_num_threads(settings.threads)
    step, tiny = CONTENDERS[name].step, _warm_up_layers(layers)
    step(make_weights(tiny, settings), tiny, settings.gradient)
    matrices = torch.ones(2, _TINY, _TINY, dtype=settings.dtype)
    torch.bmm(matrices, matrices)  # starts the BLAS, which tiny layers go without
    weights = make_weights(layers, settings)
    return rise_during(lambda: step(weights, layers, settings.gradient))


def rise_during(call: Callable[[], object]) -> int:
    """Bytes that the high-water mark of this process rises above what is resident before."""
    before = _status_bytes("VmRSS")
    _CLEAR_REFS.write_text("5")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def in_child(call: Callable[..., int], *arguments: object) -> int | None:
    """What a call finds in a process of its own; None where the system cannot tell."""
    if not _CLEAR_REFS.exists():
        return None
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(128 << 10))  # glibc reads it when the server starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ocnn_fused", "numpy"])
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(call, *arguments).result()


def _on_gpu(name: str, layers: Sequence[Layer], settings: Settings) -> int:
    weights = make_weights(layers, settings)
    for _ in range(2):  # the first makes ready
        torch.cuda.reset_peak_memory_stats(settings.device)
        before = torch.cuda.memory_allocated(settings.device)
        CONTENDERS[name].step(weights, layers, settings.gradient)
    return torch.cuda.max_memory_allocated(settings.device) - before


def peak_extra_bytes(name: str, layers: Sequence[Layer], settings: Settings) -> int | None:
    """Peak memory of a contender's step beyond the weights, gradients included; None where the system cannot tell."""
    if settings.device != "cpu":
        return _on_gpu(name, expand(layers), settings)
    return in_child(_measure, name, expand(layers), settings)


def measure(harness: Harness, section: str, subject: str, layers: Sequence[Layer], names: Sequence[str]) -> None:
    size = sum(layer.weights for layer in layers) * harness.settings.dtype.itemsize
    for name in names:
        harness.announce(f"{subject}, {name}")
        harness.memory(section, subject, name, peak_extra_bytes(name, layers, harness.settings), weight_bytes=size)
    harness.advance()


def tables(rows: Rows) -> str:
    body = []
    for subject, own in rows.by("subject"):
        values = {name: own.median(contender=name) for name in NAMES}
        size = own.every[0].details["weight_bytes"]
        share = ratio(values[FUSED], values[REFERENCE])
        target = (
            f"{TARGET:g} {'met' if share is not None and share <= TARGET else 'missed'}"
            if subject == LARGEST.label
            else ""
        )
        cells = [megabytes(size), *(megabytes(values[name]) for name in NAMES), number(share, "{:.2f}")]
        body.append([subject, *cells, number(ratio(values[FUSED], size), "{:.2f}"), target])
    header = [
        "layer or network",
        "weights MB",
        *(f"{name} MB" for name in NAMES),
        "fused / reference",
        "fused / weights",
        "target",
    ]
    return markdown(header, body, (0, len(header) - 1)) + (
        "\n\nPeak of one step beyond the weights, loss and gradient; the gradient itself, as large as the weights, is "
        "part of it. Differences below a megabyte are noise."
    )


def draw(rows: Rows, folder: Path) -> list[Path]:
    """In percent of the reference's, where that is more than noise."""
    known = {name: rows.median(subject=name, contender=REFERENCE) or 0.0 for name in rows.names("subject")}
    subjects = [name for name, value in known.items() if value > 5 * RESOLUTION]
    series: dict[str, list[float | None]] = {}
    for name in (KERNEL, FUSED):
        values = [rows.median(subject=subject, contender=name) for subject in subjects]
        series[name] = [value and 100 * value / known[subject] for value, subject in zip(values, subjects, strict=True)]
    labels = [f"{subject.replace(' /', ' stride ')}\n({known[subject] / 1e6:.0f} MB)" for subject in subjects]
    labels = [label.replace("x3x3", "\nx3x3").replace("x1x1", "\nx1x1").replace("x7x7", "\nx7x7") for label in labels]
    title = "Peak memory of one step beyond the weights; below each name the reference's"
    path, y_label = folder / "memory.png", "% of the memory of F.conv2d with autograd"
    return [figures.bars(path, title, labels, series, y_label, rows.every[0].environment, pattern="{:.0f}")]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(__doc__).parse_args(arguments)
    harness = Harness(COMMAND, options)
    networks = ("resnet34", "resnet50")
    layers = LAYERS if not options.quick else (LARGEST, *LAYERS[:3])
    with harness.progress(len(layers) + (0 if options.quick else len(networks) + 1)):
        for layer in layers:
            measure(harness, "layers", layer.label, [replace(layer, count=1)], NAMES)
        if not options.quick:
            for name in networks:
                measure(harness, "networks", name, NETWORKS[name], NAMES)
            measure(harness, "huge", HUGE.label, [HUGE], (FUSED,))
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
