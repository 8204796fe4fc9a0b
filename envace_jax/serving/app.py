"""The HTTP routes: Starlette over the one engine loop.

`/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/metrics`, and `/v1/worlds` (sessions of the
REHEARSE role). A key, where one is set, stands on every route but `/health`. A body is read up to its limit and no
further; a client that goes away frees its rows; a full queue answers 429 with Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from envace_jax.config import UserError
from envace_jax.serving import protocol
from envace_jax.serving.generate import Generated, Generator, Guides
from envace_jax.serving.loop import Overloaded
from envace_jax.serving.protocol import BadRequest, ChatRequest, Sampling
from envace_jax.serving.rehearsed import Rehearsals
from envace_jax.serving.stream import StreamParser, token_texts
from envace_jax.serving.structured import Structure
from envace_jax.serving.worlds import SHORT, Worlds
from envace_jax.test_time.plan import Plan, read_plan
from envace_jax.text.chat import CALL, ChatFormat


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names of one server. `api_key` None leaves the routes open (loopback only, see the command).

    `aliases` are further names that requests may use for the model: some clients ask for a fixed one.
    """

    model: str
    aliases: tuple[str, ...] = ()
    api_key: str | None = None
    max_body: int = 8 << 20
    body_seconds: float = 30.0
    defaults: Sampling = Sampling()


class Server:
    """The routes over a generator; `app` is what uvicorn runs."""

    def __init__(self, generator: Generator, chat: ChatFormat, settings: ServerSettings, worlds: Worlds):
        self.generator, self.chat, self.settings, self.worlds = generator, chat, settings, worlds
        self.rehearsals = Rehearsals(generator, chat, worlds.cfg)
        self.structure = Structure(chat, seconds=generator.loop.time_limit)
        # Four: a tokenizer's normalizer may join characters, and then a token stands for more of the text.
        self._token_chars = 4 * max(len(chat.tokenizer.decode([i])) for i in range(chat.tokenizer.vocab_size))
        guarded = self._guarded
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", guarded(self.metrics)),
                Route("/v1/models", guarded(self.models)),
                Route("/v1/models/{name:path}", guarded(self.models)),
                Route("/v1/chat/completions", guarded(self.chat_completions), methods=["POST"]),
                Route("/v1/completions", guarded(self.completions), methods=["POST"]),
                Route("/v1/worlds", guarded(self.create_world), methods=["POST"]),
                Route("/v1/worlds/{world}", guarded(self.one_world), methods=["GET", "DELETE"]),
                Route("/v1/worlds/{world}/step", guarded(self.step_world), methods=["POST"]),
                Route("/v1/worlds/{world}/fork", guarded(self.fork_world), methods=["POST"]),
            ]
        )

    # --- shared ---------------------------------------------------------------------------------------------------

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except BadRequest as e:
                return JSONResponse(e.body(), e.status)
            except UserError as e:  # of what a client sent: a tool's schema, say, that cannot be used
                return JSONResponse(BadRequest(str(e)).body(), 400)
            except Overloaded as e:
                body = BadRequest(str(e), status=429, code="rate_limit_exceeded").body()
                return JSONResponse(body, 429, {"Retry-After": str(e.retry_after)})
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    def _check_key(self, request: Request) -> None:
        key = self.settings.api_key
        if key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise BadRequest("wrong or missing API key", status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> Any:
        limit = self.settings.max_body
        too_large = BadRequest(f"the body is over this server's limit of {limit} bytes", status=413)
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > limit:
                        raise too_large
        except TimeoutError:
            raise BadRequest("the body did not arrive in time", status=408) from None
        request.state.size = len(data)
        try:
            return protocol.read_json(data.decode())
        except ValueError as e:
            raise BadRequest(f"the body is not JSON: {str(e)[:200]}") from None

    def _method(self, asked: str) -> tuple[str, Plan]:
        """The model of a request, and the test-time method that its name may carry: `NAME+rehearse-parallel-2`."""
        name, plus, method = asked.rpartition("+")
        if not plus or asked in (self.settings.model, *self.settings.aliases):
            return self._model(asked), Plan()
        try:
            plan = read_plan(method)
        except UserError as e:
            raise BadRequest(str(e), "model", 404, "model_not_found") from None
        self._model(name)
        return asked, plan

    def _model(self, asked: str) -> str:
        if asked and asked not in (self.settings.model, *self.settings.aliases):
            message = f"model '{asked}' is not served here; '{self.settings.model}' is"
            raise BadRequest(message, "model", 404, "model_not_found")
        return self.settings.model

    # --- small routes ---------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        loop = self.generator.loop
        if loop.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed"}, 503)

    async def metrics(self, request: Request) -> Response:
        loop = self.generator.loop
        lines = [f"envace_requests_open {loop.open_requests}"]
        lines += [f"envace_{name}_total {n}" for name, n in loop.counts.items()]
        lines += [f"envace_engine_{name} {value:g}" for name, value in sorted(loop.engine.stats().items())]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def models(self, request: Request) -> Response:
        card = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "envace_jax"}
        name = request.path_params.get("name")
        if name is not None:
            self._model(name)
            return JSONResponse(card)
        return JSONResponse({"object": "list", "data": [card]})

    # --- chat -----------------------------------------------------------------------------------------------------

    async def _encoded(self, chars: int, encode: Callable[[], list[int]]) -> list[int]:
        """Ids of a text: a short one's at once, a long one's away from the event loop, an endless one's never.

        Raises:
            BadRequest: the text cannot be encoded, or no tokens are long enough for it to fit.
        """
        held = self.generator.max_length
        if chars > held * self._token_chars:
            raise BadRequest(
                f"the prompt has {chars} characters; this server holds {held} tokens with the answer",
                "messages",
                code="context_length_exceeded",
            )
        return encode() if chars <= SHORT else await asyncio.to_thread(encode)

    async def _prompt(self, asked: ChatRequest) -> tuple[list[int], str]:
        """Prompt ids, and the text that was put into the model's mouth to force a call."""
        chat = self.chat if asked.thinking is None else replace(self.chat, thinking=asked.thinking)
        forced = ""
        if asked.tool_choice == "required":
            forced = f"{CALL}\n"
        elif asked.tool_choice == "named":
            forced = f'{CALL}\n{{"name": {json.dumps(asked.named_tool, ensure_ascii=False)}, "arguments": '
        if forced:
            chat = replace(chat, thinking=False)  # the call comes first
        try:
            chars = len(chat.render(asked.messages, asked.tools))
        except ValueError as e:
            raise BadRequest(f"no prompt can be made of this: {str(e)[:200]}", "messages") from None
        ids = await self._encoded(chars, functools.partial(chat.encode_prompt, asked.messages, asked.tools))
        return ids + (chat.tokenizer.encode(forced) if forced else []), forced

    async def chat_completions(self, request: Request) -> Response:
        body = await self._body(request)
        if request.headers.get("x-role", "").lower() == "rehearse":
            return await self._rehearse(request, body)
        asked = protocol.read_chat(body, self.settings.defaults)
        model, plan = self._method(asked.model)
        extra: dict[str, Any] = {}
        private = 0
        if plan.kind != "none":
            self.generator.check((await self._prompt(asked))[0], asked.sampling)  # too long: not rehearsed either
            prepared = await _unless_gone(request, asyncio.ensure_future(self.rehearsals.prepare(asked, plan)))
            asked, private = prepared.asked, prepared.tokens
            extra = {"rehearsal": {"memory": prepared.memory, "tokens": prepared.tokens}}
        prompt, forced = await self._prompt(asked)
        self.generator.check(prompt, asked.sampling)
        guides = await _unless_gone(request, asyncio.ensure_future(self.structure.guides(asked, forced)))
        if asked.sampling.stream:
            return await self._stream(request, asked, model, prompt, forced, guides, extra, private)
        outputs = await self._all(request, prompt, asked.sampling, guides)
        choices = [self._choice(i, asked, o, forced) for i, o in enumerate(outputs)]
        counted = protocol.usage(len(prompt), sum(len(o.ids) for o in outputs), private)
        identity = protocol.new_id("chatcmpl")
        return JSONResponse(protocol.envelope("chat.completion", identity, model, choices, usage=counted, **extra))

    async def _all(
        self, request: Request, prompt: list[int], sampling: Sampling, guides: Guides | None = None
    ) -> list[Generated]:
        """All choices; if the client goes away they are cancelled."""
        work = asyncio.gather(*(self.generator.whole(prompt, sampling, i, guides=guides) for i in range(sampling.n)))
        return await _unless_gone(request, work)

    def _choice(self, index: int, asked: ChatRequest, output: Generated, forced: str) -> dict[str, Any]:
        """A whole answer: what a stream of the same output adds up to."""
        parser = StreamParser(calls=bool(asked.tools), stops=asked.sampling.stop)
        said = parser.feed(forced + output.text, True)
        calls = parser.sent_calls if asked.parallel else parser.sent_calls[:1]
        choice: dict[str, Any] = {
            "index": index,
            "message": protocol.message_body(
                "".join(d.content or "" for d in said), "".join(d.reasoning or "" for d in said), calls
            ),
            "finish_reason": protocol.finish_reason(output.finish, bool(calls)),
            "logprobs": None,
        }
        if asked.sampling.logprobs:
            tokens = token_texts(self.chat.tokenizer, output.ids)
            choice["logprobs"] = protocol.chat_logprobs(tokens, output.logprobs)
        return choice

    async def _stream(
        self,
        request: Request,
        asked: ChatRequest,
        model: str,
        prompt: list[int],
        forced: str,
        guides: Guides | None,
        extra: dict[str, Any],
        private: int,
    ) -> Response:
        """Server-sent events; `extra` stands in the first one, `private` tokens are part of what was used."""
        identity = protocol.new_id("chatcmpl")
        sampling = asked.sampling
        merged: asyncio.Queue[tuple[int, Generated | Exception | None, bool]] = asyncio.Queue(maxsize=64)

        async def pump(choice: int) -> None:
            try:
                async for output, done in self.generator.stream(prompt, sampling, choice, partial=True, guides=guides):
                    await merged.put((choice, output, done))
                    if done:
                        return
            except (BadRequest, Overloaded) as e:
                await merged.put((choice, e, True))

        pumps = [asyncio.ensure_future(pump(i)) for i in range(sampling.n)]
        try:
            # What cannot run is refused with its own status, before the stream begins.
            first = await _unless_gone(request, asyncio.ensure_future(merged.get()))
        except (asyncio.CancelledError, ClientDisconnect):
            for p in pumps:
                p.cancel()
            raise
        if isinstance(first[1], Exception):
            for p in pumps:
                p.cancel()
            raise first[1]

        def chunk(
            choice: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, **extra: Any
        ) -> bytes:
            inner = {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
            return protocol.event(protocol.envelope("chat.completion.chunk", identity, model, [inner], **extra))

        async def events() -> AsyncIterator[bytes]:
            parsers = [StreamParser(calls=bool(asked.tools), stops=sampling.stop) for _ in range(sampling.n)]
            told = [0] * sampling.n
            tokens = [0] * sampling.n
            left = set(range(sampling.n))
            item: tuple[int, Generated | Exception | None, bool] | None = first
            try:
                for i in range(sampling.n):
                    yield chunk(i, {"role": "assistant", "content": ""}, **(extra if i == 0 else {}))
                while left:
                    choice, output, done = item or await merged.get()
                    item = None
                    if isinstance(output, Exception):
                        error = output if isinstance(output, BadRequest) else BadRequest(str(output), status=429)
                        yield protocol.event(error.body())
                        return
                    assert output is not None
                    tokens[choice] = len(output.ids)
                    parser = parsers[choice]
                    logprobs = None
                    if sampling.logprobs and len(output.ids) > told[choice]:
                        texts = token_texts(self.chat.tokenizer, output.ids[told[choice] :])
                        logprobs = protocol.chat_logprobs(texts, output.logprobs[told[choice] :])
                        told[choice] = len(output.ids)
                    for delta in parser.feed(forced + output.text, done):
                        if delta.call is not None:
                            index = parser.sent_calls.index(delta.call)
                            if index and not asked.parallel:
                                continue
                            wire: dict[str, Any] = {"tool_calls": [protocol.tool_call_body(delta.call, index)]}
                        elif delta.reasoning is not None:
                            wire = {"reasoning_content": delta.reasoning}
                        else:
                            wire = {"content": delta.content}
                        yield chunk(choice, wire, logprobs=logprobs)
                        logprobs = None
                    if logprobs is not None:
                        yield chunk(choice, {}, logprobs=logprobs)
                    if done and choice in left:
                        left.discard(choice)
                        yield chunk(choice, {}, protocol.finish_reason(output.finish, bool(parser.sent_calls)))
                if sampling.stream_usage:
                    counted = protocol.usage(len(prompt), sum(tokens), private)
                    yield protocol.event(protocol.envelope("chat.completion.chunk", identity, model, [], usage=counted))
                yield protocol.event("[DONE]")
            finally:
                for p in pumps:
                    p.cancel()

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    # --- raw completions ------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        asked = protocol.read_completion(
            await self._body(request), self.chat.tokenizer.vocab_size, self.settings.defaults
        )
        model, sampling = self._model(asked.model), asked.sampling
        encode = self.chat.tokenizer.encode
        prompts = [
            await self._encoded(len(p), functools.partial(encode, p)) if isinstance(p, str) else list(p)
            for p in asked.prompts
        ]
        for p in prompts:
            self.generator.check(p, sampling)
        if sampling.stream:
            if len(prompts) * sampling.n > 1:
                raise BadRequest("a raw stream takes one prompt and n=1", "stream")
            return await self._stream_raw(request, prompts[0], model, sampling)
        groups = await asyncio.gather(*(self._all(request, p, sampling) for p in prompts))
        choices: list[dict[str, Any]] = []
        for prompt, text, outputs in zip(prompts, asked.prompts, groups):
            shown = (text if isinstance(text, str) else self.chat.tokenizer.decode(prompt)) if asked.echo else ""
            choices += [self._raw_choice(len(choices) + i, o, sampling, shown) for i, o in enumerate(outputs)]
        counted = protocol.usage(sum(map(len, prompts)), sum(len(o.ids) for outputs in groups for o in outputs))
        return JSONResponse(
            protocol.envelope("text_completion", protocol.new_id("cmpl"), model, choices, usage=counted)
        )

    def _raw_choice(self, index: int, output: Generated, sampling: Sampling, shown: str = "") -> dict[str, Any]:
        logprobs = None
        if sampling.logprobs:
            tokens = token_texts(self.chat.tokenizer, output.ids)
            logprobs = {"tokens": tokens, "token_logprobs": list(output.logprobs), "top_logprobs": None}
        finish = "length" if output.finish == "length" else "stop"
        return {"index": index, "text": shown + output.text, "finish_reason": finish, "logprobs": logprobs}

    async def _stream_raw(self, request: Request, prompt: list[int], model: str, sampling: Sampling) -> Response:
        identity = protocol.new_id("cmpl")
        outputs = self.generator.stream(prompt, sampling, 0, partial=True)
        # What cannot run is refused with its own status, before the stream begins.
        first = await _unless_gone(request, asyncio.ensure_future(anext(outputs)))

        async def events() -> AsyncIterator[bytes]:
            sent = 0
            item: tuple[Generated, bool] | None = first
            try:
                while item is not None:
                    output, done = item
                    text = output.text if done else output.text.rstrip("\ufffd")
                    choice = {"index": 0, "text": text[sent:], "finish_reason": None, "logprobs": None}
                    if done:
                        choice["finish_reason"] = "length" if output.finish == "length" else "stop"
                    sent = max(sent, len(text))
                    yield protocol.event(protocol.envelope("text_completion", identity, model, [choice]))
                    item = None if done else await anext(outputs)
                yield protocol.event("[DONE]")
            except BadRequest as e:
                yield protocol.event(e.body())
            finally:
                await outputs.aclose()

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    # --- the world-model role -------------------------------------------------------------------------------------

    async def _rehearse(self, request: Request, body: Any) -> Response:
        """`X-Role: rehearse`: the conversation ends with an assistant's calls; each choice answers one, in order."""
        asked = protocol.read_chat(body, self.settings.defaults)
        model = self._model(asked.model)
        if asked.sampling.stream or asked.sampling.n != 1:
            raise BadRequest("X-Role: rehearse answers whole and once: neither 'stream' nor 'n'", "stream")
        results = await _unless_gone(
            request, asyncio.ensure_future(self.worlds.answer_once(asked, request.state.size))
        )
        choices = []
        for i, (call, result) in enumerate(zip(asked.messages[-1].tool_calls, results)):
            message = {"role": "tool", "content": result.text}
            if isinstance(call.id, str):
                message["tool_call_id"] = call.id
            choices.append({"index": i, "message": message, "finish_reason": "stop", "source": result.source})
        return JSONResponse(protocol.envelope("chat.completion", protocol.new_id("chatcmpl"), model, choices))

    async def create_world(self, request: Request) -> Response:
        body = await self._body(request)
        return JSONResponse(self.worlds.create(body, request.state.size), 201)

    async def one_world(self, request: Request) -> Response:
        world = request.path_params["world"]
        if request.method == "DELETE":
            self.worlds.delete(world)
            return Response(status_code=204)
        return JSONResponse(self.worlds.describe(world))

    async def step_world(self, request: Request) -> Response:
        body = await self._body(request)
        step = self.worlds.step(request.path_params["world"], body, request.state.size)
        return JSONResponse(await _unless_gone(request, asyncio.ensure_future(step)))

    async def fork_world(self, request: Request) -> Response:
        return JSONResponse(self.worlds.fork(request.path_params["world"]), 201)


async def _unless_gone(request: Request, work: asyncio.Future) -> Any:
    """The result of `work`; when the client goes away first, `work` is cancelled and `ClientDisconnect` raised."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return await work
    finally:
        gone.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, BadRequest, Overloaded):
            await work


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass  # nothing else comes once the body is there
