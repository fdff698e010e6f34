"""Every figure shows the numbers that it was given."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ocnn_fused.spectrum import weight_similarity

pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib")

from ocnn_fused import plot  # noqa: E402


@pytest.fixture
def ax() -> Iterator[object]:
    pyplot.switch_backend("agg")
    figure, axis = pyplot.subplots()
    yield axis
    figure.canvas.draw()  # what cannot be drawn fails here
    pyplot.close(figure)


def test_spectra(ax) -> None:
    values = {"plain": torch.tensor([0.5, 2.0, 1.0], requires_grad=True), "regularised": torch.ones(4)}
    assert plot.spectra(ax, values) is ax
    first, second, one = ax.lines
    assert first.get_ydata().tolist() == [2, 1, 0.5]
    assert first.get_xdata().tolist() == [0, 50, 100]
    assert second.get_label() == "regularised"
    assert one.get_ydata() == [1, 1]


def test_similarity_histograms(ax) -> None:
    similarity = weight_similarity(torch.randn(8, 3, 3, 3))
    assert plot.similarity_histograms(ax, {"conv1": similarity}, bins=10) is ax
    (outline,) = ax.patches
    assert outline.get_data().values.sum() == pytest.approx(1)
    assert outline.get_data().edges[0] == -1


def test_loss_history(ax) -> None:
    assert plot.loss_history(ax, [0, 10], {"conv1": [3.0, 0.1], "conv2": [2.0, 0.2]}) is ax
    assert [line.get_ydata().tolist() for line in ax.lines] == [[3.0, 0.1], [2.0, 0.2]]
    assert ax.get_yscale() == "log"


def test_lambda_sweep(ax) -> None:
    assert plot.lambda_sweep(ax, {0.1: [0.7, 0.8], 0.0: [0.6], 0.01: [0.65]}) is ax
    (line,) = ax.lines[:1]
    np.testing.assert_allclose(np.asarray(line.get_xdata(), float), [0.001, 0.01, 0.1])
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), [0.6, 0.65, 0.75])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "0.01", "0.1"]
    with pytest.raises(ValueError, match="positive lambda"):
        plot.lambda_sweep(ax, {0.0: [1.0]})


def test_frequency_map(ax) -> None:
    excess = torch.arange(12.0).reshape(3, 4)
    assert plot.frequency_map(ax, excess) is ax
    assert ax.images[0].get_array()[1, 2] == 0  # the constant input, in the middle
    with pytest.raises(ValueError, match="2 dimensions"):
        plot.frequency_map(ax, torch.zeros(3))
