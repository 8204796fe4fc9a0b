"""The small language of rules: terms over arguments and state, and three-valued conditions.

Everything is JSON and is compiled once into closures; nothing is ever evaluated as code. A term yields a state
value, `ABSENT` or `UNKNOWN`; a condition yields True, False or None (unknown). Unknown is never taken for absent:
``not_exists`` on a path that was never observed is None.

Terms: a JSON scalar is itself; ``{"$const": v}``; ``{"$arg": [segments]}``; ``{"$state": [segments or terms]}``;
``{"$out": [segments]}`` (the observation just rendered, in effects only); ``{"$entry": [segments]}`` and
``{"$key": true}`` inside a selection; ``$count``, ``$sum``, ``$diff``, ``$product``, ``$round``, ``$concat``,
``$pad``, ``$text``, ``$int``; ``$agree`` (the common value of several terms, unknown where they differ);
``$select``; other objects and lists hold terms. Conditions: ``{"left", "op", "right"}``,
``{"all"|"any"|"agree": [...]}``, ``{"not": c}`` and ``{"some"|"every": {"in": term, "where": [...]}}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from envace_jax.worldbook.notation import TermError
from envace_jax.worldbook.state import (
    ABSENT,
    UNKNOWN,
    Path,
    PMap,
    Segment,
    StateError,
    freeze,
    is_whole,
    json_equal,
    lookup,
    thaw,
)

MAX_TERM_DEPTH = 24
MAX_TERM_NODES = 4000


class Scope:
    """What a term is evaluated in: the state's root, the call's arguments (frozen), the rendered observation."""

    __slots__ = ("args", "entry", "key", "memo", "out", "root")

    def __init__(self, root: PMap, args: PMap, out: Any = UNKNOWN):
        self.root = root
        self.args = args
        self.out = out
        self.entry: Any = UNKNOWN
        self.key: Any = UNKNOWN
        self.memo: dict[str, Any] = {}


Evaluate = Callable[[Scope], Any]


# --- terms -----------------------------------------------------------------------------------------------------


def compile_term(term: Any) -> Evaluate:
    """A closure that evaluates the term in a `Scope`.

    Raises:
        TermError: not a term, or too deep or too large.
    """
    check_size(term)
    return _term(term)


def check_size(value: Any) -> None:
    """Refuse terms beyond 24 levels or 4,000 nodes, cyclic ones included."""
    nodes = 0
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        nodes += 1
        if depth > MAX_TERM_DEPTH:
            raise TermError(f"term nested deeper than {MAX_TERM_DEPTH} levels")
        if nodes > MAX_TERM_NODES:
            raise TermError(f"term of more than {MAX_TERM_NODES} nodes")
        if isinstance(item, dict):
            stack.extend((v, depth + 1) for v in item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend((v, depth + 1) for v in item)


def _term(term: Any) -> Evaluate:
    if isinstance(term, dict):
        marks = [k for k in term if isinstance(k, str) and k.startswith("$")]
        if not marks:
            return _object(term)
        name = marks[0]
        if len(term) != 1 or name not in _TERMS:
            raise TermError(f"not a term: {short(term)}")
        return _TERMS[name](term[name])
    if isinstance(term, (list, tuple)):
        return _listing([_term(t) for t in term])
    return _const(term)


def _const(value: Any) -> Evaluate:
    try:
        frozen = freeze(value)
    except StateError as error:
        raise TermError(str(error)) from None
    return lambda scope: frozen


def _object(term: dict[str, Any]) -> Evaluate:
    parts = [(k, _term(v)) for k, v in term.items()]

    def evaluate(scope: Scope) -> Any:
        out: dict[Segment, Any] = {}
        for key, part in parts:
            value = part(scope)
            if value is UNKNOWN or value is ABSENT:
                return UNKNOWN
            out[key] = value
        return PMap(out, None, True, len(out))

    return evaluate


def _listing(parts: list[Evaluate]) -> Evaluate:
    def evaluate(scope: Scope) -> Any:
        values = tuple(p(scope) for p in parts)
        return UNKNOWN if any(v is UNKNOWN or v is ABSENT for v in values) else values

    return evaluate


def _segments(value: Any) -> list[Segment | Evaluate]:
    if isinstance(value, (str, int)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise TermError(f"expected path segments, found {short(value)}")
    out: list[Segment | Evaluate] = []
    for segment in value:
        if isinstance(segment, bool) or segment is None or isinstance(segment, float):
            raise TermError(f"not a path segment: {segment!r}")
        out.append(segment if isinstance(segment, (str, int)) else _term(segment))
    return out


def _argument(value: Any) -> Evaluate:
    path = tuple(_segments(value))
    if any(callable(s) for s in path):
        raise TermError("argument paths are literal")
    if len(path) == 1:
        key = path[0]
        return lambda scope: scope.args.get(key)  # type: ignore[arg-type]
    return lambda scope: lookup(scope.args, path)  # type: ignore[arg-type]


def _state(value: Any) -> Evaluate:
    segments = _segments(value)
    if not any(callable(s) for s in segments):
        path: Path = tuple(segments)  # type: ignore[arg-type]
        return lambda scope: lookup(scope.root, path)

    last = max(i for i, s in enumerate(segments) if callable(s))
    entity = _entity(segments[: last + 1], json.dumps(value[: last + 1], sort_keys=True))
    tail: Path = tuple(segments[last + 1 :])  # type: ignore[arg-type]
    if not tail:
        return entity
    if len(tail) == 1:
        name = tail[0]

        def field(scope: Scope) -> Any:
            node = entity(scope)
            return node.get(name) if type(node) is PMap else lookup(node, tail)

        return field
    return lambda scope: lookup(entity(scope), tail)


def _entity(segments: list[Segment | Evaluate], key: str) -> Evaluate:
    """The node at a path with terms in it, looked up once a scope: most conditions of a rule ask for the same one."""

    def find(scope: Scope) -> Any:
        node: Any = scope.root
        for segment in segments:
            if callable(segment):
                segment = segment(scope)
                if segment is UNKNOWN or segment is ABSENT:
                    return segment  # a key that is not known names no known place; no key, no place
                if type(segment) is not str and type(segment) is not int:
                    return ABSENT
            node = node.get(segment) if type(node) is PMap else lookup(node, (segment,))
        return node

    if '"$entry"' in key or '"$key"' in key or '"$out"' in key:
        return find

    def evaluate(scope: Scope) -> Any:
        memo = scope.memo
        if key in memo:
            return memo[key]
        node = memo[key] = find(scope)
        return node

    return evaluate


def _output(value: Any) -> Evaluate:
    path = tuple(_segments(value))
    return lambda scope: lookup(scope.out, path)  # type: ignore[arg-type]


def _entry(value: Any) -> Evaluate:
    path = tuple(_segments(value))
    return lambda scope: lookup(scope.entry, path)  # type: ignore[arg-type]


def _arithmetic(fold: Callable[[Any, Any], Any]) -> Callable[[Any], Evaluate]:
    def make(value: Any) -> Evaluate:
        if not isinstance(value, (list, tuple)) or not value:
            raise TermError(f"expected a list of terms, found {short(value)}")
        parts = [_term(t) for t in value]

        def evaluate(scope: Scope) -> Any:
            total: Any = None
            for part in parts:
                number = part(scope)
                if isinstance(number, bool) or not isinstance(number, (int, float)):
                    return UNKNOWN
                total = number if total is None else fold(total, number)
            return total

        return evaluate

    return make


def _round(value: Any) -> Evaluate:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not isinstance(value[1], int):
        raise TermError("$round: expected [term, digits]")
    part, digits = _term(value[0]), value[1]

    def evaluate(scope: Scope) -> Any:
        number = part(scope)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return UNKNOWN
        return round(number, digits)

    return evaluate


def text_of(value: Any) -> str:
    """How a value stands inside a text: strings as they are, the rest as JSON."""
    if type(value) is str:
        return value
    return str(value) if type(value) is int else json.dumps(thaw(value), ensure_ascii=False)


def _concat(value: Any) -> Evaluate:
    if not isinstance(value, (list, tuple)):
        raise TermError("$concat: expected a list of terms")
    parts = [_term(t) for t in value]

    def evaluate(scope: Scope) -> Any:
        out = []
        for part in parts:
            item = part(scope)
            if item is ABSENT or not is_whole(item):
                return UNKNOWN
            out.append(item if type(item) is str else text_of(item))
        return "".join(out)

    return evaluate


def _pad(value: Any) -> Evaluate:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not isinstance(value[1], int):
        raise TermError("$pad: expected [term, width]")
    part, width = _term(value[0]), max(0, min(value[1], 64))

    def evaluate(scope: Scope) -> Any:
        item = part(scope)
        return UNKNOWN if item is ABSENT or not is_whole(item) else text_of(item).zfill(width)

    return evaluate


def _text(value: Any) -> Evaluate:
    part = _term(value)

    def evaluate(scope: Scope) -> Any:
        item = part(scope)
        if item is ABSENT or type(item) is str:
            return item
        return text_of(item) if is_whole(item) else UNKNOWN

    return evaluate


def _int(value: Any) -> Evaluate:
    part = _term(value)

    def evaluate(scope: Scope) -> Any:
        item = part(scope)
        if isinstance(item, str) and item.isascii() and item.lstrip("-").isdigit() and len(item) < 20:
            return int(item)
        return item if isinstance(item, int) or item is ABSENT else UNKNOWN

    return evaluate


def _agree(value: Any) -> Evaluate:
    if not isinstance(value, (list, tuple)) or not value:
        raise TermError("$agree: expected a list of terms")
    parts = [_term(t) for t in value]

    def evaluate(scope: Scope) -> Any:
        first = parts[0](scope)
        if first is UNKNOWN:
            return UNKNOWN
        for part in parts[1:]:
            other = part(scope)
            if other is first:
                continue
            if other is UNKNOWN or other is ABSENT or first is ABSENT or not json_equal(first, other):
                return UNKNOWN
            if type(first) is not type(other):
                return UNKNOWN  # 1 and 1.0 are equal and read differently
        return first

    return evaluate


def _entries(node: Any) -> list[tuple[Any, Any]] | None:
    """(key, value) pairs of a fully known collection, else None."""
    if isinstance(node, PMap):
        return list(node.items()) if node.complete else None
    if isinstance(node, tuple):
        return list(enumerate(node))
    return None


def _count(value: Any) -> Evaluate:
    part = _term(value)

    def evaluate(scope: Scope) -> Any:
        node = part(scope)
        if isinstance(node, PMap):
            return len(node) if node.complete else UNKNOWN
        if isinstance(node, (tuple, str)):
            return len(node)
        return UNKNOWN

    return evaluate


def _select(value: Any) -> Evaluate:
    """``{"from": term, "where": [conditions], "take": term, "order": "stored"|"sorted", "as": "list"|"sum"}``."""
    if not isinstance(value, dict) or not {"from", "take"} <= set(value) <= {
        "from", "where", "take", "order", "as",
    }:  # fmt: skip
        raise TermError("$select: expected from, where, take, order, as")
    from envace_jax.worldbook.conditions import compile_condition  # conditions hold terms, selections conditions

    source, take = _term(value["from"]), _term(value["take"])
    where = [compile_condition(c) for c in value.get("where", ())]
    order, kind = value.get("order", "stored"), value.get("as", "list")
    if order not in ("stored", "sorted") or kind not in ("list", "sum"):
        raise TermError("$select: order is stored or sorted, as is list or sum")

    def evaluate(scope: Scope) -> Any:
        node = source(scope)
        if node is ABSENT:
            return ABSENT
        entries = _entries(node)
        if entries is None:
            return UNKNOWN
        if order == "sorted":
            entries.sort(key=lambda e: (isinstance(e[0], str), e[0]))
        out = []
        inner = Scope(scope.root, scope.args, scope.out)
        for inner.key, inner.entry in entries:
            keep: bool | None = True
            for test in where:
                answer = test(inner)
                if answer is not True:
                    keep = answer
                    if answer is False:
                        break
            if keep is None:
                return UNKNOWN
            if keep:
                item = take(inner)
                if item is UNKNOWN or item is ABSENT:
                    return UNKNOWN
                out.append(item)
        if kind == "list":
            return tuple(out)
        if any(isinstance(n, bool) or not isinstance(n, (int, float)) for n in out):
            return UNKNOWN
        return sum(out)

    return evaluate


_TERMS: dict[str, Callable[[Any], Evaluate]] = {
    "$const": _const,
    "$arg": _argument,
    "$state": _state,
    "$out": _output,
    "$entry": _entry,
    "$key": lambda value: lambda scope: scope.key,
    "$count": _count,
    "$sum": _arithmetic(lambda a, b: a + b),
    "$diff": _arithmetic(lambda a, b: a - b),
    "$product": _arithmetic(lambda a, b: a * b),
    "$round": _round,
    "$concat": _concat,
    "$pad": _pad,
    "$text": _text,
    "$int": _int,
    "$agree": _agree,
    "$select": _select,
}


def short(value: Any) -> str:
    """A term or condition as errors show it."""
    return repr(value)[:120]
