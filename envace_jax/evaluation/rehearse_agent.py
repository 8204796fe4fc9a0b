"""A policy's REHEARSE as the agent of a harness: it answers what rules do not, under its own prompt and greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.evaluation.fidelity import Pair
from envace_jax.evaluation.quickstart import FidelityCase, ask_rehearse
from envace_jax.rehearsal.grounding import Grounding, NoGrounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.text.transcript import Message, Role, ToolCall, canonical_json
from envace_jax.worldbook.harness import AgentRequest, Prediction
from envace_jax.worldbook.ingest import observation_value
from envace_jax.worldbook.records import ActionSpec


class RehearseAgent:
    """Answers with REHEARSE (`envace_jax.worldbook.harness.Agent`), all requests in one batch of the engine.

    Args:
        engine: a sampling engine that holds the policy.
        actions: the actions on offer, for the prompt's list of tools.
        grounding: what REHEARSE may look at; nothing unless given.
    """

    def __init__(
        self,
        engine: Any,
        chat: Any,
        cfg: EpisodeConfig,
        actions: Sequence[ActionSpec],
        grounding: Grounding | None = None,
    ):
        self.engine, self.chat = engine, chat
        # The host answers nothing here: every request is REHEARSE's to answer.
        self.cfg = replace(cfg, checks=(), max_acts=1 << 20, max_segments=1 << 20)
        self.grounding = grounding or NoGrounding()
        self.tools = tuple(map(_tool, actions))

    def predict(self, requests: Sequence[AgentRequest]) -> list[Prediction]:
        """One answer a request; one that does not parse, or a prompt that does not fit, is a failed prediction."""
        prompts = [self.prompt(r) for r in requests]
        asked = [i for i, p in enumerate(prompts) if p is not None]
        cases = [FidelityCase(prompts[i] or (), Pair(requests[i].name, None, "")) for i in asked]
        pairs = ask_rehearse(cases, self.engine, self.chat, max_tokens=self.cfg.max_rehearse_tokens)
        out = [Prediction(failed="the prompt does not fit")] * len(requests)
        for i, pair in zip(asked, pairs):
            text = pair.predicted
            out[i] = Prediction(failed="no readable answer", calls=1) if text is None else Prediction(text, calls=1)
        return out

    def prompt(self, request: AgentRequest) -> tuple[int, ...] | None:
        """REHEARSE's prompt for a call after the session's turns."""
        task = self.task(request)
        played = demonstrate(task, self.chat, self.cfg, task.messages, grounding=self.grounding)
        asked = [segment for segment in played.segments if segment.role is Role.REHEARSE]
        if len(asked) <= request.session.turn:
            return None
        segment = asked[-1]
        return played.rows[segment.row].ids[: segment.start]

    def task(self, request: AgentRequest) -> Task:
        """The dialogue so far as a task of one turn, the call last; its answer here is never read."""
        session = request.session
        messages = [Message("user", session.instruction or "Please go on.")]
        for item in reversed(list(session.memory)):
            messages.append(Message("assistant", "", None, (ToolCall(item.action, item.arguments),)))
            messages.append(Message("tool", canonical_json(observation_value(item.observation))))
        messages.append(Message("assistant", "", None, (ToolCall(request.name, request.arguments),)))
        messages.append(Message("tool", "{}"))
        messages.append(Message("assistant", "Done."))
        # The group keeps the task's own traces out of a worldbook's brief, as in training.
        return Task(session.group or "session", "traces", tuple(messages), self.tools, (), {})


def _tool(action: ActionSpec) -> dict[str, Any]:
    properties = {
        name: ({} if a.type in ("any", "null") else {"type": a.type}) | ({"enum": list(a.enum)} if a.enum else {})
        for name, a in action.arguments.items()
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [name for name, a in action.arguments.items() if a.required],
    }
    function = {"name": action.name, "description": action.description, "parameters": parameters}
    return {"type": "function", "function": function}
