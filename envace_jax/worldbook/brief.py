"""The brief: what a model is told about one call in one episode, in bounded space, with data kept apart from words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook.notation import describe, describe_condition
from envace_jax.worldbook.records import TransitionRule
from envace_jax.worldbook.retrieve import Retrieved, is_novelty
from envace_jax.worldbook.state import frozen_arguments
from envace_jax.worldbook.store import Worldbook
from envace_jax.worldbook.terms import Scope
from envace_jax.worldbook.workspace import Session, summarize_state


@dataclass(frozen=True)
class BriefLimits:
    """Sizes in characters and counts; ``content`` chooses tiers of the worldbook (an ablation), ``state`` turns the
    tracked state off."""

    turns: int = 12
    turn_chars: int = 6_000
    history_chars: int = 60_000
    state_chars: int = 4_000
    similar_chars: int = 2_000
    demo_chars: int = 1_500
    fields: int = 40
    content: tuple[str, ...] = ("schema", "evidence", "abstraction")
    state: bool = True


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SPECIAL = re.compile(r"<(?=\||/?(?:think|tool_call|tool_response|tools|data|execution_result)\b)")


def neutral(text: str) -> str:
    """Text from a trace or a model made harmless for a prompt: no control characters, no tag of any chat protocol."""
    return _SPECIAL.sub("‹", _CONTROL.sub("\ufffd", text))


def clip(text: str, limit: int) -> str:
    """A text cut in the middle: three quarters of the room for its head, a quarter for its tail."""
    if len(text) <= limit:
        return text
    head, tail = limit * 3 // 4, limit // 4
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[-tail:]}"


def fenced(text: str, limit: int) -> str:
    """Data between marks that it cannot close."""
    return f"<data>\n{neutral(clip(text, limit))}\n</data>"


def rule_lines(rule: TransitionRule, applies: bool | None = None) -> str:
    """A rule for a reader: when, then, what; the conditions that only keep it to values seen are left out."""
    conditions = [describe_condition(c) for c in rule.conditions if not is_novelty(c)]
    answer = describe(rule.render) if rule.render is not None else rule.observation_template
    effects = [
        f"{e.op} {e.path if isinstance(e.path, str) else describe({'$state': list(e.path)})} {describe(e.value)}"
        for e in rule.effects
    ]
    now = {True: "applies now", False: "does not apply now", None: "may apply"}[applies]
    text = f"[{rule.id}] {rule.outcome}, confidence {rule.confidence:.2f}, {now}"
    text += "\n  when " + (" and ".join(conditions) or "always")
    if effects:
        text += "\n  then " + "; ".join(effects)
    return neutral(text + f"\n  answer {answer or 'free'}")


def make_brief(
    book: Worldbook,
    session: Session,
    name: str,
    arguments: dict[str, Any],
    found: Retrieved,
    limits: BriefLimits | None = None,
    official: str = "",
) -> str:
    """The brief of one call as text.

    ``official`` is a caller's own prompt; where it is given it stands verbatim in place of the recent turns.
    """
    limits = limits or BriefLimits()
    parts = [f"# Call\n{fenced(canonical_json({'name': name, 'arguments': arguments}), 6_000)}"]
    if session.instruction:
        parts.append(f"# What the user wants\n{fenced(session.instruction, 2_000)}")
    if limits.state:
        state = summarize_state(session.state, limits.state_chars)
        parts.append(
            "# State as tracked\nA path that is not listed has not been observed yet: that does not make it absent.\n"
            + fenced(state, limits.state_chars)
        )
    if official:
        parts.append(f"# The caller's own prompt\n{fenced(official, limits.history_chars)}")
    else:
        turns = recent_turns(session, limits)
        if turns:
            parts.append("# Recent turns, oldest first\n" + turns)
    parts += worldbook_sections(book, session, name, arguments, found, limits)
    return "\n\n".join(parts)


def worldbook_sections(
    book: Worldbook,
    session: Session,
    name: str,
    arguments: dict[str, Any],
    found: Retrieved,
    limits: BriefLimits,
) -> list[str]:
    """What the worldbook itself adds: schema, rules, notes, contracts, examples, similar turns, and the gate's word."""
    out = []
    if "schema" in limits.content:
        if found.action is not None:
            spec = {n: f"{a.type}{'' if a.required else ', optional'}" for n, a in found.action.arguments.items()}
            out.append(
                f"# The action\n{neutral(found.action.name)} {canonical_json(spec)} {neutral(found.action.description)}"
            )
        fields = [f"{f.path}: {f.type}" for f in found.fields[: limits.fields]]
        if fields and limits.state:
            out.append("# Declared state\n" + neutral("\n".join(fields)))
    if "abstraction" in limits.content:
        if found.rules:
            scope = Scope(session.state.root, frozen_arguments(arguments))
            table = book.compiled(0.0).get(book.canonical_names.get(name, name))
            lines = []
            for rule in found.rules:
                applies = table.applicable(rule.id, scope) if table is not None and rule.templated else None
                lines.append(rule_lines(rule, applies))
            out.append("# Rules\n" + "\n".join(lines))
        if found.invariants:
            out.append("# Constraints\n" + neutral("\n".join(i.description for i in found.invariants[:12])))
        if found.notes:
            out.append("# Notes\n" + neutral("\n".join(f"- {n.statement[:400]} ({n.status})" for n in found.notes)))
        for contract, examples in found.contracts:
            text = f"# Answers of this action\n{contract.content_type}"
            if contract.required_fields:
                text += f"; fields always there: {', '.join(contract.required_fields)}"
            if contract.instructions:
                text += f"\n{neutral(contract.instructions)}"
            out.append(text + "".join("\n" + fenced(e, 400) for e in examples))
    if "evidence" in limits.content:
        for demo, observation in found.demonstrations:
            text = f"{canonical_json(demo.action)}\n→ {observation}"
            out.append(f"# Example ({demo.outcome})\n" + fenced(text, limits.demo_chars))
        for g in found.similar:
            text = f"{g.item.action} {canonical_json(g.item.arguments)}\n→ {g.text}"
            out.append(f"# Recorded elsewhere ({g.verdict.replace('_', ' ')})\n" + fenced(text, limits.similar_chars))
        if found.similar and found.abstain:
            out.append(
                "# Notice\nNothing recorded speaks of the same things as this call: the recorded turns show the form "
                "of an answer, not its content."
            )
    return out


def recent_turns(session: Session, limits: BriefLimits) -> str:
    """The last turns of the episode, newest ones whole as long as there is room."""
    lines: list[str] = []
    used = 0
    for item in reversed(session.memory.recent(limits.turns)):
        text = f"turn {item.turn} ({item.kind}): {item.action} {canonical_json(item.arguments)}\n"
        text += fenced(item.observation, limits.turn_chars)
        if used + len(text) > limits.history_chars:
            lines.append(f"[{item.turn + 1} earlier turns: read_turn shows them]")
            break
        lines.append(text)
        used += len(text)
    return "\n".join(reversed(lines))


def wait_hint(observation: str) -> str:
    """What a terminal's last capture says of what it is doing: ``idle``, ``typed``, ``running`` or an empty text."""
    lines = observation.rstrip("\n").split("\n")
    last = lines[-1] if lines else ""
    if not last.strip():
        return "running" if observation.strip() else ""
    if re.search(r"(?:[$#>]|>>>)\s?$", last):
        return "idle"
    if re.search(r"[$#]\s+\S", last):
        return "typed"
    return "running"
