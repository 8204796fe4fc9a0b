"""An engine that says what it is told: rollouts without a model, for tests and dry runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from envace_jax.sampling.engine import Completion, Request
from envace_jax.text.tokenizer import Tokenizer
from envace_jax.text.transcript import ROLE_CODES, Role


@dataclass(frozen=True)
class Scripted:
    """One answer: `text`, in which tags are tags, or `ids` as they are; `finish` "stop" adds the turn end to a text."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    finish: str = "stop"


Script = Callable[[Request], str | Scripted] | Mapping[Role, Sequence[str | Scripted]]


class ScriptedEngine:
    """Same interface as `sampling.engine.Engine`.

    Args:
        outputs: a function of the request, or for each role what it says first, second, ... in every trajectory.
        tokenizer: encodes the texts.
        delay: how many calls of `step` a request takes; 1 unless given.
    """

    def __init__(
        self, outputs: Script, tokenizer: Tokenizer, *, delay: Callable[[Request], int] = lambda request: 1
    ) -> None:
        self.outputs, self.tokenizer, self.delay = outputs, tokenizer, delay
        self.requests: list[Request] = []
        self.released: list[Hashable] = []
        self._ids = itertools.count()
        self._live: dict[int, tuple[int, Request]] = {}
        self._cancelled: list[int] = []
        self._said: Counter[tuple[int, ...]] = Counter()

    def submit(self, request: Request) -> int:
        number = next(self._ids)
        self.requests.append(request)
        self._live[number] = (self.delay(request), request)
        return number

    def step(self) -> list[Completion]:
        done = [Completion(number, (), (), "cancelled") for number in self._cancelled]
        self._cancelled = []
        for number, (left, request) in list(self._live.items()):
            if left > 1:
                self._live[number] = (left - 1, request)
                continue
            del self._live[number]
            done.append(self._complete(number, request))
        return done

    @property
    def idle(self) -> bool:
        return not self._live and not self._cancelled

    def cancel(self, request_id: int) -> None:
        if self._live.pop(request_id, None) is not None:
            self._cancelled.append(request_id)

    def news(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """Nothing: a scripted output comes whole, at its end."""
        return {}

    def release(self, affinity: Hashable) -> None:
        self.released.append(affinity)

    def stats(self) -> dict[str, float]:
        return {"requests": float(len(self.requests))}

    def _complete(self, number: int, request: Request) -> Completion:
        said = self._say(request)
        said = Scripted(said) if isinstance(said, str) else said
        ids = said.ids
        if ids is None:
            end = (self.tokenizer.eos_id,) if said.finish == "stop" else ()
            ids = (*self.tokenizer.encode(said.text), *end)
        limit, finish = request.params.max_tokens, said.finish
        if len(ids) > limit:
            ids, finish = ids[:limit], "length"
        return Completion(number, ids, tuple(-0.01 * (k + 1) for k in range(len(ids))), finish)

    def _say(self, request: Request) -> str | Scripted:
        if callable(self.outputs):
            return self.outputs(request)
        role = next(role for role, code in ROLE_CODES.items() if request.key[-2] == code)
        place = request.key[:-1]  # everything but the segment
        self._said[place] += 1
        return self.outputs[role][self._said[place] - 1]
