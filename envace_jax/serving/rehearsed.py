"""`NAME+rehearse-parallel-2`: a served model that rehearses before it answers, for any client.

When a request's conversation ends with a user's message, the policy rehearses it in private, and what it remembers goes
under that message before the prompt is rendered. Requests that go on with the same message (tool results follow it)
get the same memory: memories are kept by the conversation up to the message, and sampled with keys made of it, so that
one that was dropped is made again as it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.rehearsal.episode import EpisodeState, Setting
from envace_jax.rehearsal.flow import Flow, Release, Together, Voice
from envace_jax.rehearsal.ledger import Row
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.sampling.engine import Completion, Request
from envace_jax.serving.generate import Generator
from envace_jax.serving.loop import Progress
from envace_jax.serving.protocol import BadRequest, ChatRequest
from envace_jax.serving.worlds import past_turns
from envace_jax.test_time.plan import Plan
from envace_jax.test_time.rehearse import Memory, Rehearser, Spent
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Message, Role

SERVED = ("parallel", "sequential")


@dataclass(frozen=True)
class Prepared:
    """A request with its memory attached, and the tokens that it took (0 where it was kept from before)."""

    asked: ChatRequest
    memory: str
    tokens: int


class Rehearsals:
    """Memories of the conversations of a server, the least recently used dropped beyond `limit`."""

    def __init__(self, generator: Generator, chat: ChatFormat, cfg: EpisodeConfig, limit: int = 256):
        self.generator, self.chat, self.limit = generator, chat, limit
        self.cfg = replace(cfg, context="stateless", judged=False, parser="lenient")
        self._kept: OrderedDict[str, Memory] = OrderedDict()

    async def prepare(self, asked: ChatRequest, plan: Plan) -> Prepared:
        """Rehearses the last message of the user, or takes the memory of it that is there.

        Raises:
            BadRequest: the method cannot be served, or the conversation has no user message or no tools.
        """
        if plan.kind not in SERVED:
            kinds = " or ".join(f"rehearse-{kind}-N" for kind in SERVED)
            raise BadRequest(f"'{plan.name}' is not served: {kinds}", "model")
        users = [k for k, message in enumerate(asked.messages) if message.role == "user"]
        if not users or not asked.tools:
            raise BadRequest("a rehearsal needs a message of the user, and tools", "messages")
        last = users[-1]
        heard = asked.messages[: last + 1]
        key = _digest(heard, asked.tools, plan)
        spent = Spent()
        memory = self._kept.get(key)
        if memory is None:
            rehearser = Rehearser(self.chat, self.cfg, plan)
            sampling = asked.sampling
            voice = Voice((2, int(key[:15], 16)), sampling.temperature, sampling.top_p, sampling.top_k)
            start = _start(heard, asked.tools, self.chat)
            memory = await run_flow(rehearser.memory(start, heard[-1].content, voice, spent), self.generator)
            self._kept[key] = memory
            while len(self._kept) > self.limit:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        reviewer = Rehearser(self.chat, self.cfg, plan).reviewer
        told = replace(asked.messages[last], content=reviewer.attach(heard[-1].content, memory.text))
        messages = (*asked.messages[:last], told, *asked.messages[last + 1 :])
        return Prepared(replace(asked, messages=messages), memory.text, spent.total)


def _digest(heard: Sequence[Message], tools: Sequence[dict[str, Any]], plan: Plan) -> str:
    said = [[m.role, m.content, m.thinking, [[call.name, call.arguments] for call in m.tool_calls]] for m in heard]
    return hashlib.sha256(json.dumps([said, list(tools), plan.name]).encode()).hexdigest()


def _start(heard: tuple[Message, ...], tools: tuple[dict[str, Any], ...], chat: ChatFormat) -> Any:
    """How rehearsals of a conversation's last message begin."""
    spoken = tuple(
        message for k, message in enumerate(heard) if message.role == "user" or (k == 0 and message.role == "system")
    )

    def start(setting: Setting, text: str) -> EpisodeState:
        last = Message("user", text)
        task = Task("request", "request", (*spoken[:-1], last), tools, ())
        row = Row(Role.ACT).context(chat.encode_prompt((*heard[:-1], last), tools))
        users = len(task.user_turns)
        past = past_turns(heard)
        if len(past) != users - 1:  # the conversation began with the assistant
            past = past[len(past) - users + 1 :]
        return EpisodeState(setting, task, turn=users - 1, transcript=past, rows=(row,))

    return start


async def run_flow(flow: Flow[Any], generator: Generator) -> Any:
    """Runs a flow on the server's engine loop; cancelled with its caller."""
    answer: Any = None
    try:
        while True:
            try:
                wanted = flow.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(wanted, Request):
                answer = await _complete(wanted, generator)
            elif isinstance(wanted, Release):
                generator.loop.release(wanted.affinity)
                answer = None
            else:
                assert isinstance(wanted, Together), "a served flow waits for nobody outside"
                tasks = [asyncio.ensure_future(run_flow(inner, generator)) for inner in wanted.flows]
                try:
                    answer = await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
    finally:
        flow.close()


async def _complete(request: Request, generator: Generator) -> Completion:
    here = asyncio.get_running_loop()
    done: asyncio.Future[Progress] = here.create_future()

    def settle(progress: Progress) -> None:
        if not done.done():
            done.set_result(progress)

    def report(progress: Progress) -> None:
        if progress.finish is not None or progress.error is not None:
            here.call_soon_threadsafe(settle, progress)

    if len(request.prompt_ids) >= generator.max_length:
        raise BadRequest(
            f"a rehearsal's prompt has {len(request.prompt_ids)} tokens; this server holds {generator.max_length}",
            "messages",
            code="context_length_exceeded",
        )
    ticket = generator.loop.submit(request, report)
    try:
        progress = await done
    except asyncio.CancelledError:
        generator.loop.cancel(ticket)
        raise
    if progress.error is not None:
        raise BadRequest(progress.error, status=503 if progress.finish == "error" else 400)
    return Completion(ticket, progress.ids, progress.logprobs, progress.finish or "stop")
