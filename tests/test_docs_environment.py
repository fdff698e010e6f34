"""docs/environment.md names every OCNN_FUSED_ environment variable that the code reads, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The C++ sources read no environment; there the same prefix marks preprocessor macros.
PLACES = ("setup.py", "Makefile", ".ci", ".github", "ocnn_fused", "tools", "tests", "benchmarks", "examples")
SUFFIXES = {".py", ".yml", ""}
NAME = re.compile(r"\bOCNN_FUSED_[A-Z_]*[A-Z]\b")


def read_by_the_code() -> set[str]:
    roots = [ROOT / place for place in PLACES if (ROOT / place).exists()]
    files = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    files = [path for path in files if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__)]
    texts = [path.read_text() for path in files]
    return {name for text in texts for name in NAME.findall(text)}


def test_the_page_names_every_variable_and_no_other() -> None:
    page = set(NAME.findall((ROOT / "docs" / "environment.md").read_text()))
    code = read_by_the_code()
    assert "OCNN_FUSED_BACKEND" in code
    assert sorted(code - page) == [], "read by the code, missing on the page"
    assert sorted(page - code) == [], "on the page, read by nobody"
