"""From ids to text, piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.serving.stream import Detokenizer
from envace_jax.text.tokenizer import load_tokenizer, qwen3_tokenizer_dir

QUICKSTART = Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer"
PARTS = ["a", " ", "\n", "4821", "é", "数", "🙂", "👩‍🚀", "<tool_call>", "\u2581", "</think>"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=30).map("".join)


@pytest.fixture(scope="module", params=["sentencepiece", "qwen3"])
def tokenizer(request):
    return load_tokenizer(QUICKSTART if request.param == "sentencepiece" else qwen3_tokenizer_dir())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_text(tokenizer, data):
    """Cut anywhere, also inside a character: never anything that the whole text does not begin with."""
    text = data.draw(TEXTS)
    ids = tokenizer.encode(text)
    so_far, seen = Detokenizer(tokenizer), ""
    while len(so_far.ids) < len(ids):
        n = data.draw(st.integers(1, 5))
        now = so_far.add(ids[len(so_far.ids) : len(so_far.ids) + n])
        assert now.startswith(seen) and text.startswith(now)
        seen = now
    assert seen == text


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_at_all(tokenizer, data):
    """Ids in no order, broken characters included: what is told is the beginning of the whole, but for a broken end."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    so_far = Detokenizer(tokenizer)
    for i in ids:
        so_far.add([i])
    whole = tokenizer.decode(ids)
    assert whole.startswith(so_far.text)
    assert so_far.text == whole or whole.endswith("\ufffd")
