"""How the kernels are configured: precision of the products, tile sizes, and when one launch is better than five."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..precision import matmul_precision

Precision = Literal["ieee", "tf32x3", "tf32", "bf16"]
Launch = Literal["auto", "single", "staged"]

PRECISIONS: tuple[str, ...] = get_args(Precision)
LAUNCHES: tuple[str, ...] = get_args(Launch)

#: What ``torch.set_float32_matmul_precision`` asks for.
_BY_TORCH_SETTING: dict[str, Precision] = {"highest": "ieee", "high": "tf32", "medium": "bf16"}


@dataclass(frozen=True)
class Config:
    """Tile sizes of one launch; all are compile-time constants of the kernels.

    ``block`` x ``block`` entries of a product are one work item, over ``depth`` of the contraction at a time. evaluate
    and gather take ``rows`` x ``columns`` elements with all their taps; tiny groups and the loss ``lanes`` entries.
    """

    block: int = 64
    depth: int = 32
    warps: int = 4
    stages: int = 3
    rows: int = 4
    columns: int = 32
    lanes: int = 128


SMALL_TILES = Config()
LARGE_TILES = Config(block=128, warps=8, stages=2)

#: Every configuration that is ever chosen without being asked for, per precision, as `make gpu-check` found them to be
#: free of spills on every architecture. Products in (nearly) full float32 hold more operands in registers, so their
#: tiles are shallower, and in `ieee` spread over more warps; in `tf32x3` 8 warps would compute a 64 x 64 tile twice.
#: Large tiles are buffered twice, since three times exceeds the shared memory of sm_86, sm_89 and sm_120.
SHIPPED: dict[str, tuple[Config, ...]] = {
    "ieee": (Config(depth=16, warps=8),),
    "tf32x3": (Config(depth=16, stages=2),),
    "tf32": (SMALL_TILES, LARGE_TILES),
    "bf16": (SMALL_TILES, LARGE_TILES),
}

#: The same for AMD, where `ieee` is done by matrix instructions.
SHIPPED_AMD: dict[str, tuple[Config, ...]] = {
    "ieee": (Config(depth=16),),
    "bf16": (SMALL_TILES, LARGE_TILES),
}

#: Registers per thread that the product kernels may have on NVIDIA: all. Left to itself the assembler may aim for more
#: programs per multiprocessor and spill for it.
MOST_REGISTERS = 255


def mix_registers(capability: tuple[int, int]) -> int:
    """Registers per thread of the mix kernel on NVIDIA: as few as let three programs share a multiprocessor.

    The stage is bound by memory, so programs in flight are what it needs. On sm_80 so few would spill.
    """
    return 176 if capability == (8, 0) else 168


#: Numbers of outputs that the mix stage holds at once; it is compiled for each of them.
MIX_SIZES = (16, 32, 64)

#: Of the stages that are no products, whatever the tiles of the products; their own tiles hold 4096 values.
ELEMENTWISE_WARPS, ELEMENTWISE_STAGES = 4, 3


def resolve_precision(precision: str | None) -> Precision:
    """The precision asked for, or what torch's own setting means."""
    if precision is None:
        return _BY_TORCH_SETTING[matmul_precision()]
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    return precision  # type: ignore[return-value]


def check_launch(launch: str) -> None:
    if launch not in LAUNCHES:
        raise ValueError(f"launch must be one of {', '.join(map(repr, LAUNCHES))}, got {launch!r}")


def single_config(configs: tuple[Config, ...]) -> Config:
    """The smallest tiles, shallow and buffered twice: the single kernel has little work and no registers to spare."""
    return replace(configs[0], depth=16, stages=2)


def choose_config(configs: tuple[Config, ...], large_tiles: int, multiprocessors: int) -> Config:
    """Large tiles move fewer bytes per product; they are taken when two of them per multiprocessor keep all busy.

    ``large_tiles`` counts the work items that the gram stage would have with the largest configuration.
    """
    return configs[-1] if large_tiles >= 2 * multiprocessors else configs[0]
