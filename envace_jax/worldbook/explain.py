"""Explaining observations: which terms over arguments and state give the values that were seen.

A leaf of an observation is explained by every simple term that matches it in all samples (in a stated share of them
while the state is still only partly understood). Where several terms match, the rule keeps them all and answers only
when they agree, so that what the traces left open stays open.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from envace_jax.worldbook.columns import Column, Sample, Shape, is_number, known, lookup_collection, term_key
from envace_jax.worldbook.state import ABSENT, PMap, freeze, json_equal, thaw
from envace_jax.worldbook.terms import compile_term, text_of

MAX_ALTERNATIVES = 4


@dataclass
class Leaf:
    """An explained (or, with no terms, unexplained) part of an observation."""

    path: tuple[str | int, ...]
    terms: list[Any]
    share: float


@dataclass
class Explanation:
    """The observation as a term (None where some leaf is unexplained) and its leaves."""

    term: Any
    leaves: list[Leaf] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return all(leaf.terms for leaf in self.leaves)

    @property
    def share(self) -> float:
        return min((leaf.share for leaf in self.leaves), default=1.0)


def explain(samples: Sequence[Sample], columns: Sequence[Column], shape: Shape, tolerance: float) -> Explanation:
    """Explain the observations of like-shaped samples; ``tolerance`` is the share that may disagree."""
    result = Explanation(None)
    result.term = _node([s.value for s in samples], (), samples, columns, shape, tolerance, result.leaves)
    if not result.complete:
        result.term = None
    return result


def _node(
    values: list[Any],
    path: tuple[str | int, ...],
    samples: Sequence[Sample],
    columns: Sequence[Column],
    shape: Shape,
    tolerance: float,
    leaves: list[Leaf],
) -> Any:
    first = values[0]
    if isinstance(first, dict) and first and all(isinstance(v, dict) and list(v) == list(first) for v in values):
        if any(k.startswith("$") for k in first):
            leaves.append(Leaf(path, [], 0.0))
            return None
        return {k: _node([v[k] for v in values], (*path, k), samples, columns, shape, tolerance, leaves) for k in first}
    if all(isinstance(v, list) for v in values):
        terms, share = explain_list(values, samples, columns, shape, tolerance)
    else:
        terms, share = explain_scalar(values, columns, tolerance)
    leaves.append(Leaf(path, terms, share))
    if not terms:
        return None
    return terms[0] if len(terms) == 1 else {"$agree": terms}


class _Matcher:
    """Counts how often candidate values equal the targets, giving up early."""

    def __init__(self, values: Sequence[Any], tolerance: float):
        self.targets = [freeze(v) for v in values]
        self.kinds = [type(v) for v in self.targets]
        self.allowed = int(tolerance * len(values))
        self.n = len(values)

    def share(self, candidate: Callable[[int], Any]) -> float:
        """The share that matches, or 0 as soon as more than the allowed number do not."""
        missed = 0
        for i, target in enumerate(self.targets):
            value = candidate(i)
            if type(value) is not self.kinds[i] or not (value == target or json_equal(value, target)):
                missed += 1
                if missed > self.allowed:
                    return 0.0
        return (self.n - missed) / self.n


def _each(change: Callable[[Any], Any], column: Column) -> Callable[[int], Any]:
    """The candidate that changes a column's values one by one."""
    return lambda i: change(column.values[i])


def explain_scalar(values: Sequence[Any], columns: Sequence[Column], tolerance: float) -> tuple[list[Any], float]:
    """(terms that match, share matched by the best), simple ones first; no terms: unexplained."""
    matcher = _Matcher(values, tolerance)
    found: list[tuple[float, int, Any]] = []
    # A state that is only partly understood may spoil a reading, but never a constant.
    if len(set(map(repr, values))) == 1 and not isinstance(values[0], dict):
        found.append((1.0, 1, _constant(values[0])))
    for column in columns:
        share = matcher.share(column.values.__getitem__)
        if share:
            found.append((share, column.rank, column.term))
        elif isinstance(values[0], str):
            share = matcher.share(_each(_as_text, column))
            if share:
                found.append((share, column.rank + 1, {"$text": column.term}))
        elif isinstance(values[0], int):
            share = matcher.share(_each(_as_int, column))
            if share:
                found.append((share, column.rank + 1, {"$int": column.term}))
    if not found or max(f[0] for f in found) < 1.0:
        if all(is_number(v) for v in values):
            found += _arithmetic(values, columns, matcher)
        elif all(isinstance(v, str) for v in values):
            found += _template(values, columns, matcher)
    if not found:
        return [], 0.0
    best = max(f[0] for f in found)
    kept = sorted((f for f in found if f[0] >= best - 1e-9), key=lambda f: f[1])[:MAX_ALTERNATIVES]
    return [f[2] for f in kept], best


def _constant(value: Any) -> Any:
    return {"$const": value} if isinstance(value, (dict, list)) else value


def _as_text(value: Any) -> Any:
    return text_of(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else value


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16 else value


def _arithmetic(values: Sequence[Any], columns: Sequence[Column], matcher: _Matcher) -> list[tuple[float, int, Any]]:
    found: list[tuple[float, int, Any]] = []
    numeric = [c for c in columns if any(is_number(v) for v in c.values)]
    for column in numeric:
        # The offset or factor that most samples agree on, if one does.
        offsets = Counter(_tidy(v - c) for v, c in zip(values[:60], column.values) if is_number(c) and is_number(v))
        if offsets:
            offset, n = offsets.most_common(1)[0]
            if n > 1 or len(values) == 1:
                share = matcher.share(_each(functools.partial(_add, offset), column))
                if share:
                    term = {"$sum": [column.term, offset]} if offset > 0 else {"$diff": [column.term, -offset]}
                    found.append((share, column.rank + 2, term))
        factors = Counter(
            round(v / c, 9) for v, c in zip(values[:60], column.values) if is_number(c) and is_number(v) and c
        )
        if factors:
            factor, n = factors.most_common(1)[0]
            if n > 2 and factor not in (0, 1):
                share = matcher.share(_each(functools.partial(_times, factor), column))
                if share:
                    term = {"$round": [{"$product": [column.term, factor]}, 2]}
                    found.append((share, column.rank + 3, term))
    for a in numeric:
        for b in numeric:
            if a is b:
                continue
            rank = a.rank + b.rank + 2
            share = matcher.share(lambda i: _minus(a.values[i], b.values[i]))  # noqa: B023
            if share:
                found.append((share, rank, {"$diff": [a.term, b.term]}))
            if a.key < b.key:
                share = matcher.share(lambda i: _add(a.values[i], b.values[i]))  # noqa: B023
                if share:
                    found.append((share, rank, {"$sum": [a.term, b.term]}))
                share = matcher.share(lambda i: _times(a.values[i], b.values[i]))  # noqa: B023
                if share:
                    found.append((share, rank + 1, {"$product": [a.term, b.term]}))
    if not found and any(isinstance(v, float) for v in values):
        for a in numeric:
            for b in numeric:
                share = matcher.share(lambda i: _rounded(_minus(a.values[i], b.values[i])))  # noqa: B023
                if share and a is not b:
                    found.append((share, a.rank + b.rank + 3, {"$round": [{"$diff": [a.term, b.term]}, 2]}))
                share = matcher.share(lambda i: _rounded(_times(a.values[i], b.values[i])))  # noqa: B023
                if share and a.key < b.key:
                    found.append((share, a.rank + b.rank + 3, {"$round": [{"$product": [a.term, b.term]}, 2]}))
    return found


def _tidy(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _add(a: Any, b: Any) -> Any:
    return a + b if is_number(a) and is_number(b) else ABSENT


def _minus(a: Any, b: Any) -> Any:
    return a - b if is_number(a) and is_number(b) else ABSENT


def _times(a: Any, b: Any) -> Any:
    return a * b if is_number(a) and is_number(b) else ABSENT


def _rounded(a: Any) -> Any:
    return round(a, 2) if is_number(a) and math.isfinite(a) else ABSENT


# --- texts -----------------------------------------------------------------------------------------------------


def _template(values: Sequence[str], columns: Sequence[Column], matcher: _Matcher) -> list[tuple[float, int, Any]]:
    """A text with slots: constant pieces between values of columns."""
    slots: list[tuple[str, list[Column]]] = []
    for c in columns:
        text = _as_text(c.values[0])
        if isinstance(text, str) and text and text in values[0]:
            for known_text, group in slots:
                if known_text == text:
                    group.append(c)
                    break
            else:
                slots.append((text, [c]))
    # A count may stand zero-padded after a prefix (T0007): offered as digits that grow with some number.
    parts: list[str | list[Any]] = []
    rest = values[0]
    while rest:
        hits = [(rest.find(t), -len(t), t, g) for t, g in slots if _bounded(rest, t)]
        if not hits:
            parts.append(rest)
            break
        at, _, text, group = min(hits, key=lambda h: (h[0], h[1]))
        if at:
            parts.append(rest[:at])
        parts.append(list(group))
        rest = rest[at + len(text) :]
    if any(isinstance(p, list) for p in parts):
        narrowed = _narrow(parts, values, matcher)
        if narrowed:
            terms = [p if isinstance(p, str) else _choice(p) for p in narrowed]
            share = _template_share(terms, narrowed, values, matcher)
            if share:
                return [(share, 3, {"$concat": terms})]
    return _numbered(values, columns, matcher)


def _bounded(text: str, piece: str) -> bool:
    """Whether the piece stands in the text and, if it is a number, not inside a longer one."""
    at = text.find(piece)
    if at < 0:
        return False
    if not piece[0].isdigit():
        return True
    before, after = text[at - 1 : at], text[at + len(piece) : at + len(piece) + 1]
    return not before.isdigit() and not after.isdigit()


def _narrow(parts: list[Any], values: Sequence[str], matcher: _Matcher) -> list[Any] | None:
    """The columns of each slot that go on matching, sample by sample; None when the text does not fit."""
    current = [p if isinstance(p, str) else list(p) for p in parts]
    missed = 0
    for i, text in enumerate(values):
        rest, ok = text, True
        trial: list[Any] = []
        for part in current:
            if isinstance(part, str):
                ok = rest.startswith(part)
                rest = rest[len(part) :]
                trial.append(part)
            else:
                fitting = [c for c in part if isinstance(t := _as_text(c.values[i]), str) and rest.startswith(t)]
                if fitting:
                    longest = max(len(_as_text(c.values[i])) for c in fitting)
                    fitting = [c for c in fitting if len(_as_text(c.values[i])) == longest]
                    rest = rest[longest:]
                ok = bool(fitting)
                trial.append(fitting)
            if not ok:
                break
        if not ok or rest:
            missed += 1
            if missed > matcher.allowed:
                return None
            continue
        current = trial
    return current


def _choice(columns: list[Column]) -> Any:
    terms = [c.term for c in sorted(columns, key=lambda c: c.rank)[:MAX_ALTERNATIVES]]
    return terms[0] if len(terms) == 1 else {"$agree": terms}


def _template_share(terms: list[Any], parts: list[Any], values: Sequence[str], matcher: _Matcher) -> float:
    def build(i: int) -> Any:
        out = []
        for part in parts:
            text = part if isinstance(part, str) else _as_text(part[0].values[i])
            if not isinstance(text, str):
                return ABSENT
            out.append(text)
        return "".join(out)

    return matcher.share(build)


_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)\Z", re.S)


def _numbered(values: Sequence[str], columns: Sequence[Column], matcher: _Matcher) -> list[tuple[float, int, Any]]:
    """Texts such as T0007: a prefix and a number that is a column plus a constant."""
    split = [_NUMBERED.match(v) for v in values]
    if not all(split):
        return []
    prefixes = Counter((m.group(1), m.group(3)) for m in split if m)
    (prefix, suffix), _ = prefixes.most_common(1)[0]
    widths = {len(m.group(2)) for m in split if m}
    numbers = [int(m.group(2)) for m in split if m]
    found = []
    for column in columns:
        offsets = Counter(n - c for n, c in zip(numbers, column.values) if isinstance(c, int) and is_number(c))
        if not offsets:
            continue
        offset = offsets.most_common(1)[0][0]
        inner = column.term if offset == 0 else {"$sum": [column.term, offset]}
        width = widths.copy().pop() if len(widths) == 1 else 1
        term = {"$concat": [prefix, {"$pad": [inner, width]}, suffix]}

        def build(i: int, c: Column = column, o: int = offset, w: int = width) -> Any:
            v = c.values[i]
            return f"{prefix}{v + o:0{w}d}{suffix}" if isinstance(v, int) and is_number(v) else ABSENT

        share = matcher.share(build)
        if share:
            found.append((share, column.rank + 3, term))
    return found


# --- lists -----------------------------------------------------------------------------------------------------


def explain_list(
    values: Sequence[list[Any]],
    samples: Sequence[Sample],
    columns: Sequence[Column],
    shape: Shape,
    tolerance: float,
) -> tuple[list[Any], float]:
    """Terms for list observations: a list of the state, or the entries of a collection that satisfy a condition."""
    matcher = _Matcher(values, tolerance)
    found: list[tuple[float, int, Any]] = []
    if len({repr(v) for v in values}) == 1:
        found.append((1.0, 1, {"$const": values[0]}))
    for column in columns:
        share = matcher.share(column.values.__getitem__)
        if share:
            found.append((share, column.rank, column.term))
    if not found or found[0][2].get("$const") == []:
        for collection in shape.collections:
            take = _take(values, samples, collection)
            for term in take:
                found += _selections(term, collection, samples, columns, matcher)
    if not found:
        return [], 0.0
    best = max(f[0] for f in found)
    kept = sorted((f for f in found if f[0] >= best - 1e-9), key=lambda f: f[1])[:MAX_ALTERNATIVES]
    return [f[2] for f in kept], best


def _take(values: Sequence[list[Any]], samples: Sequence[Sample], collection: Any) -> list[Any]:
    """How an element follows from an entry of the collection: its key, its key as a number, a field, an object."""
    elements: list[tuple[Any, PMap]] = []
    for v, s in zip(values, samples):
        node = lookup_collection(s.root, collection)
        if node is not None and v:
            elements += [(e, node) for e in v[:4]]
        if len(elements) > 60:
            break
    if not elements:
        return []
    needed = 0.7 * len(elements)
    if sum(isinstance(e, str) and e in n for e, n in elements) >= needed:
        return [{"$key": True}]
    if sum(isinstance(e, int) and is_number(e) and str(e) in n for e, n in elements) >= needed:
        return [{"$int": {"$key": True}}]
    if all(isinstance(e, dict) for e, _ in elements):
        return _take_object(elements, collection)
    fields = [f for f in collection.fields if f]
    return [
        {"$entry": list(f)}
        for f in fields
        if sum(any(json_equal(_field(x, f), freeze(e)) for _, x in n.items()) for e, n in elements[:20])
        >= 0.7 * len(elements[:20])
    ]


def _field(entry: Any, path: tuple[str, ...]) -> Any:
    for segment in path:
        entry = entry.get(segment) if isinstance(entry, PMap) else ABSENT
    return entry


def _take_object(elements: list[tuple[Any, PMap]], collection: Any) -> list[Any]:
    names = list(elements[0][0])
    if any(list(e) != names or any(k.startswith("$") for k in e) for e, _ in elements):
        return []
    # The element names its entry by the key; the rest are fields of that entry.
    for id_name in names:
        if not all(isinstance(e[id_name], (str, int)) and text_of(e[id_name]) in n for e, n in elements):
            continue
        term: dict[str, Any] = {}
        for name in names:
            if name == id_name:
                number = isinstance(elements[0][0][name], int)
                term[name] = {"$int": {"$key": True}} if number else {"$key": True}
                continue
            options = []
            for f in collection.fields:
                hits = sum(json_equal(_field(n.get(text_of(e[id_name])), f), freeze(e[name])) for e, n in elements)
                if f and hits >= 0.7 * len(elements):
                    options.append((-hits, f[-1] != name, f))
            if not options:
                return []
            term[name] = {"$entry": list(min(options)[2])}
        return [term]
    return []


def _selections(
    take: Any, collection: Any, samples: Sequence[Sample], columns: Sequence[Column], matcher: _Matcher
) -> list[tuple[float, int, Any]]:
    found = []
    base = {"$state": list(collection.path)}
    conditions: list[tuple[int, list[Any]]] = [(1, [])]
    seen = set()
    for f in collection.fields:
        left = {"$entry": list(f)} if f else {"$entry": []}
        for column in columns:
            if column.rank <= 1 and any(known(v) and not isinstance(v, (PMap, tuple)) for v in column.values):
                conditions.append((2 + column.rank, [{"left": left, "op": "eq", "right": column.term}]))
        for value in _common_values(samples, collection, f):
            conditions.append((2, [{"left": left, "op": "eq", "right": value}]))
    singles = [c for _, c in conditions[1:]]
    superset: list[list[Any]] = []
    for rank, where in conditions:
        for order in ("stored", "sorted"):
            term = {"$select": {"from": base, "where": where, "take": take, "order": order}}
            share = _selection_share(term, samples, matcher)
            if share:
                found.append((share, rank, term))
                break
        else:
            if where and _covers(take, base, where, samples, matcher):
                superset.append(where)
    if not found:
        for a in superset[:12]:
            for b in singles:
                mark = term_key([a, b])
                if a == b or mark in seen:
                    continue
                seen.add(mark)
                term = {"$select": {"from": base, "where": [*a, *b], "take": take, "order": "stored"}}
                share = _selection_share(term, samples, matcher)
                if share:
                    found.append((share, 5, term))
    return found


def _common_values(samples: Sequence[Sample], collection: Any, f: tuple[str, ...]) -> list[Any]:
    counts: Counter[Any] = Counter()
    for s in samples[:100]:
        node = lookup_collection(s.root, collection)
        if node is not None:
            for _, entry in node.items():
                value = _field(entry, f)
                if isinstance(value, (str, bool)):
                    counts[value] += 1
    return [thaw(v) for v, n in counts.most_common(8) if n > 2] if len(counts) <= 12 else []


def _selection_share(term: Any, samples: Sequence[Sample], matcher: _Matcher) -> float:
    run = compile_term(term)
    return matcher.share(lambda i: run(samples[i].scope()))


def _covers(take: Any, base: Any, where: list[Any], samples: Sequence[Sample], matcher: _Matcher) -> bool:
    run = compile_term({"$select": {"from": base, "where": where, "take": take}})
    for i, s in enumerate(samples[:40]):
        got = run(s.scope())
        if not isinstance(got, tuple) or any(not any(json_equal(x, e) for e in got) for x in matcher.targets[i]):
            return False
    return True
