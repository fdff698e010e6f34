"""A device that is not there: CPU tensors that say they lie on it, for finding tests that only a GPU would fail.

``OCNN_FUSED_TEST_STAND_IN=1 pytest -m gpu`` runs the suite's part for GPUs on it. As on a GPU, a tensor reaches the
host only by ``.cpu()``, ``.to("cpu")``, ``.item()`` or ``.tolist()``: ``.numpy()`` is refused, and so is an operation
of tensors on both devices. The package's ops are computed by the PyTorch backend on the CPU, so a pass shows that the
tests are fit for a GPU, and nothing about the backends that run there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

NAME = "stand_in"
_aten = torch.ops.aten

#: What a tensor subclass cannot do, by a part of a test's name: it is not traced by torch.compile or opcheck, copied
#: with its module, computed again for a checkpoint, or differentiated more than once.
LEFT_OUT = ("compile", "opcheck", "deepcopy", "checkpointing", "test_transforms.py")

#: What may take tensors of both devices.
_COPIES = {_aten.copy_.default, _aten._to_copy.default}


class DeviceTensor(torch.Tensor):
    """``inner`` is where the values are."""

    inner: torch.Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.inner = inner
        return tensor

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> DeviceTensor:
        return DeviceTensor(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == NAME


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """On the CPU, with a result on the device if an argument is there, or it is made there."""
    given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = any(isinstance(one, DeviceTensor) for one in given)
    here = [one for one in given if not isinstance(one, DeviceTensor) and one.dim() > 0]
    if there and here and func not in _COPIES:
        raise RuntimeError(f"{func} got tensors on the device and on the CPU, of shape {tuple(here[0].shape)}")
    wanted = kwargs.get("device")
    target = _is_device(wanted) if wanted is not None else there
    if func is _aten.copy_.default:
        target = isinstance(args[0], DeviceTensor)
    args, kwargs = tree_map_only(DeviceTensor, lambda one: one.inner, (args, kwargs))
    args, kwargs = tree_map(lambda value: torch.device("cpu") if _is_device(value) else value, (args, kwargs))
    if func.namespace == "ocnn_fused":
        # Backends of GPUs are not for the tensors within.
        kwargs = {**kwargs, **dict(zip((a.name for a in func._schema.arguments), args, strict=False))}
        kwargs, args = {**kwargs, **({"backend": "torch"} if "backend" in kwargs else {})}, ()
    results = func(*args, **kwargs)
    if not target:
        return results
    known = {id(one.inner): one for one in given if isinstance(one, DeviceTensor)}
    return tree_map_only(torch.Tensor, lambda one: known[id(one)] if id(one) in known else DeviceTensor(one), results)


class StandIn(TorchDispatchMode):
    """While it is active, what is made on its device can be made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def install() -> None:
    """For a whole process: torch knows a device of that name."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is a copy that the mode sees
    StandIn().__enter__()
