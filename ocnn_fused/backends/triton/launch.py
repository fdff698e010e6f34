"""Runs the kernels: tables from the cache, one workspace, and one launch or at most five."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from ...plan import Plan
from . import kernels
from .config import ELEMENTWISE_STAGES, ELEMENTWISE_WARPS, MOST_REGISTERS, Config, mix_registers
from .tables import Layout, Tables, build_tables

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
        if key in cache:
            cache.move_to_end(key)
        else:
            cache[key] = make()
            if len(cache) > limit:
                cache.popitem(last=False)
        return cache[key].use()


def tables_for(
    weights: Sequence[Tensor], plans: Sequence[Plan], grads: Sequence[bool], plane_dtype: torch.dtype, config: Config
) -> Tables:
    """Cached by shapes, strides, dtypes, plans, which gradients are wanted, configuration and device."""
    layouts, device = tuple(map(Layout.of, weights)), weights[0].device

    def build() -> _Entry[Tables]:
        if _is_capturing(device):
            raise RuntimeError(
                "the first call with these weights copies tables to the GPU, which a CUDA graph cannot capture: "
                "call once before the capture, with the same shapes, options and gradients"
            )
        tables = build_tables(layouts, plans, grads, plane_dtype, config, device)
        return _Entry(tables, (tables.table, tables.constants, tables.tiles))

    key = (layouts, tuple(plans), tuple(grads), plane_dtype, config, device)
    return _remember(_tables, key, build, MAX_TABLES)


def addresses_of(weights: Sequence[Tensor]) -> Tensor:
    """The weights' addresses on their device, as int64; copied again only when one of them changes."""
    device = weights[0].device
    addresses = tuple(weight.data_ptr() for weight in weights)

    def copy() -> _Entry[Tensor]:
        host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
        copied = host.to(device, non_blocking=True)
        return _Entry(copied, (copied,))

    if _is_capturing(device) and (addresses, device) not in _addresses:
        return _captured_addresses(addresses, device)
    return _remember(_addresses, (addresses, device), copy, MAX_ADDRESSES)


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


class Call:
    """The memory of one call and its launches. Nothing here waits for the device.

    ``losses`` is float32 ``(len(weights),)``; :meth:`grads` are in their weights' dtypes and memory formats, for all
    weights or for those marked in ``with_grad``.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        plans: Sequence[Plan],
        with_grad: bool | Sequence[bool],
        precision: str,
        config: Config,
    ) -> None:
        bf16 = precision == "bf16"
        self.wanted = [with_grad] * len(weights) if isinstance(with_grad, bool) else list(map(bool, with_grad))
        self.tables = tables = tables_for(
            weights, plans, self.wanted, torch.bfloat16 if bf16 else torch.float32, config
        )
        self.with_grad = any(self.wanted)
        self.precision = precision
        self.config = config
        self.device = device = weights[0].device
        self.weights = addresses_of(weights)
        self.owners = weights  # kept until the launches are issued: the kernels have only addresses
        self.dtypes = [weight.dtype for weight in weights]
        self.workspace = torch.empty(tables.workspace_bytes, dtype=torch.uint8, device=device)
        self.partials = self.workspace[tables.partials_bytes :].view(torch.float32)
        self.grads_buffer = torch.empty(max(1, tables.grads_bytes), dtype=torch.uint8, device=device)
        self.losses = torch.empty(tables.count, dtype=torch.float32, device=device)
        self.plane = {"PLANE": tl.bfloat16 if bf16 else tl.float32}
        self.product = {
            **self.plane,
            "PRECISION": "ieee" if bf16 else precision,
            "BLOCK": config.block,
            "DEPTH": config.depth,
            "LANES": config.lanes,
        }
        self.elements = {"ROWS": config.rows, "COLUMNS": config.columns}
        # A product and its sum are rounded once; without this the default would depend on the version of Triton.
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
        self.elementwise = {**self.options, "num_warps": ELEMENTWISE_WARPS, "num_stages": ELEMENTWISE_STAGES}
        self.mix = self.elementwise
        if torch.version.hip is None and device.type == "cuda":
            self.options["maxnreg"] = MOST_REGISTERS
            self.mix = {**self.mix, "maxnreg": mix_registers(torch.cuda.get_device_capability(device))}

    def run(self, programs: int | None = None) -> None:
        """``programs`` is the persistent grid of the single launch; None launches the stages one by one."""
        with _device_guard(self.device):
            if programs is None:
                self.run_staged()
            else:
                self.run_single(programs)

    def loss_of_each(self) -> list[Tensor]:
        """``losses`` as 0-dim tensors."""
        return [_own(loss) for loss in self.losses.unbind()]

    def grads(self) -> list[Tensor]:
        """One tensor per weight, an empty one where no gradient is wanted."""
        grads = []
        pieces = zip(self.wanted, self.dtypes, self.tables.grad_layouts, self.tables.grad_bytes, strict=True)
        for wanted, dtype, layout, begin in pieces:
            if wanted:
                piece = self.grads_buffer[begin : begin + layout.bytes].view(dtype)
                grads.append(_own(piece.as_strided(layout.shape, layout.strides)))
            else:
                grads.append(torch.empty(0, dtype=dtype, device=self.device))
        return grads

    def run_staged(self) -> None:
        t, workspace, grads = self.tables, self.workspace, self.grads_buffer
        # Counts the tiles of each weight that are done. Cleared by the first launch where another one precedes gram.
        arrivals = torch.empty(t.count, dtype=torch.int32, device=self.device)
        loss = (self.partials, arrivals, self.losses, t.loss_rows, int(self.with_grad))
        lanes = {"LANES": self.config.lanes}
        if tiles := self._tiles("evaluate"):
            kernels.evaluate_kernel[(tiles[0],)](
                t.table,
                t.constants,
                tiles[1],
                self.weights,
                workspace,
                arrivals,
                t.count,
                **self.plane,
                **self.elements,
                **self.elementwise,
            )
        else:
            arrivals.zero_()
        if tiles := self._tiles("gram"):
            kernels.gram_kernel[(tiles[0],)](
                t.table, tiles[1], self.weights, workspace, *loss, **self.product, **self.options
            )
        if tiles := self._tiles("mix"):
            kernels.mix_kernel[(tiles[0],)](t.table, t.constants, tiles[1], workspace, *loss, **lanes, **self.mix)
        if tiles := self._tiles("apply"):
            kernels.apply_kernel[(tiles[0],)](
                t.table, tiles[1], self.weights, workspace, grads, **self.product, **self.options
            )
        if tiles := self._tiles("gather"):
            kernels.gather_kernel[(tiles[0],)](
                t.table, t.constants, tiles[1], workspace, grads, **self.elements, **self.elementwise
            )

    def _tiles(self, stage: str) -> tuple[int, Tensor] | None:
        begin, end = self.tables.stage(stage)
        return (end - begin, self.tables.tiles[begin:end]) if end > begin else None

    def run_single(self, programs: int) -> None:
        arguments, options = self.single_launch()
        kernels.single_kernel[(programs,)](*arguments, **options)

    def single_launch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and options of the one launch; its barrier counter is the only memory that is cleared first."""
        t = self.tables
        arrivals = torch.zeros(1, dtype=torch.int32, device=self.device)
        arguments = (
            t.table, t.constants, t.tiles, self.weights, self.workspace, self.partials, self.grads_buffer, self.losses,
            arrivals, int(self.with_grad), *t.ends, t.loss_rows, t.count,
        )  # fmt: skip
        return arguments, {**self.product, **self.elements, **self.options, "launch_cooperative_grid": True}
