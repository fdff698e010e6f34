"""The package's rooms: who may import whom, and which way a call goes. What CONTRIBUTING.md says is what happens."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import BACKENDS

import ocnn_fused
from ocnn_fused import engine, fused_orth_loss

PACKAGE = Path(ocnn_fused.__file__).parent

#: From the bottom up: a module imports only from its own room and from rooms above it in this list.
ROOMS = [
    ("_version", "_extension", "modules", "problem", "warn"),
    ("plan", "reference"),
    ("backends",),
    ("engine",),
    ("ops",),
    ("autograd",),
    ("functional",),
    ("projection", "spectrum"),
    ("regularizer",),
    ("integrations", "info", "init", "optim"),
    ("check", "plot", "report"),
    ("__main__",),
    ("",),  # the package's __init__
]

#: Imports within functions, each with its reason; there are no others.
LAZY = {
    # What needs triton, which is an extra of the package and slow to import.
    ("backends.triton", "backends.triton.cooperative"),
    ("backends.triton", "backends.triton.launch"),
    ("backends.triton", "backends.triton.tables"),
}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted names below the package, and their files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


NAMES = {name for name, _ in modules()}


def imports(name: str, path: Path) -> Iterator[tuple[str, bool]]:
    """Modules of the package that one imports, and whether it does so within a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    within = {
        child
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{target}.{alias.name}" if target else alias.name
                yield (deeper if deeper in NAMES else target), node in within
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(one.split(".")[0] == "ocnn_fused" for one in named), f"{path}: imports itself by name"


def room(name: str) -> int:
    top = name.split(".")[0]
    (number,) = (index for index, names in enumerate(ROOMS) if top in names)
    return number


EDGES = {(name, target, lazy) for name, path in modules() for target, lazy in imports(name, path) if target != name}


def test_every_module_has_a_room() -> None:
    assert all(isinstance(room(name), int) for name in NAMES)
    assert len(EDGES) > 50


def test_dependencies_point_one_way() -> None:
    wrong = [(name, target) for name, target, _ in EDGES if room(target) > room(name)]
    assert not wrong


def test_no_module_imports_another_in_a_circle() -> None:
    """Within a room too. A package and what is in it count as one."""
    graph: dict[str, set[str]] = {name: set() for name in NAMES}
    for name, target, lazy in EDGES:
        if not lazy and not name.startswith(f"{target}.") and not target.startswith(f"{name}."):
            graph[name].add(target)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in NAMES:
        visit(name, ())


def test_no_import_hides_in_a_function() -> None:
    assert {(name, target) for name, target, lazy in EDGES if lazy} == LAZY


def test_a_wrong_edge_would_be_seen(tmp_path: Path) -> None:
    source = tmp_path / "plan.py"
    source.write_text("from .backends import cpu\ndef f():\n    from . import engine\n")
    found = set(imports("plan", source))
    assert found == {("backends.cpu", False), ("engine", True)}
    assert room("backends.cpu") > room("plan")


def test_importing_leaves_the_compiler_of_torch_alone() -> None:
    """It takes a second, and sets the folder of inductor's cache before anybody else can."""
    code = "import sys, ocnn_fused; print([one for one in ('torch._dynamo', 'torch._inductor') if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.strip() == "[]"


# ----------------------------------------------------------------------------------------------------------------------
# A warm call
# ----------------------------------------------------------------------------------------------------------------------


def python_calls(function: types.FunctionType, *arguments: object) -> list[str]:
    """Files and names of all Python functions that a call goes through."""
    seen: list[str] = []

    def profile(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled backend is left out")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_hops_of_a_warm_call(requires_grad: bool) -> None:
    """The flow of CONTRIBUTING.md: functional, problem, autograd, engine's cache, compiled code."""
    weight = torch.randn(8, 8, 3, 3, requires_grad=requires_grad)
    fused_orth_loss(weight, 1)
    before = engine.prepare.cache_info()
    calls = python_calls(fused_orth_loss, weight, 1)  # type: ignore[arg-type]
    after = engine.prepare.cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 0)
    files = [call.partition(".")[0] for call in calls]
    ours = ["functional", "problem", "node", "transforms", "__init__", "compiled", "compiled"]
    if requires_grad:  # one Function, with what torch's own class calls in Python
        assert files == [*ours[:-2], "node", "function", "function", *ours[-2:]], calls
    else:
        assert files == ours, calls
