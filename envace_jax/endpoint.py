"""The OpenAI-compatible client with its limits: judge, simulator, user simulator and world model use this one.

Requests run on one event loop in a thread of their own, so that no caller waits who does not want to. Each is
bounded: concurrency, requests and tokens a minute, attempts, a timeout for one attempt and a deadline for all
of them together. What comes back is an answer or a named cause, never an exception from the network, and
answers can be kept on disk by the content of their request. The key comes from the environment and is never
written anywhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import email.utils
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import tenacity
from aiolimiter import AsyncLimiter

from envace_jax.config import UserError

OUTAGE = "outage"  # refused connection, 5xx, 429 to the end
TIMEOUT = "timeout"  # one attempt or all of them took too long
MALFORMED = "malformed"  # a body that is no chat completion, or content that is not the JSON asked for
REFUSED = "refused"  # the model declined, or the endpoint filtered the request
REJECTED = "rejected"  # 4xx other than 408 and 429: our request is wrong for this endpoint

MAX_CONTENT_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class EndpointSettings:
    """Where the model is and how hard it may be asked.

    `requests_per_minute` and `tokens_per_minute` are off at 0; tokens are counted as asked for (prompt bytes / 4
    plus `max_tokens`) before sending. `deadline` bounds all attempts of one request, in seconds from its
    first send: what it waits for our own limits before is not the endpoint's fault.
    """

    base_url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float = 0.6
    top_p: float = 0.8
    max_tokens: int = 6000
    concurrency: int = 32
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    attempts: int = 5
    timeout: float = 120.0
    deadline: float = 600.0
    cache_dir: str = ""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise UserError(f"endpoint base_url='{self.base_url}': expected an http:// or https:// address")
        if not self.model:
            raise UserError("endpoint model='': expected the name of a model the endpoint serves")

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> EndpointSettings:
        """From a configuration section with the same keys."""
        return cls(**{f.name: section[f.name] for f in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer, or the cause why there is none (`text` is None exactly then)."""

    text: str | None
    cause: str | None = None
    detail: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 1
    cached: bool = False
    seconds: float = 0.0


class _Failure(Exception):
    def __init__(self, cause: str, detail: str, retry: bool, wait: float | None = None):
        super().__init__(detail)
        self.cause, self.detail, self.retry, self.wait = cause, detail, retry, wait


class _Backoff(tenacity.wait.wait_base):
    """Exponential with jitter, at least what the server's Retry-After asks for."""

    def __init__(self) -> None:
        self.base = tenacity.wait_random_exponential(multiplier=0.5, max=30)

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        asked = error.wait if isinstance(error, _Failure) and error.wait else 0.0
        return max(self.base(retry_state), asked)


class Endpoint:
    """One endpoint, shared by any number of callers; `close` it (or use `with`) when done."""

    def __init__(self, settings: EndpointSettings):
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        self._call(self._open()).result()

    async def _open(self) -> None:
        s = self.settings
        self._client = openai.AsyncOpenAI(
            base_url=s.base_url, api_key=os.environ.get(s.api_key_env) or "none", max_retries=0, timeout=s.timeout
        )
        self._slots = asyncio.Semaphore(s.concurrency)
        self._requests = AsyncLimiter(s.requests_per_minute, 60) if s.requests_per_minute else None
        self._tokens = AsyncLimiter(s.tokens_per_minute, 60) if s.tokens_per_minute else None

    def _call(self, coroutine: Any) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        schema_name: str = "answer",
        check: Callable[[str], str | None] | None = None,
        **sampling: Any,
    ) -> concurrent.futures.Future[Completion]:
        """Starts a chat completion and returns a future of its `Completion`.

        `schema` asks for JSON by that schema (json_schema, strict) and makes content that is not JSON
        `malformed`; so does a `check` that returns what is wrong with the content. Malformed content is tried
        again and never cached. `sampling` overrides temperature, top_p, max_tokens, seed, stop.
        """
        s = self.settings
        body: dict[str, Any] = {
            "model": s.model,
            "messages": [dict(m) for m in messages],
            "temperature": s.temperature,
            "top_p": s.top_p,
            "max_tokens": s.max_tokens,
            **sampling,
        }
        if schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": schema_name, "strict": True, "schema": dict(schema)},
            }
        return self._call(self._complete(body, check))

    def complete(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Completion:
        """Like `submit`, waiting for the answer."""
        return self.submit(messages, **kwargs).result()

    def stats(self) -> dict[str, float]:
        """Counts since the start: requests, cache_hits, attempts, tokens, and failures by cause."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Ends what is under way and stops the thread."""
        if self._loop.is_closed():
            return

        async def stop() -> None:
            others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for t in others:
                t.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._client.close()

        self._call(stop()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, **more: float) -> None:
        with self._lock:
            for key, n in more.items():
                self._counts[key] = self._counts.get(key, 0) + n

    async def _complete(self, body: dict[str, Any], check: Callable[[str], str | None] | None) -> Completion:
        started = time.monotonic()
        path = self._cache_path(body)
        if path is not None and (hit := _read_cache(path)) is not None:
            self._count(requests=1, cache_hits=1)
            return hit
        attempts = prompt_tokens = completion_tokens = 0

        async def attempt(clock: asyncio.Timeout) -> Completion:
            nonlocal attempts, prompt_tokens, completion_tokens
            attempts += 1
            answer = await self._attempt(body, clock)
            usage = getattr(answer, "usage", None)  # what comes back malformed has been paid for all the same
            prompt_tokens += _whole(usage, "prompt_tokens")
            completion_tokens += _whole(usage, "completion_tokens")
            done = _read_answer(answer, json_wanted="response_format" in body)
            wrong = check(done.text or "") if check else None
            if wrong:
                raise _Failure(MALFORMED, wrong[:300], True)
            return done

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.settings.attempts),
            wait=_Backoff(),
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, _Failure) and e.retry),
            reraise=True,
        )
        try:
            async with asyncio.timeout(None) as clock:  # it runs from the first send
                done: Completion = await retrying(attempt, clock)
        except TimeoutError:
            done = Completion(None, TIMEOUT, f"no answer within {self.settings.deadline:g} s")
        except _Failure as e:
            done = Completion(None, e.cause, e.detail)
        done = dataclasses.replace(
            done,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            attempts=max(attempts, 1),
            seconds=time.monotonic() - started,
        )
        self._count(
            requests=1,
            attempts=attempts,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            **({f"failed_{done.cause}": 1} if done.cause else {}),
        )
        if path is not None and done.text is not None:
            _write_cache(path, done)
        return done

    async def _attempt(self, body: dict[str, Any], clock: asyncio.Timeout) -> Any:
        """The answer to one send, as the client gives it; `clock` is set when the first one leaves."""
        if self._requests:
            await self._requests.acquire()
        if self._tokens:
            asked = len(json.dumps(body["messages"])) // 4 + int(body["max_tokens"])
            await self._tokens.acquire(min(asked, self._tokens.max_rate))
        async with self._slots:
            if clock.when() is None:
                clock.reschedule(self._loop.time() + self.settings.deadline)
            try:
                return await self._client.chat.completions.create(**body)
            except openai.APITimeoutError:
                raise _Failure(TIMEOUT, f"no answer within {self.settings.timeout:g} s", True) from None
            except openai.APIConnectionError as e:
                raise _Failure(OUTAGE, f"connection: {e.__cause__ or e}"[:300], True) from None
            except openai.APIStatusError as e:
                raise _status_failure(e) from None
            except (openai.APIError, ValueError, TypeError, AttributeError) as e:
                # a body that is cut off or is no JSON surfaces as one of these
                raise _Failure(MALFORMED, f"{type(e).__name__}: {e}"[:300], True) from None

    def _cache_path(self, body: Mapping[str, Any]) -> Path | None:
        if not self.settings.cache_dir:
            return None
        text = json.dumps({"base_url": self.settings.base_url, **body}, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return Path(self.settings.cache_dir) / digest[:2] / f"{digest}.json"


def _status_failure(error: openai.APIStatusError) -> _Failure:
    status, detail = error.status_code, f"status {error.status_code}: {error.message}"[:300]
    if status == 408:
        return _Failure(TIMEOUT, detail, True)
    if status == 429 or status >= 500:
        return _Failure(OUTAGE, detail, True, _retry_after(error.response.headers.get("retry-after")))
    if "content_filter" in (error.code or "") or "content_filter" in error.message:
        return _Failure(REFUSED, detail, False)
    return _Failure(REJECTED, detail, False)


def _retry_after(header: str | None) -> float | None:
    """Seconds from a Retry-After header, given as a number or as a date; at most 60."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), 60.0)


def _read_answer(answer: Any, json_wanted: bool) -> Completion:
    try:
        choice = answer.choices[0]
        message, finish = choice.message, choice.finish_reason
        text, refusal = message.content, getattr(message, "refusal", None)
    except (AttributeError, IndexError, TypeError, KeyError):
        raise _Failure(MALFORMED, "the body holds no choices[0].message", True) from None
    if refusal or finish == "content_filter":
        raise _Failure(REFUSED, str(refusal or "content_filter")[:300], False)
    if not isinstance(text, str):
        raise _Failure(MALFORMED, f"content is {type(text).__name__}, not text", True)
    if len(text) > MAX_CONTENT_BYTES:
        raise _Failure(MALFORMED, f"content of {len(text)} characters is over the limit", True)
    if json_wanted:
        try:
            json.loads(text)
        except (ValueError, RecursionError) as e:
            raise _Failure(MALFORMED, f"content is not JSON: {e}"[:300], True) from None
    return Completion(text)


def _whole(usage: Any, field: str) -> int:
    value = getattr(usage, field, 0)
    return value if isinstance(value, int) else 0


def _read_cache(path: Path) -> Completion | None:
    try:
        record = json.loads(path.read_text())
        return Completion(record["text"], cached=True) if isinstance(record["text"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: asked again


def _write_cache(path: Path, done: Completion) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            json.dump({"text": done.text}, f)
        os.replace(f.name, path)
    except OSError:
        pass  # a full disk costs the cache, not the verdict
