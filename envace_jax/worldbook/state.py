"""Persistent state: structure-shared maps, known absence beside ignorance, an event journal.

A state is a value. Writing makes a new one that shares everything untouched with the old one, so that a fork is
the state itself. Three answers are kept apart wherever a path is read: a value, `ABSENT` (known not to be there:
deleted, or missing from a map whose whole content is known) and `UNKNOWN` (never observed).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from envace_jax.config import UserError

NAMESPACES = ("world", "session", "surface", "epistemic")
MAX_DEPTH = 64

Segment = str | int
Path = tuple[Segment, ...]


class _Mark:
    """A value that stands for the lack of one."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} is neither true nor false: compare with `is`")

    def __copy__(self) -> _Mark:
        return self

    def __deepcopy__(self, memo: Any) -> _Mark:
        return self


ABSENT = _Mark("ABSENT")
UNKNOWN = _Mark("UNKNOWN")
_MISSING = _Mark("_MISSING")


class StateError(UserError, ValueError):
    """A path or a value that no state can hold."""


class PMap:
    """A persistent map: a shared base and a small overlay of changes, neither ever mutated.

    Reading is two dict lookups; writing copies the overlay (at most about the square root of the size) and now and
    then merges it, so n writes cost O(n sqrt n) and a copy costs nothing. ``closed`` says that the whole content is
    known: a key that is not there is then known to be absent. Order is that of first insertion, as in a dict.
    """

    __slots__ = ("_base", "_complete", "_hash", "_limit", "_over", "_size", "_whole", "closed")

    def __init__(
        self,
        base: Mapping[Segment, Any] = (),  # type: ignore[assignment]
        over: Mapping[Segment, Any] | None = None,
        closed: bool = False,
        size: int | None = None,
        limit: int | None = None,
    ):
        self._base: dict[Segment, Any] = base if isinstance(base, dict) else dict(base)
        self._over: dict[Segment, Any] = over if isinstance(over, dict) else {}
        self.closed = closed
        self._size = size if size is not None else sum(v is not ABSENT for v in self._base.values())
        self._limit = limit if limit is not None else max(16, math.isqrt(len(self._base)))
        self._hash: str | None = None
        self._complete: bool | None = None
        self._whole: bool | None = None

    def get(self, key: Segment) -> Any:
        """The value, `ABSENT` (tombstone, or missing in a closed map) or `UNKNOWN`."""
        if self._over:
            value = self._over.get(key, _MISSING)
            if value is not _MISSING:
                return value
        value = self._base.get(key, _MISSING)
        if value is _MISSING:
            return ABSENT if self.closed else UNKNOWN
        return value

    def set(self, key: Segment, value: Any) -> PMap:
        """A map with the key set; `ABSENT` leaves a tombstone, `UNKNOWN` marks the key as not known."""
        old = self._over.get(key, _MISSING)
        if old is _MISSING:
            old = self._base.get(key, _MISSING)
        was = old is not _MISSING and old is not ABSENT and old is not UNKNOWN
        now = value is not ABSENT and value is not UNKNOWN
        over = dict(self._over)
        over[key] = value
        size = self._size + now - was
        if len(over) > self._limit:
            base = dict(self._base)
            base.update(over)
            return PMap(base, None, self.closed, size)
        return PMap(self._base, over, self.closed, size, self._limit)

    def opened(self) -> PMap:
        """The same map with its completeness forgotten: what is missing is unknown from now on."""
        return PMap(self._base, self._over, False, self._size, self._limit) if self.closed else self

    def marked_closed(self) -> PMap:
        return self if self.closed else PMap(self._base, self._over, True, self._size, self._limit)

    def items(self) -> Iterator[tuple[Segment, Any]]:
        """Known entries, in order of first insertion; tombstones and unknown marks are left out."""
        over, base = self._over, self._base
        for key, value in base.items():
            if over:
                value = over.get(key, value)
            if value is not ABSENT and value is not UNKNOWN:
                yield key, value
        for key, value in over.items():
            if key not in base and value is not ABSENT and value is not UNKNOWN:
                yield key, value

    def raw_items(self) -> Iterator[tuple[Segment, Any]]:
        """All entries, marks included."""
        for key, value in self._base.items():
            yield key, self._over.get(key, value)
        for key, value in self._over.items():
            if key not in self._base:
                yield key, value

    @property
    def complete(self) -> bool:
        """Whether every entry is known: closed, and no value marked unknown at this level."""
        if self._complete is None:
            self._complete = self.closed and not any(v is UNKNOWN for _, v in self.raw_items())
        return self._complete

    @property
    def whole(self) -> bool:
        """Whether everything in it is known, at this level and at every one below."""
        if self._whole is None:
            self._whole = self.complete and all(is_whole(v) for _, v in self.items())
        return self._whole

    def keys(self) -> Iterator[Segment]:
        return (k for k, _ in self.items())

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: Segment) -> bool:
        value = self.get(key)
        return value is not ABSENT and value is not UNKNOWN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PMap) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return f"PMap({thaw(self)!r}{', closed' if self.closed else ''})"

    def digest(self) -> str:
        """A content hash that does not depend on the order of writing."""
        if self._hash is None:
            parts = sorted((_key_text(k), _digest_value(v)) for k, v in self.raw_items() if v is not UNKNOWN)
            if self.closed:
                parts = [p for p in parts if p[1] != "absent"]
            text = json.dumps([self.closed, parts], ensure_ascii=True)
            self._hash = hashlib.sha256(text.encode()).hexdigest()
        return self._hash


def _key_text(key: Segment) -> str:
    return ("i" if isinstance(key, int) else "s") + str(key)


def _digest_value(value: Any) -> str:
    if isinstance(value, PMap):
        return "m" + value.digest()
    if value is ABSENT:
        return "absent"
    return "v" + json.dumps(thaw(value), ensure_ascii=True, sort_keys=True, default=repr)


def freeze(value: Any, *, closed: bool = True, depth: int = 0) -> Any:
    """A JSON value as persistent state: objects become `PMap`, lists become tuples.

    Raises:
        StateError: not JSON (a cyclic value included), or nested deeper than 64 levels.
    """
    if depth > MAX_DEPTH:
        raise StateError(f"value nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        base = {k: freeze(v, closed=closed, depth=depth + 1) for k, v in value.items()}
        return PMap(base, None, closed, len(base), 16 if len(base) < 256 else None)
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v, closed=closed, depth=depth + 1) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise StateError("NaN and infinity are not JSON values")
    if value is None or isinstance(value, (str, bool, int, float, PMap)) or value is ABSENT or value is UNKNOWN:
        return value
    raise StateError(f"{type(value).__name__} is not a JSON value")


def frozen_arguments(arguments: Mapping[str, Any]) -> PMap:
    """Arguments as rules read them; of arguments that no state can hold (too deep) nothing is known."""
    try:
        frozen = freeze(dict(arguments))
    except StateError:
        return PMap()
    assert isinstance(frozen, PMap)
    return frozen


def thaw(value: Any) -> Any:
    """The JSON value of a state value; unknown and absent entries are left out."""
    if isinstance(value, PMap):
        return {k: thaw(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [thaw(v) for v in value]
    return value


class Event(NamedTuple):
    """One change of state: what was done where, by which rule or observation, at which step."""

    step: int
    op: str
    path: Path
    value: Any
    cause: str


@dataclass(frozen=True, slots=True)
class Journal:
    """A persistent list of events, newest first: appending and forking are O(1)."""

    event: Event | None = None
    before: Journal | None = None
    length: int = 0

    def append(self, event: Event) -> Journal:
        return Journal(event, self, self.length + 1)

    def __iter__(self) -> Iterator[Event]:
        """Events from the newest to the oldest."""
        node: Journal | None = self
        while node is not None and node.event is not None:
            yield node.event
            node = node.before

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class Pending:
    """An effect that is due at a later step."""

    due: int
    op: str
    path: Path
    value: Any
    cause: str


@dataclass(frozen=True, slots=True)
class State:
    """What is known about one environment: four namespaces, events that are due, and how it came to be so."""

    root: PMap
    revision: int = 0
    step: int = 0
    pending: tuple[Pending, ...] = ()
    journal: Journal = field(default_factory=Journal)

    def fork(self) -> State:
        """A state that goes its own way from here: the same value, since states never change."""
        return self

    def get(self, path: Iterable[Segment]) -> Any:
        """The value at a path, `ABSENT` or `UNKNOWN`."""
        return lookup(self.root, path)

    def apply(self, op: str, path: Path, value: Any = None, cause: str = "") -> State:
        """A new state with one change made and journalled.

        Raises:
            StateError: the operation does not exist, or does not fit what stands at the path.
        """
        root = write(self.root, path, op, value)
        event = Event(self.step, op, path, value, cause)
        return State(root, self.revision + 1, self.step, self.pending, self.journal.append(event))

    def schedule(self, delay: int, op: str, path: Path, value: Any, cause: str) -> State:
        pending = (*self.pending, Pending(self.step + delay, op, path, value, cause))
        return replace(self, pending=pending, revision=self.revision + 1)

    def advance(self) -> State:
        """The state one step later, with the effects that are due then applied in order."""
        state = State(self.root, self.revision, self.step + 1, self.pending, self.journal)
        if not self.pending:
            return state
        due = [p for p in self.pending if p.due <= state.step]
        state = replace(state, pending=tuple(p for p in self.pending if p.due > state.step))
        for p in due:
            try:
                state = state.apply(p.op, p.path, p.value, p.cause)
            except StateError:  # what it was to act on has changed since: what is there now is not known
                state = state.apply("forget", p.path, None, p.cause)
        return state

    def digest(self) -> str:
        """Equal for equal content and pending effects, whatever the history."""
        pending = [(p.due - self.step, p.op, list(p.path), _digest_value(p.value)) for p in self.pending]
        return hashlib.sha256((self.root.digest() + json.dumps(pending)).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"revision": self.revision, "step": self.step, "state": thaw(self.root)}


def empty_state() -> State:
    """A state in which nothing has been observed yet."""
    return State(PMap({n: PMap() for n in NAMESPACES}))


def state_from_json(value: Mapping[str, Any], *, complete: bool = True) -> State:
    """A state from an explicit description.

    Args:
        value: the four namespaces (or some), each an object; anything else is the content of ``world``.
        complete: the description is exhaustive: what it does not name is absent, not unknown.
    """
    if not isinstance(value, Mapping):
        raise StateError(f"initial state: expected an object, found {type(value).__name__}")
    named = value and all(k in NAMESPACES and isinstance(v, Mapping) for k, v in value.items())
    if not named:
        value = {"world": dict(value)}
    root: dict[Segment, Any] = {
        n: freeze(dict(value[n]), closed=complete) if n in value else PMap() for n in NAMESPACES
    }
    if complete:
        # A session that the description does not mention is empty, and known to be so.
        root = {n: v.marked_closed() if n != "epistemic" else v for n, v in root.items()}
    return State(PMap(root))


def lookup(node: Any, path: Iterable[Segment]) -> Any:
    """The value at a path below a state value; `ABSENT` and `UNKNOWN` are kept apart."""
    for segment in path:
        if isinstance(node, PMap):
            node = node.get(segment)
        elif isinstance(node, tuple):
            if isinstance(segment, int) and not isinstance(segment, bool) and -len(node) <= segment < len(node):
                node = node[segment]
            else:
                return ABSENT
        elif node is UNKNOWN:
            return UNKNOWN
        else:
            return ABSENT  # below a known scalar, or below nothing, there is nothing
    return node


def json_equal(a: Any, b: Any) -> bool:
    """Equality of JSON values: a boolean is no number, 1 equals 1.0. A map not wholly known equals nothing."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if isinstance(a, PMap) or isinstance(b, PMap):
        return truth_equal(a, b) is True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(json_equal(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(json_equal(v, b[k]) for k, v in a.items())
    return type(a) is type(b) and bool(a == b)


def truth_equal(a: Any, b: Any) -> bool | None:
    """Equality of state values as far as they are known: True, False, or None where what is unknown decides."""
    if a is UNKNOWN or b is UNKNOWN:
        return None
    if a is ABSENT or b is ABSENT:
        return a is b
    if isinstance(a, PMap) and isinstance(b, PMap):
        if a.whole and b.whole and a.digest() == b.digest():
            return True
        names = dict.fromkeys(k for m in (a, b) for k, _ in m.raw_items())
        return _all_true((truth_equal(a.get(k), b.get(k)) for k in names), a.closed and b.closed)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and _all_true((truth_equal(x, y) for x, y in zip(a, b)), True)
    if isinstance(a, PMap) or isinstance(b, PMap):
        return False
    return json_equal(a, b)


def _all_true(answers: Iterable[bool | None], rest: bool) -> bool | None:
    """False where one answer is; else None where one is, or where there may be more than was compared."""
    unknown = not rest
    for answer in answers:
        if answer is False:
            return False
        unknown = unknown or answer is None
    return None if unknown else True


def is_whole(value: Any) -> bool:
    """Whether nothing in a state value is unknown: no part of it could turn out to be more, or other, than it shows."""
    if type(value) is PMap:
        return value.whole
    if type(value) is tuple:
        return all(map(is_whole, value))
    return value is not UNKNOWN


def write(node: Any, path: Path, op: str, value: Any) -> Any:
    """A state value with one operation done at a path; everything else is shared.

    Operations: set, create, delete, increment, decrement, append, merge, remove (from a list, by value), forget
    (the value becomes unknown). Missing maps on the way are created, open: creating a child says nothing of others.
    """
    if not path:
        return _operate(node, op, value)
    if len(path) > MAX_DEPTH:
        raise StateError(f"path deeper than {MAX_DEPTH} segments")
    head, rest = path[0], path[1:]
    if op == "forget" and not isinstance(node, PMap) and not (isinstance(node, tuple) and _in_list(node, head)):
        return UNKNOWN  # whether there is now something that this can lie below is not known either
    if isinstance(node, tuple):
        if not _in_list(node, head):
            raise StateError(f"no element {head!r} in a list of {len(node)}")
        at = int(head)
        return (*node[:at], write(node[at], rest, op, value), *node[at + 1 :])
    if not isinstance(node, PMap):
        if node is not ABSENT and node is not UNKNOWN:
            raise StateError(f"segment {head!r} lies below a {type(node).__name__}")
        node = PMap()
    return node.set(head, write(node.get(head), rest, op, value))


def _in_list(node: tuple[Any, ...], head: Segment) -> bool:
    return isinstance(head, int) and not isinstance(head, bool) and 0 <= head < len(node)


def _operate(old: Any, op: str, value: Any) -> Any:
    if op == "set":
        return value
    if op == "create":
        if old is not ABSENT and old is not UNKNOWN:
            raise StateError("create: there is something already")
        return value
    if op == "delete":
        return ABSENT
    if op == "forget":
        return UNKNOWN
    if op in ("increment", "decrement"):
        if not _number(old) or not _number(value):
            raise StateError(f"{op}: needs two numbers, found {type(old).__name__} and {type(value).__name__}")
        return old + value if op == "increment" else old - value
    if op == "append":
        if old is UNKNOWN:
            return UNKNOWN  # appending to a list that was never seen does not make it known
        return (*(() if old is ABSENT else _list(old, op)), value)
    if op == "remove":
        if isinstance(old, PMap):
            return old.set(value, ABSENT)
        items = list(_list(old, op))
        for i, item in enumerate(items):
            if json_equal(item, value):
                return tuple(items[:i] + items[i + 1 :])
        raise StateError("remove: no such element")
    if op == "merge":
        if not isinstance(value, PMap):
            raise StateError("merge: needs an object")
        if not isinstance(old, PMap):
            if old is not ABSENT and old is not UNKNOWN:
                raise StateError(f"merge: cannot merge into a {type(old).__name__}")
            old = PMap()
        for key, item in value.items():
            old = old.set(key, item)
        return old
    raise StateError(f"no operation {op!r}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list(value: Any, op: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise StateError(f"{op}: needs a list, found {type(value).__name__}")
    return value
