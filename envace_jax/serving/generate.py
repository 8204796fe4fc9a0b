"""One generation on the engine loop, seen from asyncio: whole, or as a stream of what is new."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from envace_jax.sampling.engine import Guide, Request, SamplingParams
from envace_jax.serving.loop import EngineLoop, Progress
from envace_jax.serving.protocol import BadRequest, Sampling
from envace_jax.serving.stream import Detokenizer, cut_at_stop

_serial = itertools.count()
Guides = Callable[[], Any]
"""Makes a fresh guide for every choice of a request (one that may say why it failed, as `failure`)."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """An output: text without the turn end and cut at a stop string, its ids and log-probabilities.

    `finish` is empty while it goes on; the text then leaves out a character of which a part has not come yet.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str


class Mailbox:
    """Hands over what the engine's thread reports to an event loop: one wake-up for all that came together."""

    def __init__(self, here: asyncio.AbstractEventLoop):
        self.here = here
        self._waiting: collections.deque[tuple[asyncio.Queue[Progress], Progress]] = collections.deque()
        self._called = False

    def post(self, to: asyncio.Queue[Progress], progress: Progress) -> None:
        """From any one thread."""
        self._waiting.append((to, progress))
        if not self._called:
            self._called = True
            self.here.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before looking: what is posted from now on calls again
        while self._waiting:
            to, progress = self._waiting.popleft()
            to.put_nowait(progress)


class Generator:
    """Turns prompt ids and sampling fields into engine requests; shared by all routes."""

    def __init__(self, loop: EngineLoop, tokenizer: Any, stop_ids: Sequence[int], max_length: int, max_new: int):
        self.loop, self.tokenizer, self.stop_ids = loop, tokenizer, tuple(stop_ids)
        self.max_length, self.max_new = max_length, max_new
        self._mailbox: Mailbox | None = None

    def check(self, prompt: Sequence[int], sampling: Sampling) -> int:
        """How many tokens may be generated; a prompt that leaves no room raises `BadRequest` with both sizes."""
        room = self.max_length - len(prompt)
        if not prompt or room < 1:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens; this server holds {self.max_length} with the answer",
                "messages",
                code="context_length_exceeded",
            )
        return min(room, sampling.max_tokens or self.max_new)

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        choice: int,
        affinity: Any = None,
        guide: Guide | None = None,
    ) -> Request:
        # A seed makes an answer repeatable: its key names the seed and the choice and nothing else.
        seed = (1, sampling.seed) if sampling.seed is not None else (0, secrets.randbits(31), next(_serial))
        params = SamplingParams(
            float(sampling.temperature),
            float(sampling.top_p),
            sampling.top_k,
            self.check(prompt, sampling),
            self.stop_ids,
        )
        return Request(tuple(prompt), params, (*seed, choice), affinity, guide=guide)

    def finished(self, ids: Sequence[int], logprobs: Sequence[float], finish: str, stops: Sequence[str]) -> Generated:
        """An output that has ended."""
        visible = tuple(ids[:-1] if finish == "stop" and ids and ids[-1] in self.stop_ids else ids)
        text, stopped = cut_at_stop(self.tokenizer.decode(visible), stops)
        return Generated(text, visible, tuple(logprobs[: len(visible)]), "stop" if stopped else finish)

    def mailbox(self) -> Mailbox:
        """The mailbox of the running event loop."""
        here = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.here is not here:
            self._mailbox = Mailbox(here)
        return self._mailbox

    async def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        choice: int,
        *,
        partial: bool,
        affinity: Any = None,
        guides: Guides | None = None,
    ) -> AsyncGenerator[tuple[Generated, bool], None]:
        """(what there is so far, whether it is all), at least once. Leaving the iterator frees the row.

        Without `partial` only the end is reported, unless stop strings make it necessary to look earlier.
        """
        mailbox = self.mailbox()
        news: asyncio.Queue[Progress] = asyncio.Queue()
        partial = partial or bool(sampling.stop)
        guide = guides() if guides is not None else None

        def report(progress: Progress) -> None:
            mailbox.post(news, progress)

        ticket = self.loop.submit(self.request(prompt, sampling, choice, affinity, guide), report, stream=partial)
        done = False
        so_far = Detokenizer(self.tokenizer)
        logprobs: list[float] = []
        try:
            while not done:
                progress = await news.get()
                fresh, fresh_logprobs = list(progress.ids), list(progress.logprobs)
                while progress.finish is None and not news.empty():  # a slow reader gets all that has come at once
                    progress = news.get_nowait()
                    fresh += progress.ids
                    fresh_logprobs += progress.logprobs
                if progress.error is not None:
                    raise BadRequest(progress.error, status=503 if progress.finish == "error" else 400)
                if progress.finish == "nan":
                    raise BadRequest("the model produced NaN for this request", status=500)
                if guide is not None and progress.finish is not None and guide.failure is not None:
                    raise BadRequest(f"the schema could not be followed: {guide.failure}")
                logprobs += fresh_logprobs
                done = progress.finish is not None
                stopped = False
                if progress.finish is not None:
                    ids = (*so_far.ids, *fresh)
                    yield self.finished(ids, logprobs, progress.finish, sampling.stop), True
                else:
                    text, stopped = cut_at_stop(so_far.add(fresh), sampling.stop)
                    finish = "stop" if stopped else ""
                    yield Generated(text, tuple(so_far.ids), tuple(logprobs), finish), stopped
                if stopped:
                    return
        finally:
            if not done:
                self.loop.cancel(ticket)

    async def whole(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        choice: int,
        affinity: Any = None,
        guides: Guides | None = None,
    ) -> Generated:
        """Waits for the end; cancelled with its caller."""
        results = self.stream(prompt, sampling, choice, partial=False, affinity=affinity, guides=guides)
        async with contextlib.aclosing(results):
            async for output, done in results:
                if done:
                    return output
        raise BadRequest("the request ended without an answer", status=500)
