"""Checkpoints from anywhere: only tensors are read, nothing in the file is run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import unwrap

#: Keys under which training scripts keep the weights, and prefixes that wrappers put before every name.
_NESTED = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one sentence for the user."""


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The weights in a checkpoint, by the names that they have in the plain model, on the CPU."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(
            f"checkpoint {path} is not a file" if path.exists() else f"checkpoint {path} does not exist"
        )
    if not path.stat().st_size:
        raise CheckpointError(f"checkpoint {path} is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a file that is refused anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise CheckpointError(
                f"checkpoint {path} holds more than tensors and was not loaded, because loading it could run code; "
                "save model.state_dict() instead"
            ) from error
        raise CheckpointError(f"checkpoint {path} is damaged or no torch checkpoint") from error
    except Exception as error:  # a damaged file can fail in any step of reading it
        raise CheckpointError(
            f"checkpoint {path} is damaged or no torch checkpoint ({type(error).__name__})"
        ) from error
    for _ in range(2):  # a checkpoint within one
        for key in _NESTED:
            if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
                content = content[key]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"checkpoint {path} holds no weights by name, but a {type(content).__name__}")
    return _without_prefixes({str(name): value for name, value in content.items() if isinstance(value, Tensor)})


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    while True:
        prefix = next((prefix for prefix in _PREFIXES if all(name.startswith(prefix) for name in weights)), None)
        if prefix is None:
            return weights
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}


def load_checkpoint(model: nn.Module, weights: Mapping[str, Tensor], path: Any) -> None:
    """Put ``weights`` read from ``path`` into the model; every one must have its place and its shape."""
    plain = unwrap(model)
    own = plain.state_dict()
    # Counters that old versions of torch did not save.
    missing = [name for name in own if name not in weights and not name.endswith("num_batches_tracked")]
    unknown = [name for name in weights if name not in own]
    other = [name for name, value in weights.items() if name in own and value.shape != own[name].shape]
    if other:
        name = other[0]
        raise CheckpointError(
            f"checkpoint {path} has another shape for {name} than the model: {tuple(weights[name].shape)}, "
            f"not {tuple(own[name].shape)}{_and_more(other)}"
        )
    if missing or unknown:
        first = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model lacks"
        raise CheckpointError(f"checkpoint {path} {first}{_and_more(missing or unknown)}: is it of another model?")
    plain.load_state_dict(dict(weights), strict=False)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
