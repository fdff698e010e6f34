"""Spectra of all layers of a network, and their logging during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..modules import label, named_layers, unwrap
from .operator import LayerOptions, operator_of
from .similarity import evaluation
from .values import Summary, singular_values, with_progress


class InputError(ValueError):
    """An input that the model cannot compute with; the message is one sentence for the user."""


def input_shapes(
    model: nn.Module, input_shape: Iterable[int] | Tensor, layers: Mapping[str, nn.Module]
) -> dict[str, tuple[int, ...]]:
    """Shape of what reaches each of some modules of a model, by name, from one forward pass in eval mode.

    ``input_shape``: of one input without the batch, such as (3, 224, 224), or a batch of inputs. Modules that the pass
    does not reach are missing; of several calls the first counts.
    """
    plain = unwrap(model)
    shapes: dict[str, tuple[int, ...]] = {}
    first = next(plain.parameters(), torch.empty(0))
    inputs = input_shape if isinstance(input_shape, Tensor) else torch.zeros(1, *input_shape)
    inputs = inputs.to(first.device, first.dtype) if inputs.is_floating_point() else inputs.to(first.device)

    def note(name: str, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        shapes.setdefault(name, tuple(arguments[0].shape))

    with ExitStack() as hooks, evaluation(plain), torch.no_grad():
        for name, module in layers.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        try:
            plain(inputs)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0] or type(error).__name__
            raise InputError(
                f"{type(plain).__name__} does not take an input of shape {tuple(inputs.shape)}: {first_line}"
            ) from error
    return shapes


def layer_sizes(model: nn.Module, input_shape: Iterable[int] | Tensor) -> dict[str, tuple[int, ...]]:
    """Spatial size of the input of every layer that ``input_shape`` reaches, by name; see :func:`input_shapes`."""
    modules = dict(named_layers(unwrap(model)))
    sizes = {}
    for name, shape in input_shapes(model, input_shape, modules).items():
        rank = len(getattr(modules[name], "kernel_size", ()))
        sizes[name] = shape[len(shape) - rank :]
    return sizes


def circular_size(layer: Tensor | nn.Module, size: tuple[int, ...], **options: Unpack[LayerOptions]) -> tuple[int, ...]:
    """``size``, or the next multiple of the stride: the torus on which the layer is looked at."""
    operator = operator_of(layer, **options)
    if operator.transposed:
        return size
    return tuple(-(-n // s) * s for n, s in zip(size, operator.problem.stride, strict=True))


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
    for name in with_progress(names, progress, "layers", len(names)):
        with torch.no_grad():
            spectra[name] = singular_values(
                modules[name], circular_size(modules[name], sizes[name]), progress=False if progress else None
            )
    return spectra


class HasSpectrum(Protocol):
    """What a :class:`SpectrumLogger` asks: :meth:`ocnn_fused.OrthRegularizer.spectrum`."""

    def spectrum(self, input_shape: Iterable[int] | Tensor) -> dict[str, Summary]: ...


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
        reg: HasSpectrum,
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
            f"{self.prefix}{label(name)}/{quantity}": value
            for name, found in self.reg.spectrum(self.input_shape).items()
            for quantity, value in found.as_floats().items()
            if quantity in ("largest", "smallest", "near_one")
        }
        if hasattr(self.log, "add_scalar"):
            for key, value in values.items():
                self.log.add_scalar(key, value, step)
        else:
            self.log(values, step)
        return values
