"""Orthogonal updates against their definitions in float64: plain loops, singular values, Fourier transforms."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from conftest import kernels_run
from oracle import Case, loss_and_grad
from torch import Tensor

from ocnn_fused import spectrum
from ocnn_fused.optim import largest, minimax, orthogonal_update, promised_norm
from ocnn_fused.optim.coefficients import MUON, Step, rational, steps_of
from ocnn_fused.optim.update import NO_TARGET
from ocnn_fused.problem import problem_of

CASES = [
    Case((12, 30)),
    Case((30, 5, 1, 1)),
    Case((12, 10, 3, 3)),
    Case((6, 4, 3, 3), stride=2),
    Case((9, 2, 3, 2), stride=(2, 1), groups=3),
    Case((8, 1, 3, 3), groups=8),
    Case((4, 3, 3, 3), dilation=2),
    Case((4, 3, 4), stride=3, dilation=2),
    Case((6, 4, 2, 2), stride=2),
    Case((3, 2, 2, 3, 2)),
    Case((4, 4, 9, 9), stride=2),
    Case((5, 3, 7)),
]
RELATIVE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def updated(case: Case, tensor: Tensor, **options: object) -> Tensor:
    (found,) = orthogonal_update([tensor], [case.stride], dilations=[case.dilation], groups=[case.groups], **options)
    return found


def polynomial(values: Tensor, steps: Sequence[Step]) -> Tensor:
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return values


def by_singular_values(matrix: Tensor, steps: Sequence[Step], tight: bool = False) -> Tensor:
    """The polynomial of the singular values, where the norm (or the fourth root of its Gram matrix's) is 1."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    scale = values.pow(4).sum().pow(0.25) if tight else values.square().sum().sqrt()
    return left * polynomial(values / scale, steps) @ right


def by_loops(case: Case, tensor: Tensor, steps: Sequence[Step]) -> Tensor:
    """``a X + b Z * X``, cut to the support, with ``Z`` from the plain loops of the definition."""

    def product(x: Tensor) -> tuple[float, Tensor]:
        loss, grad = loss_and_grad(x, case)
        return loss + 2 * x.square().sum().item() - case.shape[0], torch.from_numpy(grad) / 4 + x

    rows = case.shape[0] // case.groups
    groups = tensor.reshape(case.groups, -1)
    x = (groups * (math.sqrt(rows) / groups.norm(dim=1, keepdim=True))).reshape(case.shape)
    axes = list(zip(case.shape[2:], case.steps, strict=True))
    lags = math.prod(2 * ((k - 1) // s) + 1 for k, s in axes)
    overlaps = math.prod(-(-k // s) if k > s else 1 for k, s in axes)
    x /= min((lags * product(x)[0]) ** 0.25, math.sqrt(rows * overlaps))
    for a, b, _ in steps:
        x = a * x + b * product(x)[1]
    return x


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= RELATIVE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_are_what_the_loops_say(case: Case, dtype: torch.dtype) -> None:
    tensor = case.random(0, dtype)
    before = tensor.clone()
    assert_near(updated(case, tensor), by_loops(case, tensor.double(), minimax(5)), dtype)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("backend", ["cpu", "torch", "triton"])
def test_of_a_list_on_every_backend(backend: str) -> None:
    cases = CASES[:6]
    tensors = [case.random(0, torch.float32) for case in cases]
    with kernels_run(backend):
        found = orthogonal_update(
            tensors,
            [case.stride for case in cases],
            dilations=[case.dilation for case in cases],
            groups=[case.groups for case in cases],
            steps=3,
            backend=backend,
            precision="ieee",
        )
    for case, tensor, one in zip(cases, tensors, found, strict=True):
        assert_near(one, by_loops(case, tensor.double(), minimax(3)), torch.float32)


@pytest.mark.parametrize(("taps", "size"), [((3, 3), 7), ((2, 5), 14), ((4,), 10), ((2, 2, 3), 8)])
def test_a_step_is_the_polynomial_of_every_frequency_cut_to_the_kernel(taps: tuple[int, ...], size: int) -> None:
    """At stride 1, by a Fourier transform that is long enough for the uncut polynomial."""
    case = Case((5, 4, *taps))
    tensor = case.random(0)
    one, two = updated(case, tensor, steps=1), updated(case, tensor, steps=2)
    a, b, _ = minimax(2)[1]
    axes = tuple(range(2, tensor.dim()))
    at = torch.fft.fftn(one, s=(size,) * len(taps), dim=axes).movedim((0, 1), (-2, -1))
    values = torch.fft.ifftn((a * at + b * at @ at.mH @ at).movedim((-2, -1), (0, 1)), dim=axes).real
    torch.testing.assert_close(two, values[(..., *(slice(k) for k in taps))], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("coefficients", ["muon", "minimax"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_flattened_matrices(case: Case, coefficients: str, dtype: torch.dtype) -> None:
    tensor = case.random(0, dtype)
    groups = tensor.double().reshape(case.groups, case.shape[0] // case.groups, -1)
    steps = steps_of(coefficients, 5)  # type: ignore[arg-type]
    expected = torch.stack([by_singular_values(group, steps) for group in groups]).reshape(case.shape)
    assert_near(updated(case, tensor, mode="flatten", coefficients=coefficients), expected, dtype)


@pytest.mark.parametrize("poles", [1, 2, 3])
def test_rational_functions(poles: int) -> None:
    """They are what the singular values say, and equioscillate: 2 * poles + 2 times as far from 1 as they ever get."""
    function = rational(poles)
    grid = torch.logspace(-2, 0, 20001, dtype=torch.float64)

    def of(values: Tensor) -> Tensor:
        return values * (function.factor + sum(w / (values.square() + pole) for pole, w in function.fractions))

    off = of(grid) - 1
    turns = (off[1:-1] - off[:-2]) * (off[2:] - off[1:-1]) <= 0
    extremes = torch.cat([off[:1], off[1:-1][turns], off[-1:]])
    assert len(extremes) == 2 * poles + 2
    torch.testing.assert_close(extremes.abs(), extremes.abs().max().expand_as(extremes), rtol=1e-3, atol=0)
    matrix = torch.randn(6, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    expected = left * of(values / values.norm()) @ right
    for one, wanted in ((matrix, expected), (matrix.T, expected.T)):
        (found,) = orthogonal_update([one], mode="flatten", coefficients="rational", steps=poles)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("shape", [(260, 600), (770, 780)], ids=str)
def test_large_symmetric_products_by_panels(shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for turned in (tensor, tensor.T):
        expected = by_singular_values(turned.double(), [MUON] * 5)
        (found,) = orthogonal_update([turned], mode="flatten")
        assert_near(found, expected, torch.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matrices_of_each_tap(case: Case) -> None:
    tensor = case.random(0)
    expected = torch.empty_like(tensor)
    for group, into in zip(tensor.chunk(case.groups), expected.chunk(case.groups), strict=True):
        for tap in range(math.prod(case.shape[2:])):
            matrix = group.flatten(2)[..., tap] if group.dim() > 2 else group
            into.view(*into.shape[:2], -1)[..., tap] = by_singular_values(matrix, steps_of("muon", 5))
    assert_near(updated(case, tensor, mode="per_tap"), expected, torch.float64)


def test_without_overlap_an_operator_is_a_matrix() -> None:
    case = Case((6, 4, 2, 2), stride=2)
    tensor = case.random(0)
    expected = by_singular_values(tensor.flatten(1), minimax(5), tight=True).view(case.shape)
    assert_near(updated(case, tensor), expected, torch.float64)


def random_case(generator: random.Random) -> Case:
    rank = generator.choice((1, 2, 2, 2, 3))
    kernel = tuple(generator.choice((1, 2, 3) if rank == 3 else (1, 2, 3, 3, 4, 5)) for _ in range(rank))
    groups, most = generator.choice((1, 1, 2, 8)), 6 if rank == 3 else 16
    shape = (groups * generator.randint(1, most), generator.randint(1, most), *kernel)
    strides = tuple(generator.choice((1, 1, 2, 3)) for _ in range(rank))
    return Case(shape, strides, tuple(generator.choice((1, 1, 2)) for _ in range(rank)), groups)


def direction(case: Case, kind: str, seed: int) -> Tensor:
    """Noise, noise of low rank, or what a smooth gradient looks like: nearly the same in all taps."""
    noise = case.random(seed, torch.float32)
    if kind == "low rank":
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(case.shape[0], 2, generator=generator)
        right = torch.randn(2, math.prod(case.shape[1:]), generator=generator)
        return (left @ right).view(case.shape) + 0.05 * noise
    mean = noise.mean(tuple(range(2, noise.dim())), keepdim=True)
    return mean.expand(case.shape) + 0.02 * noise if kind == "smooth" else noise


def test_norms_are_what_is_promised() -> None:
    """Of 200 random layers: the largest singular value on a grid, and with scale 'certified' at most 1."""
    generator = random.Random(0)
    ratios = []
    for seed in range(200):
        case = random_case(generator)
        kind = generator.choice(("noise", "low rank", "smooth"))
        tensor = direction(case, kind, seed)
        options = {"stride": case.stride, "dilation": case.dilation, "groups": case.groups}
        sizes = tuple(12 if case.rank == 3 else 24 for _ in range(case.rank))
        norm = float(spectrum.spectral_norm(updated(case, tensor), sizes, **options))
        problem = problem_of(case.shape, case.stride, case.dilation, case.groups, None, NO_TARGET)
        ratios.append(norm / promised_norm(problem, minimax(5)))
        assert ratios[-1] <= 1 + 1e-3, (str(case), kind)
        if seed % 4 == 0:
            certified = float(spectrum.spectral_norm(updated(case, tensor, scale="certified"), sizes, **options))
            assert 0.5 < certified <= 1 + 1e-3, (str(case), kind)
    assert max(ratios) > 0.8  # the promise is not an empty one


@pytest.mark.parametrize("mode", ["operator", "flatten", "per_tap"])
def test_zero_nan_and_rank_one(mode: str) -> None:
    case = Case((8, 4, 3, 3), groups=2)
    tensor = case.random(0, torch.float32)
    zero = updated(case, torch.zeros(case.shape), mode=mode)
    assert not zero.any()
    half = tensor.clone()
    half[:4] = 0
    found = updated(case, half, mode=mode)
    assert not found[:4].any()
    assert found[4:].isfinite().all()
    assert found[4:].any()
    for bad in (math.nan, math.inf):
        broken = tensor.clone()
        broken[0, 0, 0, 0] = bad
        first, second = orthogonal_update([broken, tensor], groups=2, mode=mode)
        assert first[0].isnan().any()
        assert torch.equal(second, updated(case, tensor, mode=mode))
    one = torch.outer(torch.arange(1.0, 9), torch.linspace(-1, 1, 20))
    values = torch.linalg.svdvals(updated(Case((8, 20)), one, mode=mode))
    assert 0.5 < values[0] < 1.3
    assert values[1] < 1e-3


def test_sizes_of_gradients_do_not_matter() -> None:
    case = Case((8, 4, 3, 3))
    tensor = case.random(0, torch.float32)
    for mode in ("operator", "flatten", "per_tap"):
        expected = updated(case, tensor, mode=mode)
        for factor in (1e-12, 1e12):
            torch.testing.assert_close(updated(case, tensor * factor, mode=mode), expected, rtol=1e-4, atol=1e-5)


def test_scales() -> None:
    case = Case((32, 8, 3, 3))
    tensor = case.random(0)
    for mode in ("operator", "flatten"):
        unit = updated(case, tensor, mode=mode)
        matched = updated(case, tensor, mode=mode, scale="match_rms_adamw")
        squares = 8 if mode == "operator" else 32
        torch.testing.assert_close(matched, unit * 0.2 * math.sqrt(32 * 72 / squares))
    tall = torch.randn(40, 10, dtype=torch.float64)
    original = updated(Case((40, 10)), tall, mode="flatten", scale="original")
    torch.testing.assert_close(original, 2 * updated(Case((40, 10)), tall, mode="flatten"))


def test_minimax_steps_are_the_best_cubics() -> None:
    lower, upper = 0.01, 1.0
    for a, b, c in minimax(6):
        grid = torch.linspace(lower, upper, 20001, dtype=torch.float64)
        values = a * grid + b * grid**3
        worst = float((values - 1).abs().max())
        assert c == 0
        for da, db in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
            assert float(((a + da) * grid + (b + db) * grid**3 - 1).abs().max()) > worst
        lower, upper = float(values.min()), float(values.max())
    assert largest(minimax(6)) == pytest.approx(upper, rel=1e-6)
    grid = polynomial(torch.linspace(0, 1, 100001, dtype=torch.float64), [MUON] * 5)
    assert float(grid.abs().max()) <= largest([MUON] * 5) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "flat"}, "mode must be one of 'operator', 'flatten', 'per_tap', got 'flat'"),
        ({"steps": 0}, "steps must be a positive int, got 0"),
        ({"scale": "rms"}, "scale must be one of 'unit', 'certified'"),
        ({"coefficients": "best"}, "coefficients must be a sequence of .* got 'best'"),
        ({"coefficients": [(1.0,)]}, "coefficients must be 'minimax', 'muon' or a sequence"),
        ({"coefficients": [(1.0, math.nan)]}, "coefficients must be 'minimax', 'muon' or a sequence"),
        ({"coefficients": "muon"}, "coefficients must be cubic"),
        ({"coefficients": "rational"}, "coefficients must be cubic in mode 'operator', got 'rational'"),
        ({"strides": [1, 1]}, "strides must be one value or a sequence of 1"),
        ({"groups": 3}, "groups must be positive and divide"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        orthogonal_update([torch.randn(4, 4, 3, 3)], **options)  # type: ignore[arg-type]


def test_nothing_to_do() -> None:
    assert orthogonal_update([]) == []
    with pytest.raises(ValueError, match=r"weights\[0\]: weight must have 2 .* dimensions"):
        orthogonal_update([torch.randn(4)])


def test_bits_repeat_and_layout_does_not_matter() -> None:
    tensor = Case((16, 8, 3, 3)).random(0, torch.float32)
    last = tensor.to(memory_format=torch.channels_last)
    for mode in ("operator", "flatten", "per_tap"):
        found = [updated(Case((16, 8, 3, 3)), one, mode=mode) for one in (tensor, tensor, last, tensor[..., :])]
        assert all(torch.equal(one, found[0]) for one in found)
