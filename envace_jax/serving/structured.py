"""Structured output: what a request's `response_format`, strict tools and `tool_choice` make of its guides.

A schema comes from a client. It is compiled away from the event loop, two at a time, first in a child process with
limits of its own, and what the masks may cost a token is bounded as well.
"""

from __future__ import annotations

import asyncio
import threading

from envace_jax.config import UserError
from envace_jax.serving.generate import Guides
from envace_jax.serving.protocol import BadRequest, ChatRequest
from envace_jax.text.chat import ChatFormat
from envace_jax.text.constrain import Constrainer, TokenGuide

COMPILERS = 2


class Structure:
    """Compiles the shapes that requests ask for; made when the first one does."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._constrainers: dict[bool, Constrainer] = {}
        self._making = threading.Lock()
        self._slots = asyncio.Semaphore(COMPILERS)

    async def guides(self, asked: ChatRequest, forced: str) -> Guides | None:
        """What makes a guide for every choice; None where the output is free.

        Raises:
            BadRequest: the schema cannot be followed.
        """
        if asked.schema is None and not asked.strict:
            return None
        async with self._slots:
            try:
                first = await asyncio.to_thread(self._guide, asked, forced)
            except UserError as error:
                raise BadRequest(str(error), "tools" if asked.schema is None else "response_format") from None
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
