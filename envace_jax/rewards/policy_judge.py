"""A frozen policy in this process as the judge: no second service, the same mesh, the same engine code.

It answers the same messages as an endpoint would. The schema is asked for in the prompt and checked on the answer;
an answer that does not hold is sampled again under another key, and what never holds is no verdict.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envace_jax.config import UserError
from envace_jax.endpoint import MALFORMED, REJECTED, Completion
from envace_jax.sampling.engine import Request, SamplingParams
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Message

JUDGE_KEY = 7
"""First part of a judge's sampling keys: they never meet a rollout's."""


@dataclasses.dataclass
class _Asked:
    prompt: tuple[int, ...]
    params: SamplingParams
    number: int
    check: Callable[[str], str | None] | None
    future: concurrent.futures.Future[Completion]
    attempt: int = 0
    completion_tokens: int = 0


class PolicyBackend:
    """`model_judge.Backend` over an engine of the judge's own. `pump` advances it by one chunk.

    Keys are numbered by request content order within a run, so equal requests in another order may be judged by other
    samples; at temperature 0 the verdicts depend on the request alone.
    """

    def __init__(
        self,
        engine: Any,
        chat: ChatFormat,
        *,
        temperature: float = 0.6,
        top_p: float = 0.8,
        max_tokens: int = 6000,
        attempts: int = 3,
    ):
        self.engine, self.chat, self.attempts = engine, chat, attempts
        self.params = SamplingParams(temperature, top_p, 0, max_tokens, chat.stop_ids)
        self._asked: dict[int, _Asked] = {}
        self._number = 0

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        schema_name: str = "answer",
        check: Callable[[str], str | None] | None = None,
        **sampling: Any,
    ) -> concurrent.futures.Future[Completion]:
        """Queues the messages; a prompt that the engine cannot hold comes back as `rejected` at once."""
        prompt = tuple(self.chat.encode_prompt([Message(str(m["role"]), str(m["content"])) for m in messages]))
        asked = _Asked(prompt, self.params, self._number, check, concurrent.futures.Future())
        self._number += 1
        self._send(asked)
        return asked.future

    def pump(self) -> None:
        """Advances the engine once and settles what has come in."""
        if not self._asked:
            return
        for done in self.engine.step():
            asked = self._asked.pop(done.request_id, None)
            if asked is not None:
                self._settle(asked, done)

    def _send(self, asked: _Asked) -> None:
        key = (JUDGE_KEY, asked.number, asked.attempt)
        try:
            number = self.engine.submit(Request(asked.prompt, asked.params, key))
        except UserError as e:
            asked.future.set_result(Completion(None, REJECTED, str(e)))
            return
        self._asked[number] = asked

    def _settle(self, asked: _Asked, done: Any) -> None:
        asked.attempt += 1
        asked.completion_tokens += len(done.ids)
        ids = done.ids[:-1] if done.finish == "stop" and done.ids else done.ids
        text = self.chat.tokenizer.decode(ids).rpartition("</think>")[2].strip()
        wrong = "cut off at the length limit" if done.finish != "stop" else asked.check(text) if asked.check else None
        counts: dict[str, Any] = {
            "prompt_tokens": len(asked.prompt),
            "completion_tokens": asked.completion_tokens,
            "attempts": asked.attempt,
        }
        if wrong is None:
            asked.future.set_result(Completion(text, **counts))
        elif asked.attempt < self.attempts:
            self._send(asked)
        else:
            asked.future.set_result(Completion(None, MALFORMED, wrong, **counts))
