"""The zero-padded layer: its explicit sparse matrix, all its singular values where they fit, else the extreme ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from .operator import Ints, LayerOptions, Operator, operator_of

# Elements of a matrix that is decomposed itself, and side of a Gram matrix that is; per group.
_DENSE_ELEMENTS = 1 << 24
_GRAM_SIDE = 1 << 14
_LANCZOS_STEPS = 400
_LANCZOS_BYTES = 1 << 29

_CONVOLUTIONS = (F.conv1d, F.conv1d, F.conv2d, F.conv3d)
_ADJOINTS = (F.conv_transpose1d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def dbt_matrix(
    layer: Tensor | nn.Module,
    input_size: Ints,
    *,
    padding_mode: Literal["circular", "zeros"] = "zeros",
    **options: Unpack[LayerOptions],
) -> Tensor:
    r"""The layer's doubly block-Toeplitz matrix, sparse COO: (outputs * positions, inputs * pixels), with a graph.

    .. math:: (\mathcal{K})_{(i, o), (c, p)} = \sum_{u:\ p = o S + u D - P} K_{i, c, u}

    so that ``layer(x).flatten() = matrix @ x.flatten()`` without bias. Arguments as in :func:`singular_values`;
    "circular" takes ``p`` modulo the size and no padding. A transposed layer gives the transpose.
    """
    operator = operator_of(layer, **options)
    if padding_mode == "circular":
        outputs = operator.positions(input_size)
        inputs = tuple(q * s for q, s in zip(outputs, operator.problem.stride, strict=True))
    else:
        inputs, outputs = operator.zero_padded_sizes(input_size)
    matrix = _sparse(operator, inputs, outputs, padding_mode == "circular")
    return matrix.t().coalesce() if operator.transposed else matrix


def _sparse(operator: Operator, inputs: tuple[int, ...], outputs: tuple[int, ...], circular: bool) -> Tensor:
    device, problem = operator.weight.device, operator.problem
    tap = position = pixel = torch.zeros(1, dtype=torch.long, device=device)
    geometry = zip(problem.kernel, problem.stride, problem.dilation, operator.padding, inputs, outputs, strict=True)
    for k, s, d, (before, _), size, count in geometry:
        at, u = torch.meshgrid(torch.arange(count, device=device), torch.arange(k, device=device), indexing="ij")
        seen = at * s + u * d - (0 if circular else before)
        inside = torch.ones_like(seen, dtype=torch.bool) if circular else (seen >= 0) & (seen < size)
        tap = (tap[:, None] * k + u[inside]).flatten()
        position = (position[:, None] * count + at[inside]).flatten()
        pixel = (pixel[:, None] * size + (seen % size)[inside]).flatten()
    filters, channels = operator.weight.shape[:2]
    i = torch.arange(filters, device=device)[:, None, None]
    c = torch.arange(channels, device=device)[None, :, None] + i // problem.rows * channels
    rows = (i * prod(outputs) + position).expand(-1, channels, -1)
    columns = c * prod(inputs) + pixel
    values = operator.weight.flatten(2)[:, :, tap] if problem.kernel else operator.weight[:, :, None]
    shape = (filters * prod(outputs), channels * problem.groups * prod(inputs))
    indices = torch.stack([rows.flatten(), columns.flatten()])
    return torch.sparse_coo_tensor(indices, values.flatten(), shape, check_invariants=False).coalesce()


def _sides(operator: Operator, input_size: Ints) -> tuple[int, int]:
    """Rows and columns of one group's matrix."""
    inputs, outputs = operator.zero_padded_sizes(input_size)
    return operator.problem.rows * prod(outputs), operator.problem.channels * prod(inputs)


def zero_padded_fits(operator: Operator, input_size: Ints) -> bool:
    """Whether all singular values can be computed."""
    rows, columns = _sides(operator, input_size)
    return rows * columns <= _DENSE_ELEMENTS or min(rows, columns) <= _GRAM_SIDE


def zero_padded_values(operator: Operator, input_size: Ints) -> Tensor:
    """All singular values, float64, descending.

    A matrix of more than 2^24 elements per group goes through its Gram matrix, whose eigenvalues are squares: values
    are then exact to 1e-8 of the largest.
    """
    rows, columns = _sides(operator, input_size)
    if not zero_padded_fits(operator, input_size):
        raise ValueError(
            f"the zero-padded matrix has {rows} x {columns} elements per group, too many for all singular values; "
            "spectral_norm and condition_number compute the extreme ones, padding_mode='circular' all"
        )
    inputs, outputs = operator.zero_padded_sizes(input_size)
    parts = []
    for group in operator.split_groups():
        matrix = _sparse(group, inputs, outputs, circular=False).double()
        if rows * columns <= _DENSE_ELEMENTS:
            parts.append(torch.linalg.svdvals(matrix.to_dense()))
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
                gram = torch.sparse.mm(matrix, matrix.t()) if rows <= columns else torch.sparse.mm(matrix.t(), matrix)
            parts.append(torch.linalg.eigvalsh(gram.to_dense()).clamp(min=0).sqrt())
    return torch.cat(parts).sort(descending=True).values


def extreme_values(operator: Operator, input_size: Ints, tolerance: float = 1e-8) -> tuple[Tensor, Tensor]:
    """Largest and smallest singular value of the zero-padded layer by the Lanczos method; no matrix is made, no graph.

    Golub and Kahan's bidiagonalisation with full reorthogonalisation, until both Ritz values have residuals below
    ``tolerance`` times the largest. The largest gets there in tens of steps. The smallest of an ill-conditioned layer
    may not: then a warning says so, and what is returned lies above it.
    """
    inputs, outputs = operator.zero_padded_sizes(input_size)
    found = [_lanczos(*_products(group, inputs, outputs), tolerance) for group in operator.split_groups()]
    if not all(converged for *_, converged in found):
        warnings.warn(
            "the smallest singular value has not converged: the true one may be smaller", RuntimeWarning, stacklevel=3
        )
    extremes = max(pair[0] for pair in found), min(pair[1] for pair in found)
    largest, smallest = torch.tensor(extremes, dtype=torch.float64, device=operator.weight.device)
    return largest, smallest


Product = Callable[[Tensor], Tensor]


def _products(
    operator: Operator, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[Product, Product, int, int, torch.device]:
    """The matrix (of the longer side first) times a vector, its transpose times a vector, columns and rows."""
    weight = operator.weight.detach().double()
    axes = len(inputs)
    if not axes:
        weight, inputs, outputs, axes = weight[:, :, None], (1,), (1,), 1
    stride, dilation = operator.problem.stride or (1,), operator.problem.dilation or (1,)
    padding = operator.padding or ((0, 0),)
    widths = [width for pair in reversed(padding) for width in pair]
    # What a stride leaves over at the end is seen by no tap; the adjoint puts zeros there.
    reached = [
        (o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(outputs, stride, dilation, weight.shape[2:], strict=True)
    ]
    rests = [n + sum(p) - r for n, p, r in zip(inputs, padding, reached, strict=True)]
    cut = [
        part
        for pair, rest in zip(reversed(padding), reversed(rests), strict=True)
        for part in (-pair[0], rest - pair[1])
    ]

    def forward(x: Tensor) -> Tensor:
        padded = F.pad(x.reshape(1, weight.shape[1], *inputs), widths)
        return _CONVOLUTIONS[axes](padded, weight, stride=stride, dilation=dilation).flatten()

    def backward(y: Tensor) -> Tensor:
        spread = _ADJOINTS[axes](y.reshape(1, weight.shape[0], *outputs), weight, stride=stride, dilation=dilation)
        return F.pad(spread, cut).flatten()

    columns, rows = weight.shape[1] * prod(inputs), weight.shape[0] * prod(outputs)
    if columns > rows:
        return backward, forward, rows, columns, weight.device
    return forward, backward, columns, rows, weight.device


def _lanczos(
    forward: Product, backward: Product, columns: int, rows: int, device: torch.device, tolerance: float
) -> tuple[float, float, bool]:
    """Extreme singular values of a matrix with ``columns <= rows``, and whether the smallest has converged."""
    steps = min(columns, _LANCZOS_STEPS, max(2, _LANCZOS_BYTES // (8 * (rows + columns))))
    generator = torch.Generator().manual_seed(0)
    right = torch.zeros(steps, columns, dtype=torch.float64, device=device)
    left = torch.zeros(steps, rows, dtype=torch.float64, device=device)
    bidiagonal = torch.zeros(steps, steps, dtype=torch.float64)
    vector = torch.randn(columns, generator=generator, dtype=torch.float64, device="cpu").to(device)
    vector /= vector.norm()
    values, converged, scale = torch.zeros(1, dtype=torch.float64), False, 0.0
    for step in range(steps):
        right[step] = vector
        image = forward(vector)
        for _ in range(2):
            image -= left[:step].T @ (left[:step] @ image)
        alpha = image.norm()
        left[step] = image / alpha if alpha > 0 else 0
        bidiagonal[step, step] = alpha
        vector = backward(left[step])
        for _ in range(2):
            vector -= right[: step + 1].T @ (right[: step + 1] @ vector)
        beta = float(vector.norm())
        scale = max(scale, float(alpha), beta)
        # A Krylov space that ends has met every singular value that the random start has a part in: all of them.
        ended = beta <= 1e-14 * scale
        if ended or step == steps - 1 or step % 10 == 9:
            u, values, _ = torch.linalg.svd(bidiagonal[: step + 1, : step + 1])
            residuals = beta * u[-1].abs()
            converged = ended or bool(max(residuals[0], residuals[-1]) <= tolerance * values[0])
            if converged or step == steps - 1:
                break
        bidiagonal[step, step + 1] = beta
        vector = vector / beta
    return float(values[0]), float(values[-1]), converged
