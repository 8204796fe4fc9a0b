"""Traces as tasks: an episode becomes a CM2 record, so that warm-starting learns both roles from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import task_from_record, task_to_record
from envace_jax.datasets.records import ChecklistItem, Task
from envace_jax.datasets.traces import TraceEpisode, TraceReport, read_traces
from envace_jax.text.transcript import Message, ToolCall, canonical_json
from envace_jax.worldbook.build import fold_of
from envace_jax.worldbook.compile import observed_actions
from envace_jax.worldbook.ingest import align, usable_prefix

HELD_OUT_SHARE = 10
"""Where traces tell no split, one group in so many is held out."""


def load_trace_tasks(path: str, eval_path: str = "", on_bad: str = "stop") -> tuple[list[Task], list[Task], list[str]]:
    """Training and held-out tasks of recorded episodes, and a message for each trace that was left out.

    Held out are: all of ``eval_path``, if given; else the episodes of any other split than ``train``, if there are
    any; else every tenth group, by a hash of its name. Groups never cross.

    Args:
        path: traces (a file or folder of `envace_jax.datasets.traces`, or a folder prepared by ``python -m data``).
        on_bad: ``stop`` raises at the first bad trace, ``skip`` leaves it out.

    Raises:
        UserError: unreadable traces, or (``stop``) a bad one.
    """
    bad: list[str] = []
    tasks = list(_tasks(_episodes(path, on_bad, bad), on_bad, bad))
    if eval_path:
        return tasks, list(_tasks(_episodes(eval_path, on_bad, bad), on_bad, bad)), bad
    heldout = {t.uuid for t in tasks if t.meta["split"] != "train"}
    if not heldout:
        heldout = {t.uuid for t in tasks if fold_of(t.meta["trajectory_group"], HELD_OUT_SHARE) == 0}
    return [t for t in tasks if t.uuid not in heldout], [t for t in tasks if t.uuid in heldout], bad


def _episodes(path: str, on_bad: str, bad: list[str]) -> Iterator[TraceEpisode]:
    from envace_jax.datasets.prepared import PreparedEpisodes, is_prepared, splits_of

    if is_prepared(path):
        for split in splits_of(path):
            yield from PreparedEpisodes(path, split)
        return
    report = TraceReport()
    yield from read_traces(path, on_bad=on_bad, report=report)
    bad += report.bad


def _tasks(episodes: Iterable[TraceEpisode], on_bad: str, bad: list[str]) -> Iterator[Task]:
    for episode in episodes:
        try:
            task = task_from_episode(episode)
            # What the format asks of any task, such as calls that fit their documents, is asked of these too.
            yield task_from_record(task_to_record(task), where=f"trace {episode.episode_id}")
        except UserError as error:
            if on_bad == "stop":
                raise
            bad.append(str(error))


def task_from_episode(episode: TraceEpisode) -> Task:
    """The task whose reference dialogue is the episode, as far as every call has its answer.

    Calls stand one a message, in their order. A dialogue that ends without words of the agent gets an empty last
    reply, and one without an instruction an empty user message, since the format wants both; tools are the documents
    that the trace carries, else what the calls show.

    Raises:
        UserError: the episode has no usable transition.
    """
    usable = {t.slice.action_event_ids[0]: t for t in usable_prefix(align(episode)[0])}
    if not usable:
        raise UserError(f"trace {episode.episode_id}: no usable transition")
    messages: list[Message] = []
    for event in episode.events:
        if event.kind == "action":
            found = usable.get(event.id)
            if found is None or event.actor != "agent":
                break  # what a user does with tools of his own has no place in the format
            call = ToolCall(found.name, found.arguments)
            messages.append(Message("assistant", "", None, (call,)))
            messages.append(Message("tool", canonical_json(found.value)))
        elif event.kind == "message":
            role = {"agent": "assistant", "environment": "user"}.get(event.actor, event.actor)
            if role == "system" and messages:
                role = "user"
            if messages and messages[-1].role == role and not messages[-1].tool_calls:
                messages[-1] = Message(role, f"{messages[-1].content}\n\n{event.content}")
            else:
                messages.append(Message(role, event.content))
    first = 1 if messages[0].role == "system" else 0
    if messages[first : first + 1] and messages[first].role != "user":
        messages.insert(first, Message("user", "(no instruction was recorded)"))
    if messages[-1].role != "assistant" or messages[-1].tool_calls:
        messages.append(Message("assistant", "(no reply was recorded)"))
    tools = tuple(episode.metadata.get("tools") or ()) or _observed_tools(list(usable.values()))
    turns = sum(m.role == "user" for m in messages)
    # The scenario keeps a group on one side of a split, the group keeps its own traces out of a worldbook's brief.
    meta: dict[str, Any] = {
        "environment": episode.environment,
        "split": episode.split,
        "scenario": episode.group,
        "trajectory_group": episode.group,
    }
    if episode.initial_state is not None:
        meta["initial_state"] = episode.initial_state
    return Task(episode.episode_id, "traces", tuple(messages), tools, (_checklist(messages, turns),), meta)


def _checklist(messages: list[Message], turns: int) -> tuple[tuple[ChecklistItem, ...], ...]:
    """One item a turn, since the format wants one: its recorded calls are made, in order."""
    calls: list[list[dict[str, Any]]] = []
    for message in messages:
        if message.role == "user":
            calls.append([])
        elif calls:
            calls[-1] += [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]
    question = "Does the agent make the recorded calls, in their order?"
    passed = "Every recorded call of the turn is made with its arguments."
    return tuple(
        (ChecklistItem("C0", question, passed, ("assistant.tool_calls",), rule={"kind": "order", "calls": made}),)
        if made
        else (ChecklistItem("C0", "Does the agent reply without a call?", "No call is made.",
                            ("assistant.content.user_visible_reply",), rule={"kind": "no_call", "names": []}),)
        for made in calls[:turns]
    )  # fmt: skip


def _observed_tools(transitions: list[Any]) -> tuple[dict[str, Any], ...]:
    """Tool documents of what was called, open to arguments that were not seen."""
    out = []
    for action in observed_actions(transitions):
        properties = {n: {} if a.type == "any" else {"type": a.type} for n, a in action.arguments.items()}
        required = [n for n, a in action.arguments.items() if a.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        out.append({"type": "function", "function": {"name": action.name, "description": "", "parameters": parameters}})
    return tuple(out)
