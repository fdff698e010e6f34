"""OrthRegularizer in a training loop: which layers, which weight, when, and with what else PyTorch offers."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import resnet18, wide_resnet
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from ocnn_fused import OrthRegularizer, fused_orth_loss, kernel_orth_loss, schedules, srip_loss
from ocnn_fused.backends import cpu, pytorch
from ocnn_fused.problem import Options


@pytest.fixture(autouse=True)
def _setup() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no orthogonal convolution exists")
        yield


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Conv2d(6, 8, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 5, 2, 2),
        nn.Conv2d(5, 5, 3, padding=1, groups=5),
        nn.Flatten(),
        nn.Linear(5 * 64, 4),
    )


def loss_of(layer: nn.Module, **options: Any) -> Tensor:
    if isinstance(layer, nn.Linear):
        return fused_orth_loss(layer.weight, **options)
    return fused_orth_loss(layer.weight, layer.stride, dilation=layer.dilation, groups=layer.groups, **options)


def grads_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def assert_added(reg: OrthRegularizer, model: nn.Module, expected: dict[str, Tensor], **options: Any) -> None:
    """``add_grad_`` gives these gradients, from nothing and on top of what is there."""
    for before in (None, 1.0):
        for parameter in model.parameters():
            parameter.grad = None if before is None else torch.full_like(parameter, before)
        reg.add_grad_(**options)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad if before is None or parameter.grad is None else parameter.grad - before
            if name in expected and expected[name].any():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
            else:
                assert gradient is None or not gradient.any(), name
    model.zero_grad()


# ----------------------------------------------------------------------------------------------------------------------
# Which layers
# ----------------------------------------------------------------------------------------------------------------------


def test_default_layers() -> None:
    reg = OrthRegularizer(small())
    assert list(reg.layers) == ["1", "3", "4"]
    assert reg.left_out == {"0": "3 input channels", "6": "a Linear layer; include it by name or type"}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("*", None, "01346"),
        (["0", "6"], None, "06"),
        ("[0-3]", None, "013"),
        (nn.Conv2d, None, "014"),
        ((nn.Linear, "3"), None, "36"),
        (lambda name, module: getattr(module, "groups", 1) > 1, None, "4"),
        (None, "3", "14"),
        (None, nn.ConvTranspose2d, "14"),
        ("*", [nn.Linear, lambda name, module: name == "0"], "134"),
        ("*", "*", ""),
        ((name for name in "13"), None, "13"),
    ],
)
@pytest.mark.filterwarnings("ignore:OrthRegularizer found no layer")
def test_include_and_exclude(include: Any, exclude: Any, expected: str) -> None:
    model = small()
    reg = OrthRegularizer(model, 1.0, include=include, exclude=exclude)
    assert "".join(reg.layers) == expected
    assert reg().item() == pytest.approx(sum(loss_of(model[int(index)]).item() for index in expected))
    reg.refresh()
    assert "".join(reg.layers) == expected


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_must_match(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument} pattern 'layer9\.\*' matches none of the layers 0, 1, 3, 4, 6"):
        OrthRegularizer(small(), **{argument: ["1", "layer9.*"]})


@pytest.mark.parametrize(
    "options", [{"include": "a[0]"}, {"exclude": ["b[[]0]", "b[1]"]}, {"weight": {"a[0]": 1.0}}], ids=str
)
def test_a_name_with_brackets_matches_itself(options: dict[str, Any]) -> None:
    model = nn.ModuleDict({name: nn.Conv2d(4, 4, 3) for name in ("a[0]", "b[0]", "b[1]")})
    assert list(OrthRegularizer(model, **options).layers) == ["a[0]"]
    assert OrthRegularizer(model, method={"a[0]": "kernel"}).layers["a[0]"].method == "kernel"


@pytest.mark.parametrize(("argument", "value"), [("weight", 0.1), ("method", "srip")])
def test_a_pattern_of_a_mapping_must_match(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{argument} pattern 'layer9\.\*' matches none of the layers 0, 1, 3, 4, 6"):
        OrthRegularizer(small(), **{argument: {"*": value, "layer9.*": value}})
    lazy = nn.Sequential(nn.LazyConv2d(8, 3))
    OrthRegularizer(lazy, **{argument: {"0": value}})
    with pytest.raises(ValueError, match=f"{argument} pattern '1' matches none of the layers 0"):
        OrthRegularizer(lazy, **{argument: {"1": value}})


def test_nothing_to_do_is_said_once() -> None:
    with pytest.warns(UserWarning, match="found no layer to regularise"):
        reg = OrthRegularizer(nn.Sequential(nn.ReLU()))
    assert reg().item() == 0
    reg().backward()
    reg.add_grad_()
    assert reg.per_layer() == {}
    assert "OrthRegularizer" in str(reg)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.5, {"1": 0.5, "3": 0.5, "4": 0.5}),
        (2, {"1": 2, "3": 2, "4": 2}),
        (lambda name, module: 0.1 * int(name), {"1": 0.1, "3": 0.3, "4": 0.4}),
        ({"1": 0.5, "[14]": 0.25}, {"1": 0.5, "4": 0.25}),
        ({"1": 0.0, "*": 1.0}, {"3": 1.0, "4": 1.0}),
    ],
)
def test_weights(weight: Any, expected: dict[str, float]) -> None:
    model = small()
    reg = OrthRegularizer(model, weight)
    assert {name: layer.weight for name, layer in reg.layers.items()} == pytest.approx(expected)
    total = sum(value * loss_of(model[int(name)]) for name, value in expected.items())
    torch.testing.assert_close(reg(), total)
    grads = grads_of(reg(), model)
    for name, gradient in grads_of(total, model).items():
        torch.testing.assert_close(grads[name], gradient)
    assert_added(reg, model, grads)


def test_layers_without_weight_are_not_computed() -> None:
    model = small()
    reg = OrthRegularizer(model, {"1": 0.0, "3": 1.0})
    model[1].weight.data.fill_(float("nan"))
    assert reg().isfinite()
    assert list(reg.per_layer()) == ["3"]
    assert reg.left_out["1"] == "weight 0"
    assert reg.left_out["4"] == "no pattern of weight matches"


def test_methods() -> None:
    model = small()
    method = {"1": "kernel", "3": "srip"}
    reg = OrthRegularizer(model, 1.0, method=method)
    parts = kernel_orth_loss(model[1].weight), srip_loss(model[3].weight), loss_of(model[4])
    torch.testing.assert_close(torch.stack([*reg.per_layer().values()]), torch.stack(parts).detach())
    torch.testing.assert_close(reg(), sum(parts))
    assert [layer.method for layer in reg.layers.values()] == ["kernel", "srip", "conv"]
    assert_added(reg, model, grads_of(reg(), model))


@pytest.mark.parametrize("normalize", ["none", "numel"])
@pytest.mark.parametrize("method", ["conv", "srip"])
def test_norms_and_sizes(normalize: str, method: str) -> None:
    model = small()
    reg = OrthRegularizer(model, 1.0, squared=False, normalize=normalize, method=method)
    total = 0.0
    for index in (1, 3, 4):
        layer = model[index]
        if method == "conv":
            loss = loss_of(layer, squared=False)
        else:
            loss = srip_loss(layer.weight, groups=layer.groups, squared=False)
        total = total + loss / (layer.weight.numel() if normalize == "numel" else 1)
    torch.testing.assert_close(reg(), total)
    assert_added(reg, model, grads_of(total, model))


@pytest.mark.parametrize(
    ("layer", "groups"),
    [
        (nn.Conv2d(16, 64, 1), 1),
        (nn.Conv2d(16, 64, 1, 2), 1),
        (nn.Conv2d(4, 64, 3), 1),
        (nn.Conv2d(8, 72, 2, groups=2), 2),
        (nn.Conv2d(16, 8, 1), 1),
        (nn.Linear(5, 20), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("near", [True, False])
def test_norm_of_kernel_orthogonality_is_that_of_the_smaller_gram(layer: nn.Module, groups: int, near: bool) -> None:
    """Near orthogonality in float32 too: no constant is subtracted that would leave rounding."""
    layer = copy.deepcopy(layer)
    for part in layer.weight.data.chunk(groups):
        nn.init.orthogonal_(part)
    layer.weight.data += (1e-4 if near else 0.3) * torch.randn_like(layer.weight)
    model = nn.Sequential(layer)
    reg = OrthRegularizer(model, 1.0, include="0", method="kernel", squared=False)
    exact = layer.weight.detach().double().requires_grad_()
    residuals = []
    for matrix in (part.flatten(1) for part in exact.chunk(groups)):
        smaller = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        residuals.append((smaller @ smaller.T - torch.eye(len(smaller), dtype=torch.float64)).flatten())
    norm = torch.cat(residuals).norm()
    (gradient,) = torch.autograd.grad(norm, exact)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if near else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(reg(), norm.float(), rtol=tolerance["rtol"], atol=1e-6)
    torch.testing.assert_close(grads_of(reg(), model)["0.weight"], gradient.float(), **tolerance)
    torch.testing.assert_close(reg.per_layer()["0"], reg().detach())
    reg.add_grad_()
    torch.testing.assert_close(layer.weight.grad, gradient.float(), **tolerance)
    assert reg.layers["0"].floor == 0
    assert re.search(r"kernel .* 1 +0$", str(reg), re.MULTILINE)


def test_norm_at_an_orthogonal_weight_has_no_gradient() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1)
    nn.init.dirac_(layer.weight)
    reg = OrthRegularizer(nn.Sequential(layer), squared=False)
    reg().backward()
    assert not layer.weight.grad.any()
    reg.add_grad_()
    assert not layer.weight.grad.any()


BAD_ARGUMENTS: list[tuple[str, Any, type[Exception], str]] = [
    ("weight", "0.1", TypeError, "weight must be a float"),
    ("weight", -1.0, ValueError, "weight must be finite and not negative, got -1.0"),
    ("weight", math.nan, ValueError, "weight must be finite"),
    ("weight", {"1": True}, TypeError, r"weight\['1'\] must be a float"),
    ("weight", {"9": 1.0}, ValueError, "weight pattern '9' matches none of the layers"),
    ("weight", lambda name, module: None, TypeError, "weight of 1 must be a float"),
    ("include", 3, TypeError, "include must be a name pattern"),
    ("include", "9", ValueError, "include pattern '9' matches none of the layers"),
    ("exclude", ["1", 3], TypeError, "exclude must be a name pattern"),
    ("exclude", "9", ValueError, "exclude pattern '9' matches none of the layers"),
    ("method", "cony", ValueError, "method must be one of 'conv', 'kernel', 'srip', got 'cony'"),
    ("method", {"*": "x"}, ValueError, "method must be one of"),
    ("squared", "no", ValueError, "squared must be one of True, False, got 'no'"),
    ("normalize", True, ValueError, "normalize must be"),
    ("schedule", 3, TypeError, "schedule must be"),
    (
        "schedule",
        lambda step: math.nan,
        ValueError,
        r"schedule <function .* must be finite and not negative, got nan at step 0",
    ),
    ("every", 0, ValueError, "every must be a positive int, got 0"),
    ("shard", "yes", ValueError, "shard must be"),
    ("shard", 1, ValueError, "shard must be one of 'auto', True, False, got 1"),
    ("preset", "resnet", ValueError, "preset must be"),
    ("preset", "paper-resnet", ValueError, "needs residual blocks"),
    ("backend", "tpu", ValueError, "backend must be"),
    ("precision", "fp8", ValueError, "precision must be"),
    ("launch", "twice", ValueError, "launch must be"),
    ("power_iterations", 0, ValueError, "power_iterations must be"),
    ("model", "resnet18", TypeError, r"model must be a torch\.nn\.Module, got str"),
]


@pytest.mark.parametrize(
    ("argument", "value", "error", "message"), BAD_ARGUMENTS, ids=[row[0] for row in BAD_ARGUMENTS]
)
def test_bad_arguments(argument: str, value: Any, error: type[Exception], message: str) -> None:
    """Assigned to the attribute, the same error, and the regulariser stays what it was."""
    reg = OrthRegularizer(small())
    before, loss = getattr(reg, argument), reg()
    with pytest.raises(error, match=message) as constructed:
        OrthRegularizer(**{"model": small(), argument: value})
    with pytest.raises(error, match=message) as assigned:
        setattr(reg, argument, value)
    assert str(assigned.value) == str(constructed.value)
    assert getattr(reg, argument) is before
    assert torch.equal(reg(), loss)


def test_a_preset_chooses_alone() -> None:
    model = resnet18(4)
    with pytest.raises(ValueError, match="include must be None with a preset"):
        OrthRegularizer(model, preset="paper-resnet", include="*")
    reg = OrthRegularizer(model, include="*")
    with pytest.raises(ValueError, match="include must be None with a preset"):
        reg.preset = "paper-resnet"
    reg.include = None
    reg.preset = "paper-resnet"
    assert list(reg.layers) == list(OrthRegularizer(model, preset="paper-resnet").layers)


# ----------------------------------------------------------------------------------------------------------------------
# Where the weight comes from
# ----------------------------------------------------------------------------------------------------------------------

COMPUTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "two": lambda layer: parametrizations.spectral_norm(parametrizations.weight_norm(layer)),
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_computed_weights(kind: str) -> None:
    """The loss of the weight that the layer uses; the gradient goes to what it is computed from."""
    model = small()
    COMPUTED[kind](model[1])
    x = torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = OrthRegularizer(model, 1.0, include="1")
    for _ in range(2):  # after a step the old-style attribute is out of date
        state = copy.deepcopy(model.state_dict())
        loss = reg()
        values, gradients = reg.per_layer(), grads_of(loss, model)
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items()), "looking is free"
        model.eval()  # no power iteration, so that the weight used is the weight seen
        model(x)
        expected = loss_of(model[1])
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(values["1"], expected.detach())
        for name, gradient in grads_of(expected, model).items():
            torch.testing.assert_close(gradients[name], gradient, msg=name)
        assert_added(reg, model, gradients)
        model.train()
        optimizer.zero_grad()
        (model(x).sum() + reg()).backward()
        optimizer.step()


def test_spread_gradient_through_a_frozen_part() -> None:
    model = small()
    parametrizations.weight_norm(model[1])
    model[1].parametrizations.weight.original0.requires_grad_(False)
    reg = OrthRegularizer(model, include="1")
    gradients = grads_of(reg(), model)
    assert list(gradients) == ["1.parametrizations.weight.original1"]
    assert_added(reg, model, gradients)


def test_weights_set_from_outside() -> None:
    """A layer whose weight another network makes: no parameter of its own."""
    layer = nn.Conv2d(4, 4, 3, bias=False)
    del layer.weight
    source = torch.randn(4, 4, 3, 3, requires_grad=True)
    layer.weight = 0.1 * source
    reg = OrthRegularizer(nn.Sequential(layer), 1.0)
    (gradient,) = torch.autograd.grad(reg(), source, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss_of(layer), source)[0])
    with pytest.raises(RuntimeError, match=r"0 gets its weight from tensors that are not its parameters"):
        reg.add_grad_()


class Sum(nn.Module):
    """A weight made of two parameters, and a third that is not used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.update = nn.Parameter(0.1 * torch.randn_like(layer.weight))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.update


def test_a_sum_of_parameters() -> None:
    """Both get the gradient, each its own copy of it."""
    model = small()
    parametrize.register_parametrization(model[1], "weight", Sum(model[1]))
    reg = OrthRegularizer(model)
    gradients = grads_of(reg(), model)
    assert_added(reg, model, gradients)
    reg.add_grad_()
    original, update = (
        parameter for name, parameter in model[1].named_parameters() if name != "bias" and parameter.dim() > 1
    )
    assert torch.equal(original.grad, update.grad)
    original.grad.zero_()
    assert update.grad.any()


def test_a_source_that_layers_share() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    for layer in model:
        parametrize.register_parametrization(layer, "weight", Sum(layer))
    shared = model[0].parametrizations.weight[0].update
    model[1].parametrizations.weight[0].update = shared
    reg = OrthRegularizer(model, 1.0)
    assert list(reg.layers) == ["0", "1"]
    expected = grads_of(reg(), model)
    assert_added(reg, model, expected)


def test_tied_biases_do_not_tie_weights() -> None:
    """However the bias is computed, and in whichever order."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    for layer in model[:2]:
        for name in ("bias", "weight"):
            parametrize.register_parametrization(layer, name, nn.Identity())
    model[1].parametrizations.bias.original = model[0].parametrizations.bias.original
    for layer in model[2:]:
        prune.identity(layer, "bias")
        prune.identity(layer, "weight")
    model[3].bias_orig = model[2].bias_orig
    reg = OrthRegularizer(model, 1.0)
    assert list(reg.layers) == ["0", "1", "2", "3"]
    torch.testing.assert_close(reg(), sum(loss_of(layer) for layer in model))
    assert_added(reg, model, grads_of(reg(), model))
    model[1].parametrizations.weight.original = model[0].parametrizations.weight.original
    reg.refresh()
    assert reg.left_out == {"1": "tied to 0"}


def test_weights_that_share_one_of_two_sources_are_not_tied() -> None:
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Conv2d(4, 4, 3)) for _ in range(2)))
    model[1].parametrizations.weight.original0 = model[0].parametrizations.weight.original0
    reg = OrthRegularizer(model, 1.0)
    assert list(reg.layers) == ["0", "1"]
    torch.testing.assert_close(reg(), loss_of(model[0]) + loss_of(model[1]))
    assert_added(reg, model, grads_of(reg(), model))


def test_losses_within_cached_parametrisations() -> None:
    """What is looked at first without a gradient must not be kept for the model, which needs one."""
    model = small()
    parametrizations.weight_norm(model[1])
    reg = OrthRegularizer(model)
    for look in (reg.per_layer, reg.add_grad_):
        with parametrize.cached():
            look()
            assert model[1].weight.requires_grad


def test_functional_call() -> None:
    model = small()
    reg = OrthRegularizer(model, 1.0)
    others = {name: torch.randn_like(value) for name, value in model.named_parameters()}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return reg()

    value = torch.func.functional_call(Loss(), {f"model.{name}": other for name, other in others.items()}, ())
    moved = copy.deepcopy(model)
    moved.load_state_dict(others)
    assert torch.equal(value, OrthRegularizer(moved, 1.0)())
    assert not torch.equal(value, reg())


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight = model[0].weight
    reg = OrthRegularizer(model, 1.0)
    assert list(reg.layers) == ["0", "2"]
    assert reg.left_out == {"1": "tied to 0"}
    torch.testing.assert_close(reg(), loss_of(model[0]) + loss_of(model[2]))
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    torch.testing.assert_close(reg(), 2 * loss_of(model[0]) + loss_of(model[2]))
    model[2].weight = model[1].weight
    torch.testing.assert_close(reg(), 2 * loss_of(model[0]))
    model.append(model[0])  # the same module again
    torch.testing.assert_close(reg(), 2 * loss_of(model[0]))


def test_lazy_layers() -> None:
    """Left out until they have seen an input, as a weight on the meta device is until it holds numbers."""
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyConvTranspose2d(4, 2), nn.LazyLinear(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # building the regulariser first is as good
        reg = OrthRegularizer(model, 1.0)
        assert not reg.layers
        assert reg.left_out["0"] == "a LazyConv2d that has not seen an input yet"
        assert re.search(r"^  1 +a LazyConvTranspose2d that has not seen an input yet$", str(reg), re.M)
    with pytest.warns(UserWarning, match="left out, because their weights hold no numbers yet: 0, 1; run"):
        assert reg() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert reg() == 0
        reg.add_grad_()
        reg.project_()
    model(torch.randn(1, 5, 6, 6))
    assert list(reg.layers) == ["0", "1"]
    torch.testing.assert_close(reg(), loss_of(model[0]) + loss_of(model[1]))
    assert set(grads_of(reg(), model)) == {"0.weight", "1.weight"}


def test_flattened_weights_are_refused() -> None:
    model = small()
    model[1].weight = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"weight of 1 \(Conv2d\) must have 4 dimensions, got \(7,\).*fully_shard"):
        OrthRegularizer(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "EMA": AveragedModel,
    "nested": lambda model: torch.compile(nn.DataParallel(torch.compile(model, backend="eager")), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_do_not_show_in_names(wrapper: str) -> None:
    model = small()
    reg = OrthRegularizer(WRAPPERS[wrapper](model), 1.0)
    assert list(reg.layers) == ["1", "3", "4"]
    assert torch.equal(reg(), OrthRegularizer(model, 1.0)())


def test_wrapped_parts_do_not_show_in_names() -> None:
    model = small()
    expected = OrthRegularizer(model, 1.0)()
    model[1] = torch.compile(model[1], backend="eager")
    model[3] = checkpoint_wrapper(model[3])
    reg = OrthRegularizer(model, 1.0, include=["1", "3", "4"])
    assert list(reg.layers) == ["1", "3", "4"]
    assert torch.equal(reg(), expected)


# ----------------------------------------------------------------------------------------------------------------------
# The model changes
# ----------------------------------------------------------------------------------------------------------------------


def replace_layer(model: nn.Module) -> None:
    model[1] = nn.Conv2d(6, 8, 5, 2, 2)


def append_layer(model: nn.Module) -> None:
    model.append(nn.Conv1d(4, 4, 3))


def remove_layer(model: nn.Module) -> None:
    del model[3]


def parametrise(model: nn.Module) -> None:
    parametrizations.weight_norm(model[1])


def other_stride(model: nn.Module) -> None:
    model[1].stride = (1, 1)


def other_values(model: nn.Module) -> None:
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


def other_parameter(model: nn.Module) -> None:
    model[1].weight = nn.Parameter(torch.randn_like(model[1].weight))


def other_shape(model: nn.Module) -> None:
    model[1].weight.data = torch.randn(4, 6, 3, 3)


def to_double(model: nn.Module) -> None:
    model.double()


def to_half(model: nn.Module) -> None:
    model.bfloat16()


def one_in_double(model: nn.Module) -> None:
    model[1].double()


@pytest.mark.parametrize(
    "change",
    [
        replace_layer, append_layer, remove_layer, parametrise, other_stride, other_values, other_parameter,
        other_shape, to_double, to_half, one_in_double,
    ],
)  # fmt: skip
def test_changes_are_noticed(change: Callable[[nn.Module], None]) -> None:
    model = small()
    reg = OrthRegularizer(model, 1.0)
    before = reg().detach()
    change(model)
    fresh = OrthRegularizer(model, 1.0)
    after = reg()
    assert torch.equal(after, fresh())
    assert after.dtype == fresh().dtype
    assert change in (to_double, to_half, one_in_double, parametrise) or not torch.equal(after, before)
    expected = grads_of(fresh(), model)
    gradients = grads_of(after, model)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name])
    assert str(reg) == str(fresh)


def test_moved_to_another_device() -> None:
    model = small()
    reg = OrthRegularizer(model, 0.1)
    reg()
    model.to("meta")
    assert reg().device.type == "meta"
    assert all(loss.device.type == "meta" for loss in reg.per_layer().values())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected = sum(loss_of(model[index]) for index in (1, 3, 4))
    torch.testing.assert_close(reg(), 0.1 * expected)
    assert_added(reg, model, grads_of(0.1 * expected, model))


def test_unchanged_model_is_looked_at_once() -> None:
    model = resnet18(4)
    reg = OrthRegularizer(model)
    seen = reg._seen
    reg(), reg.per_layer(), reg.add_grad_(), str(reg)
    model.eval()
    model.requires_grad_(False)
    reg()
    assert reg._seen is seen


@pytest.mark.parametrize(
    ("name", "right"),
    [("lamda", "weight"), ("weights", "weight"), ("normalise", "normalize"), ("scheduler", "schedule"), ("x", None)],
)
def test_a_wrong_attribute_is_refused(name: str, right: str | None) -> None:
    reg = OrthRegularizer(small())
    hint = rf"; did you mean {right!r}\?" if right else ""
    with pytest.raises(AttributeError, match=f"^'OrthRegularizer' object has no attribute '{name}' to set{hint}$"):
        setattr(reg, name, 3)
    with pytest.raises(AttributeError, match=f"^'OrthRegularizer' object has no attribute '{name}'{hint}$"):
        getattr(reg, name)
    assert name not in vars(reg)


def test_a_subclass_has_attributes_of_its_own() -> None:
    class Logged(OrthRegularizer):
        scheduler: object
        weights = ()

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.log: list[float] = []
            self.scheduler, self.weights, self._private = None, (1,), 2

    reg = Logged(small())
    reg.log = [1.0]
    reg.weight = 0.5
    assert (reg.log, reg.weights, reg.weight) == ([1.0], (1,), 0.5)
    assert copy.deepcopy(reg).log == [1.0]
    message = r"^'Logged' object has no attribute 'lamda' to set; did you mean 'weight'\? Else declare it in the class"
    with pytest.raises(AttributeError, match=message):
        reg.lamda = 3


def test_own_attributes_may_change() -> None:
    model = small()
    reg = OrthRegularizer(model, 1.0)
    reg()
    reg.weight = 0.5
    torch.testing.assert_close(reg(), 0.5 * OrthRegularizer(model, 1.0)())
    reg.method = "kernel"
    torch.testing.assert_close(reg(), OrthRegularizer(model, 0.5, method="kernel")())
    reg.include = (name for name in "13")
    assert reg.include == ("1", "3")
    assert list(reg.layers) == ["1", "3"]
    reg.backend = "torch"
    assert (reg.weight, reg.method, reg.backend) == (0.5, "kernel", "torch")
    other = small()
    reg.model = other
    assert torch.equal(reg(), OrthRegularizer(other, 0.5, method="kernel", include=["1", "3"], backend="torch")())


def test_another_schedule_counts_at_once() -> None:
    model = small()
    full = OrthRegularizer(model)()
    reg = OrthRegularizer(model)
    reg.step()
    reg.schedule = schedules.Warmup(4)
    assert reg.factor == 0.25
    torch.testing.assert_close(reg(), 0.25 * full)
    reg.every = 2
    assert reg().item() == 0
    reg.step()
    torch.testing.assert_close(reg(), full)
    reg.schedule = None
    torch.testing.assert_close(reg(), 2 * full)


def test_frozen_weights_count_but_get_no_gradient() -> None:
    model = small()
    reg = OrthRegularizer(model, 1.0)
    value = reg().detach()
    model[1].weight.requires_grad_(False)
    assert torch.equal(reg().detach(), value)
    reg().backward()
    assert model[1].weight.grad is None
    assert model[3].weight.grad is not None
    assert_added(reg, model, grads_of(reg(), model))
    model[1].weight.requires_grad_(True)
    assert "1.weight" in grads_of(reg(), model)
    model.requires_grad_(False)
    assert torch.equal(reg(), value)
    reg.add_grad_()
    assert all(parameter.grad is None for parameter in model.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# Copies
# ----------------------------------------------------------------------------------------------------------------------


def weight_of_name(name: str, module: nn.Module) -> float:
    return 0.1 * int(name)


@pytest.mark.parametrize("used", [False, True])
def test_a_copied_pair_belongs_together(used: bool) -> None:
    model = small()
    reg = OrthRegularizer(model, weight_of_name, schedule=schedules.Warmup(10), every=2)
    if used:
        reg().backward()
    for duplicate in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other_model, other = duplicate((model, reg))
        assert other.model is other_model
        for _ in range(2):
            reg.step(), other.step()
        assert torch.equal(other(), reg())
        other_model[1].weight.data.zero_()
        assert not torch.equal(other(), reg())


def test_a_regularizer_inside_its_model() -> None:
    """As an attribute, the way a LightningModule would hold it: no cycle of submodules, and copies stay inside."""
    model = small()
    model.reg = OrthRegularizer(model)
    assert len(list(model.modules())) == len(list(small().modules()))
    assert not any("reg" in name for name in model.state_dict())
    other = copy.deepcopy(model)
    assert other.reg.model is other
    assert torch.equal(other.reg(), model.reg())


def test_saved_with_torch() -> None:
    reg = OrthRegularizer(small())
    file = io.BytesIO()
    torch.save(reg, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(), reg())


def test_averaged_copies() -> None:
    """An EMA copy has no gradients, and its own loss."""
    model = small()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    reg, of_average = OrthRegularizer(model), OrthRegularizer(average)
    reg().backward()
    model[1].weight.data.mul_(2)
    average.update_parameters(model)
    model[1].weight.data.mul_(2)
    average.update_parameters(model)
    assert torch.equal(of_average(), OrthRegularizer(average.module)())
    assert not torch.equal(of_average(), reg())
    assert of_average.per_layer().keys() == reg.per_layer().keys()


# ----------------------------------------------------------------------------------------------------------------------
# Steps
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schedules.Constant(), [1, 1, 1, 1, 1, 1]),
        (schedules.Constant(0.5), [0.5] * 6),
        (schedules.Warmup(4), [0, 0.25, 0.5, 0.75, 1, 1]),
        (schedules.Warmup(2, start=0.5), [0.5, 0.75, 1, 1, 1, 1]),
        (schedules.Cosine(4), [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0, 0]),
        (schedules.Cosine(4, end=0.5, warmup=2), [0, 0.5, 1, 0.75, 0.5, 0.5]),
        (schedules.Step(2), [1, 1, 0.1, 0.1, 0.01, 0.01]),
        (schedules.Step(3, gamma=2.0), [1, 1, 1, 2, 2, 2]),
        pytest.param(lambda step: step**2, [0, 1, 4, 9, 16, 25], id="any callable"),
        (None, [1] * 6),
    ],
    ids=str,
)
def test_schedules(schedule: Any, expected: list[float]) -> None:
    model = small()
    full = OrthRegularizer(model)()
    gradients = grads_of(full, model)
    reg = OrthRegularizer(model, schedule=schedule)
    for step, factor in enumerate(expected):
        assert reg.steps == step
        assert reg.factor == pytest.approx(factor)
        for _ in range(2):  # the loss may be computed as often as one likes
            torch.testing.assert_close(reg(), factor * full)
        assert_added(reg, model, {name: factor * gradient for name, gradient in gradients.items()})
        reg.step()


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5])
def test_a_schedule_must_be_finite_and_not_negative(value: float) -> None:
    class Broken(schedules.Constant):
        def __call__(self, step: int) -> float:
            return value if step >= 2 else self.factor

    reg = OrthRegularizer(small(), schedule=Broken())
    reg.step()
    loss = reg()
    message = rf"schedule .*Broken\(factor=1\.0\) must be finite and not negative, got {value} at step 2"
    with pytest.raises(ValueError, match=message):
        reg.step()
    with pytest.raises(ValueError, match=message):
        reg.load_state_dict({"steps": 2, "schedule": None})
    assert (reg.steps, reg.factor) == (1, 1.0)
    assert torch.equal(reg(), loss)


def test_every_nth_step() -> None:
    model = small()
    full = OrthRegularizer(model)()
    reg = OrthRegularizer(model, every=3)
    for step in range(7):
        factor = 3.0 if step % 3 == 0 else 0.0
        torch.testing.assert_close(reg(), factor * full)
        reg().backward()  # works at every step
        model.zero_grad()
        reg.add_grad_()
        assert (model[1].weight.grad is not None) == bool(factor)
        model.zero_grad()
        assert torch.equal(reg.per_layer()["3"], loss_of(model[3]).detach())
        reg.step()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: schedules.Warmup(0), "steps must be positive, got 0"),
        (lambda: schedules.Cosine(4, warmup=4), "warmup must be at least 0 and below steps = 4, got 4"),
        (lambda: schedules.Step(-1), "steps must be positive"),
        (lambda: schedules.Warmup(3).load_state_dict({"steps": 3}), r"keys \['steps', 'start'\], got \['steps'\]"),
    ],
)
def test_bad_schedules(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("options", [{"schedule": schedules.Warmup(4)}, {"every": 4}], ids=str)
@pytest.mark.parametrize("direct", [False, True])
def test_steps_that_nobody_counts(options: dict[str, Any], direct: bool) -> None:
    """Said at the third update of the weights, once; parts of an accumulation are no updates."""
    model = small()
    parametrizations.weight_norm(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def update(reg: OrthRegularizer) -> None:
        optimizer.zero_grad()
        for _ in range(4):
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            reg.add_grad_() if direct else reg().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counted, plain = OrthRegularizer(model, **options), OrthRegularizer(model)
        for _ in range(5):
            update(plain)
            update(counted)
            counted.step()
        forgotten = OrthRegularizer(model, **options)
        for _ in range(3):
            update(forgotten)
    with pytest.warns(UserWarning, match=r"step\(\) was never called.*every=n is n times too strong") as caught:
        update(forgotten)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            update(forgotten)


def test_steps_that_nobody_counts_and_updates_that_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocnn_fused.regularizer.regularizer._CALLS_WITHOUT_STEP", 5)
    reg = OrthRegularizer(small(), every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            reg()
    with pytest.warns(UserWarning, match=r"0 times in 5 calls.*reg\.attach\(optimizer\)"):
        reg()


def test_an_optimizer_counts() -> None:
    """Accumulated gradients are one step; so is whatever a GradScaler lets through."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reg = OrthRegularizer(model, schedule=schedules.Warmup(4))
    handle = reg.attach(optimizer)
    for step in range(3):
        assert reg.steps == step
        for _ in range(4):
            (reg() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    optimizer.step()
    assert reg.steps == 3


def test_state_dict_round_trip() -> None:
    model = small()
    reg = OrthRegularizer(model, schedule=schedules.Cosine(10, end=0.1), every=2)
    for _ in range(4):
        reg.step()
    file = io.BytesIO()
    torch.save(reg.state_dict(), file)
    file.seek(0)
    other = OrthRegularizer(model, schedule=schedules.Cosine(99), every=2)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.schedule == reg.schedule
    for _ in range(4):
        assert other.factor == reg.factor
        assert torch.equal(other(), reg())
        reg.step(), other.step()
    assert OrthRegularizer(model).state_dict() == {"steps": 0, "schedule": None}


@pytest.mark.parametrize("state", [{}, {"steps": 1}, {"steps": 1, "schedule": {"steps": 3, "start": 0.0}}])
def test_foreign_states(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="state"):
        OrthRegularizer(small()).load_state_dict(state)


# ----------------------------------------------------------------------------------------------------------------------
# With the rest of PyTorch
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 8.0, torch.tensor(8.0)])
@pytest.mark.parametrize("squared", [True, False])
def test_added_gradients_are_scaled(scale: Any, squared: bool) -> None:
    model = small()
    reg = OrthRegularizer(model, squared=squared)
    expected = {name: float(scale) * gradient for name, gradient in grads_of(reg(), model).items()}
    assert_added(reg, model, expected, scale=scale)


def test_added_gradients_follow_a_training() -> None:
    """Adding to ``.grad`` and adding to the loss are the same training."""
    models = []
    for direct in (False, True):
        torch.manual_seed(1)
        model, x, y = small(), torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
        reg = OrthRegularizer(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss if direct else loss + reg()).backward()
            if direct:
                reg.add_grad_()
            optimizer.step()
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)


def test_bfloat16_autocast() -> None:
    """Inside or outside autocast, the loss is that of the float32 weights."""
    model = small()
    parametrizations.orthogonal(model[1])
    reg = OrthRegularizer(model)
    outside = reg()
    with torch.autocast("cpu", torch.bfloat16):
        inside = reg()
        loss = F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1])) + inside
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("way", ["loss", "scaled gradients", "unscaled gradients"])
def test_grad_scaler(way: str, half: bool) -> None:
    """Scaled, unscaled, clipped and stepped as without a scaler; a step with an overflow is skipped."""
    torch.manual_seed(1)
    model, x, y = small(), torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
    plain, before = copy.deepcopy(model), copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for net in (model, plain):
        reg = OrthRegularizer(net, 0.1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half and net is model):
                loss = F.cross_entropy(net(x), y)
                if net is plain or way == "loss":
                    loss = loss + reg()
            if net is plain:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                if way == "scaled gradients":
                    reg.add_grad_(scaler.get_scale())
                scaler.unscale_(optimizer)
                if way == "unscaled gradients":
                    reg.add_grad_()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            assert norm > 0.5
            if net is plain:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    assert scaler.get_scale() == 2.0**12
    tolerance = {"rtol": 0, "atol": 2e-4} if half else {}
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    for index in (1, 3, 4):
        assert (plain[index].weight - before[index].weight).abs().max() > 2e-3, "more than the tolerance hides"

    reg = OrthRegularizer(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(reg() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert reg.steps == 0, "a skipped step is none"


def test_gradient_checkpointing() -> None:
    torch.manual_seed(1)
    model, x = wide_resnet(4, 1), torch.randn(2, 3, 8, 8)
    reg = OrthRegularizer(model)
    results = []
    for recompute in (False, True):
        model.zero_grad()
        y = x
        for part in model:
            y = checkpoint(part, y, use_reentrant=False) if recompute else part(y)
        (y.square().mean() + reg()).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_loss_inside_a_checkpoint() -> None:
    model = small()
    reg = OrthRegularizer(model)
    expected = grads_of(reg(), model)
    loss = checkpoint(lambda: reg() * 1.0, use_reentrant=False)
    for name, gradient in grads_of(loss, model).items():
        assert torch.equal(gradient, expected[name])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "srip"},
        {"squared": False, "normalize": "numel"},
        {"schedule": schedules.Warmup(10)},
        {"every": 2},
    ],
    ids=str,
)
def test_compiled_loss(options: dict[str, Any]) -> None:
    """One graph, right values, and no new compilation at every step."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, x = small(), torch.randn(2, 3, 8, 8)
    parametrizations.weight_norm(model[1])
    reg = OrthRegularizer(model, power_iterations=2, **options)

    def loss() -> Tensor:
        return model(x).square().mean() + reg()

    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for _ in range(5):
        expected, value = loss(), compiled()
        torch.testing.assert_close(value, expected)
        gradients = grads_of(value, model)
        for name, gradient in grads_of(expected, model).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)
        reg.step()
    assert counter.frame_count <= 3


def test_compiled_training_step() -> None:
    """Forward, loss, backward and optimiser in one compiled function; then the model changes."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
    start, results = small(), []
    for compiled in (False, True):
        model = copy.deepcopy(start)
        reg = OrthRegularizer(model)

        def train(model: nn.Module = model, reg: OrthRegularizer = reg) -> Tensor:
            optimizer = train.optimizer
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + reg()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = torch.compile(train, backend="aot_eager") if compiled else train
        losses = []
        for change in (False, True):
            if change:
                torch.manual_seed(2)
                model[1] = nn.Conv2d(6, 8, 4, 2, 1)
                model[3].weight.requires_grad_(False)
            train.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
            losses += [run() for _ in range(3)]
        results.append((losses, list(model.parameters())))
    for one, other in zip(*(losses + parameters for losses, parameters in results), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training_step_is_not_broken_up(backend: str) -> None:
    """As many graphs, for the same reasons, as the step has without the regulariser; and one compilation."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    if backend == "inductor" and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
    start, found = small(), []
    for regularised, compiled in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        counters.clear()
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        reg = OrthRegularizer(model) if regularised else lambda: 0.0

        def train(model: nn.Module = model, reg: Any = reg, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + reg()
            loss.backward()
            optimizer.step()
            return loss.detach()

        counter = CompileCounterWithBackend(backend)
        run = torch.compile(train, backend=counter) if compiled else train
        losses = torch.stack([run() for _ in range(4)])
        found.append((counter.frame_count, dict(counters["graph_break"]), losses))
    (frames, breaks, _), (frames_with, breaks_with, losses), (_, _, expected) = found
    assert frames > 0
    assert frames_with == frames
    if backend != "inductor" or not torch.__version__.startswith("2.7."):  # that one also traces what Inductor writes
        assert breaks_with == breaks
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_double_backward() -> None:
    model = small().double()
    reg = OrthRegularizer(model, 1.0)
    weight = model[1].weight
    (first,) = torch.autograd.grad(reg(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    (expected,) = torch.autograd.grad(loss_of(model[1]), weight, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), weight)[0])


def test_first_used_in_inference_mode() -> None:
    """What is kept from an evaluation serves the training after it."""
    model = small()
    reg = OrthRegularizer(model, method={"1": "srip"})
    model.double()
    with torch.inference_mode():
        value = reg()
        reg.per_layer()
    assert torch.equal(reg(), value)
    reg().backward()
    for _ in range(2):
        reg.add_grad_()


def test_no_gradient_is_computed_without_need() -> None:
    with torch.no_grad():
        assert not OrthRegularizer(small())().requires_grad


def test_nothing_waits_for_the_device() -> None:
    """A fake tensor has no value: whatever would read one on the host fails here."""
    with FakeTensorMode():
        model = small()
        for options in ({}, {"squared": False}, {"method": "srip"}, {"normalize": "numel"}):
            reg = OrthRegularizer(model, **options)
            reg().backward()
            reg.add_grad_(torch.tensor(2.0))
            assert len(reg.per_layer()) == 3
            reg.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_two_devices() -> None:
    """One pass per device, the sum on the first."""
    model = small()
    model[1].to("cuda")
    reg = OrthRegularizer(model)
    assert reg().device.type == "cuda"
    expected = ["cuda", "cpu", "cpu"]
    assert [value.device.type for value in reg.per_layer().values()] == expected
    assert torch.equal(reg.per_layer()["3"], loss_of(model[3]).detach())
    reg.add_grad_()
    assert [model[index].weight.grad.device.type for index in (1, 3, 4)] == expected


def test_a_model_without_memory() -> None:
    """All of it on the meta device is a sketch of a model; one layer of it is something that is yet to be loaded."""
    model = small()
    reg = OrthRegularizer(model, 1.0)
    model[1].to("meta")
    assert list(reg.layers) == ["3", "4"]
    assert reg.left_out["1"] == "weight on the meta device, which holds no numbers"
    with pytest.warns(UserWarning, match="left out, because their weights hold no numbers yet: 1; run"):
        torch.testing.assert_close(reg(), loss_of(model[3]) + loss_of(model[4]))
    model[1] = nn.Conv2d(6, 8, 3, 2, 1)
    assert list(reg.layers) == ["1", "3", "4"]
    model.to("meta")
    assert reg().device.type == "meta"
    model[1].to_empty(device="cpu")
    nn.init.ones_(model[1].weight)
    torch.testing.assert_close(reg(), loss_of(model[1]))


def test_same_bits_every_time() -> None:
    model = small()
    for method in ("conv", "srip"):
        reg = OrthRegularizer(model, method=method)
        first, again = reg(), reg()
        assert torch.equal(first, again)
        for one, other in zip(grads_of(first, model).values(), grads_of(again, model).values(), strict=True):
            assert torch.equal(one, other)


# ----------------------------------------------------------------------------------------------------------------------
# For people
# ----------------------------------------------------------------------------------------------------------------------


def test_table() -> None:
    reg = OrthRegularizer(small(), {"3": 0.5, "*": 0.1}, method={"4": "srip"}, schedule=schedules.Warmup(4), every=2)
    text = str(reg)
    assert repr(reg) in text
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert re.fullmatch(r"1 +8x6x3x3 +2x2 +1 +yes +conv +\S+ +[\d.]+% +0\.1 +0", rows["1"])
    assert re.fullmatch(r"3 +8x5x2x2 +2x2 +1 +yes +conv +\S+ +[\d.]+% +0\.5 +0", rows["3"])
    assert re.fullmatch(r"4 +5x1x3x3 +1x1 +5 +yes +srip +power iteration +[\d.]+% +0\.1 +0", rows["4"])
    assert re.fullmatch(r" +0 +3 input channels", rows["0"])
    assert "a Linear layer" in rows["6"]
    assert "every 2 steps" in text
    assert "Warmup(steps=4" in text
    shares = [float(share) for share in re.findall(r"([\d.]+)%", text)]
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_table_says_which_layers_train() -> None:
    model = small()
    parametrizations.weight_norm(model[4])
    reg = OrthRegularizer(model)

    def shown() -> list[str]:
        return re.findall(r"^[134] .* (yes|frozen) +conv", str(reg), re.M)

    assert shown() == ["yes", "yes", "yes"]
    model[1].requires_grad_(False)
    model[4].parametrizations.weight.original0.requires_grad_(False)  # its direction still trains
    assert shown() == ["frozen", "yes", "yes"]
    model[4].requires_grad_(False)
    assert shown() == ["frozen", "yes", "frozen"]


def test_table_shows_the_plans_of_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "seconds", lambda *arguments: -cpu.seconds(*arguments))
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    (layer,) = OrthRegularizer(model).layers.values()
    expected = {backend: layer.plan(Options(backend=backend)).name for backend in ("torch", "cpu")}
    assert expected["torch"] != expected["cpu"]
    for backend, plan in expected.items():
        assert re.search(rf"conv +{plan} ", str(OrthRegularizer(model, backend=backend)))


# ----------------------------------------------------------------------------------------------------------------------
# SRIP
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (20, 2, 3), (5, 9), (9, 5)])
@pytest.mark.parametrize("squared", [True, False])
def test_srip_is_the_spectral_norm(shape: tuple[int, ...], squared: bool) -> None:
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    loss = srip_loss(weight, squared=squared, power_iterations=2000)
    matrix = weight.flatten(1)
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    norm = torch.linalg.matrix_norm(matrix @ matrix.T - torch.eye(len(matrix), dtype=torch.float64), 2)
    expected = norm.square() if squared else norm
    torch.testing.assert_close(loss, expected)
    gradient, wanted = (torch.autograd.grad(value, weight)[0] for value in (loss, expected))
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert srip_loss(weight, squared=squared, power_iterations=1) <= loss * (1 + 1e-12)


def test_srip_of_groups_adds() -> None:
    weight = torch.randn(8, 3, 3, 3)
    parts = [srip_loss(part) for part in weight.chunk(4)]
    torch.testing.assert_close(srip_loss(weight, groups=4), sum(parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_srip_in_half_precision(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 3, 3, 3).to(dtype).requires_grad_()
    loss = srip_loss(weight)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, srip_loss(weight.float()))
    loss.backward()
    assert weight.grad.dtype == dtype


def test_srip_needs_an_iteration() -> None:
    with pytest.raises(ValueError, match="power_iterations must be a positive int, got 0"):
        srip_loss(torch.ones(2, 2), power_iterations=0)
