"""Without a precision asked for, products are computed as PyTorch would compute the layer itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import float32_convolutions

from ocnn_fused import engine, fused_orth_loss_foreach
from ocnn_fused.backends import device as devices
from ocnn_fused.backends import triton as triton_backend
from ocnn_fused.problem import Options, problem_of

CONVOLUTION = problem_of((8, 4, 3), 1, 1, 1, None)
LINEAR = problem_of((8, 16), 1, 1, 1, None)

has_newer_settings = pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="this torch has only torch.backends.cudnn.allow_tf32"
)


@pytest.fixture(autouse=True)
def _settings_are_put_back() -> Iterator[None]:
    older, newer = torch.get_float32_matmul_precision(), getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    enabled, generic = torch.backends.cudnn.enabled, getattr(torch.backends, "fp32_precision", None)
    with float32_convolutions("tf32"):
        yield
    if generic is not None:
        torch.backends.fp32_precision = generic
    torch.backends.cudnn.enabled = enabled
    torch.set_float32_matmul_precision(older)
    if newer is not None:
        torch.backends.cuda.matmul.fp32_precision = newer


def resolved(where: str) -> tuple[str | None, str | None]:
    """Of a convolution and of a Linear."""
    options = engine._resolve_for("triton", Options(), where)
    return options.of(CONVOLUTION).precision, options.of(LINEAR).precision


@pytest.mark.parametrize(
    ("device", "expected"),
    [("A100", ("tf32", "ieee")), ("H100", ("tf32", "ieee")), ("T4", ("ieee", "ieee")), ("MI300X", ("ieee", "ieee"))],
)
def test_defaults_of_pytorch(device: str, expected: tuple[str, str]) -> None:
    """Convolutions in TF32, where there is one, and products of matrices not."""
    assert resolved(device) == expected


def test_the_interpreter_computes_as_a_cpu() -> None:
    torch.set_float32_matmul_precision("high")
    assert resolved(torch.device("cpu")) == ("ieee", "ieee")  # type: ignore[arg-type]


@pytest.mark.parametrize(("setting", "linear"), [("highest", "ieee"), ("high", "tf32"), ("medium", "bf16")])
@pytest.mark.parametrize("allowed", [True, False])
def test_each_kind_of_layer_has_its_own_setting(allowed: bool, setting: str, linear: str) -> None:
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision(setting)
    assert resolved("A100") == ("tf32" if allowed else "ieee", linear)


@has_newer_settings
def test_newer_settings() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    assert resolved("A100") == ("ieee", "tf32")
    torch.backends.cudnn.conv.fp32_precision = "none"  # the setting of all backends holds
    assert resolved("A100") == ("tf32", "tf32")


def test_without_cudnn_convolutions_are_products() -> None:
    torch.backends.cudnn.enabled = False
    torch.set_float32_matmul_precision("highest")
    assert resolved("A100")[0] == "ieee"
    torch.set_float32_matmul_precision("high")
    assert resolved("A100")[0] == "tf32"


def test_what_is_asked_for_holds_for_all_layers() -> None:
    options = engine._resolve_for("triton", Options(precision="tf32x3"), "A100")
    assert {options.of(problem).precision for problem in (CONVOLUTION, LINEAR)} == {"tf32x3"}


@pytest.mark.skipif(triton_backend.availability.triton_reason() is not None, reason="triton is not installed")
def test_a_list_of_both_kinds_is_computed_as_each_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as it asks now: a setting that changes between two calls is followed."""
    from triton_support import DEVICE, execution

    weights = [torch.randn(shape, device=DEVICE) for shape in ((32, 24, 3), (8, 16), (24, 24, 3))]
    asked = {False: "tf32", True: "ieee"}
    monkeypatch.setattr(triton_backend, "asked_precision", lambda device, linear: asked[linear])
    ran: list[tuple[str, int]] = []
    run = triton_backend.run

    def watched(weights: Any, *rest: Any, **options: Any) -> Any:
        ran.append((options["precision"], len(weights)))
        return run(weights, *rest, **options)

    monkeypatch.setattr(triton_backend, "run", watched)
    engine.prepare.cache_clear()
    with execution() if DEVICE.type == "cpu" else contextlib.nullcontext():
        losses = fused_orth_loss_foreach(weights, backend="triton")
        assert ran == [("tf32", 2), ("ieee", 1)]
        each = [fused_orth_loss_foreach([weight], backend="triton")[0] for weight in weights]
        assert torch.equal(losses, torch.stack(each))
        ran.clear()
        asked[False] = "ieee"
        exact = fused_orth_loss_foreach(weights, backend="triton")
    assert ran == [("ieee", 3)]
    assert exact[1] == losses[1]
    assert exact[0] != losses[0]
    engine.prepare.cache_clear()


def test_before_the_newer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.7 and 2.8 know cudnn.allow_tf32 alone."""

    class Older:
        enabled = True
        allow_tf32 = True

    monkeypatch.setattr(devices.torch.backends, "cudnn", Older)
    assert devices.convolution_precision() == "tf32"
    Older.allow_tf32 = False
    assert devices.convolution_precision() == "ieee"
