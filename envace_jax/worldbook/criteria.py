"""What a rule must meet to run, and what the traces say of invariants that a model states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from envace_jax.datasets.traces import TraceEpisode
from envace_jax.worldbook import records as R
from envace_jax.worldbook.harness import Harness, HarnessConfig
from envace_jax.worldbook.ingest import align, usable_prefix
from envace_jax.worldbook.notation import format_path, operand, template_term
from envace_jax.worldbook.rulebook import compile_invariant, normal_effect
from envace_jax.worldbook.state import PMap, State
from envace_jax.worldbook.store import Worldbook
from envace_jax.worldbook.terms import Scope
from envace_jax.worldbook.workspace import open_session


def executable(rule: R.TransitionRule, book: Worldbook, environments: frozenset[str] = frozenset()) -> str:
    """Why a rule may not run, or an empty text.

    Args:
        environments: those that the traces come from; a rule whose scope names one runs where they all come from it.
    """
    if rule.status != "supported":
        return f"status {rule.status}"
    if not rule.templated:
        return "no observation template"
    if rule.confidence < R.EXECUTABLE_CONFIDENCE:
        return f"confidence {rule.confidence:.2f} is below {R.EXECUTABLE_CONFIDENCE}"
    if not any(p.event_ids for p in rule.provenance):
        return "no citation of an observed event"
    scope = rule.scope.get("environment")
    if scope is not None and environments != {scope}:
        return f"scope {scope!r}: the traces come from {', '.join(sorted(environments)) or 'no named environment'}"
    for effect in rule.effects:
        problem = effect_problem(normal_effect(effect), book)
        if problem:
            return problem
    return next(_undeclared(rule, book), "")


def effect_problem(effect: R.StateMutation, book: Worldbook) -> str:
    """Why an effect of a rule is not allowed, or an empty text: what it writes is declared, mutable and of its type."""
    path = ["*" if isinstance(s, dict) else s for s in effect.path]
    value = effect.value
    if effect.op == "merge" and isinstance(value, dict) and not _is_term(value):
        parts = ((key, item) for key, item in value.items())
        problems = (book.check_effect("set", [*path, k], None if isinstance(v, (dict, list)) else v) for k, v in parts)
        return next((p for p in problems if p), "")
    literal = effect.op == "set" and not isinstance(value, (dict, list))
    return book.check_effect(effect.op, path, value if literal else None)


def _is_term(value: dict[str, Any]) -> bool:
    return any(isinstance(k, str) and k.startswith("$") for k in value)


def _undeclared(rule: R.TransitionRule, book: Worldbook) -> Iterator[str]:
    """Arguments and places of state that a rule refers to without their being declared."""
    action = next((a for a in book.actions if a.name == rule.action_type), None)
    declared = action.arguments if action is not None else {}
    parts: list[Any] = [rule.render, *rule.conditions]
    if rule.observation_template:
        parts.append(template_term(rule.observation_template))
    for effect in map(normal_effect, rule.effects):
        parts += [effect.value, *(s for s in effect.path if isinstance(s, dict))]
    for mark, value in _references(parts):
        if mark == "$arg" and value and value[0] not in declared:
            yield f"argument {value[0]!r} of {rule.action_type} is not declared"
        elif mark == "$state" and not _reachable(["*" if isinstance(s, dict) else s for s in value], book):
            yield f"path {format_path([s if isinstance(s, (str, int)) else '*' for s in value])} is not declared"


def _references(value: Any) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(value, dict):
        if "left" in value and isinstance(value["left"], str):
            value = {**value, "left": operand(value["left"])}
        for key, item in value.items():
            if key in ("$arg", "$state"):
                path = list(item) if isinstance(item, (list, tuple)) else [item]
                yield key, path
                yield from _references(path)
            elif key != "$const":
                yield from _references(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _references(item)


def _reachable(path: Sequence[Any], book: Worldbook) -> bool:
    """Whether a path is declared, lies above what is, or inside something of which no part is declared by itself."""
    for found, field in book.field_table.items():
        if not all("*" in (a, b) or a == b for a, b in zip(found, path)):
            continue
        parts = any(len(other) > len(found) and other[: len(found)] == found for other in book.field_table)
        if len(path) <= len(found) or (field.type in ("object", "array", "any") and not parts):
            return True
    return False


def tried_invariants(
    invariants: Iterable[R.Invariant], book: Worldbook, episodes: Iterable[TraceEpisode]
) -> tuple[tuple[R.Invariant, ...], list[dict[str, Any]]]:
    """Invariants as far as the traces bear them out, and those that they refute, each with the transition that does.

    The tracked states of the episodes are looked at. One that was never known to hold warns, and rejects nothing.
    """
    tests = {i.id: (i, compile_invariant(i)) for i in invariants}
    held: set[str] = set()
    refuted: dict[str, str] = {}

    def look(state: State, where: str) -> None:
        scope = Scope(state.root, PMap(closed=True))
        for name, (_, test) in tests.items():
            answer = test(scope)
            if answer is False:
                refuted.setdefault(name, where)
            elif answer:
                held.add(name)

    harness = Harness(book, None, HarnessConfig(fast_path=0.0))
    for episode in episodes if tests else ():
        session = open_session(episode.initial_state, group=episode.group)
        look(session.state, f"the start of {episode.episode_id}")
        for t in usable_prefix(align(episode)[0]):
            session = harness.observe(session, t.name, t.arguments, t.text)
            look(session.state, t.id)
    left = [i for i, _ in tests.values() if i.id not in refuted]
    kept = tuple(i if i.id in held else replace(i, severity="warning") for i in left)
    return kept, [{"kind": "invariant", "id": n, "reason": f"does not hold after {w}"} for n, w in refuted.items()]
