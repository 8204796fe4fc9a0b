"""What actions change, inferred from what is read later.

A field that reads other than the tracked state says was changed by something in between. Every earlier transition of
the episode whose arguments (or answer) name the same entity is a suspect; a hypothesis "this branch of this action sets
this field to that term" stands if it explains such readings and the next reading after each of its uses agrees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.worldbook.columns import Collection, Sample, Shape, is_number, known, term_key
from envace_jax.worldbook.records import StateMutation
from envace_jax.worldbook.state import (
    ABSENT,
    UNKNOWN,
    Event,
    Journal,
    Path,
    PMap,
    State,
    StateError,
    freeze,
    json_equal,
    lookup,
    write,
)
from envace_jax.worldbook.terms import Scope, TermError, compile_term, text_of


@dataclass(frozen=True)
class Reading:
    """At one transition, a path was read: the value seen, and what the tracked state had there."""

    sample: Sample
    path: Path
    seen: Any
    tracked: Any

    @property
    def wrong(self) -> bool:
        return not (known(self.tracked) and json_equal(self.seen, self.tracked))


class EffectRunner:
    """Applies effects to a state; paths and values are compiled once."""

    def __init__(self, effects: Sequence[StateMutation]):
        self.effects = effects
        self.parts = [
            (e.op, [s if isinstance(s, (str, int)) else compile_term(s) for s in e.path], compile_term(e.value), e)
            for e in effects
        ]

    def plan(self, scope: Scope) -> list[tuple[str, Path, Any, int]] | None:
        """(operation, path, value, delay) of every effect, all read from the state before; None: something unknown."""
        out = []
        for op, segments, value_of, effect in self.parts:
            path: list[Any] = []
            for segment in segments:
                if callable(segment):
                    segment = segment(scope)
                    if not isinstance(segment, (str, int)) or isinstance(segment, bool):
                        return None
                path.append(segment)
            value = None if op in ("delete", "forget") else value_of(scope)
            if value is UNKNOWN or value is ABSENT:
                return None
            out.append((op, tuple(path), value, effect.delay_steps))
        return out

    def run(self, state: State, scope: Scope, cause: str) -> State | None:
        """The state after the effects, or None where one cannot be carried out."""
        plan = self.plan(scope)
        if plan is None:
            return None
        return carry_out(state, plan, cause)

    def forget(self, state: State, scope: Scope, cause: str) -> State:
        """The state with every place that the effects might touch marked unknown."""
        for _, segments, _, _ in self.parts:
            path: list[Any] = []
            for segment in segments:
                if callable(segment):
                    segment = segment(scope)
                    if not isinstance(segment, (str, int)) or isinstance(segment, bool):
                        break
                path.append(segment)
            try:
                state = state.apply("forget", tuple(path), None, cause)
            except StateError:
                state = state.apply("forget", tuple(path[:-1]), None, cause)
        return state


def carry_out(state: State, plan: Sequence[tuple[str, Path, Any, int]], cause: str) -> State | None:
    """The state after a plan of effects; None where the state does not allow one of them."""
    root, journal, revision = state.root, state.journal, state.revision
    try:
        for op, path, value, delay in plan:
            if delay:
                state = State(root, revision, state.step, state.pending, journal).schedule(
                    delay, op, path, value, cause
                )
            else:
                root = write(root, path, op, value)
                journal = Journal(Event(state.step, op, path, value, cause), journal, journal.length + 1)
            revision += 1
    except StateError:
        return None
    return State(root, revision, state.step, state.pending, journal)


def dynamic_path(term: Any) -> list[Any] | None:
    """The segments of a ``$state`` term (None for other terms)."""
    if isinstance(term, dict) and "$state" in term:
        return list(term["$state"])
    return None


def concrete(path: Sequence[Any], scope: Scope) -> Path | None:
    """A path with its terms evaluated; None where one is not known."""
    out: list[Any] = []
    for segment in path:
        if isinstance(segment, dict):
            segment = compile_term(segment)(scope)
            if not isinstance(segment, (str, int)) or isinstance(segment, bool):
                return None
        out.append(segment)
    return tuple(out)


@dataclass
class Hypothesis:
    """An effect of one branch, with the readings that it explains."""

    branch: int
    effect: StateMutation
    rank: int
    support: set[int]


class EffectFinder:
    """Looks for effects that explain wrong readings, over all episodes at once."""

    def __init__(self, shape: Shape, by_episode: dict[int, list[Sample]], entity_terms: dict[str, list[Any]]):
        self.shape = shape
        self.by_episode = by_episode
        self.entity_terms = entity_terms  # action name -> [(collection, key term, depth)]

    def find(
        self,
        readings: Sequence[Reading],
        existing: dict[int, list[StateMutation]],
    ) -> dict[int, list[StateMutation]]:
        """New effects by branch. What a transition's own answer reads, that transition does not set."""
        by_episode: dict[int, list[Reading]] = defaultdict(list)
        for r in readings:
            by_episode[r.sample.episode].append(r)
        hypotheses: dict[str, Hypothesis] = {}
        wrong = [(n, r) for n, r in enumerate(readings) if r.wrong]
        shown = {(id(r.sample), r.path) for r in readings}
        for n, reading in wrong:
            for suspect in self.by_episode[reading.sample.episode]:
                if suspect.at >= reading.sample.at:
                    break
                if (id(suspect), reading.path) in shown:
                    continue
                for rank, effect in self._suspicions(suspect, reading):
                    key = f"{suspect.branch}|{term_key([effect.op, effect.path, effect.value])}"
                    entry = hypotheses.setdefault(key, Hypothesis(suspect.branch, effect, rank, set()))
                    entry.support.add(n)
        branches: dict[int, list[Sample]] = defaultdict(list)
        for samples in self.by_episode.values():
            for s in samples:
                branches[s.branch].append(s)
        accepted: dict[int, list[StateMutation]] = {}
        explained: set[int] = set()
        ranked = sorted(hypotheses.values(), key=lambda h: (-len(h.support), h.rank))
        for h in ranked[:400]:
            fresh = h.support - explained
            if not fresh:
                continue
            taken = [e.path for e in existing.get(h.branch, []) + accepted.get(h.branch, [])]
            if any(term_key(p) == term_key(h.effect.path) for p in taken):
                continue
            plus, minus = self._consistency(h, branches[h.branch], by_episode)
            if plus >= 1 and plus >= 4 * minus:
                accepted.setdefault(h.branch, []).append(h.effect)
                explained |= h.support
        return accepted

    def echoes(
        self,
        branches: dict[int, list[Sample]],
        readings: Sequence[Reading],
        existing: dict[int, list[StateMutation]],
        read: dict[int, set[str]],
    ) -> dict[int, list[StateMutation]]:
        """Effects that answers state themselves: a field of the answer bears the name of a field of an entity that
        the call names, with another value than the tracked one. ``read`` names the fields of each branch's answer that
        are plain readings of some place. The nearest entity goes first; a later reading that
        contradicts rules the hypothesis out."""
        by_episode: dict[int, list[Reading]] = defaultdict(list)
        for r in readings:
            by_episode[r.sample.episode].append(r)
        accepted: dict[int, list[StateMutation]] = {}
        for index, samples in branches.items():
            first = samples[0].value
            if not isinstance(first, dict) or not all(isinstance(s.value, dict) for s in samples):
                continue
            for name in [n for n in first if n not in read[index]]:
                options = [
                    (depth, collection, term)
                    for collection, term, depth in self.entity_terms.get(samples[0].name, [])
                    if (name,) in collection.fields
                ]
                for _, collection, term in sorted(options, key=lambda o: o[0]):
                    path = [*collection.path, term, name]
                    if any(term_key(e.path) == term_key(path) for e in existing.get(index, [])):
                        break
                    if not self._changes(samples, path, name):
                        continue
                    h = Hypothesis(index, StateMutation("set", path, {"$out": [name]}), 0, set())
                    plus, minus = self._consistency(h, samples, by_episode)
                    if plus >= 4 * minus:
                        accepted.setdefault(index, []).append(h.effect)
                        break
        return accepted

    def _changes(self, samples: Sequence[Sample], path: list[Any], name: str) -> bool:
        """Whether the answers differ from what was there in a good part of the samples, and are of the same type."""
        differs = 0
        for s in samples:
            where = concrete(path, s.scope())
            before = UNKNOWN if where is None else lookup(s.root, where)
            if not known(before) or type(before) is not type(s.value.get(name)):
                return False
            differs += not json_equal(before, s.value[name])
        return differs * 2 > len(samples)

    def _consistency(
        self, h: Hypothesis, uses: Sequence[Sample], by_episode: dict[int, list[Reading]]
    ) -> tuple[int, int]:
        """How many readings after uses of the branch agree with the hypothesis, and how many do not.

        What the effects known so far did in between is in the tracked state: a step up or down adds to it; a value that
        was set stands only where nothing known has written over it since.
        """
        runner = EffectRunner([h.effect])
        planned: dict[int, list[tuple[Sample, Path, Any]]] = defaultdict(list)
        for use in uses:
            plan = runner.plan(Scope(use.root, use.args, _frozen(use.value)))
            if plan is not None:
                planned[use.episode].append((use, plan[0][1], plan[0][2]))
        plus = minus = 0
        for episode, steps in planned.items():
            steps.sort(key=lambda s: s[0].at)
            for reading in by_episode.get(episode, ()):
                before = [s for s in steps if s[0].at < reading.sample.at and reading.path[: len(s[1])] == s[1]]
                if not before:
                    continue
                expected = self._expected(h.effect.op, before, reading)
                if expected is None:
                    continue
                if expected is reading.seen or (
                    known(expected) and expected is not _IMPOSSIBLE and json_equal(expected, reading.seen)
                ):
                    plus += 1
                elif expected is not UNKNOWN:
                    minus += 1
        return plus, minus

    def _expected(self, op: str, before: list[tuple[Sample, Path, Any]], reading: Reading) -> Any:
        """What a reading would show under the hypothesis; None where that cannot be said."""
        if op in ("increment", "decrement"):
            if reading.path != before[-1][1] or not is_number(reading.tracked):
                return None
            moved = sum(value for _, _, value in before)
            return reading.tracked + moved if op == "increment" else reading.tracked - moved
        use, path, value = before[-1]
        was = lookup(use.root, reading.path)
        if reading.tracked is not was and not (
            known(was) and known(reading.tracked) and json_equal(was, reading.tracked)
        ):
            return None
        try:
            return lookup(State(use.root).apply(op, path, value).root, reading.path)
        except StateError:
            return _IMPOSSIBLE

    def _suspicions(self, suspect: Sample, reading: Reading) -> list[tuple[int, StateMutation]]:
        """Effects of the suspect that would have left the value that was read."""
        scope = Scope(suspect.root, suspect.args, _frozen(suspect.value))
        paths = self._paths(suspect, reading.path, scope)
        if not paths:
            return []
        before = lookup(suspect.root, reading.path)
        values = self._values(suspect, scope, before, reading.seen)
        return [
            (path_rank + value_rank, StateMutation(op, path, value))
            for path_rank, path in paths
            for value_rank, op, value in values
        ]

    def _paths(self, suspect: Sample, path: Path, scope: Scope) -> list[tuple[int, list[Any]]]:
        collection = next((c for c in self.shape.collections if path[: len(c.path)] == c.path), None)
        if collection is None or len(path) <= len(collection.path):
            return [(0, list(path))]
        key, rest = path[len(collection.path)], path[len(collection.path) + 1 :]
        out = []
        for rank, term in self._key_terms(suspect, collection):
            value = compile_term(term)(scope)
            if isinstance(value, (str, int)) and not isinstance(value, bool) and text_of(value) == str(key):
                out.append((rank, [*collection.path, term, *rest]))
        return out

    def _key_terms(self, suspect: Sample, collection: Collection) -> list[tuple[int, Any]]:
        terms = [
            (depth, term)
            for other, term, depth in self.entity_terms.get(suspect.name, [])
            if other.path == collection.path
        ]
        if isinstance(suspect.value, dict):
            for name, value in suspect.value.items():
                if isinstance(value, str):
                    terms.append((3, {"$out": [name]}))
                elif isinstance(value, int) and is_number(value):
                    terms.append((4, {"$text": {"$out": [name]}}))
        return terms

    def _values(self, suspect: Sample, scope: Scope, before: Any, seen: Any) -> list[tuple[int, str, Any]]:
        if seen is ABSENT:
            return [(0, "delete", None)]
        out: list[tuple[int, str, Any]] = []
        if isinstance(suspect.value, dict):
            for name, value in suspect.value.items():
                if not isinstance(value, (dict, list)) and _same(freeze(value), seen):
                    out.append((1, "set", {"$out": [name]}))
        for name, value in suspect.args.items():
            if _same(value, seen):
                out.append((0, "set", {"$arg": [name]}))
            if is_number(before) and is_number(seen) and is_number(value) and value:
                if _near(before + value, seen):
                    out.append((2, "increment", {"$arg": [name]}))
                if _near(before - value, seen):
                    out.append((2, "decrement", {"$arg": [name]}))
            if isinstance(before, tuple) and isinstance(seen, tuple):
                if len(seen) == len(before) + 1 and json_equal(seen[:-1], before) and _same(seen[-1], value):
                    out.append((1, "append", {"$arg": [name]}))
                if len(seen) == len(before) - 1 and any(_same(e, value) for e in before):
                    out.append((2, "remove", {"$arg": [name]}))
        if isinstance(seen, (str, bool)) or seen is None or is_number(seen):
            out.append((1 if isinstance(seen, (str, bool)) else 3, "set", seen))
        if is_number(before) and is_number(seen) and before != seen:
            delta = seen - before
            step = round(abs(delta), 6) if isinstance(delta, float) else abs(delta)
            out.append((3, "increment" if delta > 0 else "decrement", step))
        grown = isinstance(before, tuple) and isinstance(seen, tuple) and len(seen) == len(before) + 1
        if grown and isinstance(suspect.value, dict):
            for name, value in suspect.value.items():
                if _same(freeze(value), seen[-1]):
                    out.append((2, "append", {"$out": [name]}))
        return out


_IMPOSSIBLE = object()


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and json_equal(a, b)


def _near(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else abs(a - b) < 1e-6


def _frozen(value: Any) -> Any:
    try:
        return freeze(value)
    except (StateError, TermError):
        return UNKNOWN


def creation_candidates(samples: Sequence[Sample], collection: Collection) -> list[StateMutation]:
    """Ways in which a branch's answers may name a new entry of a collection, with the fields that can be read off."""
    outs = [s.value for s in samples if isinstance(s.value, dict)]
    if not outs or len(outs) != len(samples):
        return []
    found = []
    for name in outs[0]:
        ids = [o.get(name) for o in outs]
        if not all(isinstance(i, str) or (isinstance(i, int) and is_number(i)) for i in ids):
            continue
        clash = 0
        for s, i in zip(samples, ids):
            node: Any = lookup(s.root, collection.path)
            clash += not isinstance(node, PMap) or text_of(i) in node
        if clash or not _alike(ids, samples, collection):
            continue
        key = {"$out": [name]} if isinstance(ids[0], str) else {"$text": {"$out": [name]}}
        fields: dict[str, Any] = {}
        for f in collection.fields:
            if len(f) != 1:
                continue
            if f[0] in outs[0]:
                fields[f[0]] = {"$out": [f[0]]}
            elif all(f[0] in s.args for s in samples):
                fields[f[0]] = {"$arg": [f[0]]}
        found.append(StateMutation("merge", [*collection.path, key], fields))
    return found


def _alike(ids: Sequence[Any], samples: Sequence[Sample], collection: Collection) -> bool:
    """Whether the ids look like keys of the collection: same letters around the digits."""

    def mask(text: str) -> str:
        return "".join("9" if ch.isdigit() else ch for ch in text)

    keys: set[str] = set()
    for s in samples[:50]:
        node = lookup(s.root, collection.path)
        if isinstance(node, PMap):
            keys |= {mask(str(k)) for k, _ in zip(node.keys(), range(50))}
    return bool(keys) and all(mask(text_of(i)) in keys for i in ids[:50])
