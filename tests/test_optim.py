"""Muon as an optimiser: what goes where, the rule, state, and what torch expects of an optimiser."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ocnn_fused.optim import Muon, orthogonal_update

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Network(nn.Module):
    """A stem, layers of every kind with something special about each, a norm, an embedding tied to a layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.strided = nn.Conv2d(8, 12, 3, 2, 1, dilation=1)
        self.transposed = nn.ConvTranspose2d(12, 6, 2, 2, groups=2)
        self.hidden = nn.Linear(6, 10)
        self.embedding = nn.Embedding(10, 10)
        self.tied = nn.Linear(10, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transposed(self.strided(self.depthwise(self.norm(self.stem(x)).relu())).relu())
        return self.head(self.tied(self.hidden(x.mean((2, 3))).relu()))


OWN = {"depthwise.weight", "strided.weight", "transposed.weight", "hidden.weight"}


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return (model(inputs(seed)) - 1).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for seed in range(first, first + steps):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def names_of(optimizer: Muon, model: nn.Module, update: Callable[[str], bool]) -> set[str]:
    groups = [group for group in optimizer.param_groups if update(group["update"])]
    ids = {id(parameter) for group in groups for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


# ----------------------------------------------------------------------------------------------------------------------
# What goes where
# ----------------------------------------------------------------------------------------------------------------------


def test_every_parameter_goes_somewhere_and_print_says_where() -> None:
    model = network()
    optimizer = Muon(model, 0.02)
    assert names_of(optimizer, model, lambda update: update != "auxiliary") == OWN
    rest = names_of(optimizer, model, lambda update: update == "auxiliary")
    assert rest | OWN == {name for name, _ in model.named_parameters()}
    text = str(optimizer)
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert set(lines) == rest | OWN
    for name, said in {
        "stem.weight": "3 input channels",
        "norm.weight": "a bias, a norm or a scale",
        "strided.weight": "operator, rate 0.02  the weight of a Conv2d",
        "transposed.weight": "the weight of a ConvTranspose2d",
        "embedding.weight": "shared with an Embedding",
        "head.weight": "the head",
        "hidden.bias": "AdamW, rate 0.001",
    }.items():
        assert said in lines[name], lines[name]
    (group,) = (group for group in optimizer.param_groups if group["update"] == "operator")
    assert group["geometries"] == [((1, 1), (1, 1), 8), ((2, 2), (1, 1), 1), ((2, 2), (1, 1), 2), ((), (), 1)]


def test_include_and_exclude() -> None:
    model = network()
    own = lambda optimizer: names_of(optimizer, model, lambda update: update != "auxiliary")  # noqa: E731
    assert own(Muon(model, include=nn.Conv2d)) == {"stem.weight", "depthwise.weight", "strided.weight"}
    assert own(Muon(model, exclude=["hidden", nn.ConvTranspose2d])) == {"depthwise.weight", "strided.weight"}
    assert "excluded" in str(Muon(model, exclude="hidden"))
    assert own(Muon(model, include="head")) == {"head.weight"}


def test_wrapped_models_and_computed_weights() -> None:
    model = network()
    nn.utils.parametrizations.weight_norm(model.strided)
    optimizer = Muon(torch.compile(model))
    own = names_of(optimizer, model, lambda update: update != "auxiliary")
    assert own == OWN - {"strided.weight"}
    train(model, optimizer, 1)


def test_groups_of_parameters() -> None:
    conv, strided, linear, bias = (torch.randn(s, requires_grad=True) for s in ((4, 4, 3, 3), (4, 4, 3, 3), (4, 6), 4))
    optimizer = Muon(
        [
            {"params": [conv, linear]},
            {"params": [strided], "stride": 2, "lr": 0.5, "update": "flatten"},
            {"params": [bias], "update": "auxiliary", "lr": 0.25},
        ],
        0.1,
        auxiliary=SGD,
    )
    before = [tensor.detach().clone() for tensor in (conv, linear, strided, bias)]
    grads = [torch.randn_like(tensor) for tensor in before]
    for tensor, grad in zip((conv, linear, strided, bias), grads, strict=True):
        tensor.grad = grad.clone()
    optimizer.step()
    a, b = orthogonal_update(grads[:2])
    (c,) = orthogonal_update([grads[2]], mode="flatten")
    torch.testing.assert_close(conv.detach(), before[0] - 0.1 * a)
    torch.testing.assert_close(linear.detach(), before[1] - 0.1 * b)
    torch.testing.assert_close(strided.detach(), before[2] - 0.5 * c)
    torch.testing.assert_close(bias.detach(), before[3] - 0.25 * grads[3])


# ----------------------------------------------------------------------------------------------------------------------
# The rule
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", ["operator", "flatten", "per_tap"])
def test_the_rule(mode: str, nesterov: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, 3, 3, generator=generator).to(dtype).requires_grad_()
    group = {"params": [weight], "stride": 2}
    options: dict[str, Any] = {"mode": mode, "momentum": 0.8, "nesterov": nesterov, "weight_decay": 0.1}
    optimizer = Muon([group], 0.05, **options, scale="match_rms_adamw")
    expected, buffer = weight.detach().double().clone(), torch.zeros(6, 4, 3, 3, dtype=torch.float64)
    for _ in range(3):
        grad = torch.randn(6, 4, 3, 3, generator=generator).to(dtype)
        weight.grad = grad.clone()
        optimizer.step()
        assert torch.equal(weight.grad, grad)
        buffer = 0.8 * buffer + 0.2 * grad.double()
        direction = 0.8 * buffer + 0.2 * grad.double() if nesterov else buffer
        (update,) = orthogonal_update([direction], [2], mode=mode, scale="match_rms_adamw")
        expected = (1 - 0.05 * 0.1) * expected - 0.05 * update
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert (weight.detach().double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16), (400, 500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_flatten_is_the_muon_of_torch_on_matrices(shape: tuple[int, int], scale: str, dtype: torch.dtype) -> None:
    """Theirs iterates in bfloat16; for the comparison it stays in the dtype of the weights."""
    torch.manual_seed(0)
    ours = torch.randn(shape, dtype=dtype).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    mine = Muon([ours], **options, mode="flatten", scale=scale)
    other = torch.optim.Muon([theirs], **options, adjust_lr_fn=scale)
    for _ in range(3):
        ours.grad = torch.randn(shape, dtype=dtype)
        theirs.grad = ours.grad.clone()
        mine.step()
        with mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor.clone()):
            other.step()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_maximize_goes_uphill() -> None:
    model, other = network(), network()
    uphill, downhill = Muon(model, maximize=True, auxiliary=SGD), Muon(other, auxiliary=SGD)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for one, optimizer in ((model, uphill), (other, downhill)):
        train(one, optimizer, 1)
    for (name, up), (_, down) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(up - start[name], start[name] - down, rtol=1e-4, atol=1e-6)


def test_it_trains() -> None:
    for mode in ("operator", "flatten", "per_tap"):
        model = network()
        losses = [sum(train(model, optimizer, 10)) for optimizer in [Muon(model, 0.02, mode=mode)] for _ in range(3)]
        assert losses[-1] < 0.7 * losses[0], mode


# ----------------------------------------------------------------------------------------------------------------------
# What torch expects of an optimiser
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auxiliary", [torch.optim.AdamW, SGD], ids=["adamw", "sgd"])
def test_a_checkpoint_continues_with_the_same_bits(auxiliary: Any) -> None:
    model = network()
    optimizer = Muon(model, 0.02, 0.9, weight_decay=0.01, auxiliary=auxiliary)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = Network()
    other.load_state_dict(saved["model"])
    resumed = Muon(other, 0.5, 0.1, auxiliary=auxiliary)
    resumed.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, 3, 3) == train(other, resumed, 3, 3)
    assert same(model, other)


def test_a_checkpoint_of_another_layer_is_refused() -> None:
    weight = torch.randn(4, 4, 3, 3, requires_grad=True)
    saved = Muon([{"params": [weight], "stride": 2}]).state_dict()
    with pytest.raises(ValueError, match=r"state_dict must have geometries \[\(\(1, 1\), .* in group 0, got"):
        Muon([weight]).load_state_dict(saved)
    with pytest.raises(ValueError, match="state_dict must have update 'flatten' in group 0, got 'operator'"):
        Muon([{"params": [weight], "stride": 2}], mode="flatten").load_state_dict(saved)


def test_copies_and_pickles() -> None:
    model = network()
    optimizer = Muon(model, auxiliary=SGD)
    train(model, optimizer, 2)
    both = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 2, 2)
    for other, resumed in (both, pickled):
        train(other, resumed, 2, 2)
        assert same(model, other)


def test_groups_can_be_added_later() -> None:
    model = network()
    head = list(model.head.parameters())
    optimizer = Muon([model.strided.weight], auxiliary=SGD)
    optimizer.add_param_group({"params": head[:1], "update": "auxiliary", "lr": 0.3})
    optimizer.add_param_group({"params": [model.hidden.weight], "lr": 0.7, "update": "flatten"})
    optimizer.add_param_group({"params": head[1:], "update": "auxiliary"})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.3, 0.7, 0.1]
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 1)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name for name in moved if "norm" not in name} == {
        "strided.weight", "hidden.weight", "head.weight", "head.bias",
    }  # fmt: skip


def test_schedulers_reach_both() -> None:
    model = network()
    optimizer = Muon(model, 0.02, auxiliary=SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, 1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(dict(model.named_parameters()))
    train(model, optimizer, 1)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_the_rate_can_be_a_tensor() -> None:
    model, other = network(), network()
    train(model, Muon(model, 0.02, auxiliary=SGD), 2)
    train(other, Muon(other, torch.tensor(0.02), auxiliary=SGD), 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_a_closure_is_called_with_gradients() -> None:
    model, other = network(), network()
    optimizer = Muon(model, auxiliary=SGD)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    value = optimizer.step(closure)
    assert value.item() == train(other, Muon(other, auxiliary=SGD), 1)[0]
    assert same(model, other)


def test_hooks_and_a_second_state() -> None:
    model = network()
    optimizer = Muon(model)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(model, optimizer, 1)
    assert called == ["after"]
    assert all(set(optimizer.state[p]) == {"momentum_buffer"} for p in (model.strided.weight, model.depthwise.weight))
    assert "exp_avg" in optimizer.state[model.head.weight]


def test_gradients_that_are_missing_or_frozen() -> None:
    model = network()
    model.strided.requires_grad_(False)
    optimizer = Muon(model)
    before = model.strided.weight.clone()
    train(model, optimizer, 2)
    assert torch.equal(model.strided.weight, before)
    assert model.strided.weight not in optimizer.state
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("infinite", [True, False])
def test_grad_scaler(infinite: bool) -> None:
    """Scaled gradients give the same step, and a step with an infinite one is left out."""
    model, other = network(), network()
    optimizer = Muon(model, auxiliary=SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    if infinite:
        model.strided.weight.grad[0] = torch.inf
    before = copy.deepcopy(dict(model.named_parameters()))
    scaler.step(optimizer)
    scaler.update()
    if infinite:
        assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
        return
    train(other, Muon(other, auxiliary=SGD), 1)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["operator", "flatten"])
def test_compiled_step(mode: str) -> None:
    model, other = network(), network()
    optimizer, plain = Muon(model, mode=mode, auxiliary=SGD), Muon(other, mode=mode, auxiliary=SGD)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for seed in range(3):
        for one, move, opt in ((model, step, optimizer), (other, plain.step, plain)):
            loss_of(one, seed).backward()
            move()
            opt.zero_grad()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_nothing_of_the_models_parameters_is_kept_twice(tmp_path: Path) -> None:
    """Its state is one buffer for each parameter, with the parameter's dtype and layout."""
    weight = torch.randn(8, 8, 3, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
    optimizer = Muon([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    (state,) = optimizer.state.values()
    buffer = state["momentum_buffer"]
    assert buffer.dtype == weight.dtype
    assert buffer.stride() == weight.stride()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 2 * weight.nbytes + 10_000


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative, got -1.0"),
        ({"lr": "fast"}, ValueError, "lr must be finite and not negative, got 'fast'"),
        ({"lr": torch.ones(2)}, ValueError, r"lr must be a number or a tensor of one, got shape \(2,\)"),
        ({"momentum": 1.0}, ValueError, "momentum must be at least 0 and less than 1, got 1.0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be finite and not negative"),
        ({"mode": "conv"}, ValueError, "mode must be one of 'operator', 'flatten', 'per_tap', got 'conv'"),
        ({"nesterov": 1}, ValueError, "nesterov must be one of True, False, got 1"),
        ({"auxiliary": "adamw"}, TypeError, "auxiliary must be a callable that makes an optimiser"),
        ({"include": "head"}, ValueError, "include and exclude choose layers of a model"),
        ({"shard": "yes"}, ValueError, "shard must be one of 'auto', True, False, got 'yes'"),
        ({"backend": "cpp"}, ValueError, "backend must be None or one of"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Muon([torch.randn(4, 4, requires_grad=True)], **options)


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ({"params": [torch.zeros(4)]}, ValueError, r"params\[0\] of shape \(4,\) cannot have an orthogonal update"),
        ({"params": [torch.zeros(4, 4, dtype=torch.cfloat)]}, TypeError, "must be float64, float32"),
        ({"params": [torch.zeros(4, 4, 3, 3)], "stride": 0}, ValueError, "stride must be a positive int"),
        ({"params": [torch.zeros(4, 4, 3, 3)], "groups": 3}, ValueError, "groups must be positive and divide"),
        ({"params": [torch.zeros(4, 4)], "update": "adam"}, ValueError, "update must be one of 'operator'"),
        ({"params": [torch.zeros(4, 4)], "momentum": 2}, ValueError, "momentum must be"),
    ],
)
def test_wrong_groups_change_nothing(group: dict[str, Any], error: type[Exception], message: str) -> None:
    optimizer = Muon([torch.randn(4, 4, requires_grad=True)])
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    weight.grad = torch.eye(4).to_sparse()
    with pytest.raises(TypeError, match=r"gradients must be dense, got layout torch.sparse_coo for params\[0\]"):
        Muon([weight]).step()
