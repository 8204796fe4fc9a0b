"""Reading a rule backwards: what an observation says of the state if this rule gave it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from envace_jax.worldbook.effects import concrete, dynamic_path
from envace_jax.worldbook.notation import operand
from envace_jax.worldbook.state import ABSENT, UNKNOWN, Path, StateError, freeze, json_equal, lookup, truth_equal
from envace_jax.worldbook.terms import Scope, compile_term

Reveals = list[tuple[Path, Any]]


def match(term: Any, value: Any, scope: Scope, override: bool = False) -> Reveals | None:
    """(path, value) pairs that the observation reveals under this render term, or None where it does not fit.

    Args:
        override: what was observed wins over what was tracked, so a differing known place is revealed, not a misfit.
    """
    if isinstance(term, dict):
        marks = [k for k in term if isinstance(k, str) and k.startswith("$")]
        if not marks:
            if not isinstance(value, dict) or value.keys() != term.keys():
                return None
            return _together(match(t, value[k], scope, override) for k, t in term.items())
        if "$agree" in term:
            return _alternatives(term["$agree"], value, scope, override)
        return _leaf(term, value, scope, override)
    if isinstance(term, list):
        if not isinstance(value, list) or len(value) != len(term):
            return None
        return _together(match(t, v, scope, override) for t, v in zip(term, value))
    return [] if json_equal(term, value) else None


def _together(parts: Iterable[Reveals | None]) -> Reveals | None:
    out: Reveals = []
    for part in parts:
        if part is None:
            return None
        out += part
    return out


def _leaf(term: Any, value: Any, scope: Scope, override: bool) -> Reveals | None:
    try:
        seen = freeze(value)
    except StateError:
        return None
    present = compile_term(term)(scope)
    agrees = truth_equal(present, seen)
    if agrees:
        return []
    segments = dynamic_path(term)
    if segments is not None and (agrees is None or override):
        path = concrete(segments, scope)
        # A value inside a text is no reading; a whole value at a known place is.
        return [(path, seen)] if path is not None else []
    return [] if agrees is None else None


def _alternatives(terms: list[Any], value: Any, scope: Scope, override: bool) -> Reveals | None:
    """Alternatives that the traces could not tell apart: one that already fits settles it; a single one that the
    observation would make true is revealed; several say nothing of any one."""
    fits = [r for t in terms if (r := match(t, value, scope, override)) is not None]
    if not fits:
        return None
    if any(not r for r in fits):
        return []
    return fits[0] if len(fits) == 1 else []


def implied(condition: Any) -> list[tuple[list[Any], Any]]:
    """(path segments, value or `ABSENT`) pairs that hold wherever the condition does."""
    if not isinstance(condition, dict):
        return []
    if "all" in condition:
        return [x for part in condition["all"] for x in implied(part)]
    if "agree" in condition:
        return implied(condition["agree"][0])[:1]
    if condition.get("op") == "eq" and not isinstance(condition.get("right"), (dict, list)):
        path = dynamic_path(operand(condition["left"]))
        return [(path, condition["right"])] if path else []
    if condition.get("op") == "not_exists":
        path = dynamic_path(operand(condition["left"]))
        return [(path, ABSENT)] if path else []
    inner = condition.get("not")
    if isinstance(inner, dict) and inner.get("op") == "exists":
        return implied({"left": inner["left"], "op": "not_exists"})
    if isinstance(inner, dict) and "agree" in inner:
        return implied({"not": inner["agree"][0]})
    if isinstance(inner, dict) and set(inner) == {"not"}:
        return implied(inner["not"])
    return []


def implied_facts(conditions: Iterable[Any], scope: Scope) -> Reveals:
    """What the conditions of the rule that explained an observation say of places that are not known."""
    out: Reveals = []
    for condition in conditions:
        for segments, value in implied(condition):
            path = concrete(segments, scope)
            if path is not None and lookup(scope.root, path) is UNKNOWN:
                out.append((path, value))
    return out
