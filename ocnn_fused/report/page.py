"""The report as one HTML file: no script, no font, no image, no request; for paper and screens, dark or light."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from .._version import __version__
from . import svg
from .measure import LayerReport, NetworkReport, comparisons, findings

_FINDINGS = 12
_MAPS = 6

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5a6475; --paper: #fff; --card: #f6f7f9; --rule: #d9dde4;
  --first: #2563a8; --second: #c2540a; --map: #7a1f5c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #a2abba; --paper: #14171d; --card: #1d222b;
  --rule: #39414f; --first: #6db0f2; --second: #f0964f; --map: #f08cc8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 1.5rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: .9rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
p, li { max-width: 75ch; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.key { display: inline-block; width: 1.2em; height: .25em; vertical-align: middle; margin-right: .35em; }
.key.s0 { background: var(--first); } .key.s1 { background: var(--second); } .legend span + span { margin-left: 1.2em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tbody th { font-weight: 500; }
.second { color: var(--second); display: block; }
.compared .first { color: var(--first); display: block; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)); gap: .9rem; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .7rem;
  break-inside: avoid; }
.hint { display: none; margin: 0 0 .4rem; } @media (max-width: 900px) { .hint { display: block; } }
svg { display: block; width: 100%; height: auto; }
svg text { font: 9.5px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: .6; } .one { stroke: var(--soft); stroke-dasharray: 2 3; fill: none; }
.line { fill: none; stroke-width: 1.8; } .line.s0 { stroke: var(--first); } .line.s1 { stroke: var(--second); }
.area { stroke-width: 1.2; fill-opacity: .2; } .area.s0 { stroke: var(--first); fill: var(--first); }
.area.s1 { stroke: var(--second); fill: var(--second); } .map rect { fill: var(--map); }
.edge { fill: none; stroke: var(--rule); }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --card: #fff; --rule: #bbb; --first: #1d4f87;
  --second: #a8480a; --map: #7a1f5c; } body { max-width: none; padding: 0; font-size: 10pt; }
  table { font-size: 7.5pt; } th, td { padding: .15rem .3rem; } .scroll { overflow: visible; } .hint { display: none; }
  h2 { break-after: avoid; } .cards { grid-template-columns: repeat(3, 1fr); } }
"""

#: Columns of the table that can differ between two networks: heading, key, and how a person reads the value.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("largest", "largest", "{:.2f}".format),
    ("median", "median", "{:.2f}".format),
    ("smallest", "smallest", lambda value: f"{value:.2g}" if value < 0.1 else f"{value:.2f}"),
    ("within 10% of 1", "near_one", "{:.0%}".format),
    ("loss above least", "above_least", lambda value: f"{value:.2g}" if value < 0.1 else f"{value:,.1f}"),
    ("filter similarity", "similarity", "{:.2f}".format),
    ("dead filters", "dead", lambda value: str(len(value))),
)
_GEOMETRY = ("shape", "stride", "input")
_CSV_KEYS = (
    "name", "kind", "shape", "stride", "groups", "input_size", "loss", "least_loss", "above_least", "largest",
    "largest_at", "smallest", "smallest_at", "median", "near_one", "effective_rank", "values", "similarity", "dead",
)  # fmt: skip


def as_html(networks: Sequence[NetworkReport], paper_similarity: bool) -> str:
    """Of one network, or of two that are compared layer by layer."""
    first = networks[0]
    title = " and ".join(network.title for network in networks)
    compared = len(networks) == 2
    rows = [[network.layers.get(name) for network in networks] for name in _names(networks)]
    sentences = comparisons(*networks) if compared else findings(first)
    body = [
        f"<h1>Orthogonality of {escape(title)}</h1>",
        f'<p class="soft">{len(rows)} layers, as circular convolutions; made by ocnn_fused {__version__}.</p>',
        _legend(networks) if compared else "",
        "<h2>What stands out</h2>",
        _list(sentences[:_FINDINGS], len(sentences)),
        "<h2>Layers</h2>",
        _table(rows, compared),
        _notes(paper_similarity, networks),
        "<h2>Singular values</h2>",
        "<p>Sorted, the largest first. An orthogonal layer is a flat line at 1: it keeps the length of its input.</p>",
        _legend(networks) if compared else "",
        _cards([_card(_any(row), svg.curves, "singular values", _series(row, "curve")) for row in rows]),
        "<h2>Similarity of filters</h2>",
        "<p>How the correlations of two filters of a layer are spread; orthogonal filters stay close to 0.</p>",
        _cards([_card(_any(row), svg.histogram, "filter similarity", _series(row, "histogram")) for row in rows]),
        _maps(networks),
        _left_out(networks),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Orthogonality of {escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f'<body class="{"compared" if compared else "single"}">\n'
        + "\n".join(filter(None, body))
        + "\n</body>\n</html>\n"
    )


def as_json(networks: Sequence[NetworkReport]) -> str:
    """Everything that the report shows, and all findings."""
    content = {
        "version": __version__,
        "networks": [
            {
                "title": network.title,
                "findings": findings(network),
                "left_out": network.left_out,
                "layers": [layer.as_json() for layer in network.layers.values()],
            }
            for network in networks
        ],
        "comparison": comparisons(*networks) if len(networks) == 2 else [],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def as_csv(networks: Sequence[NetworkReport]) -> str:
    """The table, one row per network and layer."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("network", *_CSV_KEYS))
    for network in networks:
        for layer in network.layers.values():
            content = layer.as_json()
            cells = [content[key] for key in _CSV_KEYS]
            joined = ["x".join(map(str, cell)) if isinstance(cell, tuple) else cell for cell in cells]
            joined[-1] = len(layer.dead)
            writer.writerow((network.title, *joined))
    return text.getvalue()


def _names(networks: Sequence[NetworkReport]) -> list[str]:
    """Of the layers of any network, in the order of the first that has them."""
    return list(dict.fromkeys(name for network in networks for name in network.layers))


def _any(row: Sequence[LayerReport | None]) -> LayerReport:
    return next(layer for layer in row if layer is not None)


def _series(row: Sequence[LayerReport | None], key: str) -> list[Sequence[float]]:
    """One per network; a layer that a network lacks has the other's place only."""
    return [getattr(layer, key) if layer is not None else (0.0,) for layer in row]


def _legend(networks: Sequence[NetworkReport]) -> str:
    keys = [f'<span><i class="key s{index}"></i>{escape(net.title)}</span>' for index, net in enumerate(networks)]
    return f'<p class="legend">{"".join(keys)}</p>'


def _list(sentences: Sequence[str], total: int) -> str:
    if not sentences:
        return "<p>Nothing: no singular value near zero or above 2, no dead filter, no layer near orthogonality.</p>"
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    more = f'<p class="soft">{total - len(sentences)} more in the JSON file.</p>' if total > len(sentences) else ""
    return f'<ul class="findings">{items}</ul>{more}'


def _table(rows: Sequence[Sequence[LayerReport | None]], compared: bool) -> str:
    names = ("layer", *(head for head, _, _ in _COLUMNS), *_GEOMETRY)
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in names)
    lines = []
    for row in rows:
        layer = _any(row)
        groups = f" /{layer.groups}" if layer.groups > 1 else ""
        cells = [_times(layer.shape) + groups, _times(layer.stride), _times(layer.input_size)]
        lines.append(
            f'<tr><th scope="row">{escape(layer.name)}</th>'
            + "".join(f"<td>{_both(row, key, form, compared)}</td>" for _, key, form in _COLUMNS)
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<p class="soft hint">The table goes on to the right.</p><div class="scroll">{table}</div>'


def _both(row: Sequence[LayerReport | None], key: str, form: Callable[[Any], str], compared: bool) -> str:
    texts = ["–" if layer is None else form(getattr(layer, key)) for layer in row]
    if not compared:
        return texts[0]
    return f'<span class="first">{texts[0]}</span><span class="second">{texts[1]}</span>'


def _times(numbers: Sequence[int]) -> str:
    return "×".join(map(str, numbers)) or "–"


def _notes(paper_similarity: bool, networks: Sequence[NetworkReport]) -> str:
    similarity = (
        "correlation of two filters' guided back-propagation patterns"
        if paper_similarity
        else "correlation of two filters' weights"
    )
    grouped = any(layer.groups > 1 for network in networks for layer in network.layers.values())
    shape = "Shape is filters × channels × kernel" + (" / groups. " if grouped else ". ")
    return (
        f'<p class="soft">{shape}Loss above least: the orthogonality loss less the smallest value that any weight of '
        f"this shape can have. Largest, median, smallest: of the layer's singular values. Filter similarity: mean "
        f"absolute {similarity}. A dead filter is shorter than a thousandth of the longest.</p>"
    )


def _card(layer: LayerReport, draw: svg.Draw, what: str, series: Sequence[Sequence[float]]) -> str:
    figure = draw(f"{layer.name}: {what}", series)
    return f'<div class="card"><h3>{escape(layer.name)}</h3>{figure}</div>'


def _cards(cards: Sequence[str]) -> str:
    return f'<div class="cards">{"".join(cards)}</div>'


def _maps(networks: Sequence[NetworkReport]) -> str:
    """Of the layers with the largest loss per filter, all networks on the same scale."""
    first = networks[0].layers.values()
    worst = sorted(
        (layer for layer in first if layer.excess and len(layer.excess[0]) > 1),
        key=lambda layer: -layer.above_least / layer.shape[0],
    )[:_MAPS]
    cards = []
    for layer in worst:
        pair = [(network, network.layers[layer.name]) for network in networks if layer.name in network.layers]
        top = max(max(max(row) for row in found.excess) for _, found in pair)
        for network, found in pair:
            head = layer.name if len(networks) == 1 else f"{layer.name}, {network.title}"
            figure = svg.heat_map(f"{head}: loss by frequency", found.excess, top)
            cards.append(f'<div class="card"><h3>{escape(head)}</h3>{figure}</div>')
    if not cards:
        return ""
    return (
        "<h2>Where the loss is</h2><p>The layers with the largest loss per filter. The middle of a map is constant "
        "input, its edges are the highest frequencies; the fuller the colour, the more of the loss is there.</p>"
        + _cards(cards)
    )


def _left_out(networks: Sequence[NetworkReport]) -> str:
    reasons = [
        f"<li>{escape(network.title)}, {escape(name)}: {escape(reason)}</li>"
        for network in networks
        for name, reason in network.left_out.items()
    ]
    return f"<h2>Left out</h2><ul>{''.join(reasons)}</ul>" if reasons else ""
