"""Grounded rehearsal: the gated brief in REHEARSE's prompt, the task's own group left out.

`WorldbookGrounding` is what ``rollout.grounding="worldbook"`` uses. Its notes depend on the task's group, the call and
the turns before it, and are cached by worldbook and query. What contradicts a worldbook is counted in `consistency`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.datasets.traces import task_group
from envace_jax.text.transcript import ToolCall, Transcript, canonical_json
from envace_jax.worldbook.brief import BriefLimits, clip, fenced, worldbook_sections
from envace_jax.worldbook.consistency import answered
from envace_jax.worldbook.harness import Harness, HarnessConfig
from envace_jax.worldbook.retrieve import RetrievalCache, Retriever
from envace_jax.worldbook.store import Worldbook, load_worldbook
from envace_jax.worldbook.workspace import Session, open_session, summarize_state

if TYPE_CHECKING:
    from envace_jax.rehearsal.grounding import Brief


@lru_cache(maxsize=4)
def load_grounding(path: str) -> WorldbookGrounding:
    """The grounding of the worldbook in a folder, one object for the whole process (its caches are shared)."""
    return WorldbookGrounding(load_worldbook(path))


class WorldbookGrounding:
    """Briefs out of a worldbook for REHEARSE (`envace_jax.rehearsal.grounding.Grounding`).

    Args:
        hint: say what a rule would answer where one fires. Off by default: then REHEARSE must work it out.
        state: ``tracked``: REHEARSE sees what its own earlier answers imply, and nothing else of the state; ``full``:
            the task's explicit initial state as well; ``none``.
        chars: room for the whole brief.
        content: tiers of the worldbook that the brief is made from.
    """

    def __init__(
        self,
        book: Worldbook,
        *,
        identity: str = "names",
        hint: bool = False,
        state: str = "tracked",
        chars: int = 6_000,
        cache: int = 10_000,
        content: tuple[str, ...] = BriefLimits.content,
    ):
        if state not in ("tracked", "full", "none"):
            raise UserError(f"worldbook grounding: state={state!r}: expected tracked, full or none")
        self.book = book
        self.retriever = Retriever(book, identity)
        # Harnesses by the rules that a group may not see: for most groups there are none.
        self._harnesses = {frozenset[str](): Harness(book, None, HarnessConfig())}
        self._hidden: dict[str, frozenset[str]] = {}
        self.hint, self.state, self.chars = hint, state, chars
        self.cache = RetrievalCache(cache)
        self._sessions = RetrievalCache(cache)
        self.limits = BriefLimits(state=False, similar_chars=1_200, demo_chars=800, content=content)

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        """The brief for one call: notes only, since recorded answers come gated and sanitised inside them."""
        from envace_jax.rehearsal.grounding import Brief

        turns = episode_turns(state)
        key = (self.book.digest, task.uuid, call.name, canonical_json(call.arguments), turns)
        return self.cache.get(key, lambda: Brief((), self._notes(task, turns, call)))

    def session(self, task: Task, turns: Sequence[tuple[str, str, str]]) -> Session:
        """The session of a task after some turns: what the answers so far imply is tracked, whoever wrote them."""
        if not turns:
            initial = task.meta.get("initial_state") if self.state == "full" else None
            instruction = task.user_turns[0] if task.user_turns else ""
            return open_session(initial, group=task_group(task), instruction=instruction)
        harness = self.harness_for(task_group(task))
        done = next((n for n in range(len(turns), 0, -1) if (task.uuid, tuple(turns[:n])) in self._sessions), 0)
        session = self._sessions.peek((task.uuid, tuple(turns[:done]))) if done else self.session(task, ())
        for n in range(done, len(turns)):
            name, arguments, text = turns[n]
            session = harness.observe(session, name, json.loads(arguments), text)
            self._sessions.put((task.uuid, tuple(turns[: n + 1])), session)
        return session

    def harness_for(self, group: str) -> Harness:
        """The harness of a group: rules that rest on it or state what it alone showed do nothing there."""
        if group not in self._hidden:
            rules = self.book.rules
            self._hidden[group] = frozenset(r.id for r in rules if not self.retriever.rule_visible(r, group))
        hidden = self._hidden[group]
        if hidden not in self._harnesses:
            self._harnesses[hidden] = Harness(without_rules(self.book, hidden), None, HarnessConfig())
        return self._harnesses[hidden]

    def _notes(self, task: Task, turns: Sequence[tuple[str, str, str]], call: ToolCall) -> tuple[str, ...]:
        session = self.session(task, turns)
        group = task_group(task)
        found = self.retriever.retrieve(session, call.name, dict(call.arguments), exclude=group, similar=3)
        notes: list[str] = []
        if self.state != "none" and turns:
            known = summarize_state(session.state, 1_500)
            notes.append("# State as tracked (what is not listed is unknown, not absent)\n" + fenced(known, 1_600))
        notes += worldbook_sections(self.book, session, call.name, dict(call.arguments), found, self.limits)
        if self.hint:
            _, result = self.harness_for(group).step(session, call.name, call.arguments)
            if result.source == "rule":
                notes.insert(0, f"# A rule answers\n{result.text}")
        out: list[str] = []
        room = self.chars
        for note in notes:
            if room <= 0:
                break
            out.append(clip(note, room))
            room -= len(note)
        return tuple(out)


def without_rules(book: Worldbook, hidden: frozenset[str]) -> Worldbook:
    """The worldbook with some rules put aside: what they explained is explained by none."""
    aside = [r for r in book.rules if r.id in hidden]
    unexplained = {**book.artifacts.get("unexplained", {})}
    for rule in aside:
        unexplained[rule.action_type] = unexplained.get(rule.action_type, 0) + 1
    return replace(
        book,
        rules=tuple(r for r in book.rules if r.id not in hidden),
        candidates=(*book.candidates, *aside),
        artifacts={**book.artifacts, "unexplained": unexplained},
    )


def episode_turns(state: Any) -> tuple[tuple[str, str, str], ...]:
    """(name, arguments as JSON, observation) of every call of an episode state or a transcript that its world answered.

    An error of the host (a refused form, an answer that cannot be read) is not the world's word and changes nothing.
    """
    transcript: Transcript = getattr(state, "history", state) or ()
    pairs = answered(transcript)
    output = getattr(state, "output", None)
    if output is not None:
        # Parallel calls: those of the latest output that have been answered already.
        pairs += zip(output.calls, state.observations)
    return tuple((c.name, canonical_json(c.arguments), o.text) for c, o in pairs if o.source != "error")
