"""Ids from memory are the tokenizer's ids, and nobody can change them for others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envace_jax.serving.remember import LONGEST, TEXTS, RememberingTokenizer
from envace_jax.text.transcript import Message

pytestmark = pytest.mark.quick


class Counting:
    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode_data(self, text):
        self.asked.append(text)
        return self.tokenizer.encode_data(text)


def test_a_growing_conversation_is_encoded_message_by_message(chat):
    counting = Counting(chat.tokenizer)
    remembering = replace(chat, tokenizer=RememberingTokenizer(counting))
    messages = [Message("system", "Service desk."), Message("user", "Where is 4821?")]
    for k in range(4):
        ids = remembering.encode_prompt(messages)
        assert ids == chat.encode_prompt(messages)
        ids.clear()  # the caller's own list
        messages += [Message("assistant", f"{k} is on its way."), Message("user", f"And {k}?")]
    assert remembering.encode_prompt(messages) == chat.encode_prompt(messages)
    assert len(counting.asked) == len(set(counting.asked))
    assert remembering.tokenizer.eos_id == chat.tokenizer.eos_id


def test_what_is_kept_is_bounded(chat):
    counting = Counting(chat.tokenizer)
    tokenizer = RememberingTokenizer(counting)
    for _ in range(2):
        assert tokenizer.encode_data("x" * (LONGEST + 1)) == chat.tokenizer.encode_data("x" * (LONGEST + 1))
    assert len(counting.asked) == 2  # too long to keep
    for k in range(TEXTS + 1):
        tokenizer.encode_data(str(k))
    tokenizer.encode_data("0")
    assert counting.asked[-1] == "0" and len(counting.asked) == 2 + TEXTS + 2
