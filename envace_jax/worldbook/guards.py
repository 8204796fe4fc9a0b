"""Telling branches apart: an ordered list of guards, each exact on the traces it was learned from.

An environment mostly checks one thing after another and refuses at the first that fails. Learning goes the same way:
find a predicate that holds in all remaining samples of one branch and in no other, set them aside, go on. Predicates
that the traces cannot tell apart are kept together and must agree; thresholds keep both ends of the gap between what
was refused and what was accepted. So a guard is known only where the traces speak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.worldbook.columns import Column, is_number, known
from envace_jax.worldbook.state import ABSENT, UNKNOWN, json_equal
from envace_jax.worldbook.terms import text_of

MAX_CATEGORIES = 12
MAX_CONSENSUS = 6


@dataclass
class Predicate:
    """A condition with its truth over all samples as bit masks: where it holds, and where it is known."""

    condition: Any
    true: int
    known: int
    rank: int
    existence: bool = False


@dataclass
class Guard:
    """One line of a decision list: the branch it leads to, its condition (None: what is left), how many samples."""

    branch: int
    condition: Any
    support: int


def learn_guards(
    labels: Sequence[int], columns: Sequence[Column], entities: Sequence[Column]
) -> tuple[list[Guard], int]:
    """An ordered list of guards for branch labels, and the number of samples that no guard explains.

    The last guard has no condition where a single branch is left over; where several are, there is none.
    """
    pool = predicates(columns, entities, len(labels))
    masks: dict[int, int] = {}
    for i, label in enumerate(labels):
        masks[label] = masks.get(label, 0) | (1 << i)
    remaining = (1 << len(labels)) - 1
    guards: list[Guard] = []
    while remaining:
        present = [b for b, m in masks.items() if m & remaining]
        if len(present) == 1:
            guards.append(Guard(present[0], None, remaining.bit_count()))
            return guards, 0
        guard, covered = _next_guard(present, masks, remaining, pool, columns)
        if guard is None:
            return guards, remaining.bit_count()
        guards.append(guard)
        remaining &= ~covered
    return guards, 0


def _next_guard(
    present: list[int], masks: dict[int, int], remaining: int, pool: list[Predicate], columns: Sequence[Column]
) -> tuple[Guard | None, int]:
    majority = max(present, key=lambda b: (masks[b] & remaining).bit_count())
    options: list[tuple[int, int, Guard, int]] = []
    for branch in present:
        wanted = masks[branch] & remaining
        n = wanted.bit_count()
        exact = [p for p in pool if p.true & remaining == wanted and remaining & ~p.known == 0]
        exact += _thresholds(columns, wanted, remaining)
        if exact:
            exact.sort(key=lambda p: p.rank)
            if exact[0].existence:
                # That something is not there explains a refusal better than anything said about its fields.
                exact = [p for p in exact if p.existence]
            conditions = [p.condition for p in exact[:MAX_CONSENSUS]]
            condition = conditions[0] if len(conditions) == 1 else {"agree": conditions}
            options.append((exact[0].rank + (branch == majority) * 2, -n, Guard(branch, condition, n), wanted))
    if options:
        best = min(options, key=lambda o: (o[0], o[1]))
        return best[2], best[3]
    for branch in sorted(present, key=lambda b: (masks[b] & remaining).bit_count()):
        if branch == majority:
            continue
        wanted = masks[branch] & remaining
        conjunction = _conjunction(wanted, remaining, pool)
        if conjunction is not None:
            return Guard(branch, conjunction, wanted.bit_count()), wanted
    # One branch for several reasons: the purest large part of it, then on.
    partial: list[tuple[int, int, Guard, int]] = []
    for branch in present:
        if branch == majority:
            continue
        wanted = masks[branch] & remaining
        for p in pool:
            hit = p.true & remaining
            if hit and hit & ~wanted == 0 and remaining & ~p.known == 0:
                n = hit.bit_count()
                if n >= 3 and n * 4 >= wanted.bit_count():
                    partial.append((-n, p.rank, Guard(branch, p.condition, n), hit))
    if partial:
        best = min(partial, key=lambda o: (o[0], o[1]))
        same = [o for o in partial if o[3] == best[3]][:MAX_CONSENSUS]
        conditions = [o[2].condition for o in same]
        condition = conditions[0] if len(conditions) == 1 else {"agree": conditions}
        return Guard(best[2].branch, condition, best[2].support), best[3]
    return None, 0


def _conjunction(wanted: int, remaining: int, pool: list[Predicate]) -> Any:
    """Up to three predicates that together hold exactly on the wanted samples."""
    supersets = [p for p in pool if wanted & ~(p.true & p.known) == 0 and remaining & ~p.known == 0]
    left = remaining & ~wanted
    chosen: list[Predicate] = []
    while left and len(chosen) < 3:
        best = min(supersets, key=lambda p: ((p.true & left).bit_count(), p.rank), default=None)
        if best is None or (best.true & left) == left:
            return None
        chosen.append(best)
        left &= best.true
    return None if left else {"all": [p.condition for p in chosen]}


def _thresholds(columns: Sequence[Column], wanted: int, remaining: int) -> list[Predicate]:
    """Predicates that compare one number with a constant: both ends of the gap must agree."""
    found = []
    for column in columns:
        inside: list[Any] = []
        outside: list[Any] = []
        for i, value in enumerate(column.values):
            if remaining >> i & 1:
                if not is_number(value):
                    break
                (inside if wanted >> i & 1 else outside).append(value)
        else:
            if not inside or not outside:
                continue
            whole = all(isinstance(v, int) for v in inside + outside)
            low, high = (max(outside), min(inside)) if min(inside) > max(outside) else (max(inside), min(outside))
            if low >= high:
                continue
            above = min(inside) > max(outside)
            ends = [
                {"left": column.term, "op": "gt" if above else "lte", "right": low},
                {"left": column.term, "op": "gte" if above else "lt", "right": high},
            ]
            condition = ends[0] if whole and high == low + 1 else {"agree": ends}
            found.append(Predicate(condition, wanted, remaining, 5 + column.rank))
    return found


def predicates(columns: Sequence[Column], entities: Sequence[Column], n: int) -> list[Predicate]:
    """Every simple predicate over the columns that is neither always true nor always false."""
    pool: list[Predicate] = []
    everything = (1 << n) - 1

    def add(condition: Any, truths: Iterable[bool | None], rank: int, existence: bool = False) -> None:
        true = seen = 0
        for i, truth in enumerate(truths):
            if truth is not None:
                seen |= 1 << i
                if truth:
                    true |= 1 << i
        if true and true != everything:
            pool.append(Predicate(condition, true, seen, rank, existence))
        false = seen & ~true
        if false and false != everything:
            pool.append(Predicate({"not": condition}, false, seen, rank, existence))

    for column in (*entities, *(c for c in columns if "$arg" in c.term)):
        add({"left": column.term, "op": "exists"}, [_exists(v) for v in column.values], column.rank, True)
    for column in columns:
        counts: Counter[Any] = Counter()
        kinds: dict[Any, Any] = {}
        for value in column.values:
            if isinstance(value, (str, bool, int, float)) or value is None:
                counts[repr(value)] += 1
                kinds[repr(value)] = value
        if 0 < len(counts) <= MAX_CATEGORIES:
            for value in kinds.values():
                rank = 1 + column.rank + (2 if is_number(value) else 0)
                add(
                    {"left": column.term, "op": "eq", "right": value},
                    [None if not _decided(v) else json_equal(v, value) for v in column.values],
                    rank,
                )
    _add_pairs(columns, add)
    return pool


def _add_pairs(columns: Sequence[Column], add: Any) -> None:
    scalars = [c for c in columns if any(known(v) for v in c.values)]
    for i, a in enumerate(scalars):
        for b in scalars[i + 1 :]:
            rank = a.rank + b.rank + 3
            numeric = [is_number(x) and is_number(y) for x, y in zip(a.values, b.values)]
            if any(numeric):
                for op, test in (("gt", _gt), ("lt", _lt)):
                    add(
                        {"left": a.term, "op": op, "right": b.term},
                        [test(x, y) if ok else None for ok, x, y in zip(numeric, a.values, b.values)],
                        rank,
                    )
            equal = [
                None if not _decided(x) or not _decided(y) else json_equal(x, y) for x, y in zip(a.values, b.values)
            ]
            if any(equal) and a.rank + b.rank <= 3:
                add({"left": a.term, "op": "eq", "right": b.term}, equal, rank)
            for inner, outer in ((a, b), (b, a)):
                if any(isinstance(v, tuple) for v in outer.values):
                    add(
                        {"left": inner.term, "op": "in", "right": outer.term},
                        [
                            any(json_equal(x, e) for e in y) if isinstance(y, tuple) and _decided(x) else None
                            for x, y in zip(inner.values, outer.values)
                        ],
                        rank,
                    )


def _gt(x: Any, y: Any) -> bool:
    return bool(x > y)


def _lt(x: Any, y: Any) -> bool:
    return bool(x < y)


def _exists(value: Any) -> bool | None:
    return None if value is UNKNOWN else value is not ABSENT


def _decided(value: Any) -> bool:
    return _exists(value) is not None


def _sign(column: Column, values: Sequence[Any]) -> str:
    """The comparison with 0 that all values satisfy, where leaving it would be news: an argument that is zero or below,
    a field of a named entity that is zero. Empty where it would not."""
    if "$arg" in column.term:
        return "gt" if min(values) > 0 else "gte" if min(values) == 0 else ""
    return "gt" if min(values) > 0 and column.rank <= 1 else ""


def novelty_conditions(columns: Sequence[Column], members: Sequence[int]) -> dict[str, Any]:
    """Conditions, by column, that keep a default branch to what was seen there.

    A text or flag of few values must be one of those seen; a number that was always positive, or never negative, must
    be so again. What the traces never showed is then unknown, and not taken for the default.
    """
    out: dict[str, Any] = {}
    for column in columns:
        if "$count" in column.term:
            continue
        values = [column.values[i] for i in members]
        if values and all(is_number(v) for v in values):
            op = _sign(column, values)
            if op:
                out[column.key] = {"left": column.term, "op": op, "right": 0}
            continue
        if "$arg" in column.term or not values or not all(isinstance(v, (str, bool)) for v in values):
            continue
        overall = {text_of(v) for v in column.values if isinstance(v, (str, bool))}
        if len(overall) <= MAX_CATEGORIES and len(column.values) >= 2 * len(overall):
            seen = {text_of(v): v for v in values}
            inside = {"$const": [seen[k] for k in sorted(seen)]}
            out[column.key] = {"left": column.term, "op": "in", "right": inside}
    return out


def action_novelty(columns: Sequence[Column]) -> dict[str, Any]:
    """Conditions, by column, for every rule of an action: nothing that no trace of the action showed.

    A text or flag of few values is one of those seen or is absent; a number that never was zero or negative is not.
    A check that the environment makes first, on a value that never came up, would otherwise be overlooked.
    """
    out: dict[str, Any] = {}
    for column in columns:
        if "$count" in column.term:
            continue
        absent = {"left": column.term, "op": "not_exists"}
        values = [v for v in column.values if v is not ABSENT]
        if values and all(is_number(v) for v in values):
            op = _sign(column, values)
            if op:
                out[column.key] = {"any": [absent, {"left": column.term, "op": op, "right": 0}]}
            continue
        if "$arg" in column.term or not values or not all(isinstance(v, (str, bool)) for v in values):
            continue
        seen = {text_of(v): v for v in values}
        if len(seen) <= MAX_CATEGORIES and len(column.values) >= 2 * len(seen):
            inside = {"left": column.term, "op": "in", "right": {"$const": [seen[k] for k in sorted(seen)]}}
            out[column.key] = {"any": [absent, inside]}
    return out
