"""Any geometry, any memory layout: the value is the definition's and nothing of the user's is touched."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pytest
import torch
from conftest import assert_matches_definition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Case

from ocnn_fused.plan import reduce_axis

LAYOUTS = ("contiguous", "channels_last", "sliced", "transposed", "stepped", "expanded")


@dataclass(frozen=True)
class Stored:
    """A weight and the whole buffer that it is a view of."""

    weight: torch.Tensor
    buffer: torch.Tensor


def stored(values: torch.Tensor, layout: str) -> Stored:
    """``values`` (or, expanded, its first filter repeated) as a view of a buffer with other numbers around it."""
    shape = values.shape
    if layout == "channels_last":
        order = (0, *range(2, values.dim()), 1)
        buffer = values.permute(order).contiguous()
        return Stored(buffer.permute(0, -1, *range(1, values.dim() - 1)), buffer)
    if layout == "transposed":
        buffer = values.permute(*reversed(range(values.dim()))).contiguous()
        return Stored(buffer.permute(*reversed(range(values.dim()))), buffer)
    if layout in ("sliced", "stepped"):
        step = 2 if layout == "stepped" else 1
        buffer = torch.full([step * size + 3 for size in shape], 7.0, dtype=values.dtype)
        view = buffer[tuple(slice(2, 2 + step * size, step) for size in shape)]
        return Stored(view.copy_(values), buffer)
    if layout == "expanded":
        buffer = torch.cat([torch.full((5,), 7.0, dtype=values.dtype), values[0].flatten()])
        return Stored(buffer[5:].view(1, *shape[1:]).expand(shape), buffer)
    return Stored(values.clone(), values)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(0, 3))
    longest = (0, 9, 7, 3)[rank]
    kernel = tuple(draw(st.integers(1, longest)) for _ in range(rank))
    strides = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    dilations = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 17]))
    rows = draw(st.sampled_from([1, 2, 3, 5, 8, 13, 17, 24]))
    channels = draw(st.sampled_from([1, 2, 3, 7, 16, 20, 33]))
    budget = max(1, 12_000 // (groups * prod(kernel)))  # weights that the definition's loops take in good time
    rows = min(rows, budget)
    channels = max(1, min(channels, budget // rows))
    padding = None
    if draw(st.booleans()):
        padding = tuple(stride * draw(st.integers(0, 7)) for stride in strides)
    return Case((groups * rows, channels, *kernel), strides, dilations, groups, padding)


def sides(case: Case) -> list[str]:
    axes = zip(case.shape[2:], case.strides, case.dilations, case.paddings, strict=True)
    whole = all(axis.lags == axis.all_lags for axis in (reduce_axis(*geometry) for geometry in axes))
    return ["auto", "row", "column"] if whole else ["auto", "row"]


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_matches_definition_and_leaves_memory_alone(layout: str, backend: str, data: st.DataObject) -> None:
    case = data.draw(cases())
    memory = stored(case.random(seed=data.draw(st.integers(0, 99))), layout)
    before = memory.buffer.clone()
    side = data.draw(st.sampled_from(sides(case)))
    assert_matches_definition(memory.weight, case, side=side, backend=backend)
    assert torch.equal(memory.buffer, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case((33, 20, 3, 3)),
        Case((40, 3, 4, 4), stride=2),
        Case((20, 24, 1, 1)),
        Case((24, 1, 3, 3), groups=24),
        Case((18, 20)),
        Case((12, 9, 7)),
    ],
    ids=str,
)
def test_layout_changes_no_value(case: Case, layout: str, dtype: torch.dtype, backend: str) -> None:
    """In low precision too: the same numbers elsewhere in memory give the same result."""
    memory = stored(case.random(dtype=dtype), layout)
    before = memory.buffer.clone()
    loss, gradient = assert_matches_definition(memory.weight, case, backend=backend)
    plain_loss, plain_gradient = assert_matches_definition(memory.weight.contiguous().clone(), case, backend=backend)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, plain_gradient, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-5)
    assert torch.equal(memory.buffer, before)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradient_keeps_a_dense_layout(layout: str, backend: str) -> None:
    """As optimisers with fused kernels like it: the gradient's strides are the weight's."""
    memory = stored(Case((8, 6, 3, 3)).random(), layout)
    _, gradient = assert_matches_definition(memory.weight, Case((8, 6, 3, 3)), backend=backend)
    assert gradient.stride() == memory.weight.stride()
