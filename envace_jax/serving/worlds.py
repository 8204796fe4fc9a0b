"""Sessions of the REHEARSE role: a world that answers calls and remembers what it has answered.

A world is a list of answered calls over some tools, and what it was told at the start; forking copies a reference.
Calls are checked against the tools first, as in a rollout, and the model is asked only about sound ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from envace_jax.datasets.records import RecordedCall, Task
from envace_jax.rehearsal.grounding import Brief, closest
from envace_jax.rehearsal.prompts import PromptWriter, Scene, call_block, call_text
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.serving.generate import Generator
from envace_jax.serving.protocol import BadRequest, ChatRequest, Sampling, read_tools
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tool_calls import parse_execution_result
from envace_jax.text.tool_schema import check_call
from envace_jax.text.transcript import (
    AssistantOutput,
    Message,
    Observation,
    Step,
    ToolCall,
    Turn,
    canonical_json,
    result_text,
)

MAX_RECORDED = 512
COMPACT_EXAMPLES = 2
MAX_WORLD, MAX_HELD = 1 << 20, 64 << 20
"""Bytes of JSON that one world, and all worlds of a server, may hold."""
SHORT = 8_192
"""Characters that are encoded at once; more is done away from the event loop."""


@dataclass(frozen=True)
class World:
    """One session. `turns` is the conversation so far; `task` carries tools and recorded calls; `size` is both."""

    id: str
    task: Task
    turns: tuple[Turn, ...]
    size: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)

    @property
    def steps(self) -> int:
        return sum(len(turn.steps) for turn in self.turns)


class Worlds:
    """All sessions of a server, the least recently used dropped beyond `limit` of them, or `MAX_HELD` bytes."""

    def __init__(self, generator: Generator, chat: ChatFormat, cfg: EpisodeConfig, limit: int = 1024):
        self.generator, self.chat, self.cfg, self.limit = generator, chat, cfg, limit
        self.writer = PromptWriter(chat, cfg)
        self._worlds: OrderedDict[str, World] = OrderedDict()
        self._serial = itertools.count()

    def create(self, body: Any, size: int) -> dict[str, Any]:
        """`{tools, system?, user?, recorded?: [{name, arguments, result}]}` of `size` bytes -> its description."""
        _within(size)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        tools = read_tools(body.get("tools"))
        if not tools:
            raise BadRequest("a world needs tools", "tools")
        system, user = body.get("system"), body.get("user", "")
        if not isinstance(system, str | None) or not isinstance(user, str):
            raise BadRequest("'system' and 'user' must be text", "system")
        recorded = body.get("recorded", [])
        if not isinstance(recorded, list) or len(recorded) > MAX_RECORDED:
            raise BadRequest(f"'recorded' must be a list of at most {MAX_RECORDED} calls", "recorded")
        messages = [] if system is None else [Message("system", system)]
        messages.append(Message("user", user))
        for i, r in enumerate(recorded):
            call = self._call(r, f"recorded[{i}]")
            if "result" not in r:
                raise BadRequest(f"recorded[{i}] has no result", f"recorded[{i}]")
            messages += [Message("assistant", "", None, (call,)), Message("tool", result_text(r["result"]))]
        return self._keep(Task("world", "world", tuple(messages), tools, ()), (Turn(user, ()),), size)

    def fork(self, world: str) -> dict[str, Any]:
        """A second world with the same past."""
        original = self._get(world)
        return self._keep(original.task, original.turns, original.size)

    def describe(self, world: str) -> dict[str, Any]:
        w = self._get(world)
        return {"id": w.id, "object": "world", "steps": w.steps, "tools": [t["function"]["name"] for t in w.task.tools]}

    def delete(self, world: str) -> None:
        self._get(world)
        del self._worlds[world]

    async def step(self, world: str, body: Any, size: int) -> dict[str, Any]:
        """`{name, arguments}` -> `{observation, source, error_code}`; the answer becomes part of the world's past."""
        w = self._get(world)
        call = self._call(body, "body")
        async with w.lock:
            w = self._get(world)
            _within(w.size + size)
            observation = await self._answer(w.task, w.turns, call, w.size + size)
            output = AssistantOutput(call_text(call), None, "", (call,))
            last = w.turns[-1]
            turn = replace(last, steps=(*last.steps, Step(output, (observation,))))
            size += w.size + len(observation.text)
            self._worlds[world] = replace(w, turns=(*w.turns[:-1], turn), size=size)
            self._drop()
        return {"observation": observation.text, "source": observation.source, "error_code": observation.error_code}

    async def answer_once(self, asked: ChatRequest, size: int) -> list[Observation]:
        """The answers to a conversation that ends with an assistant's calls, in order (no session)."""
        _within(size)
        last = asked.messages[-1]
        if last.role != "assistant" or not last.tool_calls:
            raise BadRequest("X-Role: rehearse answers a last message that is an assistant's tool_calls", "messages")
        task = Task("request", "request", asked.messages[:1], asked.tools, ())
        turns, output = past_turns(asked.messages), AssistantOutput(last.content, None, last.content, last.tool_calls)
        answered: list[Observation] = []
        for call in last.tool_calls:
            results = self.writer.results(output, answered)
            answered.append(await self._answer(task, turns, call, size, asked.sampling, results))
        return answered

    async def _answer(
        self,
        task: Task,
        turns: tuple[Turn, ...],
        call: ToolCall,
        size: int,
        sampling: Sampling | None = None,
        results: tuple[str, ...] = (),
    ) -> Observation:
        error = check_call(call, task.tools, checks=tuple(c for c in self.cfg.checks if c in ("whitelist", "schema")))
        if error is not None:
            text = canonical_json({"error_tool_call": {"code": error.code, "message": error.message, "details": {}}})
            return Observation(text, "error", error.code)
        examples: tuple[RecordedCall, ...] = task.recorded_calls
        if self.writer.compact:
            examples = closest(examples, call, COMPACT_EXAMPLES)
        text = call_block(call_text(call))
        entries = self.writer.entries(turns)
        scene = Scene(task, Brief(examples), entries, text.strip("\n"), results, text)
        if size <= SHORT:
            prompt = self.writer.prompt(scene)
        else:  # by a writer of its own: what is kept by the shared one is short, and not for several threads
            prompt = await asyncio.to_thread(lambda: PromptWriter(self.chat, self.cfg).prompt(scene))
        if prompt is None:
            raise BadRequest("tools and call alone are longer than this server's prompts", "tools")
        wanted = replace(sampling or Sampling(), n=1, max_tokens=self.cfg.max_rehearse_tokens)
        output = await self.generator.whole(prompt, wanted, 0)
        parsed = parse_execution_result(output.text, objects_only=self.cfg.objects_only)
        if parsed.error_code is not None:
            text = canonical_json({"error_tool_call": {"code": parsed.error_code, "message": parsed.message or ""}})
            return Observation(text, "error", parsed.error_code)
        return Observation(canonical_json(parsed.value), "rehearsed")

    def _call(self, body: Any, where: str) -> ToolCall:
        name = body.get("name") if isinstance(body, dict) else None
        arguments = body.get("arguments", {}) if isinstance(body, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise BadRequest(f"{where}: expected {{name: text, arguments: object}}", where)
        return ToolCall(name, arguments)

    def _keep(self, task: Task, turns: tuple[Turn, ...], size: int) -> dict[str, Any]:
        world = World(f"world-{next(self._serial)}", task, turns, size)
        self._worlds[world.id] = world
        self._drop()
        return self.describe(world.id)

    def _drop(self) -> None:
        held = sum(world.size for world in self._worlds.values())
        while len(self._worlds) > self.limit or held > MAX_HELD:
            held -= self._worlds.popitem(last=False)[1].size

    def _get(self, world: str) -> World:
        if world not in self._worlds:
            raise BadRequest(f"there is no world '{world}'", status=404, code="world_not_found")
        self._worlds.move_to_end(world)
        return self._worlds[world]


def _within(size: int) -> None:
    if size > MAX_WORLD:
        raise BadRequest(f"a world holds at most {MAX_WORLD} bytes; this would be {size}", status=413)


def past_turns(messages: tuple[Message, ...]) -> tuple[Turn, ...]:
    """What came before the last message of a conversation, as turns."""
    turns: list[Turn] = []
    for message in messages[:-1]:
        if message.role == "user" or (not turns and message.role == "assistant"):
            turns.append(Turn(message.content if message.role == "user" else "", ()))
        if message.role == "assistant" and turns:
            output = AssistantOutput(message.content, message.thinking, message.content, message.tool_calls)
            turns[-1] = replace(turns[-1], steps=(*turns[-1].steps, Step(output, ())))
        elif message.role == "tool" and turns and turns[-1].steps:
            *before, step = turns[-1].steps
            step = replace(step, observations=(*step.observations, Observation(message.content, "recorded")))
            turns[-1] = replace(turns[-1], steps=(*before, step))
    return tuple(turns)
