"""Names across modules: what begins with an underscore stays at home, and what stands there is used somewhere."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "envace_jax").rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in PACKAGE}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def taken_private(path: Path) -> list[str]:
    """Private names of other modules that a module imports or reaches for."""
    modules, taken = set(), []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("envace_jax"):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.islower()}
            taken += [alias.name for alias in node.names if private(alias.name)]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and private(node.attr):
            taken += [f"{node.value.id}.{node.attr}"] * (node.value.id in modules)
    return taken


def test_no_module_takes_anothers_private_names() -> None:
    found = {path.relative_to(ROOT).as_posix(): names for path in PACKAGE if (names := taken_private(path))}
    assert found == {}


def defined(tree: ast.Module) -> list[str]:
    """Names that a module defines at its top."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in found if not name.startswith("__")]


def test_every_name_is_used_somewhere() -> None:
    places = ("envace_jax", "data", "configs", "benchmarks", "tests", "launch")
    files = [p for place in places for p in (ROOT / place).rglob("*") if p.suffix in (".py", ".sh")]
    words: Counter[str] = Counter()
    for file in files:
        words.update(re.findall(r"\w+", file.read_text()))
    unused = [f"{p.relative_to(ROOT)}: {name}" for p in PACKAGE for name in defined(TREES[p]) if words[name] < 2]
    assert unused == []


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    """What is tested is what may be installed."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.13"' in project
    assert "Python 3.11 or 3.12" in (ROOT / "README.md").read_text()
