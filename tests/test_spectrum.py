"""Singular values against the dense decomposition of a matrix made by applying torch's convolution to unit vectors."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ocnn_fused import fused_orth_loss, init, kernel_orth_loss
from ocnn_fused.plan import least_loss
from ocnn_fused.spectrum import (
    condition_number,
    dbt_matrix,
    dead_filters,
    excess_by_frequency,
    singular_values,
    spectral_norm,
    summary,
    upper_bound,
)
from ocnn_fused.spectrum.matrix import extreme_values
from ocnn_fused.spectrum.operator import operator_of

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
TIGHT = 1e-10


@dataclass(frozen=True)
class Layer:
    """A random weight and the geometry of its layer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    size: tuple[int, ...]
    rank_one: bool
    seed: int

    @property
    def weight(self) -> torch.Tensor:
        weight = torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        if self.rank_one:  # values that are zero: every filter the same
            weight = weight[:1].expand(self.shape).clone()
        return weight / prod(self.shape[1:]) ** 0.5

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "dilation": self.dilation, "groups": self.groups, "transposed": self.transposed}

    @property
    def positions(self) -> tuple[int, ...]:
        return self.size if self.transposed else tuple(n // s for n, s in zip(self.size, self.stride, strict=True))


def random_layer(seed: int, *, circular: bool) -> Layer:
    rng = np.random.default_rng(seed)
    rank = int(rng.choice([1, 2, 2, 2, 3]))
    largest = {1: 7, 2: 4, 3: 2}[rank]
    pick = lambda low, high: tuple(int(value) for value in rng.integers(low, high + 1, rank))  # noqa: E731
    kernel, stride, dilation = pick(1, largest), pick(1, 3 if rank < 3 else 2), pick(1, 3 if rank < 3 else 2)
    groups = int(rng.choice([1, 1, 2, 3]))
    transposed = bool(rng.random() < 0.25)
    positions = pick(1, {1: 9, 2: 5, 3: 3}[rank])
    size = positions if transposed else tuple(q * s for q, s in zip(positions, stride, strict=True))
    extents = tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    padding = tuple(int(rng.integers(0, extent + 1)) for extent in extents)
    output_padding = tuple(int(rng.integers(0, s)) if transposed else 0 for s in stride)
    if not circular:  # any size that leaves an output, or an input for the adjoint
        least = [
            2 * p // s + 1 if transposed else max(1, e + 1 - 2 * p)
            for p, s, e in zip(padding, stride, extents, strict=True)
        ]
        size = tuple(low + int(rng.integers(0, 4)) for low in least)
    rows, channels = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    shape = (groups * rows, channels, *kernel)
    return Layer(
        shape, stride, dilation, groups, padding, transposed, output_padding, size, bool(rng.random() < 0.1), seed
    )


def circular_by_unit_vectors(layer: Layer) -> torch.Tensor:
    """The convolution of periodically continued unit images; transposed, its adjoint by autograd."""
    pixels = tuple(q * s for q, s in zip(layer.positions, layer.stride, strict=True))
    channels = layer.shape[1] * layer.groups
    count = channels * prod(pixels)

    def convolution(images: torch.Tensor) -> torch.Tensor:
        for axis, (k, s, d, n, q) in enumerate(
            zip(layer.shape[2:], layer.stride, layer.dilation, pixels, layer.positions, strict=True)
        ):
            index = torch.arange((q - 1) * s + d * (k - 1) + 1) % n
            images = images.index_select(axis + 2, index)
        rank = len(pixels)
        return CONVOLUTIONS[rank](images, layer.weight, None, layer.stride, 0, layer.dilation, layer.groups)

    units = torch.eye(count, dtype=torch.float64).reshape(count, channels, *pixels)
    matrix = convolution(units).flatten(1).T
    return matrix.T if layer.transposed else matrix


def zero_padded_by_unit_vectors(layer: Layer) -> torch.Tensor:
    rank = len(layer.size)
    channels = layer.shape[0] if layer.transposed else layer.shape[1] * layer.groups
    count = channels * prod(layer.size)
    units = torch.eye(count, dtype=torch.float64).reshape(count, channels, *layer.size)
    if layer.transposed:
        out = TRANSPOSED[rank](
            units, layer.weight, None, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        )
    else:
        out = CONVOLUTIONS[rank](units, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return out.flatten(1).T


@pytest.mark.parametrize("block", range(8))
def test_circular_values_are_those_of_the_explicit_matrix(block: int) -> None:
    for seed in range(30 * block, 30 * block + 30):
        layer = random_layer(seed, circular=True)
        matrix = circular_by_unit_vectors(layer)
        expected = torch.linalg.svdvals(matrix)
        values = singular_values(layer.weight, layer.size, **layer.options)
        assert values.shape == expected.shape, layer
        scale = max(1.0, float(expected[0]))
        assert (values - expected).abs().max() <= TIGHT * scale, layer
        norm = spectral_norm(layer.weight, layer.size, **layer.options)
        assert abs(norm - expected[0]) <= TIGHT * scale, layer
        sparse = dbt_matrix(layer.weight, layer.size, padding_mode="circular", **layer.options)
        torch.testing.assert_close(sparse.to_dense(), matrix, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", range(8))
def test_loss_and_spectrum_agree(block: int) -> None:
    """``sum (s^2 - 1)^2 = positions * (loss - max(0, M - C * prod(stride)))`` where no lag wraps onto another."""
    compared = 0
    for seed in range(30 * block, 30 * block + 30):
        layer = random_layer(seed, circular=True)
        # Large enough: more frequencies than twice the lags, also after the dilation has merged some.
        size = []
        for k, s, d in zip(layer.shape[2:], layer.stride, layer.dilation, strict=True):
            lags, rest = (k - 1) // (s // gcd(s, d)), d // gcd(s, d)
            count = next(q for q in range(1, 99) if q // gcd(q, rest) > 2 * lags)
            size.append(count if layer.transposed else count * s)
        values = singular_values(layer.weight, tuple(size), **layer.options)
        positions = prod(size) // (1 if layer.transposed else prod(layer.stride))
        unreachable = layer.groups * max(0, layer.shape[0] // layer.groups - layer.shape[1] * prod(layer.stride))
        loss = fused_orth_loss(layer.weight, layer.stride, dilation=layer.dilation, groups=layer.groups)
        assert ((values**2 - 1) ** 2).sum().item() == pytest.approx(positions * (loss.item() - unreachable), rel=1e-10)
        excess = excess_by_frequency(layer.weight, tuple(size), **layer.options)
        least = least_loss(operator_of(layer.weight, **layer.options).problem)
        assert excess.shape == tuple(n if layer.transposed else n // s for n, s in zip(size, layer.stride, strict=True))
        assert excess.mean().item() == pytest.approx(loss.item() - least, rel=1e-10, abs=1e-12)
        compared += 1
    assert compared == 30


@pytest.mark.parametrize("block", range(4))
def test_zero_padded_values_are_those_of_the_explicit_matrix(block: int) -> None:
    for seed in range(1000 + 20 * block, 1000 + 20 * block + 20):
        layer = random_layer(seed, circular=False)
        options = {**layer.options, "padding": layer.padding, "output_padding": layer.output_padding}
        matrix = zero_padded_by_unit_vectors(layer)
        expected = torch.linalg.svdvals(matrix)
        values = singular_values(layer.weight, layer.size, padding_mode="zeros", **options)
        scale = max(1.0, float(expected[0]))
        # A matrix's zeros are not all counted by groups: their blocks may be wider or taller.
        assert values.shape == expected.shape, layer
        assert (values - expected).abs().max() <= TIGHT * scale, layer
        torch.testing.assert_close(
            dbt_matrix(layer.weight, layer.size, **options).to_dense(), matrix, rtol=0, atol=1e-12
        )
        largest, smallest = extreme_values(operator_of(layer.weight, **options), layer.size)
        assert abs(largest - expected[0]) <= 1e-7 * scale, layer
        assert abs(smallest - expected[-1]) <= 1e-7 * scale, layer


def test_large_zero_padded_layers_go_through_gram_and_lanczos(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits set so low that a small layer is large."""
    from ocnn_fused.spectrum import matrix

    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = singular_values(weight, 8, padding_mode="zeros")
    monkeypatch.setattr(matrix, "_DENSE_ELEMENTS", 100)
    torch.testing.assert_close(singular_values(weight, 8, padding_mode="zeros"), exact, rtol=0, atol=1e-6)
    monkeypatch.setattr(matrix, "_GRAM_SIDE", 10)
    with pytest.raises(ValueError, match=r"384 x 256 elements .* spectral_norm"):
        singular_values(weight, 8, padding_mode="zeros")
    assert spectral_norm(weight, 8, padding_mode="zeros").item() == pytest.approx(exact[0].item(), rel=1e-8)
    assert condition_number(weight, 8, padding_mode="zeros").item() == pytest.approx(
        (exact[0] / exact[-1]).item(), rel=1e-6
    )
    monkeypatch.setattr(matrix, "_LANCZOS_STEPS", 5)
    with pytest.warns(RuntimeWarning, match="has not converged"):
        extreme_values(operator_of(weight), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_those_of_the_rounded_weight(dtype: torch.dtype) -> None:
    for seed in range(20):
        layer = random_layer(seed, circular=True)
        weight = layer.weight.to(dtype)
        values = singular_values(weight, layer.size, **layer.options)
        exact = singular_values(weight.double(), layer.size, **layer.options)
        assert values.dtype == torch.float64
        assert (values - exact).abs().max() <= 1e-7 * max(1.0, exact[0].item())


MODULES = [
    (nn.Linear(7, 5), ()),
    (nn.Conv1d(4, 6, 5, 2, 2), (12,)),
    (nn.Conv2d(4, 6, 3, padding="same", groups=2), (5, 6)),
    (nn.Conv2d(4, 6, 4, padding="same", dilation=3), (9, 9)),
    (nn.Conv2d(4, 6, 3, padding="valid"), (5, 6)),
    (nn.Conv3d(2, 3, (1, 2, 3), (1, 2, 1)), (2, 4, 5)),
    (nn.ConvTranspose2d(6, 4, 4, 2, 1, groups=2), (3, 4)),
    (nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), (3, 4)),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("module", "size"), MODULES, ids=lambda value: type(value).__name__)
def test_modules_say_themselves_what_they_are(module: nn.Module, size: tuple[int, ...]) -> None:
    """The zero-padded matrix does to an input what the module does."""
    module = module.double()
    channels = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    x = torch.randn(1, channels, *size, dtype=torch.float64)
    with torch.no_grad():
        expected = (module(x) - module(torch.zeros_like(x))).flatten()
        matrix = dbt_matrix(module, size).to_dense()
    torch.testing.assert_close(matrix @ x.flatten(), expected, rtol=1e-12, atol=1e-12)
    values = singular_values(module, size, padding_mode="zeros")
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix), rtol=0, atol=1e-12)


def test_a_linear_layer_is_its_matrix() -> None:
    module = nn.Linear(7, 5).double()
    expected = torch.linalg.svdvals(module.weight)
    torch.testing.assert_close(singular_values(module, ()), expected, rtol=0, atol=1e-12)
    assert spectral_norm(module, ()).item() == pytest.approx(expected[0].item())
    assert excess_by_frequency(module, ()).item() == pytest.approx(fused_orth_loss(module.weight).item())


def test_values_have_gradients() -> None:
    weight = torch.randn(3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for options in ({}, {"padding_mode": "zeros"}):
        assert torch.autograd.gradcheck(lambda w, kw=options: singular_values(w, 5, **kw), weight)
        assert torch.autograd.gradcheck(lambda w, kw=options: condition_number(w, 5, **kw), weight)
        assert torch.autograd.gradcheck(lambda w, kw=options: spectral_norm(w, 5, **kw), weight)
    assert torch.autograd.gradcheck(lambda w: excess_by_frequency(w, 5), weight)
    assert torch.autograd.gradcheck(lambda w: dbt_matrix(w, 5).to_dense(), weight)
    found = summary(singular_values(weight, 5))
    for value in (found.largest, found.smallest, found.median, found.effective_rank):
        (gradient,) = torch.autograd.grad(value, weight, retain_graph=True)
        assert gradient.isfinite().all()
        assert gradient.any()


def test_one_tap_is_looked_at_once() -> None:
    """The symbol of a 1x1 kernel is the same at all frequencies."""
    operator = operator_of(torch.randn(3, 4, 1, 3))
    assert len(operator.frequencies((50, 8)).angles) == 5
    pointwise = operator_of(torch.randn(3, 4, 1, 1), stride=2)
    assert len(pointwise.frequencies(56).angles) == 1
    assert len(singular_values(pointwise.weight, 56, stride=2)) == 3 * 28 * 28


def test_pieces_do_not_change_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from ocnn_fused.spectrum import operator

    weight = torch.randn(6, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, norm = singular_values(weight, 8), spectral_norm(weight, 8)
    monkeypatch.setattr(operator, "PIECE_BYTES", 1)
    torch.testing.assert_close(singular_values(weight, 8, progress=True), whole, rtol=0, atol=1e-13)
    assert spectral_norm(weight, 8).item() == pytest.approx(norm.item(), rel=1e-14)


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-6, 1e-3, 1.0])
def test_largest_value_among_many_that_are_nearly_equal(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orthogonal layer has the same norm at all frequencies, and float32 cannot tell which is the largest."""
    from ocnn_fused.spectrum import operator

    generator = torch.Generator().manual_seed(0)
    weight = init.orthogonal_(torch.empty(24, 24, 3, 3, dtype=torch.float64), support="full", generator=generator)
    weight += noise * torch.randn(weight.shape, dtype=torch.float64, generator=generator)
    expected = singular_values(weight, 16)[0].item()
    for piece_bytes in (operator.PIECE_BYTES, 1 << 18):
        monkeypatch.setattr(operator, "PIECE_BYTES", piece_bytes)
        for scale in (1e-30, 1.0, 1e30):
            assert spectral_norm(scale * weight, 16).item() == pytest.approx(scale * expected, rel=1e-12)
    assert spectral_norm(torch.zeros(4, 4, 3, 3), 16).item() == 0


@pytest.mark.parametrize("shape", [(3, 4, 3, 3), (2, 5, 7), (4, 3, 2, 3, 1), (2, 2, 1, 1)])
def test_interpolated_gram_matrices_are_the_products(shape: tuple[int, ...]) -> None:
    for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 3e-6)):
        symbol = operator_of(torch.randn(shape, dtype=torch.float64)).symbol()
        symbol = symbol if dtype == torch.float64 else symbol.single()
        angles = 7 * torch.rand(50, len(shape) - 2, dtype=torch.float64)
        interpolated, multiplied = symbol.gram(10**6), symbol.gram(0)
        assert (interpolated.samples is None) == (shape[2:] == (1, 1))
        difference = interpolated.at(angles) - multiplied.at(angles)
        assert difference.abs().max() <= limit * multiplied.at(angles).abs().max()


@pytest.mark.parametrize("noise", [1e-9, 1.0])
def test_threads_give_the_values_of_one(noise: float) -> None:
    weight = init.orthogonal_(torch.empty(48, 48, 3, 3), generator=torch.Generator().manual_seed(0)).double()
    weight += noise * torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append((singular_values(weight, 8), spectral_norm(weight, 8), upper_bound(weight)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(one, several, rtol=1e-12, atol=1e-12)


def test_summary_of_known_values() -> None:
    found = summary(torch.tensor([2.0, 1.05, 1.0, 0.95, 0.0], dtype=torch.float64)).as_floats()
    shares = np.array([2.0, 1.05, 1.0, 0.95]) / 5
    assert found == pytest.approx(
        {
            "largest": 2,
            "smallest": 0,
            "median": 1,
            "near_one": 0.6,
            "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        }
    )
    assert summary(torch.ones(7, dtype=torch.float64)).effective_rank.item() == pytest.approx(7)
    assert summary(torch.zeros(3, dtype=torch.float64)).as_floats()["largest"] == 0
    assert condition_number(torch.zeros(2, 2, 1, dtype=torch.float64), 3).isnan()
    assert condition_number(torch.tensor([2.0, 0.0]).diag()[:, :, None], 3).isinf()


def test_dead_filters() -> None:
    weight = torch.randn(6, 4, 3, 3)
    weight[2] *= 1e-5
    weight[5] = 0
    assert dead_filters(weight) == [2, 5]
    assert dead_filters(weight, 1e-6) == [5]
    assert dead_filters(torch.zeros(2, 3, 1)) == [0, 1]
    module = nn.ConvTranspose1d(4, 6, 3, groups=2)
    with torch.no_grad():
        module.weight[2:, 1] = 0  # second group, its second output
    assert dead_filters(module) == [4]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: singular_values(torch.randn(2, 2, 3), 5, stride=2), ValueError, r"multiple of the stride .* \(5,\)"),
        (lambda: singular_values(torch.randn(2, 2, 3), (5, 5)), ValueError, "input_size must be a positive int"),
        (lambda: singular_values(torch.randn(2, 2, 3), 5, padding_mode="mirror"), ValueError, "'mirror'"),
        (lambda: singular_values(torch.randn(2, 2, 3), 5, stride=0), ValueError, "stride must be a positive int"),
        (lambda: singular_values(torch.randn(3, 2, 3), 5, groups=2), ValueError, "groups must be positive and divide"),
        (lambda: singular_values(torch.randn(3), 5), ValueError, "weight must have 2"),
        (lambda: singular_values(torch.ones(3, 2, 3, dtype=torch.int64), 5), ValueError, "must be a floating tensor"),
        (lambda: singular_values(torch.full((2, 2, 3), torch.nan), 5), ValueError, "weight must be finite"),
        (lambda: singular_values(nn.ReLU(), 5), TypeError, "got ReLU"),
        (lambda: singular_values("conv", 5), TypeError, "got str"),
        (lambda: singular_values(nn.Conv1d(2, 2, 3), 6, stride=2), TypeError, "module says itself what its stride"),
        (
            lambda: singular_values(torch.randn(2, 2, 5), 3, padding_mode="zeros", padding=0),
            ValueError,
            r"input_size \(3,\) is too small",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_same_as_transforming_the_kernel_at_all_frequencies() -> None:
    """What public code does, where it is right: stride 1, no groups."""
    for shape, size in (((6, 4, 3, 3), (8, 7)), ((3, 5, 5, 2), (6, 6))):
        weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        blocks = torch.fft.fft2(weight, s=size).permute(2, 3, 0, 1)
        expected = torch.linalg.svdvals(blocks).flatten().sort(descending=True).values
        torch.testing.assert_close(singular_values(weight, size), expected, rtol=0, atol=TIGHT)


@pytest.mark.parametrize("kind", ["random", "flat", "sharp", "grouped", "zero", "tiny", "huge"])
def test_largest_value_alone_is_the_largest_of_all(kind: str) -> None:
    """Where blocks are alike, where one stands out, and where there is nothing."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 24, 3, 3, dtype=torch.float64, generator=generator) / 15
    if kind == "flat":
        weight *= 1e-6
        weight[:, :, 1, 1] += torch.eye(24)
    if kind == "sharp":
        weight = weight + 1
    if kind in ("zero", "tiny", "huge"):
        weight = weight * {"zero": 0.0, "tiny": 1e-40, "huge": 1e40}[kind]
    groups = 4 if kind == "grouped" else 1
    values = singular_values(weight, 10, groups=groups)
    assert spectral_norm(weight, 10, groups=groups).item() == pytest.approx(values[0].item(), rel=1e-12, abs=0)


@pytest.mark.parametrize(("rows", "channels", "kernel"), [(8, 6, 3), (4, 9, 5), (16, 16, 3)])
def test_the_largest_value_is_that_of_orthogonium(rows: int, channels: int, kernel: int) -> None:
    """Of plain layers, where its estimate is right; `make peers` installs it."""
    singular_values_of = pytest.importorskip("orthogonium.layers.conv.singular_values").get_conv_sv
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, rows, kernel, padding=kernel // 2, padding_mode="circular", dtype=torch.float64)
    layer.group = 1  # its own layers have it
    theirs = singular_values_of(layer, n_iter=10, return_stab_rank=False, imsize=12)
    assert spectral_norm(layer, (12, 12)).item() == pytest.approx(theirs.item(), rel=1e-6)


def test_grouped_and_strided_layers_that_other_tools_get_wrong() -> None:
    """Groups do not multiply: the norm of a grouped layer is the largest of its groups'."""
    weight = torch.randn(8, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    parts = [spectral_norm(part, 8, stride=2) for part in weight.chunk(4)]
    assert spectral_norm(weight, 8, stride=2, groups=4).item() == pytest.approx(max(parts).item(), rel=1e-6)


@pytest.mark.slow
def test_loss_near_zero_means_all_values_near_one_and_kernel_orthogonality_does_not() -> None:
    """The paper's central claim."""
    spectra = {}
    for loss in (fused_orth_loss, kernel_orth_loss):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(8, 12, 3, 3, dtype=torch.float64) / 12)
        optimizer = torch.optim.LBFGS([weight], max_iter=400, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def closure(optimizer=optimizer, weight=weight, loss=loss) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(weight)
            value.backward()
            return value

        optimizer.step(closure)
        assert loss(weight).item() < 1e-4
        spectra[loss] = singular_values(weight.detach(), 12)
    assert (spectra[fused_orth_loss] - 1).abs().max() < 0.05
    assert (spectra[kernel_orth_loss] - 1).abs().max() > 0.5
