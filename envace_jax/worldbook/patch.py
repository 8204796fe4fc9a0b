"""Typed edits of a worldbook: against a stated base, into a new version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.json_files import read_json
from envace_jax.worldbook import records as R
from envace_jax.worldbook.rulebook import check_field, check_rule, compile_invariant
from envace_jax.worldbook.store import Worldbook

_KINDS: dict[str, tuple[str, Any, str]] = {
    "rule": ("rules", R.TransitionRule, "id"),
    "candidate": ("candidates", R.TransitionRule, "id"),
    "note": ("notes", R.Note, "id"),
    "invariant": ("invariants", R.Invariant, "id"),
    "contract": ("contracts", R.RenderContract, "id"),
    "action": ("actions", R.ActionSpec, "name"),
    "field": ("state_fields", R.StateField, "path"),
}

_CHECKS: dict[Any, Callable[[Any], Any]] = {
    R.TransitionRule: check_rule,
    R.Invariant: compile_invariant,
    R.StateField: check_field,
}


def read_patch(path: str | Path) -> dict[str, Any]:
    """A patch file: ``{"base": digest, "edits": [{"op": "add"|"replace"|"remove", "kind", "id", "value"}]}``."""
    patch = read_json(path)
    if not isinstance(patch, dict) or not isinstance(patch.get("edits"), list):
        raise UserError(f"{path}: expected an object with base and edits")
    return patch


def apply_patch(book: Worldbook, patch: dict[str, Any]) -> Worldbook:
    """The edited worldbook: status ``authored``, its parent the base.

    Raises:
        UserError: the base is another worldbook, an edit is malformed, adds what is there or changes what is not.
    """
    if patch.get("base") != book.digest:
        raise UserError(
            f"patch: made for {str(patch.get('base'))[:16]}, this worldbook is {book.digest[:16]}: make it anew"
        )
    fields: dict[str, dict[str, Any]] = {
        attribute: {getattr(x, key): x for x in getattr(book, attribute)} for attribute, _, key in _KINDS.values()
    }
    for i, edit in enumerate(patch["edits"]):
        where = f"patch: edit {i}"
        if not isinstance(edit, dict) or str(edit.get("kind")) not in _KINDS:
            raise UserError(f"{where}: kind: expected one of {', '.join(_KINDS)}")
        attribute, cls, key = _KINDS[str(edit["kind"])]
        table = fields[attribute]
        op = edit.get("op")
        if op == "remove":
            if table.pop(str(edit.get("id")), None) is None:
                raise UserError(f"{where}: there is no {edit['kind']} {edit.get('id')!r}")
            continue
        if op not in ("add", "replace"):
            raise UserError(f"{where}: op: expected add, replace or remove, found {op!r}")
        value = R.from_json(cls, edit.get("value"), where)
        name = getattr(value, key)
        if (name in table) != (op == "replace"):
            raise UserError(f"{where}: {edit['kind']} {name!r} is {'there already' if op == 'add' else 'not there'}")
        if cls in _CHECKS:
            _CHECKS[cls](value)
        table[name] = value
    changed: dict[str, Any] = {attribute: tuple(table.values()) for attribute, table in fields.items()}
    return replace(book, **changed, status="authored", parent=book.digest)
