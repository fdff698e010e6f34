"""Whole networks: Lipschitz bounds, similarity of filters, spectra of all layers, logging."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from networks import UNet, mobilenet, resnet18, wide_resnet
from torch import nn

from ocnn_fused import OrthRegularizer
from ocnn_fused.spectrum import (
    SpectrumLogger,
    filter_similarity,
    layer_sizes,
    lipschitz_bound,
    network_spectra,
    singular_values,
    upper_bound,
    weight_similarity,
)
from ocnn_fused.spectrum.similarity import correlation


def stretched(model: nn.Module, shape: tuple[int, ...]) -> float:
    """How much the model stretches some difference: the norm of its Jacobian at random points."""
    largest = 0.0
    for seed in range(3):
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
        jacobian = torch.autograd.functional.jacobian(lambda value: model(value).flatten(), x).flatten(1)
        largest = max(largest, torch.linalg.matrix_norm(jacobian, 2).item())
    return largest


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 0.5 * self.conv(x).relu()
        y = torch.cat([y + x, y + y], 1)
        return y[:, :, ::2].mean((2, 3)).view(x.size(0), -1)


LIPSCHITZ = {
    "sequential": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.LeakyReLU(1.5), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1),
        nn.Flatten(), nn.Linear(16, 5), nn.PReLU(init=2.0), nn.GELU(),
    ),
    "residual": Residual,
    "resnet": lambda: resnet18(width=2),
    "wide": lambda: wide_resnet(base=2, widen=1),
    "mobilenet": lambda: mobilenet(width=4),
    "overlapping": lambda: nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1), nn.ConvTranspose2d(3, 2, 4, 2, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LIPSCHITZ)
def test_no_jacobian_exceeds_the_lipschitz_bound(name: str) -> None:
    torch.manual_seed(0)
    model = LIPSCHITZ[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, -2, 2)
    model.eval()
    found = lipschitz_bound(model)
    assert not found.unproved
    assert stretched(model, (3, 12, 12)) <= found.value < float("inf")


def test_residual_and_sequential_arithmetic() -> None:
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(8, 3)
    found = lipschitz_bound(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear))
    assert found.value == pytest.approx(upper_bound(conv) * upper_bound(linear))
    assert found.parts["0"] == upper_bound(conv)
    residual = Residual()
    norm = upper_bound(residual.conv)
    assert lipschitz_bound(residual).value == pytest.approx(((0.5 * norm + 1) ** 2 + norm**2) ** 0.5)


def test_a_layer_of_zeros_ends_what_is_not_proved_before_it() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))
    nn.init.zeros_(model[1].weight)
    found = lipschitz_bound(model)
    assert found.value == 0
    assert "0" in found.unproved


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x[:, [0, 0]]


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "1", "LayerNorm"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "", "repeats pixels"),
        (nn.AdaptiveAvgPool2d(7), "", "repeat pixels"),
        (nn.BatchNorm2d(3, track_running_stats=False), "", "without running statistics"),
        (Branching(), "Branching", "cannot trace"),
        (Gate(), "getitem", "repeat elements"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_proved_is_named(model: nn.Module, name: str, reason: str) -> None:
    found = lipschitz_bound(nn.Sequential(model) if name == "" else model)
    assert found.value == float("inf")
    assert reason in found.unproved[name or "0"]


def test_correlation_is_numpy_s() -> None:
    rows = torch.randn(5, 40, dtype=torch.float64)
    torch.testing.assert_close(correlation(rows), torch.from_numpy(np.corrcoef(rows.numpy())))
    constant = torch.cat([rows, torch.full((1, 40), 0.1, dtype=torch.float64)])
    assert not correlation(constant)[5].any()


def test_weight_similarity() -> None:
    weight = torch.randn(4, 3, 3, 3)
    weight[1] = -2 * weight[0]
    found = weight_similarity(weight)
    assert found.correlation.shape == (1, 4, 4)
    assert found.correlation[0, 0, 1].item() == pytest.approx(-1)
    assert len(found.off_diagonal) == 6
    shares, edges = found.histogram(10)
    assert shares.sum().item() == pytest.approx(1)
    assert shares[0] >= 1 / 6
    assert edges[[0, -1]].tolist() == [-1, 1]
    assert weight_similarity(torch.randn(1, 3)).mean_magnitude == 0
    assert weight_similarity(nn.ConvTranspose2d(6, 4, 3, groups=2)).correlation.shape == (1, 4, 4)


class Plain(nn.Module):
    """ReLUs of every spelling between linear layers, for which guided back-propagation is written out below."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(8, 5)
        self.spelling = spelling
        self.relu = nn.ReLU(inplace=spelling == "in-place module")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            if self.spelling == "method":
                x = x.relu()
            elif self.spelling == "in-place method":
                x.relu_()
            elif self.spelling == "function":
                x = torch.nn.functional.relu(x)
            else:
                x = self.relu(x)
        return self.third(x)


@pytest.mark.parametrize("spelling", ["method", "in-place method", "function", "module", "in-place module"])
def test_patterns_are_guided(spelling: str) -> None:
    torch.manual_seed(0)
    model = Plain(spelling).train()
    x = torch.randn(3, 6)
    found = filter_similarity(model, x, ["third"])["third"]
    first = model.first(x)
    second = model.second(first.relu())
    patterns = []
    for channel in range(5):
        gradient = model.third.weight[channel].clamp(min=0) * (second > 0)
        gradient = (gradient @ model.second.weight).clamp(min=0) * (first > 0)
        patterns.append(gradient @ model.first.weight)
    expected = correlation(torch.stack(patterns, 1).detach())
    torch.testing.assert_close(found.correlation, expected)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_filter_similarity_of_a_network() -> None:
    torch.manual_seed(0)
    model = resnet18(width=4)
    images = torch.randn(2, 3, 32, 32)
    found = filter_similarity(model, images, ["layer1.0.conv1", "layer4.1.conv2"], max_filters=6)
    assert found["layer1.0.conv1"].correlation.shape == (2, 4, 4)
    assert found["layer4.1.conv2"].correlation.shape == (2, 6, 6)
    assert 0 < found["layer4.1.conv2"].mean_magnitude < 1
    with pytest.raises(ValueError, match="got 'layer9'"):
        filter_similarity(model, images, ["layer9"])


def test_layer_sizes_and_network_spectra() -> None:
    model = UNet(width=2)
    sizes = layer_sizes(model, (3, 16, 12))
    assert sizes == {
        "enter": (16, 12), "down1": (16, 12), "down2": (8, 6), "up2": (4, 3), "up1": (8, 6), "leave": (16, 12),
    }  # fmt: skip
    spectra = network_spectra(model, (3, 16, 12), ["down2", "up2"], progress=True)
    assert list(spectra) == ["down2", "up2"]
    torch.testing.assert_close(spectra["up2"], singular_values(model.up2, (4, 3)).detach())
    odd = network_spectra(nn.Sequential(nn.Conv2d(3, 2, 3, 2, 1)), torch.zeros(1, 3, 9, 7))
    assert len(odd["0"]) == 2 * 5 * 4


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}

    def add_scalar(self, key: str, value: float, step: int) -> None:
        self.scalars[key] = value, step


def test_spectrum_of_a_regularizer_is_that_of_its_layers() -> None:
    model = mobilenet()
    reg = OrthRegularizer(model)
    found = reg.spectrum((3, 30, 30))  # a size that the strides do not divide
    spectra = network_spectra(model, (3, 30, 30), reg.layers)
    assert found.keys() == spectra.keys() == reg.layers.keys()
    for name, values in spectra.items():
        assert not found[name].largest.requires_grad
        assert found[name].largest.item() == pytest.approx(values[0].item(), rel=1e-12)
        assert found[name].smallest.item() == pytest.approx(values[-1].item(), rel=1e-6, abs=1e-8)


class Doubled(nn.Module):
    """A layer of its own kind: twice the weight that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)))
        self.stride = (2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, 2 * self.kept, stride=2, padding=1)


def test_spectrum_of_a_regularizer_takes_the_weights_that_it_takes() -> None:
    """Those that a callable gives, those that are parametrised, and transposed ones; not those out of reach."""
    model = nn.Sequential(
        Doubled(), nn.ConvTranspose2d(6, 5, 4, 2, 1), nn.utils.parametrizations.weight_norm(nn.Conv2d(5, 5, 3))
    )
    model.spare = nn.Conv2d(4, 4, 3)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    reg = OrthRegularizer(model, weight_of={Doubled: lambda module: 2 * module.kept})
    found = reg.spectrum((4, 8, 8))
    assert list(reg.layers) == ["0", "1", "2", "spare"]
    assert list(found) == ["0", "1", "2"]
    expected = (
        singular_values(2 * model[0].kept, 8, stride=2),
        singular_values(model[1], 4),
        singular_values(model[2], 8),
    )
    for name, values in zip(found, expected, strict=True):
        assert found[name].largest.item() == pytest.approx(values[0].item(), rel=1e-12)
        assert found[name].smallest.item() == pytest.approx(values[-1].item(), rel=1e-6, abs=1e-7)


def test_logger_writes_every_n_steps() -> None:
    reg = OrthRegularizer(resnet18(width=4), include="layer1.*")
    writer = Writer()
    log = SpectrumLogger(reg, (3, 16, 16), writer, every=2)
    assert log(1) == {}
    assert not writer.scalars
    values = log(4)
    assert len(values) == 3 * len(reg.layers)
    assert {key: (value, 4) for key, value in values.items()} == writer.scalars
    found = reg.spectrum((3, 16, 16))["layer1.0.conv1"]
    assert values["spectrum/layer1.0.conv1/largest"] == found.largest.item()
    logged = []
    SpectrumLogger(reg, (3, 16, 16), lambda values, step: logged.append((values, step)), prefix="")(0)
    assert logged[0][1] == 0
    assert logged[0][0]["layer1.0.conv1/near_one"] == found.near_one.item()
    with pytest.raises(TypeError, match="add_scalar"):
        SpectrumLogger(reg, (3, 16, 16), 7)
    with pytest.raises(ValueError, match="every must be"):
        SpectrumLogger(reg, (3, 16, 16), writer, every=0)
