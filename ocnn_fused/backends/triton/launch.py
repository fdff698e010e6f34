"""Runs the kernels: tables from the cache, one workspace, and one launch or at most five."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import sub
from typing import Any, Generic, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from ...plan import Plan
from ..device import beside_all_graphs
from ..epilogue import Epilogue
from . import fields, kernels
from .config import Config, compile_options
from .fields import PassRow
from .tables import STAGES, Layout, Tables, build_tables, to_device

#: Bounds of the caches: a model has a few lists of weights, and tables are at most a few megabytes.
MAX_TABLES = 32
MAX_ADDRESSES = 64

_Value = TypeVar("_Value")

_tables: OrderedDict[Any, _Entry[Tables]] = OrderedDict()
_addresses: OrderedDict[Any, _Entry[Tensor]] = OrderedDict()
_lock = threading.RLock()

#: What captured graphs read, by identity: a graph may be replayed at any time, so it is never freed.
_captured: dict[int, object] = {}


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _is_capturing(device: torch.device) -> bool:
    """Whether the stream that the device's kernels are launched on is; the current device may be another one."""
    with _device_guard(device):
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Entry(Generic[_Value]):
    """Something copied to the device on one stream; other streams wait for the copy, and hold the memory."""

    def __init__(self, value: _Value, tensors: Sequence[Tensor]) -> None:
        self.value = value
        self.tensors = tensors
        stream = _stream(tensors[0].device)
        self.streams = {stream}
        self.copied = stream.record_event() if stream is not None else None

    def use(self) -> _Value:
        """For work on the current stream."""
        device = self.tensors[0].device
        if _is_capturing(device):  # a capture begins when the device is idle, and must not wait for what precedes it
            _captured[id(self)] = self
        elif (stream := _stream(device)) not in self.streams:
            assert stream is not None
            assert self.copied is not None
            stream.wait_event(self.copied)
            for tensor in self.tensors:
                tensor.record_stream(stream)
            self.streams.add(stream)
        return self.value


def _remember(
    cache: OrderedDict[Any, _Entry[_Value]], key: Any, make: Callable[[], _Entry[_Value]], limit: int
) -> _Value:
    """The cached value, or a new one in place of the one used longest ago."""
    with _lock:
        entry = cache.pop(key, None) or make()  # a key is long: it is hashed no more than twice
        cache[key] = entry
        if len(cache) > limit:
            cache.popitem(last=False)
        return entry.use()


def tables_for(
    weights: Sequence[Tensor],
    plans: Sequence[Plan],
    grads: Sequence[bool],
    plane_dtype: torch.dtype,
    config: Config,
    rounded: bool = False,
    passes: tuple[range, ...] | None = None,
) -> Tables:
    """Cached by shapes, strides, dtypes, plans, which gradients are wanted, configuration, device and passes."""
    layouts, device = tuple(map(Layout.of, weights)), weights[0].device

    def build() -> _Entry[Tables]:
        if _is_capturing(device):
            raise RuntimeError(
                "the first call with these weights copies tables to the GPU, which a CUDA graph cannot capture: "
                "call once before the capture, with the same shapes, options and gradients"
            )
        return beside_all_graphs(device, copy)

    def copy() -> _Entry[Tables]:
        tables = build_tables(layouts, plans, grads, plane_dtype, config, device, rounded, passes)
        return _Entry(tables, (tables.table, tables.constants, tables.tiles))

    key = (layouts, tuple(plans), tuple(grads), plane_dtype, config, device, rounded, passes)
    return _remember(_tables, key, build, MAX_TABLES)


def addresses_of(weights: Sequence[Tensor], offsets: Sequence[int] | None = None) -> Tensor:
    """The weights' addresses on their device, minus offsets, as int64; copied again only when one of them changes."""
    device = weights[0].device
    addresses = tuple([weight.data_ptr() for weight in weights])
    if offsets is not None:
        addresses = tuple(map(sub, addresses, offsets))

    def copy() -> _Entry[Tensor]:
        copied = to_device(addresses, torch.int64, device)
        return _Entry(copied, (copied,))

    if _is_capturing(device) and (addresses, device) not in _addresses:
        return _captured_addresses(addresses, device)
    return _remember(_addresses, (addresses, device), partial(beside_all_graphs, device, copy), MAX_ADDRESSES)


def _captured_addresses(addresses: Sequence[int], device: torch.device) -> Tensor:
    """Of weights that the captured graph computes itself: written by the graph, as no host memory outlives it.

    They belong to the graph alone, since nothing is written before it is replayed.
    """
    written = torch.empty(len(addresses), dtype=torch.int64, device=device)
    for place, address in zip(written.unbind(), addresses, strict=True):
        place.fill_(address)
    return written


def clear_caches() -> None:
    with _lock:
        _tables.clear()
        _addresses.clear()


def _device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _own(piece: Tensor) -> Tensor:
    """A piece of a buffer as a tensor in its own right: to autograd it is no view, so it may be changed in place.

    It keeps the buffer, and is known to the allocator as a part of it.
    """
    return piece.data


def kernel_constants(kernel: str, precision: str, config: Config, adds: bool = False) -> dict[str, Any]:
    """The compile-time constants of a kernel, named by its stage or "single"; ``adds``: to gradients that are there."""
    sizes = {name.upper(): getattr(config, name) for name in ("tile", "depth", "rows", "columns", "lanes")}
    sizes |= {"WIDTH": max(config.wide, config.tile), "GATHERED_COLUMNS": config.gathered_columns}
    products = ("ieee", tl.bfloat16) if precision == "bf16" else (precision, tl.float32)
    if kernel == "gather":
        sizes["COLUMNS"] = config.gathered_columns
    values = {"PRECISION": products[0], "PLANE": products[1], "TF32": precision == "tf32", "ADDS": adds, **sizes}
    values["BY_PRODUCTS"] = config.by_products and precision == "tf32"
    taken = getattr(kernels, f"{kernel}_kernel").arg_names
    return {name: value for name, value in values.items() if name in taken}


@lru_cache(maxsize=256)
def _settings(
    kernel: str, precision: str, config: Config, adds: bool, capability: tuple[int, int] | None
) -> dict[str, Any]:
    return {**kernel_constants(kernel, precision, config, adds), **compile_options(kernel, config, capability)}


def can_add(weights: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether gradients can be added where they are computed: targets, if any, lie as fresh gradients would."""
    return all(
        target.data_ptr() % 16 == 0
        and target.dtype == weight.dtype
        and target.shape == weight.shape
        and target.stride() == (weight if weight.is_contiguous() else torch.empty_like(weight, device="meta")).stride()
        for weight, target in zip(weights, targets, strict=False)
    )


def _apart_from_targets(
    weights: Sequence[Tensor], targets: Sequence[Tensor], plans: Sequence[Plan]
) -> Sequence[Tensor]:
    """Weights that can be read as long as the gradients are written.

    Planes are evaluated before anything is written. Where the weight itself serves as planes, and for tiny groups, a
    weight that is its own target is copied.
    """
    return [
        weight.clone()
        if (plan.small or plan.algorithm == "direct" or plan.is_flat) and weight.data_ptr() == target.data_ptr()
        else weight
        for weight, target, plan in zip(weights, targets, plans, strict=True)
    ]


class Call:
    """The memory of one call and its launches. Nothing here waits for the device.

    ``losses`` is float32 ``(len(weights),)``; :meth:`grads` are in their weights' dtypes and memory formats, for all
    weights or for those marked in ``with_grad``. Where an epilogue has targets, they are added to these.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        plans: Sequence[Plan],
        with_grad: bool | Sequence[bool],
        precision: str,
        config: Config,
        epilogue: Epilogue | None = None,
        passes: tuple[range, ...] | None = None,
    ) -> None:
        plane_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.wanted = [with_grad] * len(weights) if isinstance(with_grad, bool) else list(map(bool, with_grad))
        self.tables = tables = tables_for(weights, plans, self.wanted, plane_dtype, config, precision == "tf32", passes)
        self.with_grad = any(self.wanted)
        self.precision = precision
        self.config = config
        self.device = device = weights[0].device
        self.adds = epilogue is not None and bool(epilogue.targets)
        if self.adds:
            weights = _apart_from_targets(weights, epilogue.targets, plans)  # type: ignore[union-attr]
        self.weights = self.targets = addresses_of(weights)
        self.owners = weights  # kept until the launches are issued: the kernels have only addresses
        self.workspace = torch.empty(tables.workspace_bytes, dtype=torch.uint8, device=device)
        self.partials = self.workspace[tables.partials_bytes :].view(torch.float32)
        grads_bytes = 0 if self.adds else tables.grads_bytes
        self.grads_buffer = torch.empty(max(grads_bytes, 16), dtype=torch.uint8, device=device)
        self.scaling: tuple[int, Tensor, float] = (int(self.with_grad), self.workspace[:0].view(torch.float64), 1.0)
        if epilogue is not None:
            self.scaling = (fields.SCALED.value if self.with_grad else 0, epilogue.factors, epilogue.factor)
        if self.adds:
            self.targets = addresses_of(epilogue.targets, tables.grad_bytes)  # type: ignore[union-attr]
        self.losses = torch.empty(tables.count, dtype=torch.float32, device=device)
        nvidia = device.type == "cuda" and torch.version.hip is None
        self.capability = torch.cuda.get_device_capability(device) if nvidia else None

    def settings(self, kernel: str) -> dict[str, Any]:
        """What a kernel, named by its stage or "single", is compiled with."""
        return _settings(kernel, self.precision, self.config, self.adds, self.capability)

    def run(self, programs: int | None = None) -> None:
        """``programs`` is the persistent grid of the single launch; None launches the stages one by one."""
        with _device_guard(self.device):
            if programs is None:
                self.run_staged()
            else:
                arguments, settings = self.single_launch()
                kernels.single_kernel[(programs,)](*arguments, **settings)

    def grads(self) -> list[Tensor]:
        """One tensor per weight, an empty one where no gradient is wanted."""
        layouts = self.tables.grad_layouts
        whole = {dtype: self.grads_buffer.view(dtype) for dtype in {layout.dtype for layout in layouts}}
        grads = []
        for wanted, layout, begin in zip(self.wanted, layouts, self.tables.grad_bytes, strict=True):
            dtype = layout.dtype
            if wanted:
                piece = whole[dtype].as_strided(layout.shape, layout.strides, begin // dtype.itemsize)
                grads.append(_own(piece))
            else:
                grads.append(torch.empty(0, dtype=dtype, device=self.device))
        return grads

    def run_staged(self) -> None:
        # Counts the tiles of each weight that are done. Cleared by the first launch, unless that is gram.
        arrivals = torch.empty(self.tables.count, dtype=torch.int32, device=self.device)
        begin, end = self.tables.passes[0].stage("evaluate")
        if begin == end:
            arrivals.zero_()
        for one in self.tables.passes:
            self.run_pass(one, arrivals)

    def run_pass(self, one: PassRow, arrivals: Tensor) -> None:
        """A launch for each stage that has work."""
        for stage in STAGES:
            tiles = self.tiles_of(one, stage)
            if count := len(tiles):
                arguments = self.stage_arguments(stage, tiles, arrivals)
                getattr(kernels, f"{stage}_kernel")[(count,)](*arguments, **self.settings(stage))

    def tiles_of(self, one: PassRow, stage: str) -> Tensor:
        """The work items of a stage, one for each program."""
        begin, end = one.stage(stage)
        return self.tables.tiles[begin:end]

    def stage_arguments(self, stage: str, tiles: Tensor, arrivals: Tensor) -> tuple[Any, ...]:
        """What a stage's kernel is launched with."""
        t, weights, workspace = self.tables, self.weights, self.workspace
        loss = (self.partials, arrivals, self.losses, t.loss_rows, *self.scaling)
        gradients = (workspace, self.grads_buffer, self.targets)
        if stage == "squares":
            return t.table, tiles, weights, workspace, self.partials
        if stage == "evaluate":
            return t.table, t.constants, tiles, weights, workspace, arrivals, t.count
        if stage == "gram":
            return t.table, tiles, weights, workspace, *loss
        if stage == "mix":
            return t.table, t.constants, tiles, workspace, *loss
        if stage == "apply":
            return t.table, tiles, weights, *gradients
        return t.table, t.constants, tiles, *gradients

    def single_launch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and settings of the one launch; its barrier counter is the only memory that is cleared first."""
        t = self.tables
        arrivals = torch.zeros(1, dtype=torch.int32, device=self.device)
        arguments = (
            t.table, t.constants, t.tiles, self.weights, self.workspace, self.partials, self.grads_buffer, self.targets,
            self.losses, arrivals, *self.scaling, t.pass_rows, len(t.passes), t.loss_rows, t.count,
        )  # fmt: skip
        return arguments, self.settings("single")
