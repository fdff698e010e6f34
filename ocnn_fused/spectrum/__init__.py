"""What a layer does to the length of its input: singular values, certified bounds, similarity of filters."""

from .bounds import lower_bound, upper_bound
from .lipschitz import LipschitzBound, lipschitz_bound
from .matrix import dbt_matrix
from .network import SpectrumLogger, layer_sizes, network_spectra, regularizer_spectrum
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
    "LayerOptions",
    "LipschitzBound",
    "SpectrumLogger",
    "Summary",
    "condition_number",
    "dbt_matrix",
    "dead_filters",
    "excess_by_frequency",
    "filter_similarity",
    "layer_sizes",
    "lipschitz_bound",
    "lower_bound",
    "network_spectra",
    "regularizer_spectrum",
    "singular_values",
    "spectral_norm",
    "summary",
    "upper_bound",
    "values_by_frequency",
    "weight_similarity",
]
