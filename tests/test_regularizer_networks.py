"""Whole networks: the regulariser is the weighted sum of the layers' definitions, gradients included."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCES
from networks import mobilenet, network_1d, network_3d, resnet18, resnet34, resnet50, unet, wide_resnet
from oracle import Case, loss_and_grad
from torch import nn

from ocnn_fused import OrthRegularizer

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many layers the default takes
    "resnet18": (lambda: resnet18(8), 19),
    "resnet34": (lambda: resnet34(4), 35),
    "resnet50": (lambda: resnet50(4), 52),
    "wide_resnet": (lambda: wide_resnet(4, 2), 9),
    "mobilenet": (lambda: mobilenet(8), 7),
    "unet": (lambda: unet(6), 5),
    "1d": (lambda: network_1d(8), 4),
    "3d": (lambda: network_3d(4), 4),
}


def case_of(module: nn.Module, method: str = "conv") -> Case:
    if isinstance(module, nn.Linear):
        return Case(tuple(module.weight.shape))
    padding = None if method == "conv" else 0
    return Case(tuple(module.weight.shape), module.stride, module.dilation, module.groups, padding)


def expected(model: nn.Module, weight: float = 0.1) -> tuple[float, dict[str, np.ndarray]]:
    """Which layers, from the rule, and what they add up to, from the definition."""
    total, gradients = 0.0, {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd) and module.in_channels > 3:
            loss, gradient = loss_and_grad(module.weight, case_of(module))
            total += weight * loss
            gradients[name] = weight * gradient
    return total, gradients


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no orthogonal convolution exists")
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_sum_of_definitions(name: str, dtype: torch.dtype, backend: str) -> None:
    build, count = NETWORKS[name]
    torch.manual_seed(0)
    model = build().to(dtype)
    reg = OrthRegularizer(model, weight=0.1, backend=backend)
    total, gradients = expected(model)
    assert list(reg.layers) == list(gradients)
    assert len(gradients) == count

    loss = reg()
    assert loss.shape == ()
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(total, rel=TOLERANCES[dtype])
    loss.backward()
    by_loss = {layer: module.weight.grad for layer, module in model.named_modules() if layer in gradients}
    model.zero_grad()
    reg.add_grad_()
    for layer, gradient in gradients.items():
        limit = TOLERANCES[dtype] * abs(gradient).max()
        assert abs(by_loss[layer].double().cpu().numpy() - gradient).max() <= limit, layer
        assert abs(model.get_submodule(layer).weight.grad.double().cpu().numpy() - gradient).max() <= limit, layer
    assert all(
        parameter.grad is None for n, parameter in model.named_parameters() if n.rpartition(".")[0] not in reg.layers
    )

    losses = reg.per_layer()
    assert list(losses) == list(gradients)
    assert all(value.shape == () and not value.requires_grad for value in losses.values())
    assert 0.1 * sum(value.item() for value in losses.values()) == pytest.approx(total, rel=TOLERANCES[dtype])


@pytest.mark.parametrize(("name", "method"), [("resnet18", "kernel"), ("resnet50", "kernel"), ("resnet18", "srip")])
def test_other_methods(name: str, method: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name][0]().double()
    reg = OrthRegularizer(model, weight=1.0, method=method, power_iterations=500)
    total = 0.0
    for layer in reg.layers.values():
        weight = layer.module.weight.detach()
        if method == "kernel":
            total += loss_and_grad(weight, case_of(layer.module, "kernel"))[0]
        else:
            singular = torch.linalg.svdvals(weight.flatten(1))
            total += (singular.square() - 1).abs().max().square().item()
    assert reg().item() == pytest.approx(total, rel=1e-3 if method == "srip" else 1e-12)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_layers_of_the_paper(name: str) -> None:
    """First convolution of a basic block, all of a bottleneck, shortcuts; 1x1 by kernel orthogonality."""
    model = NETWORKS[name][0]()
    reg = OrthRegularizer(model, preset="paper-resnet")
    blocks = sum(len(getattr(model, stage)) for stage in model.stages)
    shortcuts = 4 if name == "resnet50" else 3
    per_block = 3 if name == "resnet50" else 1
    assert len(reg.layers) == blocks * per_block + shortcuts
    for layer in reg.layers.values():
        last = layer.name.rpartition(".")[2]
        assert last == "0" or last in ({"conv1", "conv2", "conv3"} if name == "resnet50" else {"conv1"})
        assert layer.method == ("kernel" if layer.problem.shape[2:] == (1, 1) else "conv")
    assert {"conv1", "fc"} <= reg.left_out.keys()
    assert "layer1.0.conv2" in (reg.layers if name == "resnet50" else reg.left_out)
    assert {layer.method for layer in OrthRegularizer(model, preset="paper-resnet", method="srip").layers.values()} == {
        "srip"
    }


@pytest.mark.parametrize(
    "layer",
    [
        nn.ConvTranspose2d(4, 3, 2, 2),
        nn.ConvTranspose2d(4, 6, 3, 2, groups=2),
        nn.ConvTranspose2d(6, 4, (4, 3), (2, 1), dilation=(1, 2)),
        nn.ConvTranspose1d(5, 4, 8, 4),
        nn.ConvTranspose3d(4, 3, 2, (1, 2, 2)),
    ],
    ids=str,
)
def test_transposed_convolution_is_compared_with_its_matrix(layer: nn.Module) -> None:
    """``||T^T T - I||^2``, rows of one input pixel far from the border: how far T is from preserving length."""
    layer = layer.double()
    layer.bias.data.zero_()
    axes = len(layer.kernel_size)
    width = 9 if axes < 3 else 3  # wide enough for every placement that meets the one in the centre
    size = (width,) * axes
    inputs = layer.in_channels * width**axes
    basis = torch.eye(inputs, dtype=torch.float64).reshape(inputs, layer.in_channels, *size)
    with torch.no_grad():
        matrix = layer(basis).flatten(1).T  # column by column
    gram = (matrix.T @ matrix).reshape(layer.in_channels, *size, layer.in_channels, *size)
    identity = torch.eye(inputs, dtype=torch.float64).reshape(gram.shape)
    centre = (slice(None), *(width // 2,) * axes)
    reg = OrthRegularizer(nn.Sequential(layer), weight=1.0)
    torch.testing.assert_close(reg().detach(), (gram - identity)[centre].square().sum())


def test_orthogonal_transposed_convolution_preserves_length() -> None:
    case = Case((8, 3, 4, 4), stride=2, groups=2)
    layer = nn.ConvTranspose2d(8, 6, 4, 2, groups=2, bias=False).double()
    layer.weight.data = case.orthogonal()
    assert OrthRegularizer(nn.Sequential(layer))().item() < 1e-20
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))


# ----------------------------------------------------------------------------------------------------------------------
# Least losses
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "method", "floor", "exists"),
    [
        (nn.Conv2d(4, 10, 1, 2), "conv", 6, False),  # skips pixels and has too many filters
        (nn.Conv2d(4, 4, 1, 2), "conv", 0, True),
        (nn.Conv2d(4, 10, 1), "conv", 6, True),  # orthogonal by columns
        (nn.Conv2d(4, 6, 3, padding=1), "conv", 2, True),
        (nn.Conv2d(6, 4, 3, padding=1), "conv", 0, True),
        (nn.Conv2d(4, 18, 2, 2), "conv", 2, True),
        (nn.Conv2d(4, 18, 2, 3), "conv", 2, False),
        (nn.Conv1d(4, 9, 3, 2, dilation=2), "conv", 5, False),  # sees even pixels only
        (nn.Conv2d(8, 24, 1, (1, 2), groups=4), "conv", 16, False),
        (nn.Conv2d(8, 16, 3, 2, groups=8), "conv", 0, True),
        (nn.Conv1d(4, 15, 3), "kernel", 3, True),
        (nn.ConvTranspose2d(10, 4, 1, 2), "conv", 6, False),
        (nn.ConvTranspose2d(12, 4, 2, 2), "conv", 0, True),
        (nn.Linear(4, 7), "conv", 3, True),
    ],
    ids=str,
)
def test_minimised_loss_reaches_the_bound(layer: nn.Module, method: str, floor: int, exists: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer.double())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reg = OrthRegularizer(model, weight=1.0, method=method, include="0")
    assert reg.layers["0"].floor == floor
    assert reg.layers["0"].has_orthogonal == exists
    assert [f"at least {floor}" in str(warning.message) for warning in caught] == [True] * (not exists)

    nn.init.orthogonal_(layer.weight)  # a start from which the minimum is near
    layer.weight.data += 0.1 * torch.randn_like(layer.weight)
    optimizer = torch.optim.LBFGS([layer.weight], max_iter=300, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = reg()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert reg().item() == pytest.approx(floor, abs=1e-5)


def test_impossible_layers_are_named_once() -> None:
    model = resnet18(8)
    with pytest.warns(UserWarning, match=r"layer2\.0\.downsample\.0 \(16x8x1x1, stride 2x2\): at least 8") as caught:
        reg = OrthRegularizer(model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reg()
        model.double()
        reg()
        OrthRegularizer(model, exclude="*.downsample.*")


def test_training_lowers_every_layer() -> None:
    torch.manual_seed(0)
    model = unet(6)
    reg = OrthRegularizer(model, weight=1.0)
    before = reg.per_layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x, y = torch.randn(2, 3, 16, 16), torch.randn(2, 1, 16, 16)
    for _ in range(40):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + reg()).backward()
        optimizer.step()
    for name, loss in reg.per_layer().items():
        floor = reg.layers[name].floor
        assert loss - floor < 0.5 * (before[name] - floor), name
