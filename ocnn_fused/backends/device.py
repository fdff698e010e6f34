"""What GPU backends know of devices: published rates, names, and the precision of float32 products asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

from ..problem import Precision

_Made = TypeVar("_Made")

#: A device, or the name of one in SPECS.
Device = torch.device | str

#: What ``torch.set_float32_matmul_precision`` asks for.
_BY_TORCH_SETTING: dict[str, Precision] = {"highest": "ieee", "high": "tf32", "medium": "bf16"}


def matmul_precision() -> str:
    """``"highest"``, ``"high"`` or ``"medium"``, as ``torch.get_float32_matmul_precision()`` names them.

    That function raises, or says what was asked for earlier, where ``torch.backends.cuda.matmul.fp32_precision`` (or
    the setting of all backends) was set since. The newer setting is what cuBLAS follows, and has no name for "medium".
    """
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")  # not there before torch 2.9
    if newer == "ieee":
        return "highest"
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "highest"
    return "high" if newer == "tf32" and older == "highest" else older


def convolution_precision() -> Precision:
    """What cuDNN does with float32 convolutions: TF32 unless PyTorch is told otherwise."""
    if not torch.backends.cudnn.enabled:  # convolutions are products of cuBLAS then
        return "ieee" if matmul_precision() == "highest" else "tf32"
    convolutions = getattr(torch.backends.cudnn, "conv", None)
    if convolutions is None or not hasattr(convolutions, "fp32_precision"):  # before torch 2.9
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    return "tf32" if convolutions.fp32_precision == "tf32" else "ieee"


def asked_precision(device: Device, linear: bool) -> Precision:
    """What torch's own settings ask for: of matmul for a Linear layer, of ``F.conv2d`` for a convolution.

    A CPU has no TF32, and Triton's interpreter there computes what a CPU would.
    """
    if isinstance(device, torch.device) and device.type == "cpu":
        return "ieee"
    return _BY_TORCH_SETTING[matmul_precision()] if linear else convolution_precision()


@dataclass(frozen=True)
class DeviceSpec:
    """Published rates of one device; multiply-adds and bytes per second, dense."""

    name: str
    multiprocessors: int
    matmul: Mapping[Precision, float]
    elementwise: float  # float32 multiply-adds outside the tensor cores
    issue: float  # instructions of threads: four warps' per multiprocessor and cycle
    bandwidth: float
    l2_bytes: int
    l2_bandwidth: float
    efficiency: float = 0.6  # share of the product rate that tiles of this size reach
    launch: float = 4e-6  # one kernel launch, including the gap that it leaves
    barrier: float = 2e-6  # one barrier of the whole grid

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def has_wide_tiles(self) -> bool:
        """Whether products are so fast, next to the L2 cache, that their tiles are made wider."""
        return self.name == "H100"

    @property
    def has_fast_products(self) -> bool:
        """Whether TF32 products, three of them for one in float32, are much faster than multiply-adds outside."""
        return self.matmul.get("tf32", 0.0) > 6 * self.elementwise

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("MI")

    def native_precision(self, precision: Precision) -> Precision:
        """AMD's matrix units take float32 as it is, so there is nothing to gain from TF32."""
        return precision if precision in self.matmul else "ieee"


def _spec(
    name: str, multiprocessors: int, fp32: float, tf32: float, bf16: float,
    bandwidth: float, l2_mb: float, l2_bandwidth: float, instructions: int = 1,
) -> DeviceSpec:  # fmt: skip
    """Rates in the units of data sheets: TFLOP/s (two per multiply-add), TB/s, MB.

    ``instructions`` can be issued in the time of a float32 multiply-add: 2 where a multiprocessor has 64 such units.
    """
    half = 0.5e12
    matmul: dict[Precision, float] = {
        "ieee": fp32 * half,
        "tf32x3": tf32 / 3 * half,
        "tf32": tf32 * half,
        "bf16": bf16 * half,
    }
    return DeviceSpec(
        name, multiprocessors, matmul, fp32 * half, instructions * fp32 * half,
        bandwidth * 1e12, int(l2_mb * 2**20), l2_bandwidth * 1e12,
    )  # fmt: skip


#: Data-sheet rates, dense. GTX 1080 Ti and T4 have no TF32, so that every precision is `ieee` there. Triton serves
#: neither; the first is what papers of the time measured on, the second what the CUDA backend serves.
SPECS: dict[str, DeviceSpec] = {
    "A100": _spec("A100", 108, 19.5, 156, 312, 1.555, 40, 4.5, instructions=2),
    "H100": _spec("H100", 132, 67, 495, 989, 3.35, 50, 7.0),
    "RTX 4090": _spec("RTX 4090", 128, 82.6, 82.6, 165, 1.008, 72, 5.0),
    "GTX 1080 Ti": DeviceSpec(
        "GTX 1080 Ti", 28, {"ieee": 5.65e12}, 5.65e12, 5.65e12, 0.484e12, int(2.75 * 2**20), 1.2e12
    ),
    "T4": DeviceSpec("T4", 40, {"ieee": 4.05e12}, 4.05e12, 8.1e12, 0.32e12, 4 << 20, 1.3e12),
    "MI250": DeviceSpec("MI250", 104, {"ieee": 22.6e12, "bf16": 90e12}, 11.3e12, 22.6e12, 1.6e12, 8 << 20, 3.0e12),
    "MI300X": DeviceSpec("MI300X", 304, {"ieee": 81.7e12, "bf16": 653e12}, 40.8e12, 81.7e12, 5.3e12, 256 << 20, 10e12),
}

#: What an unnamed device is taken for: the latest of these that is not newer than it.
_BY_CAPABILITY = {
    (0, 0): "GTX 1080 Ti",
    (7, 5): "T4",
    (8, 0): "A100",
    (8, 6): "RTX 4090",
    (9, 0): "H100",
    (12, 0): "RTX 4090",
}


def spec_of(device: Device) -> DeviceSpec:
    """The spec of a device: by name, by what torch says of it, or the nearest relative. A CPU stands for an A100."""
    if isinstance(device, str) and device in SPECS:
        return SPECS[device]
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return SPECS["A100"]
    return _cuda_spec(_index(device))


def device_name(device: Device) -> str:
    """The device's own name and architecture: what measurements on it are kept under."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    properties = torch.cuda.get_device_properties(_index(device))
    if torch.version.hip is not None:
        return f"{properties.name} ({properties.gcnArchName})"
    return f"{properties.name} (sm_{properties.major}{properties.minor})"


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@lru_cache(maxsize=16)
def _cuda_spec(index: int) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return SPECS["MI300X" if "gfx94" in properties.gcnArchName else "MI250"]
    # As a word of its own: "A100" is in "NVIDIA A100-SXM4-80GB", but not in "NVIDIA RTX A1000".
    named = (spec for name, spec in SPECS.items() if re.search(rf"\b{name}\b", properties.name))
    capability = (properties.major, properties.minor)
    relative = max(known for known in _BY_CAPABILITY if known <= capability)
    return next(named, SPECS[_BY_CAPABILITY[relative]])


def described(device: Device) -> str:
    """The spec's name, and whose rates they are taken for if the device has another name."""
    spec = spec_of(device)
    name = spec.name if isinstance(device, str) and device in SPECS else device_name(device)
    return spec.name if re.search(rf"\b{spec.name}\b", name) else f"{name}, taken for {spec.name}"


def beside_all_graphs(device: torch.device, make: Callable[[], _Made]) -> _Made:
    """What ``make`` allocates on the device, none of it in the memory of a CUDA graph, which it may outlive.

    While ``torch.compile`` warms up a graph, what this thread, or its stream, allocates belongs to that graph. So this
    is done by another thread, on that one's stream.
    """
    if device.type == "cpu":
        return make()

    def work() -> _Made:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def missing_gpu() -> str | None:
    """Why torch cannot use a GPU here."""
    if torch.cuda.is_available():
        return None
    built = "a CPU build" if torch.version.cuda is None and torch.version.hip is None else "no usable driver or GPU"
    return f"torch sees no GPU ({built}, torch {torch.__version__})"
