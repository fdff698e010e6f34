"""How the kernels are configured: tile sizes, registers, and when one launch is better than five."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ...plan import Plan
from ...problem import Precision
from ..device import DeviceSpec
from ..model import plan_seconds


@dataclass(frozen=True)
class Config:
    """Tile sizes of one launch; all are compile-time constants of the kernels.

    ``tile`` x ``tile`` entries of a product are one work item, over ``depth`` of the contraction at a time; ``tile`` x
    ``wide``, unless that is 0, where nothing but the product is to be done. evaluate
    takes ``rows`` x ``columns`` elements with all their taps, gather ``rows`` x ``gathered_columns``: with more of them
    a thread has more sums to a coefficient, and fewer registers left. Tiny groups and the loss take ``lanes`` entries.
    ``by_products``: in TF32 evaluate, mix and gather use matrix instructions too, on high and low bits.
    """

    tile: int = 64
    wide: int = 0
    depth: int = 32
    warps: int = 4
    stages: int = 3
    rows: int = 4
    columns: int = 128
    gathered_columns: int = 64
    lanes: int = 128
    by_products: bool = False


SMALL_TILES = Config()
LARGE_TILES = Config(tile=128, warps=8, stages=2)
WIDE_TILES = Config(tile=128, wide=256, depth=16, warps=8, stages=3)

#: Every configuration that is ever chosen without being asked for, per precision, as `make gpu-check` found them to be
#: free of spills on every architecture. Products in (nearly) full float32 hold more operands in registers, so their
#: tiles are shallower, and in `ieee` spread over more warps; in `tf32x3` 8 warps would compute a 64 x 64 tile twice.
#: Large tiles are buffered twice, since three times exceeds the shared memory of sm_86, sm_89 and sm_120.
SHIPPED: dict[Precision, tuple[Config, ...]] = {
    "ieee": (Config(depth=16, warps=8),),
    "tf32x3": (Config(depth=16, stages=2),),
    "tf32": (SMALL_TILES, LARGE_TILES),
    "bf16": (SMALL_TILES, LARGE_TILES),
}

#: Where matrix instructions are many times faster than others, evaluate, mix and gather use them as well.
SHIPPED_BY_PRODUCTS: dict[Precision, tuple[Config, ...]] = {
    **SHIPPED,
    "tf32": tuple(replace(config, by_products=True) for config in SHIPPED["tf32"]),
}

#: With the product rate of sm_90 tiles also wait for the L2 cache: wide ones read a quarter less. They need more shared
#: memory than sm_86, sm_89 and sm_120 have.
SHIPPED_HOPPER: dict[Precision, tuple[Config, ...]] = {
    **SHIPPED,
    "tf32": (*SHIPPED_BY_PRODUCTS["tf32"], replace(WIDE_TILES, by_products=True)),
    "bf16": (*SHIPPED["bf16"], WIDE_TILES),
}

#: The same for AMD, where `ieee` is done by matrix instructions.
SHIPPED_AMD: dict[Precision, tuple[Config, ...]] = {
    "ieee": (Config(depth=16),),
    "bf16": (SMALL_TILES, LARGE_TILES),
}


def shipped(spec: DeviceSpec) -> dict[Precision, tuple[Config, ...]]:
    """The device's configurations, by precision.

    With some versions of triton large tiles would spill on NVIDIA, and are shallower: with 3.3 in apply, and then there
    are neither wide ones nor matrix instructions in evaluate, mix and gather; since 3.9 in gram for sm_120.
    """
    if spec.is_amd:
        return SHIPPED_AMD
    if _spills_early():
        return _with_shallow_tiles(SHIPPED)
    if spec.has_wide_tiles:
        return SHIPPED_HOPPER
    if spec.has_fast_products:
        return SHIPPED_BY_PRODUCTS
    return SHIPPED if _triton_version() < (3, 9) else _with_shallow_tiles(SHIPPED)


def _with_shallow_tiles(every: dict[Precision, tuple[Config, ...]]) -> dict[Precision, tuple[Config, ...]]:
    return {
        precision: tuple(replace(config, depth=16) if config.tile > 64 else config for config in configs)
        for precision, configs in every.items()
    }


#: Numbers of outputs that the mix stage holds at once; it is compiled for each of them.
MIX_SIZES = (16, 32, 64)


@cache
def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def _spills_early() -> bool:
    """Whether the compiler is that of triton 3.3, which needs a few registers more for the same kernels."""
    return _triton_version() < (3, 4)


def compile_options(kernel: str, config: Config, capability: tuple[int, int] | None) -> dict[str, int]:
    """How Triton compiles a kernel, named by its stage or "single"; ``capability`` is NVIDIA's, None elsewhere."""
    # A product and its sum are rounded once; unless said here, that would depend on the version of Triton.
    is_product = kernel in ("gram", "apply", "single")
    options: dict[str, int] = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    if not is_product:  # whatever the tiles of the products; their own tiles hold 4096 values
        options |= {"num_warps": 4, "num_stages": 3}
    if capability is not None and is_product:
        options["maxnreg"] = _registers(kernel, config)
        if kernel == "apply" and capability in _LITTLE_SHARED:
            options["num_stages"] = min(2, config.stages)  # else one program would take the shared memory of two
    elif capability is not None and kernel == "mix":
        # Bound by memory, the stage needs programs in flight: with so few registers three share a multiprocessor where
        # it does not spill, elsewhere two.
        options["maxnreg"] = 168 if capability in ((8, 6), (8, 9)) and not _spills_early() else 255
    if kernel == "single":
        options["launch_cooperative_grid"] = True
    return options


#: Architectures with 100 KB of shared memory on a multiprocessor.
_LITTLE_SHARED = ((8, 6), (8, 9), (12, 0))


def _registers(kernel: str, config: Config) -> int:
    """Most registers of a thread of a product kernel: as few as `make gpu-check` finds to need no spill.

    Fewer of them let more programs share a multiprocessor; left to itself the assembler may aim for more, and spill.
    """
    if config.tile > 64 or kernel == "single":
        return 255  # all there are
    if config.warps > 4:
        return 128  # two programs
    return 208 if _spills_early() else 168  # two programs, or three


def single_configs(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """Those of the single kernel, in which all stages share the registers of a thread."""
    return tuple(map(_single_config, configs))


def _single_config(config: Config) -> Config:
    """Tiles of the same sides; only those of eight warps are halved, so that two programs share a multiprocessor."""
    narrow = replace(config, columns=64, gathered_columns=32)
    if config.tile > 64:
        return replace(config, depth=16) if config.by_products else narrow
    small = replace(narrow, depth=16, stages=2)
    return small if config.warps == 4 else replace(small, tile=32, warps=4)


def choose_config(
    configs: tuple[Config, ...], large_tiles: int, multiprocessors: int, wide_padding: float = 0.0
) -> Config:
    """Large tiles move fewer bytes per product; they are taken when two of them per multiprocessor keep all busy.

    ``large_tiles`` counts the work items that the gram stage would have with them; a wide tile is two of them.
    ``wide_padding`` is the share of multiply-adds that wide tiles would add, in columns that are not there.
    """
    if large_tiles < 2 * multiprocessors:
        return configs[0]
    wide = configs[-1].wide and large_tiles >= 3 * multiprocessors and wide_padding <= MOST_PADDING
    return configs[-1] if wide or len(configs) < 3 else configs[1]


#: Most of the multiply-adds that wide tiles may add, for a quarter of the reads from the L2 cache.
MOST_PADDING = 0.05


#: Launches of one pass, of which the single kernel saves all but one of a call.
STAGED_LAUNCHES = 5
#: Barriers that it has in a pass; behind the last one there is none.
BARRIERS = 5
#: What a stage loses in it, as a share of its work, where more programs of it alone would share a multiprocessor. With
#: small tiles that is so for all stages.
SINGLE_LOSS = 0.25


def prefer_single(
    plans: Sequence[Plan], spec: DeviceSpec, precision: Precision, passes: int = 1, alone: bool = True
) -> bool:
    """One launch pays while the launches it saves cost more than its barriers and its lower occupancy.

    Several passes, or another call beside this one, would make too many launches of a network, and with large tiles one
    of them loses little: of these one program fits on a multiprocessor in any case.
    """
    has_large_tiles = shipped(spec)[precision][-1].tile > 64
    if has_large_tiles and (passes > 1 or not alone):
        return True
    loss = SINGLE_LOSS * _work_seconds(tuple(plans), spec, precision)
    return (STAGED_LAUNCHES * passes - 1) * spec.launch > (BARRIERS * passes - 1) * spec.barrier + loss


@lru_cache(maxsize=64)
def _work_seconds(plans: tuple[Plan, ...], spec: DeviceSpec, precision: Precision) -> float:
    return sum(plan_seconds(plan, spec, precision) for plan in plans)
