"""What counts as a layer and with which weight: presets, adapters, custom modules, ties, odd attributes and dtypes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import Case, loss_and_grad
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer, fused_orth_loss, fused_orth_loss_foreach, schedules, srip_loss
from ocnn_fused.regularizer import watch

pytestmark = pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")


def definition(weight: Tensor, *stride: int, groups: int = 1) -> float:
    loss, _ = loss_and_grad(weight, Case(tuple(weight.shape), stride or 1, groups=groups))
    return loss


# ----------------------------------------------------------------------------------------------------------------------
# The preset
# ----------------------------------------------------------------------------------------------------------------------


def unit(channels: int, width: int, size: int, **options: Any) -> nn.Sequential:
    """A convolution within a module of its own, as in timm's ConvNormAct and Hugging Face's ResNetConvLayer."""
    return nn.Sequential(nn.Conv2d(channels, width, size, **options), nn.BatchNorm2d(width), nn.ReLU())


def squeeze(width: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 2, 1), nn.ReLU(), nn.Conv2d(2, width, 1))


class Named(nn.Module):
    """As timm's regnet and its resnets with attention: conv1 to conv3 are modules around a convolution."""

    def __init__(self, bottleneck: bool, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = unit(8, 4, 1) if bottleneck else unit(8, 8, 3)
        self.conv2 = unit(4, 4, 3) if bottleneck else unit(8, 8, 3)
        self.se = squeeze(4 if bottleneck else 8)
        if bottleneck:
            self.conv3 = unit(4, 8, 1)
            self.attention = nn.Conv1d(1, 1, 3)
        self.downsample = unit(8, 8, 1) if shortcut else None


class Wrapped(nn.Module):
    """As Hugging Face's: the main branch is one child, and the shortcut may be an identity."""

    def __init__(self, bottleneck: bool, shortcut: bool) -> None:
        super().__init__()
        self.shortcut = unit(8, 8, 1) if shortcut else nn.Identity()
        sizes = [(8, 4, 1), (4, 4, 3), (4, 8, 1)] if bottleneck else [(8, 8, 3), (8, 8, 3)]
        parts = [unit(*size) for size in sizes]
        self.layer = nn.Sequential(*parts[:2], squeeze(parts[1][0].out_channels), *parts[2:])


class Branches(nn.Module):
    """conv1 has two convolutions side by side, as in selective kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, dilation=2)])
        self.conv2 = unit(8, 8, 3)


@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("bottleneck", [True, False])
@pytest.mark.parametrize("kind", [Named, Wrapped])
def test_blocks_are_known_by_structure(kind: Callable[..., nn.Module], bottleneck: bool, shortcut: bool) -> None:
    # The names of a block's layers are those of stems too, within the model as in CLIP, or in a module as in timm.
    model = nn.ModuleDict({"conv1": nn.Conv2d(3, 8, 3), "conv2": nn.Conv2d(8, 8, 3), "fc": nn.Linear(8, 2)})
    model["stem"] = nn.ModuleDict({"conv1": nn.Conv2d(3, 8, 3), "conv2": nn.Conv2d(8, 8, 3)})
    model["stage"] = nn.Sequential(kind(bottleneck, shortcut), kind(bottleneck, False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="no orthogonal convolution exists")
        reg = OrthRegularizer(model, preset="paper-resnet")
    taken = ("0", "1", "3") if bottleneck else ("0",)
    if kind is Named:
        main = [f"conv{number}.0" for number in ((1, 2, 3) if bottleneck else (1,))]
    else:
        main = [f"layer.{number}.0" for number in taken]
    expected = {f"stage.{block}.{name}" for block in (0, 1) for name in main}
    if shortcut:
        expected.add(f"stage.0.{'downsample' if kind is Named else 'shortcut'}.0")
    assert set(reg.layers) == expected
    assert {layer.method for layer in reg.layers.values() if layer.problem.kernel == (1, 1)} <= {"kernel"}


def test_a_preset_that_misses_blocks_says_which() -> None:
    model = nn.Sequential(Named(False, False), Branches())
    with pytest.warns(
        UserWarning, match=r"found no layer in these residual blocks.*: 1; choose with include"
    ) as caught:
        reg = OrthRegularizer(model, preset="paper-resnet")
    assert list(reg.layers) == ["0.conv1.0"]
    assert caught[0].filename == __file__


# ----------------------------------------------------------------------------------------------------------------------
# Weights that are not simply the module's
# ----------------------------------------------------------------------------------------------------------------------


def standardised(conv: nn.Conv2d) -> Tensor:
    mean, deviation = (f(conv.weight, (1, 2, 3), keepdim=True) for f in (torch.mean, torch.std))
    return (conv.weight - mean) / deviation / math.sqrt(conv.weight[0].numel())


class StdConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised(self), self.bias, self.stride, self.padding)


class Filters(nn.Module):
    """A convolution that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(6, 4, 3, 3))
        self.stride = (2, 2)


def test_weight_of_custom_modules() -> None:
    model = nn.Sequential(StdConv2d(4, 6, 3), Filters(), nn.Conv2d(6, 4, 3))
    assert list(OrthRegularizer(model).layers) == ["0", "2"]
    reg = OrthRegularizer(model, 1.0, weight_of={StdConv2d: standardised, Filters: lambda m: m.filters})
    assert list(reg.layers) == ["0", "1", "2"]
    losses = {name: loss.item() for name, loss in reg.per_layer().items()}
    assert losses["0"] == pytest.approx(definition(standardised(model[0])), rel=1e-5)
    assert losses["1"] == pytest.approx(definition(model[1].filters, 2, 2), rel=1e-5)
    expected = torch.autograd.grad(reg(), [model[0].weight, model[1].filters])
    reg.add_grad_()
    for parameter, gradient in zip((model[0].weight, model[1].filters), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    model[2] = Filters()
    model[2].filters = model[1].filters
    assert reg.left_out == {"2": "tied to 1"}
    with pytest.raises(TypeError, match="1: weight_of must give a tensor, got tuple"):
        reg.weight_of = {Filters: lambda m: m.stride}


def test_the_raw_weight_is_admitted() -> None:
    model = nn.Sequential(StdConv2d(4, 6, 3), nn.Conv2d(6, 4, 3))
    (note,) = re.findall(
        r"^  (\d) +the raw weight; StdConv2d may compute with another", str(OrthRegularizer(model)), re.M
    )
    assert note == "0"
    assert "raw weight" not in str(OrthRegularizer(model, weight_of={StdConv2d: standardised}))


@pytest.mark.parametrize("value", [3, {"0": len}, {nn.Conv2d: 3}], ids=str)
def test_bad_weight_of(value: Any) -> None:
    with pytest.raises(TypeError, match="weight_of must be a mapping from module types to callables"):
        OrthRegularizer(nn.Conv2d(4, 4, 3), weight_of=value)


class Adapter(nn.Module):
    """A layer with LoRA, named as peft names its parts."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Conv2d(8, 8, 3).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Conv2d(8, 4, 3)})
        self.lora_B = nn.ModuleDict({"default": nn.Conv2d(4, 8, 1)})


def test_adapters_are_left_out() -> None:
    reg = OrthRegularizer(nn.Sequential(Adapter(), nn.Conv2d(8, 8, 3)), include=nn.Conv2d)
    assert list(reg.layers) == ["1"]
    assert reg.left_out["0.base_layer"].startswith("the base of a peft adapter")
    assert reg.left_out["0.lora_A.default"] == reg.left_out["0.lora_B.default"] == "a peft adapter"


def test_tied_weights_at_another_stride_count() -> None:
    """A weight at another stride is another convolution; at the same one it is the same."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 4, 3, 2))
    model[1].weight = model[2].weight = model[0].weight
    reg = OrthRegularizer(model, 1.0)
    assert reg.left_out == {"2": "tied to 1"}
    weight = model[0].weight
    assert reg().item() == pytest.approx(definition(weight) + definition(weight, 2, 2), rel=1e-5)
    (expected,) = torch.autograd.grad(reg(), weight)
    for before in (None, torch.ones_like(weight)):
        weight.grad = before
        reg.add_grad_()
        torch.testing.assert_close(weight.grad, expected if before is None else expected + 1)
    assert list(OrthRegularizer(model, method="kernel").layers) == ["0"]


# ----------------------------------------------------------------------------------------------------------------------
# Accepted, or left out, as PyTorch would
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpy_integers(integer: Callable[[int], Any]) -> None:
    weight = torch.randn(8, 2, 3, 3)
    expected = fused_orth_loss(weight, 2, dilation=1, groups=2)
    assert fused_orth_loss(weight, integer(2), dilation=integer(1), groups=integer(2)) == expected
    assert fused_orth_loss(weight, (integer(2), 2), dilation=[integer(1)] * 2, groups=2) == expected
    assert fused_orth_loss_foreach([weight], integer(2), groups=integer(2))[0] == expected
    conv = nn.Conv2d(4, 8, 3, 2, groups=2)
    loss = OrthRegularizer(conv)()
    conv.stride = (integer(2), integer(2))
    assert OrthRegularizer(conv)() == loss


def test_an_int_as_stride_of_a_module() -> None:
    conv = nn.Conv2d(4, 8, 3, 2)
    reg = OrthRegularizer(conv)
    loss = reg()
    conv.stride = 2
    assert reg() == loss
    assert "8x4x3x3       2x2" in str(reg)
    conv.stride = 1
    assert reg() != loss
    conv.stride = 0
    with pytest.raises(ValueError, match="0: stride must be a positive int"):
        OrthRegularizer(nn.Sequential(conv))


def test_a_model_that_is_a_layer_is_called_so() -> None:
    conv = nn.Conv2d(4, 8, 3)
    reg = OrthRegularizer(conv)
    assert re.search(r"^the model +8x4x3x3", str(reg), re.M)
    reg()
    conv.weight.data.mul_(100)
    with pytest.warns(UserWarning, match="loss explodes in the model"):
        reg()
    conv.stride = 0
    with pytest.raises(ValueError, match=r"^the model: stride must be a positive int"):
        OrthRegularizer(conv)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_weight_of_another_kind_is_left_out(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, 3))
    model[0].weight = nn.Parameter(torch.zeros(6, 4, 3, 3).to(dtype), requires_grad=False)
    reg = OrthRegularizer(model, 1.0)
    assert list(reg.layers) == ["1"]
    assert reg.left_out["0"].endswith(f"got {dtype}")
    assert reg().item() == pytest.approx(definition(model[1].weight), rel=1e-5)
    model[0].weight = nn.Parameter(torch.randn(6, 4, 3, 3))
    assert list(reg.layers) == ["0", "1"]


@pytest.mark.filterwarnings("ignore")  # quantised tensors of torch.ao say that they are deprecated
def test_quantised_layers_are_left_out_with_a_reason() -> None:
    quantized = pytest.importorskip("torch.ao.nn.quantized")
    model = nn.Sequential(nn.Conv2d(4, 6, 3), quantized.Conv2d(6, 8, 3), quantized.Linear(8, 8))
    reg = OrthRegularizer(model, 1.0)
    assert list(reg.layers) == ["0"]
    assert reg.left_out == dict.fromkeys("12", "quantised: its weight is not trained")
    assert reg().item() == pytest.approx(definition(model[0].weight), rel=1e-5)
    assert list(OrthRegularizer(model, include=["0", "1"]).layers) == ["0"]  # a pattern for it matches
    readable = {quantized.Conv2d: lambda module: module.weight().dequantize()}
    assert list(OrthRegularizer(model, weight_of=readable).layers) == ["0", "1"]
    model[1] = nn.Conv2d(6, 8, 3)
    assert list(reg.layers) == ["0", "1"]


@pytest.mark.parametrize("argument", ["weight", "method"])
def test_patterns_are_text(argument: str) -> None:
    with pytest.raises(TypeError, match=f"{argument} must map name patterns .* got the key 0"):
        OrthRegularizer(nn.Sequential(nn.Conv2d(4, 4, 3)), **{argument: {0: 0.1}})


def test_why_nothing_was_found() -> None:
    for model, reason in (
        (nn.Sequential(nn.ReLU()), "the model has no Linear and no convolution layer"),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), r"every layer is left out\nleft out:\n  0  3 input channels"),
    ):
        with pytest.warns(UserWarning, match="found no layer") as caught:
            reg = OrthRegularizer(model)
        assert caught[0].filename == __file__
        assert re.search(f"^nothing is regularised: {reason}$", str(reg), re.M)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), TypeError, "weight must be a tensor, got list"),
        ((torch.ones(3, 3, dtype=torch.int32),), TypeError, r"weight must be float64.*got torch\.int32"),
        ((torch.ones(3),), ValueError, r"weight must have 2 .* got shape \(3,\)"),
        ((torch.ones(3, 0),), ValueError, "weight must not have an empty dimension"),
    ],
)
def test_bad_weights_of_srip(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        srip_loss(*arguments)


def test_bad_options_of_srip() -> None:
    weight = torch.ones(6, 2)
    for options, message in (
        ({"groups": 4}, "groups must be positive and divide"),
        ({"power_iterations": 1.5}, "power_iterations must be a positive int, got 1.5"),
        ({"squared": "no"}, "squared must be one of True, False"),
    ):
        with pytest.raises(ValueError, match=message):
            srip_loss(weight, **options)


@pytest.mark.parametrize("real", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("whole", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_numbers(real: type, whole: type) -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 8, 3))
    methods = {"0": "srip"}
    plain = OrthRegularizer(model, 0.5, method=methods, every=2, power_iterations=3)
    given = [real(0.5), {"*": real(0.5)}, lambda name, module: real(0.5)]
    for weight in given:
        reg = OrthRegularizer(model, weight, method=methods, every=whole(2), power_iterations=whole(3))
        assert reg() == plain()
        reg.add_grad_(scale=real(2))
        plain.add_grad_(scale=-2.0)
        assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
        str(reg)
    reg.method = "conv"
    assert reg() == OrthRegularizer(model, 0.5, every=2)()
    reg.project_(steps=whole(2), rate=real(0.5))
    twin = OrthRegularizer(model, real(1), schedule=schedules.Warmup(whole(4), real(0.5)), target=real(0.5))
    assert twin.factor == 0.5
    for wrong in (np.bool_(True), True, "0.1", None):
        with pytest.raises(TypeError, match="weight must be a float"):
            OrthRegularizer(model, wrong)


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("squared", [True, False])
def test_excess_is_counted_from_the_least_loss(squared: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 40, 3), nn.Conv2d(40, 4, 3))
    plain = OrthRegularizer(model, 0.5, squared=squared)
    excess = OrthRegularizer(model, 0.5, squared=squared, normalize="excess")
    least = [36 if squared else 6, 0]  # 40 filters cannot be orthogonal over 4 channels at stride 1
    for name, by in zip("01", least, strict=True):
        difference = plain.per_layer()[name] - excess.per_layer()[name]
        assert difference.item() == pytest.approx(by, rel=1e-5)
    assert (plain() - excess()).item() == pytest.approx(0.5 * sum(least), rel=1e-4)
    gradients = [torch.autograd.grad(reg(), model[0].weight)[0] for reg in (plain, excess)]
    assert torch.equal(*gradients)
    assert "counted from the least loss" in str(excess)


@pytest.mark.parametrize("way", ["reg()", "add_grad_", "through the graph"])
@pytest.mark.parametrize("factor", [20.0, math.nan, math.inf])
def test_an_exploding_loss_is_told_once(factor: float, way: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    reg = OrthRegularizer(model, method={"1": "srip"} if way == "through the graph" else "conv")
    call = reg if way == "reg()" else reg.add_grad_
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            call()
    with torch.no_grad():
        model[1].weight.mul_(factor)
    exploded = r"^the orthogonality loss explodes in 1 \(\S+ at first, now \S+\): it grows"
    broken = "^the weight of 1 holds NaN or inf, so the orthogonality loss is not finite;"
    with pytest.warns(UserWarning, match=exploded if math.isfinite(factor) else broken) as caught:
        [call() for _ in range(3)]
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_finite_weight_whose_loss_overflows_explodes() -> None:
    """Both at once: the loss that overflowed is not blamed on the weight that is NaN."""
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(3)))
    with torch.no_grad():
        model[0].weight.mul_(1e15)
        model[2].weight[0, 0, 0, 0] = math.nan
    reg = OrthRegularizer(model)
    with pytest.warns(UserWarning, match="^the weight of 2 holds NaN or inf, .*the orthogonality loss explodes in 0 "):
        reg()


def test_a_loss_that_starts_near_zero_may_grow() -> None:
    """An orthogonal start has next to no loss; a hundred times that is nothing yet."""
    conv = nn.Conv2d(4, 4, 1)
    nn.init.eye_(conv.weight.data[:, :, 0, 0])
    reg = OrthRegularizer(conv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reg() == 0
        nn.init.normal_(conv.weight)
        assert reg() > 0.1


def test_losses_on_a_device_are_looked_at_when_they_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the copy is judged at a later call, once its event has passed, and nothing waits."""
    passed = False

    class Event:
        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            return passed

        def synchronize(self) -> None:
            raise AssertionError("waited")

    class Losses:
        """What Watch may do with losses on a GPU."""

        device = torch.device("cuda", 0)

        def __init__(self, values: list[float]) -> None:
            self.values = values

        def detach(self) -> Losses:
            return self

        def to(self, device: str, non_blocking: bool) -> Tensor:
            assert (device, non_blocking) == ("cpu", True)
            return torch.tensor(self.values)

    monkeypatch.setattr(watch, "Tensor", Losses)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    looking = watch.Watch(["a", "b"], [1.0, 1.0])
    assert [looking.is_due(Losses.device) for _ in range(10)] == [True, *[False] * 7, True, False]
    weights = [torch.ones(1), torch.ones(1)]
    assert looking.see(Losses([1.0, 1.0]), weights) == ""
    assert looking.see(Losses([1.0, 1e9]), weights) == ""
    passed = True
    assert looking.see(Losses([1.0, 1e9]), weights) == ""  # the first
    said = "the orthogonality loss explodes in b (1 at first, now 1e+09): "
    assert looking.see(Losses([1.0, 1.0]), weights).startswith(said)
