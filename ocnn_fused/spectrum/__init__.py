"""What a layer does to the length of its input: singular values, certified bounds, similarity of filters."""

from .bounds import lower_bound, upper_bound
from .lipschitz import LipschitzBound, lipschitz_bound
from .matrix import dbt_matrix
from .network import HasSpectrum, SpectrumLogger, circular_size, input_shapes, layer_sizes, network_spectra
from .operator import LayerOptions
from .similarity import FilterSimilarity, filter_similarity, weight_similarity
from .values import (
    Summary,
    condition_number,
    dead_filters,
    excess_by_frequency,
    singular_values,
    spectral_norm,
    summary,
    values_by_frequency,
)

__all__ = [
    "FilterSimilarity",
    "HasSpectrum",
    "LayerOptions",
    "LipschitzBound",
    "SpectrumLogger",
    "Summary",
    "circular_size",
    "condition_number",
    "dbt_matrix",
    "dead_filters",
    "excess_by_frequency",
    "filter_similarity",
    "input_shapes",
    "layer_sizes",
    "lipschitz_bound",
    "lower_bound",
    "network_spectra",
    "singular_values",
    "spectral_norm",
    "summary",
    "upper_bound",
    "values_by_frequency",
    "weight_similarity",
]
