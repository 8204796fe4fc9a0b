"""The two tokenizers of these tests: the real Qwen3 one, and a small SentencePiece model trained here."""

from __future__ import annotations

import json

import pytest

from envace_jax.config import UserError
from envace_jax.text.tokenizer import load_tokenizer, qwen3_tokenizer_dir, train_sentencepiece

TEXTS = [
    'get_order {"order_id": "O-1042", "status": "delivered", "total": 31.5, "items": ["lamp", "desk"]}\n',
    "You are a service desk agent.  Answer briefly.\n\n  Refund order O-77 to account A-5.\n",
    "<|im_start|>user\nPlease cancel order O-12 and refund 12.50.<|im_end|>\n<|im_start|>assistant\n",
    "aaa aa aaaa abab ababa  aba\t\tend\n",
    "Größe, façade, 日本語, naïve 😀\n",
] * 20


@pytest.fixture(scope="session")
def corpus():
    return TEXTS


@pytest.fixture(scope="session")
def sp_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    train_sentencepiece(TEXTS, path, 480)
    return path


@pytest.fixture(scope="session")
def sp(sp_path):
    return load_tokenizer(sp_path)


@pytest.fixture(scope="session")
def qwen3_dir():
    try:
        return qwen3_tokenizer_dir()
    except UserError as err:
        pytest.skip(f"THE REAL QWEN3 TOKENIZER IS NOT HERE, so template and token identity stay unchecked: {err}")


@pytest.fixture(scope="session")
def qwen3(qwen3_dir):
    return load_tokenizer(qwen3_dir)


@pytest.fixture(scope="session")
def official_template(qwen3_dir):
    return json.loads((qwen3_dir / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
