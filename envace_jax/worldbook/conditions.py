"""Three-valued conditions: True, False, or None where what is known does not decide.

Unknown is never taken for absent, and never for false: a rule that needs a condition fires only where it is True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from envace_jax.worldbook.notation import TermError, operand
from envace_jax.worldbook.state import ABSENT, UNKNOWN, PMap, freeze, truth_equal
from envace_jax.worldbook.terms import Evaluate, Scope, compile_term, short

Truth = bool | None
Test = Callable[[Scope], Truth]


def truth_not(value: Truth) -> Truth:
    return None if value is None else not value


def _fast_eq(left: Evaluate, text: str) -> Test:
    def evaluate(scope: Scope) -> Truth:
        value = left(scope)
        return None if value is UNKNOWN else value == text if type(value) is str else False

    return evaluate


def truth_all(values: Sequence[Truth]) -> Truth:
    if any(v is False for v in values):
        return False
    return None if any(v is None for v in values) else True


def compile_condition(condition: Any) -> Test:
    """A closure that tells whether the condition holds in a `Scope`: True, False, or None when it is not known.

    Raises:
        TermError: not a condition.
    """
    if not isinstance(condition, dict):
        raise TermError(f"not a condition: {short(condition)}")
    keys = set(condition)
    if keys == {"not"}:
        inner = compile_condition(condition["not"])
        return lambda scope: None if (v := inner(scope)) is None else not v
    if len(keys) == 1 and keys <= {"all", "any", "agree"}:
        kind = next(iter(keys))
        return _group(kind, condition[kind])
    if len(keys) == 1 and keys <= {"some", "every"}:
        kind = next(iter(keys))
        return _quantified(kind, condition[kind])
    if {"left", "op"} <= keys <= {"left", "op", "right"}:
        return _comparison(condition)
    raise TermError(f"not a condition: {short(condition)}")


def _absent_or(value: Any) -> Test | None:
    """``any`` of "x does not exist" and a comparison of the same x with a constant, looking x up once; else None."""
    if len(value) != 2 or not all(isinstance(c, dict) and {"left", "op"} <= set(c) for c in value):
        return None
    first, second = value
    same = first["op"] == "not_exists" and first["left"] == second["left"]
    if not same or second["op"] not in _COMPARE or isinstance(second["left"], str):
        return None
    right = second.get("right")
    constant = right["$const"] if isinstance(right, dict) and set(right) == {"$const"} else right
    if isinstance(constant, dict):
        return None
    left, frozen, compare = compile_term(second["left"]), freeze(constant), _COMPARE[second["op"]]
    texts = None
    if second["op"] == "in" and isinstance(frozen, tuple) and all(type(t) is str for t in frozen):
        texts = frozenset(frozen)

    def evaluate(scope: Scope) -> Truth:
        a = left(scope)
        if a is ABSENT:
            return True
        if a is UNKNOWN:
            return None
        if texts is not None:
            return type(a) is str and a in texts
        return compare(a, frozen)

    return evaluate


def _group(kind: str, value: Any) -> Test:
    if not isinstance(value, (list, tuple)) or (kind == "agree" and not value):
        raise TermError(f"{kind}: expected a list of conditions")
    if kind == "any" and (fused := _absent_or(value)) is not None:
        return fused
    parts = [compile_condition(c) for c in value]
    stop = {"all": False, "any": True}.get(kind)

    def combined(scope: Scope) -> Truth:
        unknown = False
        for part in parts:
            answer = part(scope)
            if answer is stop:
                return stop
            unknown = unknown or answer is None
        return None if unknown else not stop

    def agreed(scope: Scope) -> Truth:
        first = parts[0](scope)
        if first is None:
            return None
        return first if all(p(scope) is first for p in parts[1:]) else None

    return agreed if kind == "agree" else combined


def _quantified(kind: str, value: Any) -> Test:
    if not isinstance(value, dict) or set(value) != {"in", "where"}:
        raise TermError(f"{kind}: expected in and where")
    source, where = compile_term(value["in"]), [compile_condition(c) for c in value["where"]]
    wanted = kind == "some"

    def evaluate(scope: Scope) -> Truth:
        node = source(scope)
        if node is ABSENT:
            return not wanted
        if not isinstance(node, (PMap, tuple)):
            return None
        complete = isinstance(node, tuple) or node.complete
        inner = Scope(scope.root, scope.args, scope.out)
        unknown = not complete
        for inner.key, inner.entry in node.items() if isinstance(node, PMap) else enumerate(node):
            answer = truth_all([t(inner) for t in where])
            if answer is wanted:
                return wanted
            unknown = unknown or answer is None
        return None if unknown else not wanted

    return evaluate


def _comparison(condition: dict[str, Any]) -> Test:
    op = condition["op"]
    left = compile_term(operand(condition["left"]))
    if op in ("exists", "not_exists"):
        wanted = op == "exists"

        def presence(scope: Scope) -> Truth:
            value = left(scope)
            return None if value is UNKNOWN else (value is not ABSENT) is wanted

        return presence
    if op not in _COMPARE:
        raise TermError(f"no comparison {op!r}")
    listed = condition.get("right")
    if op == "in" and isinstance(listed, dict) and set(listed) == {"$const"}:
        texts = listed["$const"]
        if isinstance(texts, list) and all(type(t) is str for t in texts):
            return _in_texts(left, frozenset(texts))
    if op == "eq" and type(listed) is str:
        return _fast_eq(left, listed)
    right, compare = compile_term(listed), _COMPARE[op]

    def evaluate(scope: Scope) -> Truth:
        a = left(scope)
        if a is UNKNOWN:
            return None
        b = right(scope)
        if b is UNKNOWN:
            return None
        return compare(a, b)

    return evaluate


def _in_texts(left: Evaluate, texts: frozenset[str]) -> Test:
    def evaluate(scope: Scope) -> Truth:
        value = left(scope)
        if value is UNKNOWN or value is ABSENT:
            return None
        return type(value) is str and value in texts

    return evaluate


def _same(a: Any, b: Any) -> Truth:
    if type(a) is str and type(b) is str:
        return a == b
    return truth_equal(a, b)


def _ordered(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Truth]:
    def compare(a: Any, b: Any) -> Truth:
        # No order between what is absent or of different kinds: not known, so that no rule rests on it.
        if isinstance(a, bool) or isinstance(b, bool):
            return None
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            return test(a, b)
        if isinstance(a, str) and isinstance(b, str):
            return test(a, b)
        return None

    return compare


def _contains(a: Any, b: Any) -> Truth:
    if a is ABSENT or b is ABSENT:
        return None
    if isinstance(a, str):
        return b in a if isinstance(b, str) else False
    if isinstance(a, tuple):
        answers = [truth_equal(x, b) for x in a]
        return True if True in answers else None if None in answers else False
    if isinstance(a, PMap):
        value = a.get(b) if isinstance(b, (str, int)) and not isinstance(b, bool) else ABSENT
        return None if value is UNKNOWN else value is not ABSENT
    return None


_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", tuple: "array", PMap: "object"}


def _is_kind(a: Any, b: Any) -> Truth:
    if a is ABSENT or b is ABSENT:
        return None
    kind = "null" if a is None else _KINDS.get(type(a), "any")
    return b == kind or (b == "number" and kind == "integer")


_COMPARE: dict[str, Callable[[Any, Any], Truth]] = {
    "eq": _same,
    "ne": lambda a, b: truth_not(_same(a, b)),
    "gt": _ordered(lambda a, b: a > b),
    "gte": _ordered(lambda a, b: a >= b),
    "lt": _ordered(lambda a, b: a < b),
    "lte": _ordered(lambda a, b: a <= b),
    "contains": _contains,
    "type": _is_kind,
    "in": lambda a, b: _contains(b, a),
}
