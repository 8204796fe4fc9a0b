"""What a rule may look at: the shape of the state, and the terms worth comparing for one action.

The inducer does not know any domain. It finds the collections of the state (maps from ids to like entries), sees
which arguments are keys of which collection, follows ids one step further, and offers every field so reached as a
column: one value for each observed transition.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from envace_jax.worldbook.state import ABSENT, UNKNOWN, PMap
from envace_jax.worldbook.terms import Scope, compile_term, text_of

MAX_COLUMNS = 160
KEY_SHARE = 0.2  # an argument is a key of a collection if it is one in at least this share of its uses


@dataclass(frozen=True)
class Collection:
    """A map from ids to entries: the path to it and the paths of the fields below an entry (``()``: a scalar entry)."""

    path: tuple[str, ...]
    fields: tuple[tuple[str, ...], ...]


@dataclass
class Shape:
    """What the states look like: collections, and paths of single values outside of them, with their types."""

    collections: list[Collection] = field(default_factory=list)
    singles: list[tuple[str, ...]] = field(default_factory=list)
    types: dict[tuple[str, ...], str] = field(default_factory=dict)  # "*" stands for an id


def discover_shape(roots: Iterable[PMap], limit: int = 400) -> Shape:
    """The shape that the given states have in common."""
    shape = Shape()
    nodes = [r for _, r in zip(range(limit), roots)]
    if nodes:
        _visit((), nodes, shape)
    return shape


def _visit(path: tuple[str, ...], nodes: list[PMap], shape: Shape) -> None:
    children: dict[str, list[Any]] = {}
    for node in nodes:
        for key, value in node.items():
            children.setdefault(str(key), []).append(value)
    for key, values in children.items():
        maps = [v for v in values if isinstance(v, PMap)]
        here = (*path, key)
        if maps and len(maps) >= len(values) / 2:
            if len(path) >= 1 and is_collection(maps):
                shape.types[here] = "object"
                entries = [e for m in maps for _, e in m.items()]
                fields: dict[tuple[str, ...], None] = {}
                _fields((), entries[:2000], fields, (*here, "*"), shape)
                shape.collections.append(Collection(here, tuple(fields)))
            else:
                _visit(here, maps, shape)
        else:
            shape.singles.append(here)
            shape.types[here] = kind_of(values)


def _fields(
    path: tuple[str, ...], entries: list[Any], fields: dict[Any, None], full: tuple[str, ...], shape: Shape
) -> None:
    maps = [e for e in entries if isinstance(e, PMap)]
    if not maps or len(path) >= 3:
        fields[path] = None
        shape.types[(*full, *path)] = kind_of(entries)
        return
    children: dict[str, list[Any]] = {}
    for entry in maps:
        for key, value in entry.items():
            children.setdefault(str(key), []).append(value)
    for key, values in children.items():
        _fields((*path, key), values, fields, full, shape)


def is_collection(maps: Sequence[PMap]) -> bool:
    """Whether maps at one place are keyed by ids rather than by field names."""
    counts: Counter[Any] = Counter(k for m in maps for k in m.keys())  # noqa: SIM118
    if not counts:
        return True
    values = [v for m in maps[:200] for _, v in m.items()]
    kinds = {type(v) for v in values}
    if len(kinds) > 1:
        return False
    common = sum(c == len(maps) for c in counts.values())
    idlike = sum(any(ch.isdigit() for ch in str(k)) for k in counts) >= len(counts) / 2
    if len(maps) > 1 and common < len(counts) / 2 and (kinds == {PMap} or idlike):
        return True
    if kinds != {PMap}:
        return idlike and len(counts) > 2
    shared = set.intersection(*[set(v.keys()) for v in values[:200]]) if values else set()
    return idlike or (len(values) > 1 and bool(shared))


def kind_of(values: Iterable[Any]) -> str:
    """The declared type that fits all values."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "array", PMap: "object"}
    kinds = {names.get(type(v), "any") for v in values if v is not None}
    if kinds == {"integer", "number"}:
        return "number"
    return kinds.pop() if len(kinds) == 1 else "any"


@dataclass
class Column:
    """A term with its value in every sample; ``rank`` orders terms from simple to far-fetched."""

    term: Any
    values: list[Any]
    rank: int

    @property
    def key(self) -> str:
        return term_key(self.term)


def term_key(term: Any) -> str:
    return json.dumps(term, sort_keys=True)


class Sample:
    """One observed transition with the state that is believed to have stood before it."""

    __slots__ = ("_scope", "args", "at", "branch", "episode", "id", "name", "root", "text", "value")

    def __init__(self, episode: int, at: int, id: str, name: str, args: PMap, value: Any, text: str, root: PMap):
        self.episode, self.at, self.id, self.name = episode, at, id, name
        self.args, self.value, self.text, self.root = args, value, text, root
        self.branch = -1
        self._scope: Scope | None = None

    def scope(self) -> Scope:
        """The scope of arguments and the state before; kept while that state is, with what was looked up in it."""
        if self._scope is None or self._scope.root is not self.root:
            self._scope = Scope(self.root, self.args)
        return self._scope


@lru_cache(maxsize=20_000)
def _compiled(key: str) -> Any:
    return compile_term(json.loads(key))


def evaluate(term: Any, samples: Sequence[Sample], rank: int) -> Column:
    """The column of a term; the same few terms come back for every branch, so their closures are kept."""
    run = _compiled(term_key(term))
    return Column(term, [run(s.scope()) for s in samples], rank)


def entity_terms(samples: Sequence[Sample], shape: Shape) -> list[tuple[Collection, Any, int]]:
    """(collection, key term, depth) for every entity that the action's arguments reach."""
    out: list[tuple[Collection, Any, int]] = []
    seen: set[str] = set()
    names = Counter(k for s in samples for k in s.args.keys())  # noqa: SIM118
    sources: list[tuple[Any, list[Any]]] = []
    for name in names:
        column = evaluate({"$arg": [name]}, samples, 0)
        sources.append((column.term, column.values))
    for depth in (1, 2):
        following: list[tuple[Any, list[Any]]] = []
        for term, values in sources:
            scalar = [(s, v) for s, v in zip(samples, values) if isinstance(v, (str, int)) and not isinstance(v, bool)]
            if not scalar:
                continue
            key_term = {"$text": term} if any(isinstance(v, int) for _, v in scalar) else term
            for collection in shape.collections:
                hits = 0
                for s, v in scalar:
                    node = lookup_collection(s.root, collection)
                    hits += node is not None and text_of(v) in node
                if hits < max(1, KEY_SHARE * len(scalar)):
                    continue
                mark = term_key([collection.path, key_term])
                if mark in seen:
                    continue
                seen.add(mark)
                out.append((collection, key_term, depth))
                for f in collection.fields:
                    column = evaluate({"$state": [*collection.path, key_term, *f]}, samples, depth)
                    following.append((column.term, column.values))
        sources = following
    return out


def lookup_collection(root: PMap, collection: Collection) -> PMap | None:
    node: Any = root
    for segment in collection.path:
        node = node.get(segment) if isinstance(node, PMap) else UNKNOWN
    return node if isinstance(node, PMap) else None


def build_columns(samples: Sequence[Sample], shape: Shape) -> tuple[list[Column], list[Column]]:
    """(value columns, entity columns) of one action's samples, simple ones first.

    Value columns are arguments, single values, fields of reachable entities and sizes; entity columns are the
    entities themselves, used for existence.
    """
    values: list[Column] = []
    entities: list[Column] = []
    for name in dict.fromkeys(k for s in samples for k in s.args.keys()):  # noqa: SIM118
        values.append(evaluate({"$arg": [name]}, samples, 0))
    for collection, key_term, depth in entity_terms(samples, shape):
        base = [*collection.path, key_term]
        entities.append(evaluate({"$state": base}, samples, depth))
        for f in collection.fields:
            if f:
                values.append(evaluate({"$state": [*base, *f]}, samples, depth))
            else:
                values.append(Column(entities[-1].term, entities[-1].values, depth))
    for path in shape.singles:
        values.append(evaluate({"$state": list(path)}, samples, 1))
    for collection in shape.collections:
        values.append(evaluate({"$count": {"$state": list(collection.path)}}, samples, 2))
    values = [c for c in values if any(v is not ABSENT and v is not UNKNOWN for v in c.values)]
    return values[:MAX_COLUMNS], entities


def known(value: Any) -> bool:
    return value is not ABSENT and value is not UNKNOWN


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
