"""A report of any network: what its layers do to their inputs, as one HTML file with JSON and CSV beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from ..modules import unwrap
from .checkpoint import CheckpointError, load_checkpoint, read_state_dict
from .measure import LayerReport, NetworkReport, comparisons, findings, measure
from .page import as_csv, as_html, as_json

__all__ = [
    "CheckpointError",
    "LayerReport",
    "NetworkReport",
    "comparisons",
    "findings",
    "load_checkpoint",
    "measure",
    "read_state_dict",
    "report",
    "write",
]


def report(
    model: nn.Module,
    input_shape: Iterable[int] | Tensor,
    out: str | Path | None = None,
    *,
    compare: nn.Module | None = None,
    titles: tuple[str, str] | None = None,
    layers: Iterable[str] | None = None,
    images: Tensor | None = None,
    progress: bool = False,
) -> list[NetworkReport]:
    """Look at a model, or at two side by side, and write ``out`` (.html) with a .json and a .csv file beside it.

    Args:
        model: with Linear, convolution and transposed convolution layers; each is looked at as a circular layer of the
            size at which the input reaches it, rounded up to a multiple of its stride.
        input_shape: of one input, such as (3, 224, 224), or a batch of inputs.
        out: the HTML file; None writes nothing.
        compare: a second model with layers of the same names, such as the one trained with the regulariser.
        titles: what the two are called.
        layers: names of layers; default all.
        images: a batch for filter similarity by guided back-propagation, as in the paper; without it the correlation
            of the weights is taken.

    Returns:
        The numbers, one :class:`NetworkReport` per model.
    """
    models = [model] if compare is None else [model, compare]
    named = titles or (type(unwrap(model)).__name__, "compared")
    wanted = None if layers is None else list(layers)
    shape = input_shape if isinstance(input_shape, Tensor) else tuple(input_shape)
    networks = [
        measure(part, shape, title=title, layers=wanted, images=images, progress=progress)
        for part, title in zip(models, named, strict=False)
    ]
    if out is not None:
        write(networks, out, paper_similarity=images is not None)
    return networks


def write(networks: list[NetworkReport], out: str | Path, *, paper_similarity: bool = False) -> tuple[Path, Path, Path]:
    """The HTML file, and the JSON and CSV files beside it; returns the three paths."""
    page = Path(out)
    texts = {
        page: as_html(networks, paper_similarity),
        page.with_suffix(".json"): as_json(networks),
        page.with_suffix(".csv"): as_csv(networks),
    }
    if len(texts) < 3:
        raise ValueError(f"out must be the name of the HTML file, got {page}")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return page, page.with_suffix(".json"), page.with_suffix(".csv")
