"""Exact starts: loss and singular values over random geometries, existence, and whole models."""

from __future__ import annotations

import random
from math import gcd, prod

import pytest
import torch
import torch.nn.functional as F
from oracle import Case, loss_and_grad
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer, fused_orth_loss, init

GEOMETRIES = 300


def random_case(seed: int) -> Case:
    """Any rank, stride, dilation and number of groups; small enough for the explicit matrix."""
    rng = random.Random(seed)
    axes = rng.choice([0, 1, 1, 2, 2, 2, 3])
    longest = {0: 1, 1: 6, 2: 4, 3: 3}[axes]
    kernel = tuple(rng.randint(1, longest) for _ in range(axes))
    stride = tuple(rng.randint(1, 3 if axes < 3 else 2) for _ in range(axes))
    dilation = tuple(rng.choice([1, 1, 2]) if axes < 3 else 1 for _ in range(axes))
    groups = rng.choice([1, 1, 2, 3])
    rows, channels = rng.randint(1, 9 if axes < 3 else 4), rng.randint(1, 4 if axes < 3 else 2)
    return Case((groups * rows, channels, *kernel), stride, dilation, groups)


def exists(case: Case) -> bool:
    """Achour, Malgouyres and Mamalet (2022), axis by axis; a dilation with a common factor of the stride skips pixels.

    Rows: no more filters than channels times the taps that one placement does not share. Columns: every pixel is seen.
    """
    rows, channels, *kernel = case.shape[0] // case.groups, *case.shape[1:]
    axes = list(zip(kernel, case.strides, case.dilations, strict=True))
    by_rows = rows <= channels * prod(min(k, s // gcd(s, d)) for k, s, d in axes)
    by_columns = all(s <= k and gcd(s, d) == 1 for k, s, d in axes)
    return by_rows or by_columns


def circular_singular_values(weight: Tensor, case: Case) -> Tensor:
    """Of the convolution on a periodic image, from its values at all unit vectors."""
    if case.rank == 0:
        return torch.cat([torch.linalg.svdvals(group) for group in weight.chunk(case.groups)])
    reach = [d * (k - 1) for k, d in zip(case.shape[2:], case.dilations, strict=True)]
    size = [-(-max(r, 1) // s) * s for r, s in zip(reach, case.strides, strict=True)]
    inputs = case.groups * case.shape[1]
    units = torch.eye(inputs * prod(size), dtype=weight.dtype).reshape(-1, inputs, *size)
    around = [width for r in reversed(reach) for width in (0, r)]
    convolution = (F.conv1d, F.conv2d, F.conv3d)[case.rank - 1]
    padded = F.pad(units, around, mode="circular")
    images = convolution(padded, weight, None, case.strides, 0, case.dilations, case.groups)  # type: ignore[arg-type]
    return torch.linalg.svdvals(images.flatten(1))


def options(case: Case) -> dict[str, object]:
    return {"stride": case.stride, "dilation": case.dilation, "groups": case.groups}


@pytest.mark.parametrize("support", ["delta", "full"])
def test_loss_and_singular_values(support: str) -> None:
    """The least loss to 1e-12 and every singular value to 1e-10; an error exactly where no such convolution exists."""
    filled = refused = unfillable = 0
    for seed in range(GEOMETRIES):
        case = random_case(seed)
        weight = torch.full(case.shape, torch.nan, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        try:
            init.orthogonal_(weight, **options(case), support=support, generator=generator)  # type: ignore[arg-type]
        except ValueError as error:
            if "support" in str(error):
                assert case.shape[1] == 1, case  # two channels always suffice
                unfillable += 1
            else:
                assert not exists(case), case
                refused += 1
            continue
        filled += 1
        assert exists(case), case
        residues = prod(min(k, s) for k, s in zip(case.shape[2:], case.steps, strict=True))
        least = case.groups * max(0, case.shape[0] // case.groups - case.shape[1] * residues)
        assert abs(loss_and_grad(weight, case)[0] - least) <= 1e-12, case
        assert (circular_singular_values(weight, case) - 1).abs().max() <= 1e-10, case
        per_tap = weight.reshape(case.groups, -1, prod(case.shape[2:])).abs().amax(1)
        blocks = prod(min(k, s) for k, s in zip(case.shape[2:], case.steps, strict=True))
        assert ((per_tap > 1e-9).sum(1) == (per_tap.shape[1] if support == "full" else blocks)).all(), case
    assert filled > GEOMETRIES // 2
    assert refused > 10
    assert (unfillable > 10) == (support == "full")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((1, 1, 3), 1), ((2, 1, 3), 2), ((1, 1, 3), 2), ((1, 1, 5), 2), ((1, 1, 3, 3), 1), ((4, 1, 3, 3), 2)],
)
def test_full_is_refused_where_a_zero_is_forced(shape: tuple[int, ...], stride: int) -> None:
    """With one channel at an outermost tap, the outermost lag is a product of two vectors that must vanish."""
    with pytest.raises(ValueError, match="cannot use every tap"):
        init.orthogonal_(torch.empty(shape), stride, support="full")


@pytest.mark.parametrize(("shape", "stride"), [((1, 1, 4), 2), ((3, 1, 3), 2), ((2, 1, 3), 1), ((1, 1, 5, 4), 3)])
def test_full_with_one_channel_where_there_is_room(shape: tuple[int, ...], stride: int) -> None:
    weight = init.orthogonal_(torch.empty(shape, dtype=torch.float64), stride, support="full")
    case = Case(shape, stride)
    assert (circular_singular_values(weight, case) - 1).abs().max() <= 1e-10
    assert (weight.abs().amax((0, 1)) > 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("support", ["delta", "full"])
def test_rounded_once(dtype: torch.dtype, support: str) -> None:
    exact, rounded = torch.empty(8, 4, 3, 3, dtype=torch.float64), torch.empty(8, 4, 3, 3, dtype=dtype)
    for weight in (exact, rounded):
        init.orthogonal_(weight, 2, support=support, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    assert torch.equal(exact.to(dtype), rounded)


def test_memory_format_generator_and_graph() -> None:
    parameter = nn.Parameter(torch.empty(8, 6, 3, 3).to(memory_format=torch.channels_last))
    torch.manual_seed(3)
    returned = init.orthogonal_(parameter)
    first = parameter.detach().clone()
    assert returned is parameter
    assert parameter.grad_fn is None
    assert parameter.is_contiguous(memory_format=torch.channels_last)
    torch.manual_seed(3)
    assert torch.equal(init.orthogonal_(parameter), first)
    assert not torch.equal(init.orthogonal_(parameter), first)


def test_delta_is_in_the_middle() -> None:
    weight = init.orthogonal_(torch.empty(4, 4, 5, 3))
    assert weight[:, :, 2, 1].abs().max() > 0
    weight[:, :, 2, 1] = 0
    assert not weight.any()


def test_transposed_convolution_preserves_length() -> None:
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False, dtype=torch.float64)
    init.orthogonal_(layer.weight, 2, transposed=True, support="full")
    image = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    assert torch.allclose(layer(image).norm(), image.norm(), rtol=1e-12)


def test_messages() -> None:
    with pytest.raises(ValueError, match="5 output channels are more than the 4 input"):
        init.orthogonal_(torch.empty(5, 1, 2, 2), 3)
    with pytest.raises(ValueError, match="5 input channels are more than the 4 output"):
        init.orthogonal_(torch.empty(5, 1, 2, 2), 3, transposed=True)
    with pytest.raises(ValueError, match="support must be one of 'delta', 'full', got 'dense'"):
        init.orthogonal_(torch.empty(4, 4, 3, 3), support="dense")  # type: ignore[arg-type]


def small_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Linear(8, 4)
    )


def test_model() -> None:
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert init.init_model_(model, support="full") == ["1", "2"]
    for name, loss in OrthRegularizer(model).per_layer().items():
        layer = OrthRegularizer(model).layers[name]
        assert abs(loss.item() - layer.floor) < 1e-5
    for name in ("0.weight", "1.bias", "3.weight"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert init.init_model_(model, include=nn.Linear) == ["3"]
    assert fused_orth_loss(model[3].weight).item() < 1e-10


def test_model_is_left_alone_after_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 80, 2, stride=3))
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ValueError, match=r"^1: no orthogonal convolution"):
        init.init_model_(model)
    assert all(map(torch.equal, before, model.state_dict().values()))
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"^0: its weight is computed"):
        init.init_model_(model, include="0")
    with pytest.raises(ValueError, match="include"):
        init.init_model_(model, include="stem*")


@pytest.mark.parametrize("layer", [nn.LazyConv2d(8, 3), nn.Conv2d(8, 8, 3, device="meta")], ids=["lazy", "meta"])
def test_a_weight_without_numbers_is_not_passed_over(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), layer)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"^1 cannot be filled: (a LazyConv2d|weight on the meta device)"):
        init.init_model_(model)
    assert torch.equal(model[0].weight, before)
    assert init.init_model_(model, exclude="1") == ["0"]
