"""From episodes to aligned transitions: each action with its observation, or a flag that says why not.

Results answer calls by call id, else in order where order leaves no choice. Duplicates, overlaps, uncorrelated
batches and results without a call are flagged and withheld; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from envace_jax.datasets.traces import TraceEpisode, TraceEvent, too_deep
from envace_jax.worldbook.records import SourceRef, TransitionSlice

HISTORY_EVENTS = 20


@dataclass(frozen=True)
class Transition:
    """An aligned transition with its contents: ``value`` is the observation as JSON where it is JSON, else its text."""

    slice: TransitionSlice
    name: str
    arguments: dict[str, Any]
    text: str
    value: Any

    @property
    def id(self) -> str:
        return self.slice.id

    @property
    def episode_id(self) -> str:
        return self.slice.episode_id

    def source(self, source_id: str = "traces") -> SourceRef:
        """The reference that a claim resting on this transition carries."""
        events = self.slice.action_event_ids + self.slice.observation_event_ids
        return SourceRef(source_id, self.slice.episode_id, events, f"transition {self.slice.index}", self.text[:160])


@dataclass(frozen=True)
class Flag:
    """Something in a trace that was withheld."""

    episode_id: str
    event_id: str
    problem: str


def observation_value(text: str) -> Any:
    """The JSON value of an observation text, or the text itself where it is not JSON, or nested beyond all sense."""
    stripped = text.strip()
    if stripped[:1] in '{["-0123456789tfn':
        try:
            value = json.loads(stripped, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return text
        return text if too_deep(value) else value
    return text


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def align(episode: TraceEpisode) -> tuple[list[Transition], list[Flag]]:
    """The transitions of one episode in the order of their actions, and what could not be aligned.

    Ambiguous transitions are returned too, marked (`TransitionSlice.usable` is False), so that a reader sees where
    the known sequence ends.
    """
    flags: list[Flag] = []
    actions = [(i, e) for i, e in enumerate(episode.events) if e.kind == "action"]
    problems: dict[int, list[str]] = {i: [] for i, _ in actions}
    by_id: dict[str, int] = {}
    for i, event in actions:
        call_id = event.metadata.get("call_id")
        if call_id is None:
            continue
        if call_id in by_id:
            problems[i].append("duplicate call id")
            problems[by_id[call_id]].append("duplicate call id")
        else:
            by_id[call_id] = i
    answers: dict[int, list[int]] = {i: [] for i, _ in actions}
    correlated: set[int] = set()
    open_calls: list[int] = []  # calls without an id that still wait for a result
    for i, event in enumerate(episode.events):
        if event.kind == "action":
            # A call whose result never carries its id may be answered in order, if it is the only one waiting.
            open_calls.append(i)
        elif event.kind == "observation":
            call_id = event.metadata.get("call_id")
            if call_id is not None:
                target = by_id.get(call_id)
                if target is None or target > i:
                    flags.append(Flag(episode.episode_id, event.id, "result without its call"))
                    continue
                if answers[target]:
                    problems[target].append("two results for one call")
                answers[target].append(i)
                correlated.add(target)
                open_calls = [c for c in open_calls if c != target]
            elif len(open_calls) == 1:
                answers[open_calls[0]].append(i)
                open_calls = []
            elif open_calls:
                for c in open_calls:
                    problems[c].append("uncorrelated results of several calls")
                    answers[c].append(i)
                flags.append(Flag(episode.episode_id, event.id, "result of one of several calls"))
                open_calls = []
            else:
                flags.append(Flag(episode.episode_id, event.id, "result without a call"))
        elif open_calls and event.actor == "agent":
            for c in open_calls:
                problems[c].append("no result before the agent went on")
            open_calls = []
    for c in open_calls:
        problems[c].append("no result")
    overlapping = _overlaps(actions, answers)
    out = []
    for position, (i, event) in enumerate(actions):
        for problem in problems[i]:
            flags.append(Flag(episode.episode_id, event.id, problem))
        if not answers[i]:
            if not problems[i]:
                flags.append(Flag(episode.episode_id, event.id, "no result"))
            problems[i].append("no result")
        if overlapping.get(i):
            flags.append(Flag(episode.episode_id, event.id, "answered while another call was open"))
        mates = tuple(episode.events[k].id for k in sorted(overlapping.get(i, ())))
        out.append(_transition(episode, i, event, answers[i], problems[i], i in correlated, position, mates))
    return out, flags


def _overlaps(actions: list[tuple[int, TraceEvent]], answers: dict[int, list[int]]) -> dict[int, set[int]]:
    """Calls that ran side by side, by call: one was answered between the making and the answer of an earlier one.

    Which of them acted first is not recorded, so neither speaks for the state before it. Calls that are answered in
    the order in which they were made are a sequence.
    """
    out: dict[int, set[int]] = {}
    spans = [(i, answers[i][0]) for i, event in actions if len(answers[i]) == 1 and not event.metadata.get("ordered")]
    for at, (i, end) in enumerate(spans):
        for k, other in spans[at + 1 :]:
            if k > end:
                break
            if other < end:
                out.setdefault(i, set()).add(k)
                out.setdefault(k, set()).add(i)
    return out


def _transition(
    episode: TraceEpisode,
    at: int,
    event: TraceEvent,
    answers: list[int],
    problems: list[str],
    correlated: bool,
    position: int,
    concurrent: tuple[str, ...],
) -> Transition:
    batch = event.metadata.get("batch")
    if batch is not None and not event.metadata.get("ordered"):
        # Without ids the results of one message cannot be told apart.
        mates = [
            (k, e)
            for k, e in enumerate(episode.events)
            if e.kind == "action" and e.metadata.get("batch") == batch and k != at
        ]
        if not correlated:
            concurrent = tuple(e.id for _, e in mates)
    alignment = "ambiguous" if problems else ("correlated" if correlated else "sequential")
    text = episode.events[answers[0]].content if answers else ""
    history = tuple(e.id for e in episode.events[max(0, at - HISTORY_EVENTS) : at])
    piece = TransitionSlice(
        id=f"t-{event.id}",
        episode_id=episode.episode_id,
        group=episode.group,
        index=position,
        action_event_ids=(event.id,),
        observation_event_ids=tuple(episode.events[a].id for a in answers),
        history_event_ids=history,
        concurrent_event_ids=concurrent,
        alignment=alignment,  # type: ignore[arg-type]
        ambiguities=tuple(dict.fromkeys(problems)),
    )
    return Transition(piece, event.content["type"], event.content["arguments"], text, observation_value(text))


def usable_prefix(transitions: Iterable[Transition]) -> list[Transition]:
    """The transitions before the first one that is not usable: from there on the state is not known."""
    out = []
    for t in transitions:
        if not t.slice.usable:
            break
        out.append(t)
    return out
