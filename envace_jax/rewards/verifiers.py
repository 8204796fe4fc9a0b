"""Rule verifiers: a machine-readable checklist rule, checked against the transcript of an episode.

In training a rule sees the transcript only: what was called, what the observations said, what was replied.
It never sees the state of a real environment. A rule is a JSON object with a `kind`:

- `call` {name, arguments, accepted, min, max}: the number of matching calls of the turn lies in [min, max],
by default
  at least one; `accepted` true or false counts only calls whose observation accepted or refused them.
- `order` {calls: [{name, arguments}]}: matching calls of the turn occur in this order; others may stand
between.
- `state` {writes: [tool], effects: [{name, arguments}]}: the accepted calls of `writes` in all turns so far
are exactly
  `effects`, as a multiset. This is the transcript form of "the state reached is the wanted one".
- `reply` {contains, excludes}: the turn's reply contains every entry of the first and none of the second.
- `refusal` {call: {name, arguments}, contains}: the call was made in the turn, no observation accepted it,
and the
  reply contains every entry.
- `no_call` {names}: no tool of `names` was called in the turn.

`arguments` matches as a subset: the call may carry more. Effects of `state` match their accepted call in the
same way, one to one. An entry of `contains` or `excludes` is a text, or a list of alternatives of which one
is enough; texts are compared without case, as whole words: "12" is not found in "12.50", in "312" or in "-12".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envace_jax.config import UserError
from envace_jax.text.transcript import Observation, ToolCall, Transcript, Turn

_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {  # kind -> (required, optional)
    "call": (frozenset({"name"}), frozenset({"arguments", "accepted", "min", "max"})),
    "order": (frozenset({"calls"}), frozenset()),
    "state": (frozenset({"writes", "effects"}), frozenset()),
    "reply": (frozenset(), frozenset({"contains", "excludes"})),
    "refusal": (frozenset({"call"}), frozenset({"contains"})),
    "no_call": (frozenset({"names"}), frozenset()),
}

_SIGN = r"(?<!^-)(?<![\s(:=]-)"  # a minus that belongs to the number; "A-12" and "10-12" hold 12

_NO_ERROR = (None, False, "")  # `"error": null` in an answer says that there was none


def check_rule(rule: Mapping[str, Any], *, where: str = "rule") -> None:
    """Raise `UserError`, naming `where`, unless `rule` is well formed."""
    kind = rule.get("kind") if isinstance(rule, Mapping) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise UserError(f"{where}: kind must be one of {', '.join(sorted(_FIELDS))}, got {kind!r}")
    required, optional = _FIELDS[kind]
    fields = set(rule) - {"kind"}
    if required - fields or fields - required - optional:
        may = sorted(optional)
        raise UserError(f"{where}: {kind!r} needs {sorted(required)} and may have {may}, got {sorted(fields)}")
    calls = {"call": lambda: [rule], "order": lambda: rule["calls"], "state": lambda: rule["effects"],
             "refusal": lambda: [rule["call"]]}.get(kind, list)()  # fmt: skip
    if not isinstance(calls, Sequence) or not all(_is_call(call) for call in calls):
        raise UserError(f"{where}: a call in a rule needs a text 'name' and, if given, an object 'arguments'")
    for field in ("contains", "excludes", "names", "writes"):
        entries = rule.get(field, ())
        if not isinstance(entries, (list, tuple)) or not all(_is_entry(entry, field) for entry in entries):
            raise UserError(f"{where}: {field!r} must be a list of texts that are not empty, got {entries!r}")
    for field in ("calls", "names", "writes"):
        if field in rule and not rule[field]:
            raise UserError(f"{where}: {field!r} is empty, so that the rule says nothing")
    if kind == "reply" and not rule.get("contains") and not rule.get("excludes"):
        raise UserError(f"{where}: 'reply' needs an entry in 'contains' or 'excludes'")
    if kind == "call":
        _check_counts(rule, where)


def _check_counts(rule: Mapping[str, Any], where: str) -> None:
    low, high = rule.get("min", 1), rule.get("max")
    for field, number in (("min", low), ("max", high)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise UserError(f"{where}: {field!r} must be a whole number of at least 0, got {number!r}")
    if low is None or (high is not None and high < low):
        raise UserError(f"{where}: no number of calls is at least 'min' {low} and at most 'max' {high}")
    if not isinstance(rule.get("accepted"), bool | None):
        raise UserError(f"{where}: 'accepted' must be true or false, got {rule['accepted']!r}")


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("name"), str)
        and isinstance(call.get("arguments", {}), Mapping)
    )


def _is_entry(entry: Any, field: str) -> bool:
    if isinstance(entry, str):
        return bool(entry)
    return (
        field in ("contains", "excludes")
        and isinstance(entry, (list, tuple))
        and bool(entry)
        and all(isinstance(text, str) and text for text in entry)
    )


def verify(rule: Mapping[str, Any], transcript: Transcript, turn: int) -> bool:
    """Whether `rule` holds at the end of turn `turn` (from 0) of `transcript`; later turns are not looked at.

    Raises:
        UserError: when the rule is malformed.
    """
    check_rule(rule)
    here = transcript[turn]
    kind = rule["kind"]
    if kind == "call":
        accepted = rule.get("accepted")
        count = sum(
            _matches(rule, call) and (accepted is None or is_accepted(observation) is accepted)
            for call, observation in turn_calls(here)
        )
        return rule.get("min", 1) <= count and (rule.get("max") is None or count <= rule["max"])
    if kind == "order":
        made = iter([call for call, _ in turn_calls(here)])
        return all(any(_matches(wanted, call) for call in made) for wanted in rule["calls"])
    if kind == "state":
        writes = set(rule["writes"])
        done = [
            call
            for past in transcript[: turn + 1]
            for call, observation in turn_calls(past)
            if call.name in writes and is_accepted(observation)
        ]
        return _pair_up(rule["effects"], done)
    if kind == "reply":
        reply = turn_reply(here)
        return states_all(reply, rule.get("contains", ())) and not any(
            states(reply, entry) for entry in rule.get("excludes", ())
        )
    if kind == "refusal":
        wanted = rule["call"]
        seen = [is_accepted(observation) for call, observation in turn_calls(here) if _matches(wanted, call)]
        return bool(seen) and not any(seen) and states_all(turn_reply(here), rule.get("contains", ()))
    names = set(rule["names"])  # no_call
    return not any(call.name in names for call, _ in turn_calls(here))


def turn_calls(turn: Turn) -> Iterator[tuple[ToolCall, Observation | None]]:
    """The calls of a turn in order, each with its observation (`None` where the turn ended before it
    came)."""
    for step in turn.steps:
        for k, call in enumerate(step.output.calls):
            yield call, step.observations[k] if k < len(step.observations) else None


def turn_reply(turn: Turn) -> str:
    """The visible reply that ended the turn; empty where its last step still called tools or was cut off."""
    if not turn.steps:
        return ""
    last = turn.steps[-1].output
    return "" if last.calls or last.error_code or last.truncated else last.reply


def is_accepted(observation: Observation | None) -> bool:
    """Whether an observation says that the call took effect: it came, and is no error object."""
    if observation is None or observation.error_code is not None:
        return False
    try:
        value = json.loads(observation.text)
    except (ValueError, RecursionError):
        return True  # plain text from an environment that does not speak JSON
    if not isinstance(value, dict):
        return True
    return value.get("error") in _NO_ERROR and value.get("error_tool_call") in _NO_ERROR


def states(text: str, entry: str | Sequence[str]) -> bool:
    """Whether `text` contains `entry` (one of them, for a list) as whole words, without case."""
    options = [entry] if isinstance(entry, str) else entry
    return any(
        re.search(rf"(?<!\w)(?<!\d[.,]){_SIGN}{re.escape(option)}(?!\w)(?![.,]\d)", text, re.IGNORECASE) is not None
        for option in options
    )


def states_all(text: str, entries: Sequence[str | Sequence[str]]) -> bool:
    """Whether `text` contains every entry (see `states`)."""
    return all(states(text, entry) for entry in entries)


def json_equal(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but true does not equal 1; key order does not matter."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(json_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(json_equal, left, right))
    return left == right


def _matches(wanted: Mapping[str, Any], call: ToolCall) -> bool:
    arguments = wanted.get("arguments", {})
    return call.name == wanted["name"] and all(
        key in call.arguments and json_equal(value, call.arguments[key]) for key, value in arguments.items()
    )


def _pair_up(wanted: Sequence[Mapping[str, Any]], calls: Sequence[ToolCall]) -> bool:
    """Whether wanted and made calls match one to one; a loose effect must not use up a strict one's call."""
    if len(wanted) != len(calls):
        return False
    taken: dict[int, int] = {}  # call -> wanted

    def place(w: int, seen: set[int]) -> bool:
        for c, call in enumerate(calls):
            if c not in seen and _matches(wanted[w], call):
                seen.add(c)
                if c not in taken or place(taken[c], seen):
                    taken[c] = w
                    return True
        return False

    return all(place(w, set()) for w in range(len(wanted)))
