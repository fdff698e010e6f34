"""How much a whole network can stretch a difference of inputs, where that can be proved from its graph."""

from __future__ import annotations

import operator as python
from dataclasses import dataclass
from math import inf, prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..modules import is_convolution, is_layer, unwrap
from ..problem import per_axis
from .bounds import upper_bound

# Largest slopes; those of GELU and SiLU rounded up.
_SLOPES: dict[type[nn.Module], float] = {
    nn.ReLU: 1,
    nn.ReLU6: 1,
    nn.Tanh: 1,
    nn.Sigmoid: 0.25,
    nn.Hardtanh: 1,
    nn.Softplus: 1,
    nn.Hardswish: 1.5,
    nn.SiLU: 1.0999,
    nn.GELU: 1.13,
    nn.Identity: 1,
    nn.Flatten: 1,
    nn.Unflatten: 1,
    nn.Dropout: 1,
    nn.Dropout2d: 1,
    nn.Dropout3d: 1,
    nn.PixelShuffle: 1,
    nn.PixelUnshuffle: 1,
    nn.ZeroPad2d: 1,
}
# Functions and methods that never enlarge a difference of their first argument.
_CONTRACTIONS: set[Any] = {
    torch.relu, F.relu, F.relu6, torch.tanh, torch.flatten, torch.mean, torch.cat, torch.concat, "relu", "relu_",
    "tanh", "flatten", "mean", "view", "reshape", "squeeze", "unsqueeze", "transpose", "permute", "contiguous",
}  # fmt: skip
_SUMS = (python.add, python.sub, python.iadd, torch.add, torch.sub, "add", "add_", "sub")
_ADAPTIVE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_SHAPES = ("size", "dim")


@dataclass(frozen=True)
class LipschitzBound:
    """``value``: the bound, infinite where it needs what is ``unproved`` (what, and why). ``parts``: of each module."""

    value: float
    parts: dict[str, float]
    unproved: dict[str, str]


def lipschitz_bound(model: nn.Module, *, tolerance: float = 0.005) -> LipschitzBound:
    r"""A certified ``c`` with ``||f(x) - f(y)|| <= c ||x - y||`` for the model in eval mode, any input size.

    The graph (torch.fx) is followed from the input on: a layer multiplies by :func:`upper_bound`, an activation by its
    largest slope, a batch norm by ``max |γ| / sqrt(var + eps)``, a sum adds and a concatenation adds squares, so that
    a residual block ``x + g(x)`` has ``1 + c_g``. Products of norms are far above the truth for deep networks: the
    bound is for comparing, and for networks made to have a small one. What cannot be followed is named in ``unproved``.
    """
    plain = unwrap(model)
    try:
        graph = fx.Tracer(param_shapes_constant=True).trace(plain)
    except Exception as error:  # whatever the model's own forward raises when it is traced
        return LipschitzBound(inf, {}, {type(plain).__name__: f"torch.fx cannot trace it: {error}"})
    modules = dict(plain.named_modules())
    bounds: dict[fx.Node, float] = {}
    parts: dict[str, float] = {}
    unproved: dict[str, str] = {}
    for node in graph.nodes:
        arguments: list[fx.Node] = []  # one that is used twice is there twice
        fx.map_arg((node.args, node.kwargs), arguments.append)
        sources = [bounds[argument] for argument in arguments]
        if node.op == "placeholder":
            bounds[node] = 1.0
        elif node.op == "get_attr":
            bounds[node] = 0.0  # the same for every input
        elif node.op == "output":
            return LipschitzBound(sqrt(sum(bound**2 for bound in sources)), parts, unproved)
        elif not any(sources) or node.target in _SHAPES or node.target is getattr:
            bounds[node] = 0.0
        else:
            name = str(node.target) if node.op == "call_module" else node.name
            factor, reason = _factor(node, modules, tolerance)
            if factor is None:
                unproved[name] = reason
            elif node.op == "call_module":
                parts[name] = factor
            together = sum(sources) if node.target in _SUMS else sqrt(sum(bound**2 for bound in sources))
            bounds[node] = inf if factor is None else together * factor if factor else 0.0
    raise ValueError("the model returns nothing")


def _factor(node: fx.Node, modules: dict[str, nn.Module], tolerance: float) -> tuple[float | None, str]:
    """What a node multiplies a difference of its arguments by; None and the reason if that is not known."""
    target = node.target
    if node.op == "call_module":
        return _module_factor(modules[str(target)], tolerance)
    if target in _SUMS:
        return (None, "alpha scales one of the terms") if "alpha" in node.kwargs else (1.0, "")
    if target in _CONTRACTIONS or (target in _ADAPTIVE and _is_one(node.args[1])):
        return 1.0, ""
    if target is python.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        once = all(isinstance(part, (int, slice, type(None), type(...))) for part in index)
        return (1.0, "") if once else (None, "an index may repeat elements")
    if target in (python.mul, torch.mul, "mul"):
        numbers = [argument for argument in node.args if isinstance(argument, (int, float))]
        return (abs(numbers[0]), "") if numbers else (None, "a product of two tensors")
    if target is python.truediv and isinstance(node.args[1], (int, float)):
        return abs(1 / node.args[1]), ""
    return None, f"no bound is known for {getattr(target, '__name__', target)}"


def _module_factor(module: nn.Module, tolerance: float) -> tuple[float | None, str]:
    if type(module) in _SLOPES:
        return float(_SLOPES[type(module)]), ""
    if is_layer(module):
        if not is_convolution(module) or module.padding_mode == "zeros":
            return upper_bound(module, tolerance=tolerance), ""
        return None, f"padding_mode {module.padding_mode!r} repeats pixels"
    if isinstance(module, (nn.LeakyReLU, nn.ELU, nn.PReLU)):
        slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else getattr(module, "alpha", 1.0)
        if isinstance(module, nn.PReLU):
            slope = float(module.weight.detach().abs().max())
        return max(1.0, abs(slope)), ""
    if isinstance(module, _BatchNorm):
        if module.running_var is None:
            return None, "a batch norm without running statistics"
        scale = (module.running_var + module.eps).rsqrt()
        scale = scale if module.weight is None else scale * module.weight.detach().abs()
        return float(scale.max()), ""
    if isinstance(module, (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)):
        return (1.0, "") if _is_one(module.output_size) else (None, "adaptive pooling may repeat pixels")
    if isinstance(module, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)):
        return _pooling(module), ""
    return None, f"no bound is known for {type(module).__name__}"


def _is_one(size: Any) -> bool:
    return size == 1 or (isinstance(size, (tuple, list)) and all(entry == 1 for entry in size))


def _pooling(module: Any) -> float:
    """A pixel is in at most ``ceil(k/s)`` windows per axis; a mean of ``n`` has ``n`` times less of the squares."""
    axes = int(type(module).__name__[-2])
    kernel = per_axis("kernel_size", module.kernel_size, axes, least=1)
    stride = per_axis("stride", module.stride, axes, least=1)
    dilation = per_axis("dilation", getattr(module, "dilation", 1), axes, least=1)
    if any(d > 1 for d in dilation):
        stride = (1,) * axes  # at most every tap of the kernel sees a pixel
    windows = prod(-(-k // s) for k, s in zip(kernel, stride, strict=True))
    if not isinstance(module, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)):
        return sqrt(windows)
    divisor: Any = getattr(module, "divisor_override", None)
    if divisor:
        return sqrt(windows * prod(kernel)) / abs(divisor)
    if not module.count_include_pad or module.ceil_mode:  # windows at the border may hold a single pixel
        return sqrt(windows)
    return sqrt(windows / prod(kernel))
