"""The convolutions of well-known networks, as tables of shape, stride and count, and the shapes with speed targets.

Written from the architectures themselves, so that no model package is needed; ``python benchmarks/shapes.py`` checks
every table against the network's published number of convolution weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from ocnn_fused.problem import Problem, problem_of


@dataclass(frozen=True)
class Layer:
    """``count`` convolutions of one weight ``shape`` (out channels, in channels / groups, kernel...)."""

    name: str
    shape: tuple[int, ...]
    stride: int = 1
    groups: int = 1
    dilation: int = 1
    count: int = 1

    @property
    def geometry(self) -> tuple[tuple[int, ...], int, int, int]:
        """What decides the time: everything but the name and the count."""
        return self.shape, self.stride, self.groups, self.dilation

    @property
    def problem(self) -> Problem:
        """Its orthogonality loss, with every lag."""
        return problem_of(self.shape, self.stride, self.dilation, self.groups, None)

    @property
    def label(self) -> str:
        """``512x256x3x3 /2``: the shape, then whatever is not 1."""
        parts = ["x".join(map(str, self.shape))]
        parts += [f"/{self.stride}"] if self.stride > 1 else []
        parts += [f"g{self.groups}"] if self.groups > 1 else []
        parts += [f"d{self.dilation}"] if self.dilation > 1 else []
        return " ".join(parts)

    @property
    def weights(self) -> int:
        """Number of weights, all ``count`` convolutions."""
        return self.count * prod(self.shape)


@dataclass(frozen=True)
class Target:
    """What a single shape should reach on the CPU: times faster than the reference, and the share of its bound."""

    layer: Layer
    ratio: float
    share: float | None = None


# ----------------------------------------------------------------------------------------------------------------------
# Networks
# ----------------------------------------------------------------------------------------------------------------------


def _basic_resnet(blocks: tuple[int, int, int, int]) -> Iterator[Layer]:
    """ImageNet ResNet of two 3x3 convolutions per block."""
    yield Layer("stem", (64, 3, 7, 7), 2)
    before = 64
    for stage, depth in enumerate(blocks):
        width, stride = 64 << stage, 2 if stage else 1
        name = f"layer{stage + 1}"
        if stride > 1:
            yield Layer(f"{name} first", (width, before, 3, 3), stride)
            yield Layer(f"{name} shortcut", (width, before, 1, 1), stride)
        yield Layer(name, (width, width, 3, 3), count=2 * depth - (stride > 1))
        before = width


def _bottleneck_resnet(blocks: tuple[int, int, int, int]) -> Iterator[Layer]:
    """ImageNet ResNet of 1x1, 3x3, 1x1 blocks, the stride on the 3x3 (version 1.5)."""
    yield Layer("stem", (64, 3, 7, 7), 2)
    before = 64
    for stage, depth in enumerate(blocks):
        width, stride = 64 << stage, 2 if stage else 1
        wide, name = 4 * width, f"layer{stage + 1}"
        yield Layer(f"{name} first reduce", (width, before, 1, 1))
        yield Layer(f"{name} first", (width, width, 3, 3), stride)
        yield Layer(f"{name} shortcut", (wide, before, 1, 1), stride)
        yield Layer(f"{name} reduce", (width, wide, 1, 1), count=depth - 1)
        yield Layer(name, (width, width, 3, 3), count=depth - 1)
        yield Layer(f"{name} expand", (wide, width, 1, 1), count=depth)
        before = wide


def _wide_resnet(depth: int, factor: int) -> Iterator[Layer]:
    """CIFAR WideResNet: three stages of ``(depth - 4) / 6`` blocks of two 3x3 convolutions."""
    blocks = (depth - 4) // 6
    yield Layer("stem", (16, 3, 3, 3))
    before = 16
    for stage in range(3):
        width, stride = (16 << stage) * factor, 2 if stage else 1
        name = f"group{stage + 1}"
        yield Layer(f"{name} first", (width, before, 3, 3), stride)
        yield Layer(f"{name} shortcut", (width, before, 1, 1), stride)
        yield Layer(name, (width, width, 3, 3), count=2 * blocks - 1)
        before = width


def _vgg(widths: tuple[int, ...]) -> Iterator[Layer]:
    """3x3 convolutions in a row."""
    before = 3
    for index, width in enumerate(widths):
        yield Layer(f"conv{index + 1}", (width, before, 3, 3))
        before = width


def _dcgan_discriminator(width: int = 64) -> Iterator[Layer]:
    """64x64 images: four 4x4 stride-2 convolutions, then one that leaves a single number."""
    before = 3
    for index in range(4):
        yield Layer(f"conv{index + 1}", (width << index, before, 4, 4), 2)
        before = width << index
    yield Layer("conv5", (1, before, 4, 4))


#: Inverted residuals of MobileNetV2: expansion, output channels, repeats, stride of the first.
_INVERTED_RESIDUALS = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


def _mobilenet_v2() -> Iterator[Layer]:
    yield Layer("stem", (32, 3, 3, 3), 2)
    before = 32
    for stage, (expansion, width, repeats, first_stride) in enumerate(_INVERTED_RESIDUALS):
        for index in range(repeats):
            hidden, name = before * expansion, f"block{stage + 1}"
            if expansion > 1:
                yield Layer(f"{name} expand", (hidden, before, 1, 1))
            yield Layer(f"{name} depthwise", (hidden, 1, 3, 3), 1 if index else first_stride, groups=hidden)
            yield Layer(f"{name} project", (width, hidden, 1, 1))
            before = width
    yield Layer("head", (1280, before, 1, 1))


def _convnext(depths: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[Layer]:
    """Depthwise 7x7, then two pointwise layers, which the original writes as Linear."""
    before = 3
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        name, patch = f"stage{stage + 1}", 2 if stage else 4
        yield Layer(f"{name} downsample" if stage else "stem", (width, before, patch, patch), patch)
        yield Layer(f"{name} depthwise", (width, 1, 7, 7), groups=width, count=depth)
        yield Layer(f"{name} expand", (4 * width, width, 1, 1), count=depth)
        yield Layer(f"{name} project", (width, 4 * width, 1, 1), count=depth)
        before = width


def distinct(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """One layer per geometry, in order of appearance, with the counts added."""
    merged: dict[tuple[tuple[int, ...], int, int, int], Layer] = {}
    for layer in layers:
        first = merged.get(layer.geometry)
        merged[layer.geometry] = replace(first, count=first.count + layer.count) if first else layer
    return tuple(merged.values())


def _depthwise(layers: Iterable[Layer]) -> Iterator[Layer]:
    return (layer for layer in layers if layer.groups > 1)


_VGG16 = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)

#: Distinct layers of each network.
NETWORKS: dict[str, tuple[Layer, ...]] = {
    "resnet18": distinct(_basic_resnet((2, 2, 2, 2))),
    "resnet34": distinct(_basic_resnet((3, 4, 6, 3))),
    "resnet50": distinct(_bottleneck_resnet((3, 4, 6, 3))),
    "wideresnet28_10": distinct(_wide_resnet(28, 10)),
    "convnext_t": distinct(_convnext((3, 3, 9, 3), (96, 192, 384, 768))),
    "vgg16": distinct(_vgg(_VGG16)),
    "dcgan": distinct(_dcgan_discriminator()),
    "mobilenetv2_depthwise": distinct(_depthwise(_mobilenet_v2())),
}

#: What the whole network should reach in one call over all of its layers, where that is a target.
NETWORK_RATIOS: dict[str, float] = dict.fromkeys(("resnet34", "resnet50", "wideresnet28_10", "convnext_t"), 10.0)

#: Single shapes with a speed target on two CPU threads in float32, loss and gradient. The share of the bound is asked
#: of the square 3x3 kernels.
TARGETS: tuple[Target, ...] = (
    Target(Layer("square 512", (512, 512, 3, 3)), 10.0, 0.80),
    Target(Layer("wide 512", (512, 256, 3, 3)), 18.0),
    Target(Layer("square 256", (256, 256, 3, 3)), 9.0, 0.72),
    Target(Layer("square 128", (128, 128, 3, 3)), 8.0, 0.58),
    Target(Layer("square 64", (64, 64, 3, 3)), 6.0, 0.40),
    Target(Layer("strided 512", (512, 256, 3, 3), 2), 7.0),
    Target(Layer("strided 128", (128, 64, 3, 3), 2), 5.0),
    Target(Layer("expand", (2048, 512, 1, 1)), 14.0),
    Target(Layer("reduce", (512, 2048, 1, 1)), 3.5),
    Target(Layer("5x5", (128, 128, 5, 5)), 18.0),
    Target(Layer("discriminator", (512, 256, 4, 4), 2), 5.5),
    Target(Layer("stem", (64, 3, 7, 7), 2), 6.0),
    Target(Layer("7x7 at 64", (64, 64, 7, 7)), 7.0),
    Target(Layer("7x7 at 128", (128, 128, 7, 7)), 7.0),
    Target(Layer("31x31", (8, 8, 31, 31)), 50.0),
    Target(Layer("9x9x9", (2, 2, 9, 9, 9)), 20.0),
    Target(Layer("7x7x7", (3, 3, 7, 7, 7)), 1.0),
    Target(Layer("few channels", (16, 4, 7, 7)), 1.0),
    Target(Layer("11x11", (12, 12, 11, 11)), 1.0),
    Target(Layer("9x9", (32, 32, 9, 9)), 1.0),
)


def large_kernels(count: int = 60) -> tuple[Layer, ...]:
    """Random layers, the same ones every time: 6 to 31 taps on an axis, in one dimension up to 1001, in three up to 9.

    Of the channels that nothing speaks against, as many as leave the reference a second or so.
    """
    rng = random.Random(0)
    layers: list[Layer] = []
    while len(layers) < count:
        axes = rng.choice((1, 2, 2, 2, 3))
        kernel = tuple(rng.randint(6, {1: 1001, 2: 31, 3: 9}[axes]) for _ in range(axes))
        groups = rng.choice((1, 1, 1, 2, 4, 16))
        rows, channels = rng.choice((1, 2, 3, 4, 8, 12, 16, 24, 48)), rng.choice((1, 2, 3, 4, 8, 12, 16, 24, 48))
        stride, dilation = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
        layer = Layer("random", (groups * rows, channels, *kernel), stride, groups, dilation)
        products = groups * rows * rows * channels * prod(k * (2 * ((k - 1) // stride) + 1) for k in kernel)
        if products < 10**10:
            layers.append(layer)
    return tuple(layers)


# ----------------------------------------------------------------------------------------------------------------------
# Self-check
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """The published size of a network and what of it is not a convolution weight."""

    layers: tuple[Layer, ...]
    parameters: int
    classifier: int  # weights and biases of the linear layers
    normalisation: int  # scales and shifts, and biases of the convolutions

    @property
    def convolution_weights(self) -> int:
        return self.parameters - self.classifier - self.normalisation


PUBLISHED: dict[str, Published] = {
    "resnet18": Published(NETWORKS["resnet18"], 11_689_512, 513_000, 9_600),
    "resnet34": Published(NETWORKS["resnet34"], 21_797_672, 513_000, 17_024),
    "resnet50": Published(NETWORKS["resnet50"], 25_557_032, 2_049_000, 53_120),
    "wideresnet28_10": Published(NETWORKS["wideresnet28_10"], 36_479_194, 6_410, 17_952),
    "convnext_t": Published(NETWORKS["convnext_t"], 28_589_128, 769_000, 64_128),
    "vgg16": Published(NETWORKS["vgg16"], 138_357_544, 123_642_856, 4_224),
    "dcgan": Published(NETWORKS["dcgan"], 2_765_568, 0, 1_792),
    "mobilenetv2": Published(tuple(_mobilenet_v2()), 3_504_872, 1_281_000, 34_112),
}


def wrong_tables() -> list[str]:
    """One sentence per table whose number of weights is not the published one; empty when all are right."""
    counted = {name: sum(layer.weights for layer in published.layers) for name, published in PUBLISHED.items()}
    return [
        f"{name}: the table has {counted[name]:,} convolution weights, published are {published.convolution_weights:,}"
        for name, published in PUBLISHED.items()
        if counted[name] != published.convolution_weights
    ]


def main() -> None:
    """Print every network's distinct layers; exit non-zero when a table does not add up."""
    for name, layers in NETWORKS.items():
        count, weights = sum(layer.count for layer in layers), sum(layer.weights for layer in layers)
        print(f"{name}: {count} convolutions, {weights:,} weights")
        for layer in layers:
            print(f"  {layer.count:>3} x {layer.label:<22}{layer.name}")
    raise SystemExit("\n".join(wrong_tables()) or 0)


if __name__ == "__main__":
    main()
