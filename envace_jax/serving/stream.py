"""From sampled ids to what a client may see: reasoning, reply and whole calls, piece by piece.

Text is held back while it could still turn out to be the beginning of a tag, of a stop string or of a character;
a call is sent when its block is closed and parses, so that a client never gets half a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from envace_jax.text.tool_calls import parse_assistant
from envace_jax.text.transcript import ToolCall

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True)
class Delta:
    """One piece: exactly one of the three is set."""

    reasoning: str | None = None
    content: str | None = None
    call: ToolCall | None = None


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there was one."""
    places = [i for i in (text.find(s) for s in stops) if i >= 0]
    return (text[: min(places)], True) if places else (text, False)


def held_back(text: str, strings: Sequence[str]) -> int:
    """How many characters at the end could be the beginning of one of the strings."""
    longest = 0
    for s in strings:
        for n in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:n]):
                longest = n
                break
    return longest


class StreamParser:
    """Feed the whole text so far each time; get what is new. `calls=False` leaves tool tags alone (no tools given)."""

    def __init__(self, *, calls: bool, stops: Sequence[str] = ()):
        self._calls, self._stops = calls, tuple(stops)
        self._at = 0
        self._mode = "content"
        self._started = False
        self.sent_calls: list[ToolCall] = []

    def feed(self, text: str, final: bool) -> list[Delta]:
        out: list[Delta] = []
        end = len(text)
        if not final:
            if text.endswith("\ufffd"):
                end -= len(text) - len(text.rstrip("\ufffd"))
            end -= held_back(text[:end], (THINK, END_THINK, CALL, END_CALL, *self._stops))
        while self._at < end:
            before = self._at
            getattr(self, f"_in_{self._mode}")(text, end, final, out)
            if self._at == before:
                break
        return out

    def _say(self, kind: str, piece: str, out: list[Delta]) -> None:
        if not self._started:
            piece = piece.lstrip("\n")
        if piece:
            self._started = True
            out.append(Delta(reasoning=piece) if kind == "reasoning" else Delta(content=piece))

    def _in_content(self, text: str, end: int, final: bool, out: list[Delta]) -> None:
        tags = [(text.find(t, self._at, end), t) for t in ((THINK, CALL) if self._calls else (THINK,))]
        found = min(((i, t) for i, t in tags if i >= 0), default=None)
        stop = found[0] if found else end
        piece = text[self._at : stop]
        if found or not final:
            kept = piece.rstrip("\n")  # newlines before a tag belong to the protocol, not to the reply
            if not found:
                stop -= len(piece) - len(kept)
            piece = kept
        self._say("content", piece, out)
        self._at = stop
        if found:
            self._at = found[0] + len(found[1])
            self._mode = "thinking" if found[1] == THINK else "call"
            self._started = False

    def _in_thinking(self, text: str, end: int, final: bool, out: list[Delta]) -> None:
        close = text.find(END_THINK, self._at, end)
        stop = close if close >= 0 else end
        piece = text[self._at : stop]
        if close >= 0 or not final:
            kept = piece.rstrip("\n")
            if close < 0:
                stop -= len(piece) - len(kept)
            piece = kept
        self._say("reasoning", piece, out)
        self._at = stop
        if close >= 0:
            self._at = close + len(END_THINK)
            self._mode = "content"
            self._started = False

    def _in_call(self, text: str, end: int, final: bool, out: list[Delta]) -> None:
        close = text.find(END_CALL, self._at, end)
        if close < 0 and not final:
            return
        block = text[self._at : close if close >= 0 else end]
        parsed = parse_assistant(f"{CALL}{block}{END_CALL}", mode="lenient")
        if close < 0 or parsed.error_code is not None or not parsed.calls:
            out.append(Delta(content=f"{CALL}{block}{END_CALL if close >= 0 else ''}"))
        for call in parsed.calls if close >= 0 else ():
            self.sent_calls.append(call)
            out.append(Delta(call=call))
        self._at = close + len(END_CALL) if close >= 0 else end
        self._mode = "content"
        self._started = False


class Detokenizer:
    """The text of ids that come piece by piece; each piece is decoded once, with the piece before it.

    A decoder may treat the first token of what it is given differently, so new text is what a piece adds behind the one
    before it. Text that ends in U+FFFD may be a character of which a part is missing: it waits for what follows.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.text = ""
        self._begin = self._end = 0  # the last piece whose text is whole

    def add(self, ids: Sequence[int]) -> str:
        """All text so far."""
        self.ids += ids
        known = self._tokenizer.decode(self.ids[self._begin : self._end])
        more = self._tokenizer.decode(self.ids[self._begin :])
        if len(more) > len(known) and not more.endswith("\ufffd"):
            self.text += more[len(known) :]
            self._begin, self._end = self._end, len(self.ids)
        return self.text


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of every token on its own, for `logprobs`."""
    return [tokenizer.decode([i]) for i in ids]
