"""The way of a launch to the driver: JIT, binary, handles, cooperative attribute and packed arguments, with no GPU.

Triton's own launcher runs against a libcuda that writes down what it is given (tests/stub_driver). ``make gpu-check
TRITON=triton==3.9.0`` runs these tests, too, with another triton.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from stub_driver import pretend

STUB = Path(__file__).parent / "stub_driver"

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(pretend.COMPILER is None, reason="Triton needs a C compiler for its driver module"),
]

STAGES = ["squares", "evaluate", "gram", "mix", "apply", "gather"]


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stub."""
    folder = tmp_path_factory.mktemp("libcuda")
    pretend.build(folder)
    return folder


@pytest.fixture(scope="session", params=["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest, libcuda: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What launches.py found for one target, compiled anew."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    environment.pop("OCNN_FUSED_BACKEND", None)
    command = [sys.executable, str(STUB / "launches.py"), str(libcuda), request.param, "tf32"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def is_right(launch: dict[str, Any]) -> bool:
    """Every parameter has the kernel's size and the call's value, and nothing is missing."""
    return not launch["wrong"] and not launch["missing"] and not any(launch["extra"])


def test_staged_launches(report: dict[str, Any]) -> None:
    launches = report["staged"]
    assert [launch["kernel"] for launch in launches] == [f"{stage}_kernel" for stage in STAGES]
    assert [launch["grid"] for launch in launches] == [report["tiles"][stage] for stage in STAGES]
    for launch in launches:
        assert is_right(launch), launch
        assert not launch["cooperative"]
        assert launch["threads"] == 128
        assert 0 < launch["registers"] <= 255


def triton_before_single_launches() -> bool:
    return tuple(map(int, version("triton").split(".")[:2])) < (3, 5)


def skip_before_single_launches() -> None:
    if triton_before_single_launches():
        pytest.skip("the single kernel needs triton 3.5")


def test_single_launch_is_cooperative_and_fits(report: dict[str, Any]) -> None:
    skip_before_single_launches()
    (launch,) = report["single"]
    assert launch["kernel"] == "single_kernel"
    assert is_right(launch), launch
    assert launch["cooperative"]
    assert launch["grid"] == report["programs"]
    assert 0 < report["programs"] <= report["fitting"]


def test_a_grid_that_does_not_fit_is_refused(report: dict[str, Any]) -> None:
    """By the stub, which counts for itself what fits: the package's count is the largest that is accepted."""
    skip_before_single_launches()
    assert report["too many programs"].startswith("RuntimeError: Triton Error [CUDA]: too many blocks in cooperative")


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("an argument less", "TypeError"),
        ("an argument more", "TypeError"),
        ("a float for a count", "CompilationError"),
        ("memory of the host", "ValueError: Pointer argument"),
    ],
)
def test_planted_mistakes_are_refused(mistake: str, error: str, report: dict[str, Any]) -> None:
    assert report[mistake].startswith(error)


def test_exchanged_arguments_are_seen(report: dict[str, Any]) -> None:
    """Of one kind, so that nothing refuses them."""
    (launch,) = report["exchanged"]
    assert len(launch["wrong"]) == 2


@pytest.mark.slow
def test_a_resnet34_is_one_launch_or_five_per_pass() -> None:
    """Of the kernels that a GPU would get, counted by the driver; those of PyTorch are counted in test_launches.py."""
    command = [sys.executable, "-W", "ignore", str(STUB / "host_time.py"), "1"]
    environment = {name: value for name, value in os.environ.items() if name != "OCNN_FUSED_BACKEND"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    found = dict(re.findall(r"^(\S+, [\w ]+): (\d+) launches", result.stdout, re.M))
    by_itself = "20" if triton_before_single_launches() else "1"
    assert found == {
        "reg(), by itself": by_itself,
        "add_grad_, by itself": by_itself,
        "reg(), staged": "20",
        "add_grad_, staged": "20",
    }
