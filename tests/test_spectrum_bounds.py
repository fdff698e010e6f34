"""Certified bounds: never on the wrong side of the truth, and close to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_spectrum import random_layer

from ocnn_fused.spectrum import lower_bound, singular_values, spectral_norm, upper_bound


@pytest.mark.slow
def test_no_layer_of_any_size_exceeds_its_upper_bound() -> None:
    """2000 random cases: 500 layers, each circular and zero-padded at two sizes."""
    slack = []
    for seed in range(500):
        layer = random_layer(seed, circular=True)
        weight = layer.weight
        bound = upper_bound(weight, **layer.options)
        rank = len(layer.size)
        large = tuple(n * {1: 12, 2: 4, 3: 2}[rank] for n in layer.size)
        norms = [spectral_norm(weight, size, **layer.options).item() for size in (layer.size, large)]
        extents = [d * (k - 1) for k, d in zip(layer.shape[2:], layer.dilation, strict=True)]
        zeros = [tuple(e + more for e in extents) for more in (1, 4)]
        for size, padding in zip(zeros, (layer.padding, None), strict=True):
            norms.append(spectral_norm(weight, size, padding_mode="zeros", padding=padding, **layer.options).item())
        assert bound >= max(norms), layer
        # Large inputs come close to the supremum, which a fine grid finds.
        fine = tuple({1: 240, 2: 48, 3: 12}[rank] * (1 if layer.transposed else s) for s in layer.stride)
        slack.append(bound / spectral_norm(weight, fine, **layer.options).item() - 1)
    assert np.median(slack) < 0.01


def test_lower_bounds_are_below_and_close() -> None:
    ratios = []
    for seed in range(150):
        layer = random_layer(seed, circular=True)
        bound = lower_bound(layer.weight, **layer.options)
        rank = len(layer.size)
        fine = tuple({1: 120, 2: 24, 3: 6}[rank] * (1 if layer.transposed else s) for s in layer.stride)
        smallest = min(singular_values(layer.weight, size, **layer.options)[-1].item() for size in (layer.size, fine))
        assert bound <= smallest + 1e-14, layer
        if smallest > 1e-3:
            ratios.append(bound / smallest)
    assert len(ratios) > 50
    assert np.median(ratios) > 0.95


def test_lower_bound_holds_for_zero_padding_where_it_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, channels in ((2, 5), (5, 2)):
        weight = torch.randn(rows, channels, 3, dtype=torch.float64, generator=generator)
        padding = 0 if rows < channels else 2
        bound = lower_bound(weight)
        assert bound > 0.1
        for size in (3, 7, 20):
            assert singular_values(weight, size, padding_mode="zeros", padding=padding)[-1] >= bound


def test_bounds_of_flat_and_of_sharp_spectra() -> None:
    identity = torch.eye(4, dtype=torch.float64)[:, :, None, None] * torch.zeros(3, 3).index_fill(0, torch.tensor(1), 1)
    middle = torch.zeros(4, 4, 3, 3, dtype=torch.float64)
    middle[:, :, 1, 1] = torch.eye(4)
    assert 1 <= upper_bound(middle, tolerance=1e-3) <= 1.001
    assert 0.999 <= lower_bound(middle, tolerance=1e-3) <= 1
    # All three columns of the middle row are added up: norm 3 at frequency 0.
    assert 3 <= upper_bound(identity, tolerance=1e-6) <= 3.000004
    assert lower_bound(identity) == 0
    assert lower_bound(torch.randn(8, 4, 1, 1), stride=2) == 0  # most pixels are seen by no tap
    for bound in (upper_bound, lower_bound):
        with pytest.raises(ValueError, match="tolerance must be positive"):
            bound(middle, tolerance=0)


def test_what_torch_calls_the_spectral_norm_is_not_the_layer_s() -> None:
    torch.manual_seed(0)
    module = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Conv2d(64, 64, 3), n_power_iterations=30)
    assert torch.linalg.matrix_norm(module.weight.flatten(1), 2).item() == pytest.approx(1, rel=1e-2)
    assert upper_bound(module) > 1.4
