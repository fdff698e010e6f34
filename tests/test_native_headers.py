"""The compiled code as a library: headers stand alone, nothing of torch is included, every machine can run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import BACKENDS

from ocnn_fused import _extension

CSRC = Path(__file__).resolve().parent.parent / "csrc"
COMPILER = os.environ.get("CXX", "g++")
HEADERS = sorted(CSRC.rglob("*.h"))


def first_errors(header: Path) -> str:
    command = [COMPILER, "-std=c++20", "-fsyntax-only", "-x", "c++", str(header)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stderr[:2000]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not there")
def test_every_header_compiles_alone() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = dict(zip(HEADERS, pool.map(first_errors, HEADERS), strict=True))
    assert len(errors) > 20
    assert not [f"{header.name}: {error}" for header, error in errors.items() if error]


def test_nothing_of_torch_is_included() -> None:
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    includes = [(path.name, line) for path in sources for line in re.findall(r"#include.*", path.read_text())]
    assert len(includes) > 100
    assert not [found for found in includes if re.search(r"[<\"](ATen|c10|torch)/", found[1])]


def functions_with_wide_registers(module: str) -> Iterator[tuple[str, bool]]:
    """All functions of a module, and whether they use registers of more than 16 bytes."""
    code = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", module], capture_output=True, text=True, check=True
    ).stdout
    for function in re.split(r"\n\n(?=[0-9a-f]+ <)", code):
        name = re.match(r"[0-9a-f]+ <(.*)>:", function)
        if name is not None:
            yield name[1], re.search(r"%[yz]mm", function) is not None


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled backend is left out")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not there")
def test_only_code_of_its_own_is_compiled_for_an_instruction_set() -> None:
    """The linker keeps one copy of the standard library's inline functions, which every machine must be able to run."""
    wide = [name for name, is_wide in functions_with_wide_registers(_extension.module.__file__) if is_wide]
    if not wide:
        pytest.skip("no names of functions, or no wide registers on this machine")
    assert not [name for name in wide if not re.search(r"cpu::avx(2|512)::", name)]
