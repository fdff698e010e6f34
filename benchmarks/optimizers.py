"""Orthogonal updates: what one optimiser step takes, and how flat the updates' spectra are.

    python benchmarks/optimizers.py                          both, all networks
    python benchmarks/optimizers.py --network resnet18       one network
    python benchmarks/optimizers.py --only flatness          no timing

A step is ``optimizer.step()`` of all convolution weights of a network, with gradients that are there. Contenders take
turns in one process. timm's Muon is timed if timm is installed (``pip install timm --no-deps``). The Muons of torch and
timm iterate in bfloat16; "float32" is the same code with that conversion left out. Before anything is timed, the first
step of each flattened Muon in float32 is compared with the polynomial of the singular values, in float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import gpu_model
import torch
from harness import Harness, disturbed, parser_of, run
from record import COUNT, Row, Rows
from shapes import NETWORKS, PUBLISHED, Layer
from steps import WrongResultError, expand
from tables import milliseconds, number, ratio, table, times
from torch import Tensor

from ocnn_fused.backends.device import SPECS, DeviceSpec
from ocnn_fused.optim import Muon, orthogonal_update
from ocnn_fused.optim.coefficients import MUON
from ocnn_fused.problem import Precision
from ocnn_fused.spectrum import singular_values

COMMAND = "optimizers"
TIMM_SPEC = find_spec("timm")  # before anything stands in for the package
STEP, FLATNESS = "optimizer step", "flatness"

MODELS: dict[str, tuple[Layer, ...]] = {
    "resnet18": NETWORKS["resnet18"],
    "resnet34": NETWORKS["resnet34"],
    "convnext_t": NETWORKS["convnext_t"],
    "mobilenetv2": PUBLISHED["mobilenetv2"].layers,
}


# ----------------------------------------------------------------------------------------------------------------------
# Contenders
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """An optimiser of weights, and whether its step is that of flattened Muon with torch's coefficients."""

    name: str
    make: Callable[[list[Tensor], Sequence[Layer]], torch.optim.Optimizer]
    context: Callable[[], Any] | None = None  # within which it steps
    is_muon: bool = False  # somebody else's
    is_flat: bool = False
    flattens: bool = False  # is given matrices


def _ours(weights: list[Tensor], layers: Sequence[Layer], **options: Any) -> torch.optim.Optimizer:
    geometries = [(layer.stride, layer.dilation, layer.groups) for layer in layers]
    return Muon([{"params": weights, "geometries": geometries}], RATE, 0.95, **options)


def _torch_muon(weights: list[Tensor], layers: Sequence[Layer]) -> torch.optim.Optimizer:
    return torch.optim.Muon(weights, RATE, 0.0, 0.95)


def _timm_muon(weights: list[Tensor], layers: Sequence[Layer]) -> torch.optim.Optimizer:
    return _timm().Muon(weights, RATE, 0.0, 0.95, nesterov=True, ns_coefficients="original", adjust_lr_fn="original")


def _timm() -> Any:
    """timm's module alone: its optimisers need nothing but torch, the rest of timm imports much more."""
    if "timm" not in sys.modules:
        package, models = ModuleType("timm"), ModuleType("timm.models")
        package.__path__ = list(TIMM_SPEC.submodule_search_locations or ()) if TIMM_SPEC else []
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": package, "timm.models": models})
    return import_module("timm.optim.muon")


def _torch_in_float32() -> Any:
    return mock.patch.object(Tensor, "bfloat16", Tensor.clone)


@contextmanager
def _timm_in_float32() -> Iterator[None]:
    module = _timm()
    exact = partial(module.zeropower_via_newtonschulz, dtype=torch.float32)
    with mock.patch.object(module, "zeropower_via_newtonschulz", exact):
        yield


#: So small that weights stay what they are; the arithmetic is the same.
RATE = 1e-6
TORCH = Contender("torch.optim.Muon, flattened copies", _torch_muon, is_muon=True, flattens=True)
TIMM = Contender("timm Muon", _timm_muon, is_muon=True)
OPERATOR, FLAT = "ours: operator", "ours: flatten"
CONTENDERS = (
    Contender(OPERATOR, _ours),
    Contender(FLAT, partial(_ours, mode="flatten"), is_flat=True),
    Contender("ours: flatten, rational", partial(_ours, mode="flatten", coefficients="rational")),
    Contender("ours: per_tap", partial(_ours, mode="per_tap")),
    Contender(f"{TORCH.name}, float32", TORCH.make, _torch_in_float32, True, True, True),
    TORCH,
    Contender(f"{TIMM.name}, float32", TIMM.make, _timm_in_float32, True, True),
    TIMM,
    Contender("torch AdamW", lambda weights, _: torch.optim.AdamW(weights, RATE, foreach=True)),
    Contender("torch SGD", lambda weights, _: torch.optim.SGD(weights, RATE, 0.95, nesterov=True, foreach=True)),
)


def available() -> list[Contender]:
    missing = [] if hasattr(torch.optim, "Muon") else ["torch"]
    missing += [] if TIMM_SPEC else ["timm"]
    for package in missing:
        print(f"{package} has no Muon here: left out")
    return [one for one in CONTENDERS if not (one.is_muon and any(one.name.startswith(name) for name in missing))]


@dataclass
class Prepared:
    """An optimiser with weights of its own, and the gradients that all share."""

    contender: Contender
    weights: list[Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        if self.contender.context is None:
            self.optimizer.step()
            return
        with self.contender.context():
            self.optimizer.step()


def prepared(contender: Contender, layers: Sequence[Layer], grads: Sequence[Tensor]) -> Prepared:
    weights = []
    for grad in grads:
        shown = grad.flatten(1) if contender.flattens else grad
        weight = torch.zeros_like(shown).requires_grad_()
        weight.grad = shown
        weights.append(weight)
    return Prepared(contender, weights, contender.make(weights, layers))


def gradients(layers: Sequence[Layer]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(layer.shape, generator=generator) for layer in layers]


def verify(one: Prepared, layers: Sequence[Layer], grads: Sequence[Tensor]) -> None:
    """The first step of flattened Muon against the polynomial of the singular values, on layers that are not large."""
    checked = 0
    for layer, weight, grad in zip(layers, one.weights, grads, strict=True):
        if layer.groups > 1 or prod(layer.shape) > 200_000 or min(layer.shape[:2]) < 16:
            continue  # of depthwise layers timm leaves the update to AdamW
        left, values, right = torch.linalg.svd(grad.flatten(1).double(), full_matrices=False)
        values = values / values.norm()
        a, b, c = MUON
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        wanted = -left * values @ right
        found = weight.detach().flatten(1).double()
        error = float(
            (found / found.norm() - wanted / wanted.norm()).abs().max() / (wanted / wanted.norm()).abs().max()
        )
        checked += 1
        if error > 1e-3:
            raise WrongResultError(f"{one.contender.name}: the update of {layer.label} is off by {error:.1e}")
    if not checked:
        raise WrongResultError("no layer was checked")


def measure_steps(harness: Harness, name: str) -> None:
    layers = expand(MODELS[name])
    grads = gradients(layers)
    calls: dict[str, Callable[[], object]] = {}
    for contender in available():
        one = prepared(contender, layers, grads)
        one.step()
        if contender.is_flat:
            verify(one, layers, grads)
        calls[contender.name] = one.step
    weights = sum(prod(layer.shape) for layer in layers)
    harness.time(name, name, calls, STEP, {"layers": len(layers), "weights": weights})


# ----------------------------------------------------------------------------------------------------------------------
# Flatness
# ----------------------------------------------------------------------------------------------------------------------

SIZE = 24  # of the circle, a multiple of all strides
LAYERS = (
    Layer("square", (64, 64, 3, 3)),
    Layer("narrowing", (32, 64, 3, 3)),
    Layer("strided", (64, 32, 3, 3), 2),
    Layer("strided 3", (64, 32, 3, 3), 3),
    Layer("5x5", (32, 32, 5, 5)),
    Layer("4x4 strided", (64, 16, 4, 4), 2),
    Layer("7x7 stem", (64, 16, 7, 7), 2),
    Layer("grouped", (64, 8, 3, 3), groups=8),
    Layer("depthwise", (64, 1, 3, 3), groups=64),
    Layer("dilated", (64, 64, 3, 3), dilation=2),
)
FREQ = "FreqMuon's recipe"
MEASURES = ("10% quantile", "90% quantile", "largest")


def direction(layer: Layer) -> Tensor:
    """What an update looks like: of rank 8, with a tenth of noise."""
    generator = torch.Generator().manual_seed(0)
    columns = prod(layer.shape[1:])
    low = torch.randn(layer.shape[0], 8, generator=generator) @ torch.randn(8, columns, generator=generator) / 8**0.5
    return (low + 0.1 * torch.randn(layer.shape[0], columns, generator=generator)).view(layer.shape)


def freq_muon(layer: Layer, tensor: Tensor) -> Tensor | None:
    """The polar factor of every frequency of an 8x8 transform, cropped to the kernel; of stride 1 without groups."""
    if layer.stride > 1 or layer.groups > 1 or max(tensor.shape[2:]) > 8:
        return None
    at = torch.fft.fft2(tensor.double(), s=(8, 8)).permute(2, 3, 0, 1)
    left, _, right = torch.linalg.svd(at, full_matrices=False)
    return torch.fft.ifft2((left @ right).permute(2, 3, 0, 1)).real[:, :, : tensor.shape[2], : tensor.shape[3]].float()


def updates(layer: Layer) -> dict[str, Tensor]:
    tensor = direction(layer)
    options: dict[str, Any] = {"strides": [layer.stride], "dilations": [layer.dilation], "groups": [layer.groups]}
    found = {
        "operator": orthogonal_update([tensor], **options)[0],
        "operator, 9 steps": orthogonal_update([tensor], steps=9, **options)[0],
        "flatten": orthogonal_update([tensor], mode="flatten", **options)[0],
        "flatten, rational": orthogonal_update([tensor], mode="flatten", coefficients="rational", **options)[0],
        "per_tap": orthogonal_update([tensor], mode="per_tap", **options)[0],
    }
    cropped = freq_muon(layer, tensor)
    return found if cropped is None else {**found, FREQ: cropped}


def measure_flatness(harness: Harness) -> None:
    for layer in LAYERS:
        harness.announce(layer.label)
        for name, update in updates(layer).items():
            options: Any = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
            values = singular_values(update, (SIZE, SIZE), progress=False, **options).double()
            low, high = torch.quantile(values, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
            for measure, value in zip(MEASURES, (low, high, values.max().item()), strict=True):
                harness.add(FLATNESS, layer.label, name, measure, COUNT, [value])
        harness.advance()


# ----------------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------------


def steps_table(rows: Rows) -> str:
    """One column for each network: milliseconds, and how many times as long as our flattened step."""
    sections = [name for name in MODELS if len(rows.where(section=name, measure=STEP))]
    body = []
    for contender in rows.where(measure=STEP).names("contender"):
        cells = {"ms": contender}
        for name in sections:
            own = rows.where(section=name, measure=STEP)
            mine, flat = own.median(contender=contender), own.median(contender=FLAT)
            cells[name] = "-" if mine is None else f"{milliseconds(mine)} ({times(ratio(mine, flat))})"
        body.append(cells)
    return table(body)


def target_table(rows: Rows) -> str:
    """Our flattened steps against the fastest of the other Muons in float32."""
    body = []
    for name in MODELS:
        own = rows.where(section=name, measure=STEP)
        others = {
            row.contender: row.p50 for row in own if row.contender.endswith("float32") and "ours" not in row.contender
        }
        if not others:
            continue
        best = min(others, key=others.__getitem__)
        cells = {"network": name, "fastest other": best, "ms": milliseconds(others[best])}
        for contender in (FLAT, "ours: flatten, rational", OPERATOR):
            cells[contender] = times(ratio(others[best], own.median(contender=contender)))
        body.append(cells)
    return table(body, ("fastest other",))


def flatness_table(rows: Rows) -> str:
    own, body = rows.where(section=FLATNESS), []
    for subject, of_layer in own.by("subject"):
        cells = {"layer": subject}
        for contender in own.names("contender"):
            low, high, most = (of_layer.median(contender=contender, measure=measure) for measure in MEASURES)
            cells[contender] = (
                "-"
                if low is None
                else f"{number(low, '{:.2f}')} to {number(high, '{:.2f}')} ({number(most, '{:.2f}')})"
            )
        body.append(cells)
    return table(body)


def tables(rows: Rows) -> str:
    parts = [steps_table(rows), target_table(rows)] if len(rows.where(measure=STEP)) else []
    parts += [flatness_table(rows)] if len(rows.where(section=FLATNESS)) else []
    return "\n\n".join(parts)


#: Of the model: how often a step reads or writes every element beside its passes and products (momentum, norms, scales,
#: decay, the move itself), launches of that, launches of each shape's products, and the share of the rate they reach.
TRAVERSALS, LAUNCHES, LAUNCHES_PER_SHAPE, EFFICIENCY = 24, 30, 30, 0.4


def modelled_seconds(layers: Sequence[Layer], spec: DeviceSpec, precision: Precision, is_flat: bool) -> float:
    """One optimiser step on a GPU: nothing of it is measured."""
    numbers = sum(prod(layer.shape) * layer.count for layer in layers)
    around = TRAVERSALS * 4 * numbers / spec.bandwidth + LAUNCHES * spec.launch
    if not is_flat:
        return around + 5 * gpu_model.added_seconds(gpu_model.plans_of(layers, spec, precision), spec, precision)
    products = 0.0
    for layer in layers:
        rows, columns = layer.shape[0] // layer.groups, prod(layer.shape[1:])
        small, large = min(rows, columns), max(rows, columns)
        products += 2 * layer.count * layer.groups * (2 * small**2 * large + 17 * small**3)
    shapes = len({(layer.shape[0] // layer.groups, prod(layer.shape[1:])) for layer in layers})
    return around + products / (EFFICIENCY * spec.matmul[precision]) + shapes * LAUNCHES_PER_SHAPE * spec.launch


def modelled_table() -> str:
    body = []
    for name, layers in MODELS.items():
        cells = {"modelled ms, TF32": name}
        for device in ("A100", "H100", "RTX 4090"):
            spec = SPECS[device]
            for mode, is_flat in (("operator", False), ("flatten", True)):
                cells[f"{device}, {mode}"] = milliseconds(modelled_seconds(layers, spec, "tf32", is_flat))
        body.append(cells)
    return table(body)


def where_measured(rows: Rows) -> str:
    timed = list(rows.where(measure=STEP))
    if not timed:
        return "Not measured yet."
    where: Row = timed[0]
    note = disturbed(timed)
    return f"{where.environment}. Medians; in brackets times of `{FLAT}`." + (f" {note}" if note else "")


def with_tables(text: str, rows: Rows) -> str:
    """The page with its tables made anew, each between two comments."""
    made = {
        "flatness": flatness_table(rows),
        "steps": f"{where_measured(rows)}\n\n{steps_table(rows)}",
        "target": target_table(rows),
        "modelled": modelled_table(),
    }
    for which, new in made.items():
        begin, end = f"<!-- {which} table, written by make report -->\n", "\n<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found:
            raise SystemExit(f"error: docs/optimizer.md must have the line {begin.strip()}")
        text = before + begin + "\n" + new + "\n" + end + rest.partition(end)[2]
    return text


def draw(rows: Rows, folder: Path) -> list[Path]:
    return []


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--network", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--only", choices=("steps", "flatness"))
    options = parser.parse_args(arguments)
    harness = Harness(COMMAND, options)
    networks = [] if options.only == "flatness" else options.network
    with harness.progress(len(networks) + (0 if options.only == "steps" else len(LAYERS))):
        for name in networks:
            measure_steps(harness, name)
        if options.only != "steps":
            measure_flatness(harness)
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
