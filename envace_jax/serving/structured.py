"""Structured output: what a request's `response_format`, strict tools and `tool_choice` make of its guides.

A schema comes from a client. It is compiled away from the event loop, two at a time, first in a child process with
limits of its own, and what the masks may cost a token is bounded as well. So are those that wait for it.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from envace_jax.config import UserError
from envace_jax.serving.generate import Guides
from envace_jax.serving.loop import Overloaded
from envace_jax.serving.protocol import BadRequest, ChatRequest
from envace_jax.text.chat import ChatFormat
from envace_jax.text.constrain import Constrainer, TokenGuide

COMPILERS = 2
MAX_OPEN = 64


class Structure:
    """Compiles the shapes that requests ask for, `MAX_OPEN` at most being compiled or waiting, `seconds` at most."""

    def __init__(self, chat: ChatFormat, seconds: float) -> None:
        self.chat, self.seconds = chat, seconds
        self._constrainers: dict[bool, Constrainer] = {}
        self._making = threading.Lock()
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="schema")
        self._open: set[Future] = set()

    async def guides(self, asked: ChatRequest, forced: str) -> Guides | None:
        """What makes a guide for every choice; None where the output is free.

        Raises:
            BadRequest: the schema cannot be followed.
            Overloaded: too many wait, or it took too long.
        """
        if asked.schema is None and not asked.strict:
            return None
        if len(self._open) >= MAX_OPEN:
            raise Overloaded(f"{MAX_OPEN} schemas are open, which is the limit", 2)
        work = self._pool.submit(self._guide, asked, forced)
        self._open.add(work)
        work.add_done_callback(self._open.discard)
        try:
            async with asyncio.timeout(self.seconds):
                first = await asyncio.wrap_future(work)  # cancelled with its caller: what has not begun never does
        except UserError as error:
            raise BadRequest(str(error), "tools" if asked.schema is None else "response_format") from None
        except TimeoutError:
            raise Overloaded("the schema was not compiled in time", 2) from None
        unused = [first]
        return lambda: unused.pop() if unused else self._guide(asked, forced)

    def _guide(self, asked: ChatRequest, forced: str) -> TokenGuide:
        thinking = (self.chat.thinking if asked.thinking is None else asked.thinking) and not forced
        with self._making:
            if thinking not in self._constrainers:
                made = Constrainer(self.chat.tokenizer, self.chat.stop_ids, thinking=thinking, guarded=True)
                self._constrainers[thinking] = made
        constrainer = self._constrainers[thinking]
        if not asked.tools:
            assert asked.schema is not None
            return constrainer.reply(asked.schema)
        return constrainer.calls(
            asked.tools,
            required=asked.tool_choice in ("required", "named"),
            name=asked.named_tool,
            parallel=asked.parallel,
            schema=asked.schema,
            after=forced,
        )
