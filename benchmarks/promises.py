"""What should hold of the kept rows, and whether it does: the first table of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import compare
import contention
import latency
import memory
import peers
import scaling
from contenders import FUSED, FUSED_KERNEL, KERNEL, ONE_BY_ONE, REFERENCE
from record import Rows
from shapes import NETWORK_RATIOS
from tables import markdown, ratio

Kept = Mapping[str, Rows]  # by command


@dataclass(frozen=True)
class Promise:
    """One sentence, what is wanted of it, and what was found."""

    what: str
    wanted: str
    found: str
    holds: bool | None  # None: not measured


def _at_least(what: str, limit: float, value: float | None) -> Promise:
    found = "" if value is None else f"{value:.2f}x"
    return Promise(what, f"at least {limit:g}x", found, None if value is None else value >= limit)


def _at_most(what: str, limit: float, value: float | None, unit: str) -> Promise:
    found = "" if value is None else f"{value:.3g}{unit}"
    return Promise(what, f"at most {limit:g}{unit}", found, None if value is None else value <= limit)


def _every(what: str, exceptions: list[str], count: int) -> Promise:
    """Of ``count`` rows."""
    found = f"not in {'; '.join(exceptions)}" if exceptions else f"in all {count}"
    return Promise(what, "every row", found if count else "", not exceptions if count else None)


def _over(rows: Rows, numerator: str, denominator: str) -> float | None:
    return ratio(rows.median(contender=numerator), rows.median(contender=denominator))


def _of_networks(kept: Kept) -> Iterator[Promise]:
    compared = kept["compare"]
    for network, target in NETWORK_RATIOS.items():
        whole = compared.where(section=network, subject=network, measure=compare.BOTH)
        yield _at_least(f"{network}, one call: reference / fused", target, _over(whole, REFERENCE, FUSED))
    slower, slower_kernels, rows = [], [], 0
    for network in NETWORK_RATIOS:
        section = compared.where(section=network, measure=compare.BOTH)
        for subject, own in section.by("subject"):
            rows += 1
            if (winner := compare.fastest_exact(own)) != FUSED:
                slower.append(f"{network} {subject} ({winner} by {_over(own, FUSED, winner):.2f}x)")
            kernels = _over(own, KERNEL, FUSED_KERNEL)
            if kernels is not None and kernels < 1:
                slower_kernels.append(f"{network} {subject} ({kernels:.2f}x)")
    yield _every("fused is the fastest exact contender", slower, rows)
    yield _every("our kernel orthogonality is faster than the plain one", slower_kernels, rows)
    whole = compared.where(section="resnet34", subject="resnet34", measure=compare.BOTH)
    yield _at_most("resnet34: all lags / plain kernel orthogonality", 1.6, _over(whole, FUSED, KERNEL), "x")
    loss = compared.where(section="resnet34", subject="resnet34", measure=compare.LOSS)
    yield _at_least("resnet34, loss only: the reference's forward / fused", 10, _over(loss, REFERENCE, FUSED))
    small = compared.where(section=compare.FOREACH, measure=compare.BOTH)
    yield _at_least("50 small layers: 50 reference calls / one call", 5, _over(small, REFERENCE, FUSED))
    yield _at_least("50 small layers: 50 fused calls / one call", 1.3, _over(small, ONE_BY_ONE, FUSED))


def _of_threads(kept: Kept) -> Iterator[Promise]:
    for layer in scaling.THREAD_LAYERS:
        own = kept["scaling"].where(section=scaling.THREADS, subject=layer.label)
        value = _over(own, f"{FUSED}, 1", f"{FUSED}, 2")
        yield _at_least(f"{layer.label}: one thread / two threads", scaling.THREAD_TARGET, value)


def _of_neighbours(kept: Kept) -> Iterator[Promise]:
    for name, limit in contention.SLOWER.items():
        yield _at_most(f"{name}, disturbed / quiet", limit, contention.slower(kept["contention"], name), "x")
        ahead = contention.ahead(kept["contention"], name, contention.DISTURBED)
        yield _at_least(f"{name}, both disturbed: reference / fused", contention.AHEAD, ahead)


def _of_fixed_costs(kept: Kept) -> Iterator[Promise]:
    for section, limit in latency.TARGETS.items():
        for row in latency.judged(kept["latency"].where(section=section)):
            yield _at_most(f"{section}, {row.subject}", limit * 1e3, row.p50 * 1e3, " ms")


def _of_memory(kept: Kept) -> Iterator[Promise]:
    own = kept["memory"].where(subject=memory.LARGEST.label)
    yield _at_most(
        f"memory of {memory.LARGEST.label}: fused / reference", memory.TARGET, _over(own, FUSED, REFERENCE), "x"
    )
    huge = kept["memory"].get(subject=memory.HUGE.label, contender=FUSED)
    value = None if huge is None else huge.p50 / huge.details["weight_bytes"]
    yield _at_most(f"memory of {memory.HUGE.label}, its gradient included / weight", memory.HUGE_TARGET, value, "x")


def _of_peers(kept: Kept) -> Iterator[Promise]:
    for section in kept["peers"].names("section")[-1:]:
        added = kept["peers"].where(section=section, measure=peers.ADDED)
        ours = added.median(contender=peers.IN_LOSS)
        hard = [row for row in added if not row.details["ours"] and row.contender != peers.PLAIN]
        cheaper = [
            f"{row.contender} ({row.p50 * 1e3:+.1f} ms, ours {(ours or 0) * 1e3:+.1f} ms)"
            for row in hard
            if ours is None or row.p50 <= ours
        ]
        yield _every("reg() adds less to a training step than hard layers", cheaper, len(hard))


def promises(kept: Kept) -> list[Promise]:
    parts = (_of_networks, _of_threads, _of_neighbours, _of_fixed_costs, _of_memory, _of_peers)
    return [promise for part in parts for promise in part(kept)]


def table(kept: Kept) -> str:
    verdicts = {True: "holds", False: "**does not hold**", None: "not measured"}
    body = [[one.what, one.wanted, one.found, verdicts[one.holds]] for one in promises(kept)]
    return markdown(["what", "wanted", "measured", "verdict"], body, (0, 1, 2, 3))
