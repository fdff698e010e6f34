"""Spectra of all layers of a network, and their logging during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..regularizer.modules import named_layers, unwrap
from .operator import operator_of
from .similarity import evaluation
from .values import Summary, singular_values, summary, with_progress

if TYPE_CHECKING:
    from ..regularizer import OrthRegularizer


def layer_sizes(model: nn.Module, input_shape: Iterable[int] | Tensor) -> dict[str, tuple[int, ...]]:
    """Spatial size of the input of every layer, by name, from one forward pass in eval mode.

    ``input_shape``: of one input without the batch, such as (3, 224, 224), or a batch of inputs. Layers that the pass
    does not reach are missing.
    """
    plain = unwrap(model)
    sizes: dict[str, tuple[int, ...]] = {}
    first = next(plain.parameters(), torch.empty(0))
    inputs = input_shape if isinstance(input_shape, Tensor) else torch.zeros(1, *input_shape)
    inputs = inputs.to(first.device, first.dtype) if inputs.is_floating_point() else inputs.to(first.device)

    def note(name: str, rank: int, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        shape = arguments[0].shape
        sizes.setdefault(name, tuple(shape[len(shape) - rank :]))

    hooks = []
    try:
        for name, module in named_layers(plain):
            rank = len(module.kernel_size) if hasattr(module, "kernel_size") else 0  # type: ignore[arg-type]
            hooks.append(module.register_forward_pre_hook(partial(note, name, rank)))
        with evaluation(plain), torch.no_grad():
            plain(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


def circular_size(module: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
    """``size``, or the next multiple of the stride: the torus on which the layer is looked at."""
    operator = operator_of(module)
    if operator.transposed:
        return size
    return tuple(-(-n // s) * s for n, s in zip(size, operator.stride, strict=True))


def network_spectra(
    model: nn.Module,
    input_shape: Iterable[int] | Tensor,
    layers: Iterable[str] | None = None,
    *,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Singular values of the circular layers of a model, by name, without a graph.

    ``input_shape`` as in :func:`layer_sizes`; ``layers`` default to all that the input reaches. A size that a stride
    does not divide is rounded up. ``progress`` shows a bar, if tqdm is installed and stderr a terminal.
    """
    modules = dict(named_layers(unwrap(model)))
    sizes = layer_sizes(model, input_shape)
    names = [name for name in (modules if layers is None else layers) if name in sizes]
    spectra = {}
    for name in with_progress(names, progress, "layers"):
        with torch.no_grad():
            spectra[name] = singular_values(
                modules[name], circular_size(modules[name], sizes[name]), progress=False if progress else None
            )
    return spectra


def regularizer_spectrum(reg: OrthRegularizer, input_shape: Iterable[int] | Tensor) -> dict[str, Summary]:
    """What the spectra of the regularised layers are like, by name; ``input_shape`` of the model, as (3, 32, 32)."""
    spectra = network_spectra(reg.model, input_shape, reg.layers)
    return {name: summary(values) for name, values in spectra.items()}


class SpectrumLogger:
    """Logs largest and smallest singular value and the share near 1 of every regularised layer, each n-th step.

    ::

        log_spectrum = SpectrumLogger(reg, (3, 32, 32), SummaryWriter(), every=500)
        for step, (x, y) in enumerate(data):
            ...
            log_spectrum(step)

    ``log`` is a TensorBoard writer (anything with ``add_scalar``), or a callable of a dictionary and the step, such as
    ``wandb.log`` or ``lambda values, step: fabric.log_dict(values, step)``.
    """

    def __init__(
        self,
        reg: OrthRegularizer,
        input_shape: Iterable[int] | Tensor,
        log: Any,
        *,
        every: int = 1000,
        prefix: str = "spectrum/",
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be a positive int, got {every!r}")
        if not callable(log) and not hasattr(log, "add_scalar"):
            raise TypeError(f"log must have add_scalar or be a callable of (values, step), got {type(log).__name__}")
        self.reg = reg
        self.input_shape = input_shape if isinstance(input_shape, Tensor) else tuple(input_shape)
        self.log = log
        self.every = every
        self.prefix = prefix

    def __call__(self, step: int) -> Mapping[str, float]:
        """Log if ``step`` is a multiple of ``every``; returns what was logged, by key."""
        if step % self.every:
            return {}
        values = {
            f"{self.prefix}{name}/{quantity}": value
            for name, found in regularizer_spectrum(self.reg, self.input_shape).items()
            for quantity, value in found.as_floats().items()
            if quantity in ("largest", "smallest", "near_one")
        }
        if hasattr(self.log, "add_scalar"):
            for key, value in values.items():
                self.log.add_scalar(key, value, step)
        else:
            self.log(values, step)
        return values
