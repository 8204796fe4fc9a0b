"""Texts that come again and again are encoded once: system prompts, tools, the messages of a growing conversation."""

from __future__ import annotations

import functools
from array import array
from typing import Any

TEXTS = 512
LONGEST = 16_384
"""Characters. With `TEXTS` it bounds what is kept to some tens of megabytes, whatever clients send."""


class RememberingTokenizer:
    """A tokenizer that keeps the ids of the latest `TEXTS` texts that were data; all else is the tokenizer's own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = functools.lru_cache(TEXTS)(lambda text: array("i", tokenizer.encode_data(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_data(self, text: str) -> list[int]:
        """Ids of a text that is data; the list is the caller's."""
        return self._ids(text).tolist() if len(text) <= LONGEST else self._tokenizer.encode_data(text)
