"""Configuration files are Python files with a `get_config`; one may start from another.

Whatever a file does wrong becomes one `UserError` that names the file and, where a key is meant, its full name.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError, based_on, default_config, flat, unknown_key


def read_config(path: str, preset: str | None = None) -> ConfigDict:
    """The tree that a file's `get_config` gives.

    A preset that the file names is the ground on which its own values stand. `preset` names another ground instead
    (`default`: the file alone), and is not what the tree then says: that is left to the caller.

    Raises `UserError`: the file is not there or fails, a key is unknown or has a value of the wrong type, or what comes
    back is not the whole tree.
    """
    with based_on(preset or "default"):
        cfg = _get_config(path)
    if preset is None and cfg.preset != "default":
        with based_on(cfg.preset):
            cfg = _get_config(path)
    return cfg


def start_from(this_file: str, other: str) -> ConfigDict:
    """The tree of another configuration file, named relative to `this_file` (pass `__file__`)."""
    return _get_config(str((Path(this_file).parent / other).resolve()))


def value_of(path: str, function: str) -> Any:
    """Imports a Python file and calls its `function`; whatever goes wrong is a `UserError` with the file's name."""
    try:
        return getattr(load_module(path, function), function)()
    except UserError:
        raise
    except (Exception, SystemExit) as e:
        raise _refused(path, e) from e


def load_module(path: str, function: str) -> ModuleType:
    """Imports a Python file that must define `function`; raises `UserError` when it does not."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path}: no such file; configs/ holds examples")
    spec = importlib.util.spec_from_file_location(f"envace_config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise UserError(f"{path}: defines no {function}()")
    return module


def _get_config(path: str) -> ConfigDict:
    cfg = value_of(path, "get_config")
    if not isinstance(cfg, ConfigDict):
        raise UserError(
            f"{path}: get_config() returned {type(cfg).__name__}; expected the tree of default_config()"
        )
    names, known = ({name for name, _ in flat(tree)} for tree in (cfg, default_config()))
    if names != known:
        lines = [str(unknown_key(default_config(), name)) for name in sorted(names - known)]
        lines += [f"config key '{name}' is missing" for name in sorted(known - names)]
        more = [f"(and {len(lines) - 5} more)"] if len(lines) > 5 else []
        raise UserError(f"{path}: " + "; ".join(lines[:5] + more))
    return cfg


def _refused(path: str, error: BaseException) -> UserError:
    """What went wrong in a file: by the key's full name where one was set or read, else as Python says it."""
    frames, file = list(traceback.walk_tb(error.__traceback__)), Path(path).absolute()
    lines = [number for frame, number in frames if Path(frame.f_code.co_filename).absolute() == file]
    where = f"{path}" + (f", line {lines[-1]}" if lines else "")
    if isinstance(error, SystemExit):
        return UserError(f"{where}: the file ended the program (sys.exit)")
    key, value = _key_of([frame for frame, _ in frames])
    if key and isinstance(error, AttributeError | KeyError):
        return UserError(f"{where}: {unknown_key(default_config(), key)}")
    if key and isinstance(error, TypeError):
        known = dict(flat(default_config()))
        kind = type(known[key]).__name__ if key in known else "section"
        return UserError(f"{where}: {key}={value!r}: expected a value of type {kind}")
    return UserError(f"{where}: {type(error).__name__}: {error}")


def _key_of(frames: list[FrameType]) -> tuple[str, Any]:
    """The full name of the key that a ConfigDict was asked for or given, and the value; empty where it was none.

    A ConfigDict does not know where in the tree it stands; the variables of the frames that led to it hold the tree.
    """
    inside = [frame for frame in frames if isinstance(frame.f_locals.get("self"), ConfigDict)]
    if not inside or inside[-1] is not frames[-1]:
        return "", None
    last = inside[-1].f_locals
    node, leaf = last["self"], last.get("key", last.get("attribute"))
    if not isinstance(leaf, str):
        return "", None
    trees = [tree for frame in frames for tree in frame.f_locals.values() if isinstance(tree, ConfigDict)]
    prefixes = [prefix for tree in trees if (prefix := _prefix(tree, node)) is not None]
    return max(prefixes, key=len, default="") + leaf, last.get("value")


def _prefix(tree: ConfigDict, node: ConfigDict) -> str | None:
    """Where `node` stands in `tree`, as `a.b.`; None where it does not."""
    if tree is node:
        return ""
    for name in tree:
        if isinstance(tree[name], ConfigDict):
            found = _prefix(tree[name], node)
            if found is not None:
                return f"{name}.{found}"
    return None
