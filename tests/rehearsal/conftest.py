"""A tiny tokenizer and the chat formats over it."""

from __future__ import annotations

import pytest

from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer, train_sentencepiece
from tests.rehearsal.helpers import TEXTS


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece(TEXTS, path, 400)
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def chat(tokenizer):
    return ChatFormat(tokenizer, thinking=False, tool_docs="full", old_thinking="keep")
