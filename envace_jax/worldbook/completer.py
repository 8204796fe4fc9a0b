"""The language model as the worldbook sees it: one method, a scripted double, limits, a log that resumes."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from envace_jax.config import UserError
from envace_jax.json_files import read_json
from envace_jax.text.transcript import canonical_json

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Completion:
    """One answer of a language model. ``cost`` is in the currency of the endpoint's price table (0 where unknown)."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class Completer(Protocol):
    """A chat model. ``schema`` is a JSON schema that the answer should satisfy, where the backend can enforce it."""

    def complete(
        self,
        messages: Sequence[dict[str, str]],
        *,
        max_tokens: int,
        temperature: float,
        schema: dict[str, Any] | None = None,
    ) -> Completion: ...


class BudgetExceeded(UserError):
    """The build used up its model budget; it goes on from its log when started with a larger one."""


class ScriptedCompleter:
    """Answers from a JSON file: ``{"answers": [{"contains": [texts], "texts": [answers]}], "default": text}``.

    The first entry all of whose ``contains`` stand in the messages answers; its texts are given in turn, the last one
    for ever. The file is fixed beforehand: nothing in it can depend on what is being tested.
    """

    def __init__(self, path: str | Path | None = None, script: dict[str, Any] | None = None):
        if path is not None:
            script = read_json(path)
        if not isinstance(script, dict) or not isinstance(script.get("answers"), list):
            raise UserError(f"{path or 'script'}: expected an object with a list of answers")
        self.answers = script["answers"]
        self.default = script.get("default")
        self.asked: list[str] = []
        self._turn = [0] * len(self.answers)
        self._lock = threading.Lock()

    def complete(
        self,
        messages: Sequence[dict[str, str]],
        *,
        max_tokens: int,
        temperature: float,
        schema: dict[str, Any] | None = None,
    ) -> Completion:
        prompt = "\n".join(m["content"] for m in messages)
        with self._lock:
            self.asked.append(prompt)
            for i, entry in enumerate(self.answers):
                if all(piece in prompt for piece in entry["contains"]):
                    texts = entry["texts"]
                    text = texts[min(self._turn[i], len(texts) - 1)]
                    self._turn[i] += 1
                    return Completion(text, len(prompt) // 4, len(text) // 4)
        if self.default is None:
            raise UserError(f"the script has no answer for: {prompt[:200]!r}")
        return Completion(self.default, len(prompt) // 4, len(self.default) // 4)


class EndpointFailure(UserError):
    """The endpoint gave no answer; the message names the cause."""


class EndpointCompleter:
    """An OpenAI-compatible endpoint (`envace_jax.endpoint.Endpoint`) as a completer, with prices per million tokens."""

    def __init__(self, endpoint: Any, *, price_in: float = 0.0, price_out: float = 0.0):
        self.endpoint, self.price_in, self.price_out = endpoint, price_in, price_out

    def complete(
        self,
        messages: Sequence[dict[str, str]],
        *,
        max_tokens: int,
        temperature: float,
        schema: dict[str, Any] | None = None,
    ) -> Completion:
        answer = self.endpoint.complete(messages, schema=schema, max_tokens=max_tokens, temperature=temperature)
        if answer.text is None:
            raise EndpointFailure(f"{answer.cause}: {answer.detail}"[:300])
        cost = (answer.prompt_tokens * self.price_in + answer.completion_tokens * self.price_out) / 1e6
        return Completion(answer.text, answer.prompt_tokens, answer.completion_tokens, cost)


class CallLog:
    """Asks a completer at most once for each item and prompt, within a budget, and remembers the answers on disk.

    The budget is that of the whole build: what earlier starts spent, as the file tells, counts. `calls`, `cost` and the
    tokens are those of this start, `before` (calls) and `before_cost` those of earlier ones.
    """

    def __init__(
        self,
        completer: Completer,
        file: Path | None = None,
        max_calls: int = 100_000,
        max_cost: float = 0.0,
        log: Callable[[str], None] = lambda text: None,
    ):
        self.completer = completer
        self.max_calls, self.max_cost, self.log = max_calls, max_cost, log
        self.calls = self.reused = self.prompt_tokens = self.completion_tokens = self.before = 0
        self.cost = self.before_cost = 0.0
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()
        self._file = None
        if file is not None:
            if file.is_file():
                self._read(file)
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("a", encoding="utf-8")

    def _read(self, file: Path) -> None:
        with file.open(encoding="utf-8", errors="replace") as handle:
            for line in handle:
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry["text"]
                    self.before += 1
                    self.before_cost += float(entry.get("cost", 0.0))
                except (ValueError, RecursionError, KeyError, TypeError):
                    continue  # the line that a kill cut off: asked again
        # A cut-off last line must not swallow the next one.
        data = file.read_bytes()
        if data and not data.endswith(b"\n"):
            with file.open("ab") as handle:
                handle.write(b"\n")

    def ask(
        self,
        stage: str,
        item: str,
        messages: Sequence[dict[str, str]],
        *,
        max_tokens: int = 4096,
        temperature: float = 0.0,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """The answer for an item of a stage.

        Raises:
            BudgetExceeded: the call or cost limit is reached.
        """
        text = canonical_json([stage, item, list(messages), max_tokens, temperature])
        key = hashlib.sha256(text.encode()).hexdigest()
        with self._lock:
            if key in self._known:
                self.reused += 1
                return self._known[key]
            calls, cost = self.before + self.calls, self.before_cost + self.cost
            if calls >= self.max_calls or (self.max_cost and cost >= self.max_cost):
                raise BudgetExceeded(
                    f"{stage}: the budget is used up after {calls} calls (cost {cost:.4f}): "
                    "start again with a larger one, answered items are kept"
                )
            self.calls += 1
        answer = self.completer.complete(messages, max_tokens=max_tokens, temperature=temperature, schema=schema)
        with self._lock:
            self._known[key] = answer.text
            cost = float(getattr(answer, "cost", 0.0) or 0.0)
            self.prompt_tokens += answer.prompt_tokens
            self.completion_tokens += answer.completion_tokens
            self.cost += cost
            if self._file is not None:
                entry = {"stage": stage, "item": item, "key": key, "text": answer.text, "cost": cost}
                self._file.write(canonical_json(entry) + "\n")
                self._file.flush()
                os.fsync(self._file.fileno())
        return answer.text

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def in_parallel(work: Callable[[T], U], items: Iterable[T], limit: int) -> list[U]:
    """Results in the order of the items, at most ``limit`` at a time; the first error is raised, and what has not begun
    by then does not begin."""
    items = list(items)
    if limit <= 1 or len(items) <= 1:
        return [work(i) for i in items]
    pool = ThreadPoolExecutor(max_workers=limit)
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)
