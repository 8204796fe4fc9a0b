"""A policy's REHEARSE as the model of a world: it answers what rules do not, under its own prompt and greedily.

`RehearseModel.system` gives the five systems of `envace_jax.worldbook.baselines` with REHEARSE in place of a chat
model: what a system puts into a chat model's prompt stands here as recorded calls or notes in REHEARSE's own. It has no
tools, so there is no loop: ``harness_only`` asks what ``direct`` asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envace_jax.datasets.records import RecordedCall, Task
from envace_jax.datasets.traces import task_group
from envace_jax.evaluation.fidelity import Pair
from envace_jax.evaluation.quickstart import FidelityCase, ask_rehearse
from envace_jax.rehearsal.grounding import Brief, Grounding, NoGrounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.text.transcript import Message, Role, ToolCall, canonical_json
from envace_jax.worldbook.baselines import CONTENT, StaticBlock, SystemConfig, make_system
from envace_jax.worldbook.grounding import WorldbookGrounding
from envace_jax.worldbook.harness import AgentRequest, Harness, Prediction
from envace_jax.worldbook.ingest import observation_value
from envace_jax.worldbook.records import ActionSpec
from envace_jax.worldbook.retrieve import Retriever
from envace_jax.worldbook.store import Worldbook
from envace_jax.worldbook.workspace import open_session


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


class TraceGrounding:
    """Raw recorded turns as recorded calls, ungated, the most similar last; nothing of the task's own group."""

    def __init__(self, book: Worldbook, turns: int = 5):
        self.retriever, self.turns = Retriever(book, gate=False), turns

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        group = task_group(task)
        found = self.retriever.retrieve(
            open_session(group=group), call.name, dict(call.arguments), exclude=group, similar=self.turns
        )
        turns = [
            RecordedCall(
                g.item.action, g.item.arguments, canonical_json(observation_value(g.item.observation)), 0, 0, 0
            )
            for g in reversed(found.similar)
        ]
        return Brief(tuple(turns))


class BlockGrounding:
    """The fixed block of the static worldbook as one note."""

    def __init__(self, book: Worldbook):
        self.block = StaticBlock(book)

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        group = task_group(task)
        return Brief((), (self.block.text(open_session(group=group), call.name, dict(call.arguments), group),))


class RehearseModel:
    """The REHEARSE of a configuration's policy, loaded once, behind each of the systems.

    Args:
        config: a configuration file; its policy answers greedily within its own limits on lengths.
    """

    def __init__(self, config: str):
        from envace_jax.build import chat_format, load_model, make_engine, mesh_for
        from envace_jax.config_file import read_config
        from envace_jax.rehearsal.settings import RolloutConfig

        cfg = read_config(config)
        self.chat = chat_format(cfg)
        spec, params = load_model(cfg, self.chat, mesh_for(cfg))
        self.engine = make_engine(cfg, spec, params)
        self.episode = RolloutConfig.from_config(cfg).episode
        self.name = f"REHEARSE of {Path(cfg.model.path).name or 'random weights'}"

    def system(self, book: Worldbook, config: SystemConfig) -> Harness:
        """A system as a harness."""
        grounding: Grounding = NoGrounding()
        if config.system == "trace_rag":
            grounding = TraceGrounding(book)
        elif config.system == "static_worldbook":
            grounding = BlockGrounding(book)
        elif config.system == "full":
            state = "full" if config.state else "none"
            grounding = WorldbookGrounding(book, state=state, content=CONTENT[config.content])
        harness = make_system(book, None, config)
        harness.agent = RehearseAgent(self.engine, self.chat, self.episode, book.actions, grounding)
        return harness


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
