"""Traces as tasks: an episode becomes a CM2 record, so that warm-starting learns both roles from it."""

from __future__ import annotations

from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import ChecklistItem, Task
from envace_jax.datasets.traces import TraceEpisode
from envace_jax.text.transcript import Message, ToolCall, canonical_json
from envace_jax.worldbook.compile import observed_actions
from envace_jax.worldbook.ingest import align, usable_prefix


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
            if found is None:
                break
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
    meta: dict[str, Any] = {"environment": episode.environment, "split": episode.split, "scenario": episode.group}
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
