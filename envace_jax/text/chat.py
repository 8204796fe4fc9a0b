"""The Qwen3 chat protocol: whole conversations, and the pieces that a ledger appends.

What the protocol itself writes (roles, tags, the tool preamble) is encoded with its tags; everything that a user, a
tool or a model wrote is data (`Tokenizer.encode_data`). For conversations whose contents hold no tag strings the ids
equal those of the official template and tokenizer. Where a content does hold a tag string, the official pair would
read it as a tag (a user could end the turn or fake a tool response); here it stays text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.text import template
from envace_jax.text.tokenizer import Tokenizer
from envace_jax.text.transcript import Message, ToolCall, canonical_json, clean_text

START, END = "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
RESPONSE, END_RESPONSE = "<tool_response>", "</tool_response>"
GENERATE = f"{START}assistant\n"
_OWN_TAGS = (THINK, END_THINK, CALL, END_CALL)  # what an output may write
_OWN_PATTERN = re.compile("(" + "|".join(map(re.escape, _OWN_TAGS)) + ")")
EMPTY_THINKING = f"{THINK}\n\n{END_THINK}\n\n"


class Data(str):
    """Text that somebody wrote, as against text that the protocol writes (plain `str`)."""


Piece = str | Data | Sequence[int]


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text and ids.

    thinking: whether the model may think. False writes an empty thinking block into every generation prompt.
    tool_docs: "full" documents the tools in the system message; "none" leaves them out (the policy knows them).
    old_thinking: "strip" is the official template: thinking before the latest user message goes, and so does, within
      a turn, an empty block that only a generation prompt wrote. "keep" never drops a block.
    """

    tokenizer: Tokenizer
    thinking: bool = True
    tool_docs: str = "full"
    old_thinking: str = "strip"

    def __post_init__(self) -> None:
        if self.tool_docs not in ("full", "none"):
            raise ValueError(f"tool_docs={self.tool_docs!r}: expected 'full' or 'none'")
        if self.old_thinking not in ("strip", "keep"):
            raise ValueError(f"old_thinking={self.old_thinking!r}: expected 'strip' or 'keep'")

    # Whole conversations.

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] = (), add_generation_prompt: bool = True
    ) -> str:
        """Text of a conversation, equal to the official template's (`old_thinking="strip"`, `tool_docs="full"`)."""
        return _text(self._pieces(messages, tools, add_generation_prompt))

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[dict] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of `render`, contents taken as data."""
        return self._encode(self._pieces(messages, tools, add_generation_prompt))

    def template(self) -> str:
        """The Jinja template that renders as this format does; it stands beside an exported model."""
        return template.jinja(thinking=self.thinking, tool_docs=self.tool_docs, old_thinking=self.old_thinking)

    # Pieces of a ledger.

    def head_ids(self, messages: Sequence[Message], tools: Sequence[dict] = ()) -> list[int]:
        """Everything up to and including the generation prompt."""
        return self.encode_prompt(messages, tools, True)

    def observation_ids(self, observations: Sequence[str | Sequence[int]]) -> list[int]:
        """What follows a sampled turn end: one user block with a tool response per item, then the generation prompt.

        A string is data. A list of ids is what was sampled between the two response tags, white space included; it
        stands here verbatim.
        """
        pieces: list[Piece] = [f"\n{START}user"]
        for item in observations:
            if isinstance(item, str):
                pieces += [f"\n{RESPONSE}\n", Data(item), f"\n{END_RESPONSE}"]
            else:
                pieces += [f"\n{RESPONSE}", tuple(item), END_RESPONSE]
        return self._encode([*pieces, f"{END}\n", self._generation_prompt()])

    def user_ids(self, text: str) -> list[int]:
        """What follows a turn end when a user speaks: the user message, then the generation prompt."""
        return self._encode([f"\n{START}user\n", Data(text), f"{END}\n", self._generation_prompt()])

    def output_ids(self, message: Message) -> list[int]:
        """Ids that an assistant would sample after the generation prompt to say `message`, turn end included."""
        return self._encode([*self._thinking(message.thinking), *_said(message.content, message.tool_calls), END])

    def said_ids(self, raw: str) -> list[int]:
        """Ids of an output that is known by its text, turn end included: thinking and call tags count as tags, every
        other tag string is data (it stood in an argument, or was made up)."""
        return self._encode([part if part in _OWN_TAGS else Data(part) for part in _OWN_PATTERN.split(raw)] + [END])

    def answer_ids(self, opening: str, result: str, closing: str) -> list[int]:
        """Ids of a rehearsed answer between its two tags, turn end included; the result is data."""
        return self._encode([f"{opening}\n", Data(result), f"\n{closing}", END])

    def output_text(self, message: Message) -> str:
        """Text of `output_ids` without the turn end."""
        return _text([*self._thinking(message.thinking), *_said(message.content, message.tool_calls)])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an output."""
        return (self.tokenizer.eos_id,)

    def strip_thinking(self, ids: Sequence[int], boundary: str = "user") -> list[tuple[int, int]]:
        """The fork of a ledger: spans [start, stop) that stay when it goes on; one span over all: nothing goes.

        boundary: "user" when a user message follows: with `old_thinking="strip"` every thinking block of every
        assistant message goes, the newlines after it too. "observation" when tool responses follow: only blocks
        without content go (a generation prompt wrote them; the template does not write them again).
        """
        if boundary not in ("user", "observation"):
            raise ValueError(f"boundary={boundary!r}: expected 'user' or 'observation'")
        if self.old_thinking == "keep":
            return [(0, len(ids))] if ids else []
        kept, done = [], 0
        for start, stop in self._thinking_blocks(ids):
            if boundary == "observation" and not self._is_empty_block(ids[start:stop]):
                continue
            if start > done:
                kept.append((done, start))
            done = stop
        return kept + ([(done, len(ids))] if done < len(ids) else [])

    # Inside.

    def _generation_prompt(self) -> str:
        return GENERATE if self.thinking else GENERATE + EMPTY_THINKING

    def _thinking(self, thinking: str | None) -> list[Piece]:
        if not self.thinking or thinking is None:
            return []
        return [f"{THINK}\n", Data(thinking.strip("\n")), f"\n{END_THINK}\n\n"]

    def _pieces(self, messages: Sequence[Message], tools: Sequence[dict], generate: bool) -> list[Piece]:
        pieces: list[Piece] = []
        system = messages[0].content if messages and messages[0].role == "system" else None
        if tools and self.tool_docs == "full":
            pieces.append(f"{START}system\n")
            if system is not None:
                pieces += [Data(system), "\n\n"]
            pieces.append(template.TOOLS_HEAD)
            for tool in tools:
                pieces += ["\n", Data(canonical_json(tool))]
            pieces += [template.TOOLS_TAIL, f"{END}\n"]
        elif system is not None:
            pieces += [f"{START}system\n", Data(system), f"{END}\n"]
        last_query = _last_query(messages)
        for index, message in enumerate(messages):
            last = index == len(messages) - 1
            if message.role == "assistant":
                pieces += self._assistant(message, index > last_query, last)
            elif message.role == "tool":
                if index == 0 or messages[index - 1].role != "tool":
                    pieces.append(f"{START}user")
                pieces += [f"\n{RESPONSE}\n", Data(message.content), f"\n{END_RESPONSE}"]
                if last or messages[index + 1].role != "tool":
                    pieces.append(f"{END}\n")
            elif message.role == "user" or (message.role == "system" and index > 0):
                pieces += [f"{START}{message.role}\n", Data(message.content), f"{END}\n"]
        return [*pieces, self._generation_prompt()] if generate else pieces

    def _assistant(self, message: Message, current: bool, last: bool) -> list[Piece]:
        thinking, content = _split_thinking(message)
        block: list[Piece] = [f"{THINK}\n", Data((thinking or "").strip("\n")), f"\n{END_THINK}\n\n"]
        if self.old_thinking == "keep":
            shown = thinking is not None or not self.thinking
        else:
            shown = current and (last or bool(thinking))
        said = _said(content, message.tool_calls, strip=shown)
        return [GENERATE, *(block if shown else []), *said, f"{END}\n"]

    def _thinking_blocks(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Spans of the leading thinking block of each assistant message, trailing newlines included."""
        start_id, end_id = self.tokenizer.token_id(START), self.tokenizer.eos_id
        think, end_think = self.tokenizer.token_id(THINK), self.tokenizer.token_id(END_THINK)
        call = self.tokenizer.token_id(CALL)
        header = self._header
        blocks: list[tuple[int, int]] = []
        ids = list(ids)
        stops = [i for i, token in enumerate(ids) if token in (start_id, end_id)]
        for here, stop in zip(stops, [*stops[1:], len(ids)]):
            begin = here + len(header)
            if ids[here:begin] != header:
                continue
            body = ids[begin:stop]
            close = body.index(end_think) if end_think in body else None
            first = next((i for i, t in enumerate(body) if not self._is_newlines(t)), len(body))
            opened = first < len(body) and body[first] == think
            if close is None:
                if opened:  # thinking that never ended: nothing was said
                    blocks.append((begin + first, stop))
                continue
            if not opened and call in body[:close]:
                continue  # the closing tag stands inside a call, it ends no thinking
            after = close + 1
            while after < len(body) and self._is_newlines(body[after]):
                after += 1
            blocks.append((begin, begin + after))
        return blocks

    def _is_empty_block(self, ids: Sequence[int]) -> bool:
        tags = (self.tokenizer.token_id(THINK), self.tokenizer.token_id(END_THINK))
        return all(token in tags or self._is_newlines(token) for token in ids)

    @functools.cached_property
    def _header(self) -> list[int]:
        return self._encode([GENERATE])

    def _is_newlines(self, token: int) -> bool:
        return token in self._newline_ids

    @functools.cached_property
    def _newline_ids(self) -> frozenset[int]:
        # Runs of newlines as the tokenizer merges them; longer runs come as several ids.
        return frozenset(i for n in range(1, 33) for i in self.tokenizer.encode_data("\n" * n))

    @functools.cached_property
    def _tags(self) -> dict[str, int]:
        return self.tokenizer.tags

    @functools.cached_property
    def _tag_pattern(self) -> re.Pattern[str]:
        tags = sorted(self._tags, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, tags)) + ")")

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of pieces. Text between two tags is encoded in one go, whoever wrote it, as the official pair does."""
        ids: list[int] = []
        pending: list[str] = []

        def flush() -> None:
            if pending:
                ids.extend(self.tokenizer.encode_data("".join(pending)))
                pending.clear()

        tags = self._tags
        for piece in pieces:
            if isinstance(piece, Data):
                pending.append(piece)
            elif isinstance(piece, str):
                for part in self._tag_pattern.split(piece):
                    if part in tags:
                        flush()
                        ids.append(tags[part])
                    elif part:
                        pending.append(part)
            else:
                flush()
                ids.extend(int(i) for i in piece)
        flush()
        return ids


def _text(pieces: Sequence[Piece]) -> str:
    return clean_text("".join(p for p in pieces if isinstance(p, str)))


def _last_query(messages: Sequence[Message]) -> int:
    """Index of the latest user message that is not a tool response written out by hand."""
    for index in range(len(messages) - 1, -1, -1):
        text = messages[index].content
        if messages[index].role == "user" and not (text.startswith(RESPONSE) and text.endswith(END_RESPONSE)):
            return index
    return len(messages) - 1


def _split_thinking(message: Message) -> tuple[str | None, str]:
    """Thinking and content; a message without `thinking` may carry a thinking block inside its content."""
    if message.thinking is not None or END_THINK not in message.content:
        return message.thinking, message.content
    thinking = message.content.split(END_THINK)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
    return thinking, message.content.split(END_THINK)[-1].lstrip("\n")


def _said(content: str, calls: Sequence[ToolCall], strip: bool = False) -> list[Piece]:
    """Content (after a thinking block: without leading newlines) and calls of an assistant message."""
    pieces: list[Piece] = [Data(content.lstrip("\n") if strip else content)]
    for index, call in enumerate(calls):
        pieces += ["\n"] if content or index else []
        pieces += _call(call)
    return pieces


def _call(call: ToolCall) -> list[Piece]:
    arguments: Any = call.arguments  # a string is JSON text already, as recorded conversations hold it
    text = arguments if isinstance(arguments, str) else canonical_json(arguments)
    return [f'{CALL}\n{{"name": "', Data(call.name), '", "arguments": ', Data(text), f"}}\n{END_CALL}"]
