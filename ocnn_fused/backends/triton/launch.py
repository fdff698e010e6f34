"""Runs the kernels: tables from the cache, one workspace, and one launch or at most five."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from ...plan import Plan
from . import kernels
from .config import ELEMENTWISE_STAGES, ELEMENTWISE_WARPS, MOST_REGISTERS, Config, mix_registers
from .tables import Layout, Tables, build_tables

#: Bounds of the caches: a model has a few lists of weights, and tables are at most a few megabytes.
MAX_TABLES = 32
MAX_ADDRESSES = 64

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_tables: OrderedDict[Any, Tables] = OrderedDict()
_addresses: OrderedDict[Any, Tensor] = OrderedDict()


def _remember(cache: OrderedDict[_Key, _Value], key: _Key, make: Callable[[], _Value], limit: int) -> _Value:
    """The cached value, or a new one in place of the one used longest ago."""
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    value = cache[key] = make()
    if len(cache) > limit:
        cache.popitem(last=False)
    return value


def tables_for(weights: Sequence[Tensor], plans: Sequence[Plan], plane_dtype: torch.dtype, config: Config) -> Tables:
    """Cached by shapes, strides, dtypes, plans, configuration and device."""
    layouts, device = tuple(map(Layout.of, weights)), weights[0].device
    key = (layouts, tuple(plans), plane_dtype, config, device)
    return _remember(_tables, key, lambda: build_tables(layouts, plans, plane_dtype, config, device), MAX_TABLES)


def addresses_of(weights: Sequence[Tensor]) -> Tensor:
    """The weights' addresses on their device, as int64; copied again only when one of them changes."""
    device = weights[0].device
    addresses = tuple(weight.data_ptr() for weight in weights)

    def copy() -> Tensor:
        host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    return _remember(_addresses, (addresses, device), copy, MAX_ADDRESSES)


def clear_caches() -> None:
    _tables.clear()
    _addresses.clear()


def _device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _own(piece: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own, which keeps the buffer that it is a piece of.

    An op must not return tensors that share a storage, and one buffer for all lets the tables hold offsets into it.
    """
    return from_dlpack(to_dlpack(piece))


class Call:
    """The memory of one call and its launches. Nothing here waits for the device.

    ``losses`` is float32 ``(len(weights),)``; :meth:`grads` are in their weights' dtypes and memory formats.
    """

    def __init__(
        self, weights: Sequence[Tensor], plans: Sequence[Plan], with_grad: bool, precision: str, config: Config
    ) -> None:
        bf16 = precision == "bf16"
        self.tables = tables = tables_for(weights, plans, torch.bfloat16 if bf16 else torch.float32, config)
        self.with_grad = with_grad
        self.precision = precision
        self.config = config
        self.device = device = weights[0].device
        self.weights = addresses_of(weights)
        self.owners = weights  # kept until the launches are issued: the kernels have only addresses
        self.dtypes = [weight.dtype for weight in weights]
        self.workspace = torch.empty(tables.workspace_bytes, dtype=torch.uint8, device=device)
        self.partials = self.workspace[tables.partials_bytes :].view(torch.float32)
        self.grads_buffer = torch.empty(tables.grads_bytes if with_grad else 1, dtype=torch.uint8, device=device)
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
        """One tensor per weight."""
        if not self.with_grad:
            return []
        grads = []
        for dtype, layout, begin in zip(self.dtypes, self.tables.grad_layouts, self.tables.grad_bytes, strict=True):
            piece = self.grads_buffer[begin : begin + layout.bytes].view(dtype)
            grads.append(_own(piece.as_strided(layout.shape, layout.strides)))
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
        if self.with_grad and (tiles := self._tiles("apply")):
            kernels.apply_kernel[(tiles[0],)](
                t.table, tiles[1], self.weights, workspace, grads, **self.product, **self.options
            )
        if self.with_grad and (tiles := self._tiles("gather")):
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
        evaluate, gram, mix, apply, gather = t.ends
        if not self.with_grad:
            apply = gather = mix
        arrivals = torch.zeros(1, dtype=torch.int32, device=self.device)
        arguments = (
            t.table, t.constants, t.tiles, self.weights, self.workspace, self.partials, self.grads_buffer, self.losses,
            arrivals, int(self.with_grad), evaluate, gram, mix, apply, gather, t.loss_rows, t.count,
        )  # fmt: skip
        return arguments, {**self.product, **self.elements, **self.options, "launch_cooperative_grid": True}
