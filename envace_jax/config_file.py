"""Configuration files are Python files with a `get_config`; one may start from another."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from envace_jax.config import UserError


def load_file(path: str) -> ModuleType:
    """Imports a configuration file by its path; raises `UserError` when it is not there or has no get_config."""
    return load_module(path, "get_config")


def load_module(path: str, function: str) -> ModuleType:
    """Imports a Python file that must define `function`; raises `UserError` when it cannot."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--config {path}: no such file; configs/ holds examples")
    spec = importlib.util.spec_from_file_location(f"envace_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"--config {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"--config {path}: {type(e).__name__}: {e}") from e
    if not callable(getattr(module, function, None)):
        raise UserError(f"--config {path}: defines no {function}()")
    return module


def start_from(this_file: str, other: str) -> ConfigDict:
    """The tree of another configuration file, named relative to `this_file` (pass `__file__`)."""
    return load_file(str((Path(this_file).parent / other).resolve())).get_config()
