"""How true a rehearsed observation is: one prediction against the environment's own answer, and summaries.

The metrics (all in 0..1 but MCC): parseable, exact, json_equal, key_f1, leaf_f1 and, beside it under its own name,
tolerant_f1; rejection precision, recall, F1 and Matthews correlation (accuracy is not reported: accepting always
scores .91 on real airline calls); error class among true rejections; predicted against real state change. Each
is also given without calls that could be copied from grounding, by tool, and by distance into the episode.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envace_jax.rewards.verifiers import json_equal

Rejection = Callable[[Any], bool]


@dataclass(frozen=True)
class Pair:
    """One call with what REHEARSE answered and what the environment answered (both texts).

    `copyable`: the same name and arguments stood in the grounding, so the answer could be reused. `distance`: calls
    made before it in the episode. `group`: the trajectory, for clustered intervals. `writes`: whether a call like it
    may change the state, which is known before it is answered; with an answer that accepts it, that is the predicted
    change. `changed`: whether the real state changed; None where that is not known.
    """

    tool: str
    predicted: str | None
    actual: str
    writes: bool = False
    copyable: bool = False
    distance: int = 0
    group: str = ""
    changed: bool | None = None


Keep = Callable[[str, Sequence[Pair]], None]
"""Is given the pairs behind some figures, by the figures' name."""


def nothing(name: str, pairs: Sequence[Pair]) -> None:
    """The `Keep` that keeps nothing."""


@dataclass(frozen=True)
class Fidelity:
    """The scores of one pair. `rejects` and `rejected` are the predicted and the real decision."""

    parseable: bool
    exact: bool
    json_equal: bool
    key_f1: float
    leaf_f1: float
    tolerant_f1: float
    rejects: bool | None
    rejected: bool
    predicted_class: str | None
    actual_class: str | None


def is_error(value: Any) -> bool:
    """The usual sign of a rejection: an object with a truthy `error` or `error_tool_call`, or an error text."""
    if isinstance(value, Mapping):
        return bool(value.get("error") or value.get("error_tool_call"))
    return isinstance(value, str) and value.lower().startswith(("error", "exception"))


ERROR_CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("unknown_tool", ("tool_not_available", "unknown tool", "unknown function", "no such tool")),
    ("format", ("invalid_tool_call_format", "malformed", "json")),
    (
        "bad_parameters",
        ("invalid_parameters", "schema_validation_failed", "argument", "parameter", "invalid", "required"),
    ),
    ("not_found", ("not found", "not_found", "no such", "does not exist", "unknown")),
    ("not_available", ("not available", "not_available", "unavailable", "sold out")),
    ("payment", ("payment", "balance", "fund", "credit", "amount", "exceeds")),
    ("state", ("already", "cannot", "can not", "not allowed", "status", "shipped", "delivered", "open", "closed")),
)
"""Beginnings of words by which an error text is classed, first match first; what matches none is `other`."""


def error_class(value: Any) -> str:
    """The class of a rejection: EnvACE's three checks, then what environments say."""
    text = json.dumps(value, ensure_ascii=False).lower() if not isinstance(value, str) else value.lower()
    for name, words in ERROR_CLASSES:
        if any(re.search(rf"(?<![a-z]){word}", text) for word in words):
            return name
    return "other"


def leaves(value: Any, path: str = "", positions: bool = True) -> Iterator[tuple[str, Any]]:
    """(path, scalar) of every leaf; empty containers are leaves. List items carry their position or `[]`."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{_pointer(str(key))}", positions)
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}/{i if positions else '[]'}", positions)
    else:
        yield path, value


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def f1(predicted: Iterable[Any], actual: Iterable[Any]) -> float:
    """Harmonic mean of precision and recall of two multisets; 1 where both are empty."""
    p, a = Counter(predicted), Counter(actual)
    total = p.total() + a.total()
    return 2 * (p & a).total() / total if total else 1.0


def _is_number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool)


def _leaf(path: str, value: Any) -> tuple[str, str, str]:
    # the type stands beside the value: True, 1 and "1" are three leaves, 1 and 1.0 one
    kind = "number" if _is_number(value) else type(value).__name__
    text = repr(float(value)) if _is_number(value) and abs(value) < 2**53 else json.dumps(value, ensure_ascii=False)
    return path, kind, text


def _tolerant_leaf(path: str, value: Any) -> tuple[str, str]:
    if _is_number(value):
        return path, f"{float(value):.3g}"
    return path, " ".join(str(value).lower().split())


def parse(text: str | None) -> tuple[bool, Any]:
    """(whether the text is JSON, its value); a text that is no JSON is its own value."""
    if text is None:
        return False, None
    try:
        return True, json.loads(text)
    except (ValueError, RecursionError):
        return False, text


def compare(pair: Pair, is_rejection: Rejection = is_error) -> Fidelity:
    """Scores one pair. An answer that does not parse scores 0 and decides nothing (`rejects` is None)."""
    _, actual = parse(pair.actual)
    ok, predicted = parse(pair.predicted)
    if not ok and isinstance(actual, str) and pair.predicted is not None:
        ok = True  # an environment that answers in plain text is answered in plain text
    rejected = is_rejection(actual)
    actual_class = error_class(actual) if rejected else None
    if not ok:
        return Fidelity(False, False, False, 0.0, 0.0, 0.0, None, rejected, None, actual_class)
    ours, theirs = list(leaves(predicted)), list(leaves(actual))
    loose_ours, loose_theirs = list(leaves(predicted, "", False)), list(leaves(actual, "", False))
    rejects = is_rejection(predicted)
    return Fidelity(
        parseable=True,
        exact=pair.predicted == pair.actual,
        json_equal=json_equal(predicted, actual),
        key_f1=f1((p for p, _ in ours), (p for p, _ in theirs)),
        leaf_f1=f1((_leaf(*x) for x in ours), (_leaf(*x) for x in theirs)),
        tolerant_f1=f1((_tolerant_leaf(*x) for x in loose_ours), (_tolerant_leaf(*x) for x in loose_theirs)),
        rejects=rejects,
        rejected=rejected,
        predicted_class=error_class(predicted) if rejects else None,
        actual_class=actual_class,
    )


def rejection_scores(decisions: Sequence[tuple[bool | None, bool]]) -> dict[str, float]:
    """Precision, recall, F1 and Matthews correlation of rejecting; (predicted, real), None counts as accepting.

    A figure whose denominator is zero is NaN (nothing was rejected, or everything): it is not a zero.
    """
    tp = sum(bool(p) and a for p, a in decisions)
    fp = sum(bool(p) and not a for p, a in decisions)
    fn = sum(not p and a for p, a in decisions)
    tn = len(decisions) - tp - fp - fn
    precision = tp / (tp + fp) if tp + fp else math.nan
    recall = tp / (tp + fn) if tp + fn else math.nan
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return {
        "reject_precision": precision,
        "reject_recall": recall,
        "reject_f1": 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else math.nan,
        "reject_mcc": (tp * tn - fp * fn) / root if root else math.nan,
    }


def rejection_intervals(
    decisions: Sequence[tuple[bool | None, bool]], groups: Sequence[str], *, resamples: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """95% intervals of F1 and Matthews correlation of rejecting, by resampling whole trajectories.

    Resamples that decide nothing (no rejection at all) are left out; NaN where none decides.
    """
    ids = {group: k for k, group in enumerate(dict.fromkeys(groups))}
    counts = np.zeros((len(ids), 4))  # tp, fp, fn, tn
    for (predicted, real), group in zip(decisions, groups):
        counts[ids[group], (0 if real else 1) if predicted else (2 if real else 3)] += 1
    rng = np.random.default_rng(seed)
    found: dict[str, list[np.ndarray]] = {"reject_f1": [], "reject_mcc": []}
    for _ in range(0, resamples, 500):
        drawn = counts[rng.integers(len(ids), size=(500, len(ids)))].sum(axis=1)
        tp, fp, fn, tn = drawn.T
        with np.errstate(invalid="ignore", divide="ignore"):
            found["reject_f1"].append(2 * tp / (2 * tp + fp + fn))
            found["reject_mcc"].append((tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    out: dict[str, float] = {}
    for name, parts in found.items():
        values = np.concatenate(parts)
        values = values[np.isfinite(values)]
        low, high = np.quantile(values, [0.025, 0.975]) if len(values) else (math.nan, math.nan)
        out |= {f"{name}_low": float(low), f"{name}_high": float(high)}
    return out


MEANS = ("parseable", "exact", "json_equal", "key_f1", "leaf_f1", "tolerant_f1")


def summarise(pairs: Sequence[Pair], is_rejection: Rejection = is_error) -> dict[str, float]:
    """All metrics over some pairs; NaN where nothing decides a figure."""
    scores = [compare(p, is_rejection) for p in pairs]
    n = len(scores)
    out: dict[str, float] = {"n": n}
    for name in MEANS:
        out[name] = sum(float(getattr(s, name)) for s in scores) / n if n else math.nan
    out |= rejection_scores([(s.rejects, s.rejected) for s in scores])
    both = [s for s in scores if s.rejected and s.rejects]
    out["error_class_accuracy"] = (
        sum(s.predicted_class == s.actual_class for s in both) / len(both) if both else math.nan
    )
    changes = [(p.changed, p.writes and s.rejects is False) for p, s in zip(pairs, scores) if p.changed is not None]
    out["state_change_accuracy"] = sum(a == b for a, b in changes) / len(changes) if changes else math.nan
    right = sum(a and b for a, b in changes)
    for name, said in (("precision", sum(b for _, b in changes)), ("recall", sum(bool(a) for a, _ in changes))):
        out[f"state_change_{name}"] = right / said if said else math.nan
    return out


def report(pairs: Sequence[Pair], is_rejection: Rejection = is_error) -> dict[str, dict[str, float]]:
    """Summaries of all pairs, of those that cannot be copied, reads and writes apart, by tool and by distance."""
    parts: dict[str, list[Pair]] = {"all": list(pairs)}
    parts["not_copyable"] = [p for p in pairs if not p.copyable]
    parts["copyable"] = [p for p in pairs if p.copyable]
    parts["reads"] = [p for p in pairs if not p.writes]
    parts["writes"] = [p for p in pairs if p.writes]
    for tool in sorted({p.tool for p in pairs}):
        parts[f"tool:{tool}"] = [p for p in pairs if p.tool == tool]
    for low, high in ((0, 0), (1, 2), (3, 5), (6, 10**9)):
        name = f"distance:{low}" if low == high else f"distance:{low}-{high if high < 10**9 else ''}"
        parts[name] = [p for p in pairs if low <= p.distance <= high]
    return {name: summarise(part, is_rejection) for name, part in parts.items() if part}
