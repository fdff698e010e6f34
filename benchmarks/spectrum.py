"""Singular values: ours against the Fourier transform and an SVD of every frequency, in turns in one process.

    python benchmarks/spectrum.py                       everything, about ten minutes on two cores
    python benchmarks/spectrum.py --only layers         the table of layers alone; also: large, network, zeros
    python benchmarks/spectrum.py --only zeros --stride 2

``FFT + SVD`` is what public code does: the kernel's transform at all frequencies and the singular values of each. Both
work in float64, and their results are compared before anything is timed. Memory is the most that a process of its own
takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median
from time import perf_counter

import torch
from resnet import ResNet
from timing import CpuTimer, Disturbance, Effort, interleave
from torch import Tensor

from ocnn_fused.spectrum import network_spectra, singular_values, spectral_norm

#: Channels, size, and by how much all values and the largest alone should be faster.
LAYERS: tuple[tuple[int, int, float | None, float | None], ...] = (
    (64, 32, None, None),
    (128, 16, 3.0, 10.0),
    (256, 16, 5.0, 10.0),
)
TOLERANCE = 1e-10


def fft_and_svd(weight: Tensor, size: int) -> Tensor:
    """All singular values of a stride-1 layer, float64, descending."""
    blocks = torch.fft.fft2(weight, s=(size, size)).permute(2, 3, 0, 1).contiguous()
    return torch.linalg.svdvals(blocks).flatten().sort(descending=True).values


def layers(effort: Effort) -> None:
    """The table of layers."""
    print("Medians; in brackets the ratio of the least times.\n")
    print("| layer | FFT + SVD | all values | faster | largest alone | faster |\n|---|---|---|---|---|---|")
    disturbance = Disturbance()
    for channels, size, wanted_all, wanted_largest in LAYERS:
        weight = torch.randn(channels, channels, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        weight /= 3 * channels**0.5
        contestants: dict[str, Callable[[], Tensor]] = {
            "plain": partial(fft_and_svd, weight, size),
            "all": partial(singular_values, weight, size, progress=False),
            "largest": partial(spectral_norm, weight, size),
        }
        expected = contestants["plain"]()
        for name, wanted in (("all", expected), ("largest", expected[0])):
            error = (contestants[name]() - wanted).abs().max().item()
            if error > TOLERANCE:
                raise SystemExit(f"{name} values of {channels} channels are wrong by {error:.1e}")
        samples = interleave(contestants, CpuTimer(), effort)
        medians, least = ({name: of(taken) for name, taken in samples.items()} for of in (median, min))
        times = [f"{seconds * 1e3:.0f} ms" for seconds in medians.values()]
        faster = [
            _verdict(medians["plain"] / medians[name], least["plain"] / least[name], wanted)
            for name, wanted in (("all", wanted_all), ("largest", wanted_largest))
        ]
        name = f"{channels}x{channels}x3x3 at {size}x{size}"
        print(f"| {name} | {times[0]} | {times[1]} | {faster[0]} | {times[2]} | {faster[1]} |")
    share = disturbance.share
    print(f"\nOther processes took {'an unknown share' if share is None else f'{share:.0%}'} of the machine.")


def _verdict(ratio: float, of_least: float, wanted: float | None) -> str:
    """Of medians, and of the least times; both must be as wanted."""
    missed = wanted is not None and min(ratio, of_least) < wanted
    return f"{ratio:.1f}x ({of_least:.1f}x)" + (f", wanted {wanted:g}x" if missed else "")


def large() -> str:
    weight = torch.randn(512, 512, 3, 3, generator=torch.Generator().manual_seed(0)) / 68
    return f"{len(singular_values(weight, 32)):,} values of 512x512x3x3 at 32x32"


def network() -> str:
    spectra = network_spectra(ResNet((3, 4, 6, 3), 1000, cifar=False), (3, 224, 224), progress=True)
    return f"{sum(map(len, spectra.values())):,} values of the {len(spectra)} layers of a ResNet-34 at 224x224"


def zeros(stride: int) -> str:
    weight = torch.randn(64, 128, 3, 3, generator=torch.Generator().manual_seed(0)) / 24
    values = singular_values(weight, 16, padding_mode="zeros", stride=stride)
    return f"{len(values):,} values of the zero-padded 64x128x3x3 at 16x16, stride {stride}"


def _measured(work: Callable[[], str], threads: int) -> str:
    torch.set_num_threads(threads)
    start = perf_counter()
    what = work()
    seconds = perf_counter() - start
    return f"{what}: {seconds:.1f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2:.1f} GB"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", choices=("layers", "large", "network", "zeros"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="per layer of the table")
    parser.add_argument("--stride", type=int, default=1, help="of the zero-padded layer")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.only in (None, "layers"):
        layers(Effort(options.seconds, 1, 20))
    for name, work in (("large", large), ("network", network), ("zeros", partial(zeros, options.stride))):
        if options.only in (None, name):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                print(pool.submit(_measured, work, options.threads).result())


if __name__ == "__main__":
    main()
