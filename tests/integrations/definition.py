"""What a regulariser makes of somebody else's network, against the definition."""

from __future__ import annotations

from typing import Any

import torch
from conftest import TOLERANCES, errors
from oracle import Case
from torch import nn

from ocnn_fused import OrthRegularizer


def assert_is_definition(model: nn.Module, **options: Any) -> OrthRegularizer:
    """Loss and gradient of every layer; by default all convolutions with more than 3 input channels are layers."""
    reg = OrthRegularizer(model, 1.0, **options)
    if not options:
        convolutions = [part for part in model.modules() if isinstance(part, nn.modules.conv._ConvNd)]
        assert len(reg.layers) == sum(part.in_channels > 3 for part in convolutions)
    losses = reg.per_layer()
    model.zero_grad()
    reg().backward()
    for name, layer in reg.layers.items():
        weight, problem = layer.module.weight, layer.problem
        case = Case(tuple(weight.shape), problem.stride, problem.dilation, problem.groups, problem.padding)
        loss_error, grad_error = errors(losses[name], weight.grad, weight, case)
        assert loss_error <= TOLERANCES[torch.float32], (name, str(case), loss_error)
        assert grad_error <= TOLERANCES[torch.float32], (name, str(case), grad_error)
    return reg
