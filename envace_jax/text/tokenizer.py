"""Tokenizers behind one interface: a Hugging Face `tokenizer.json` and a SentencePiece `.model`.

Two ways to encode: `encode` reads tag strings such as `<|im_end|>` as tags, `encode_data` never does. Chat code
encodes everything that users, tools and models wrote as data, so no text can end a turn or open a tool call.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from envace_jax.config import UserError
from envace_jax.json_files import read_json
from envace_jax.text.qwen3_files import qwen3_tokenizer_dir
from envace_jax.text.sentencepiece_bpe import (
    CHAT_TAGS,
    SPACE,
    read_model,
    tag_pieces,
    to_tokenizer_json,
    train_sentencepiece,
    without_tags,
)
from envace_jax.text.transcript import clean_text

__all__ = [
    "CHAT_TAGS",
    "HfTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "qwen3_tokenizer_dir",
    "train_sentencepiece",
]

TURN_END, PAD = "<|im_end|>", "<|endoftext|>"
LONG = 8_192  # characters


class Tokenizer(Protocol):
    """Text to ids and back. Lone surrogates in a text become U+FFFD before it is encoded."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id (a model's embedding may have more rows)."""

    @property
    def eos_id(self) -> int:
        """The id that ends a turn (`<|im_end|>`)."""

    @property
    def pad_id(self) -> int:
        """The id that fills unused places; masks never depend on it."""

    @property
    def tags(self) -> dict[str, int]:
        """Every string that `encode` reads as one tag, with its id."""

    @property
    def fingerprint(self) -> str:
        """Hash of what decides the ids; two files of one kind with equal fingerprints give equal ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which tag strings are tags."""

    def encode_data(self, text: str) -> list[int]:
        """Ids of a text that is data: no tag id ever comes out, whatever strings it holds."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, tags included. Ids outside the vocabulary and broken UTF-8 become U+FFFD."""

    def token_id(self, piece: str) -> int | None:
        """The id of a piece (a tag, or a piece as the vocabulary spells it), or None."""

    def definition(self) -> str:
        """A `tokenizer.json` that gives the same ids."""

    def save(self, directory: str | Path, chat_template: str | None = None) -> None:
        """Write files that `transformers.AutoTokenizer.from_pretrained` loads, giving the same ids."""


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file (`*.model` or `*.json`) or in a folder (`tokenizer.model`, else `tokenizer.json`)."""
    path = Path(path)
    if path.is_dir():
        for name in ("tokenizer.model", "tokenizer.json"):
            if (path / name).is_file():
                path = path / name
                break
        else:
            raise UserError(f"{path}: no tokenizer.model and no tokenizer.json in this folder")
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file")
    return SentencePieceTokenizer(path) if path.suffix == ".model" else HfTokenizer(path)


def _required(tokenizer: Any, piece: str, where: Path) -> int:
    found = tokenizer.token_id(piece)
    if found is None:
        raise UserError(f"{where}: the tokenizer has no piece {piece!r}; the chat protocol needs it")
    return found


class HfTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(self, path: str | Path):
        import tokenizers

        self._path = Path(path)
        try:
            text = self._path.read_text(encoding="utf-8")
            definition: dict[str, Any] = json.loads(text)
            vocab: dict[str, int] = definition["model"]["vocab"]
            self._tags: dict[str, int] = {token["content"]: token["id"] for token in definition["added_tokens"]}
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            if any(tag in vocab for tag in self._tags):
                # Tags that also stand in the model's own vocabulary must not come back through it.
                kept = {piece: index for piece, index in vocab.items() if piece not in self._tags}
                data = {**definition, "added_tokens": [], "model": {**definition["model"], "vocab": kept}}
                self._data_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
            else:
                self._data_tokenizer = tokenizers.Tokenizer(self._tokenizer.model)
                self._data_tokenizer.normalizer = self._tokenizer.normalizer
                self._data_tokenizer.pre_tokenizer = self._tokenizer.pre_tokenizer
            self._size = max(*vocab.values(), *self._tags.values()) + 1
            self.fingerprint = _fingerprint(definition)
        except Exception as err:  # the library raises bare Exception for a broken definition
            raise UserError(f"{self._path}: not a readable tokenizer.json: {err}") from None
        self.eos_id = _required(self, TURN_END, self._path)
        self.pad_id = _required(self, PAD, self._path)

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def tags(self) -> dict[str, int]:
        return dict(self._tags)

    def encode(self, text: str) -> list[int]:
        return self._encode(clean_text(text), self._tokenizer)

    def encode_data(self, text: str) -> list[int]:
        return self._encode(clean_text(text), self._data_tokenizer)

    @staticmethod
    def _encode(text: str, tokenizer: Any) -> list[int]:
        if len(text) < LONG:
            return tokenizer.encode(text, add_special_tokens=False).ids
        # Other threads run meanwhile: `encode` keeps the interpreter to itself, `encode_batch` does not.
        return tokenizer.encode_batch([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known(ids, self._size, lambda part: self._tokenizer.decode(part, skip_special_tokens=False))

    def token_id(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def definition(self) -> str:
        return self._path.read_text(encoding="utf-8")

    def save(self, directory: str | Path, chat_template: str | None = None) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_bytes(self._path.read_bytes())
        config_path = self._path.with_name("tokenizer_config.json")
        config = read_json(config_path) if config_path.is_file() else {}
        _write_config(directory, {"tokenizer_class": "PreTrainedTokenizerFast"} | config, chat_template)


class SentencePieceTokenizer:
    """A lossless SentencePiece BPE `.model` (see `train_sentencepiece`); decode(encode(x)) == x for every text."""

    def __init__(self, path: str | Path):
        import sentencepiece

        self._path = Path(path)
        try:
            raw = self._path.read_bytes()
            self._proto = read_model(raw, str(self._path))
            self._tokenizer = sentencepiece.SentencePieceProcessor(model_proto=raw)
            self._data_tokenizer = sentencepiece.SentencePieceProcessor(model_proto=without_tags(self._proto))
        except UserError:
            raise
        except Exception as err:  # protobuf and sentencepiece raise their own kinds for a broken file
            raise UserError(f"{self._path}: not a readable SentencePiece model: {err}") from None
        self._tags = tag_pieces(self._proto)
        self._ids = {p.piece: i for i, p in enumerate(self._proto.pieces)}
        self._literal_space = [self._ids[f"<0x{byte:02X}>"] for byte in SPACE.encode()]
        self.eos_id = _required(self, TURN_END, self._path)
        self.pad_id = _required(self, PAD, self._path)

    @property
    def vocab_size(self) -> int:
        return len(self._proto.pieces)

    @property
    def tags(self) -> dict[str, int]:
        return dict(self._tags)

    @functools.cached_property
    def fingerprint(self) -> str:
        pieces = [[p.piece, round(p.score, 4), p.type] for p in self._proto.pieces]
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._encode(text, self._tokenizer)

    def encode_data(self, text: str) -> list[int]:
        return self._encode(text, self._data_tokenizer)

    def _encode(self, text: str, processor: Any) -> list[int]:
        # A literal U+2581 would come back as a space, so it goes in as its bytes.
        first, *rest = clean_text(text).split(SPACE)
        ids = processor.encode(first)
        for part in rest:
            ids += self._literal_space + processor.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known(ids, self.vocab_size, self._tokenizer.decode)

    def token_id(self, piece: str) -> int | None:
        return self._ids.get(piece.replace(" ", SPACE))

    def definition(self) -> str:
        return to_tokenizer_json(self._proto).to_str()

    def save(self, directory: str | Path, chat_template: str | None = None) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.model").write_bytes(self._path.read_bytes())
        to_tokenizer_json(self._proto).save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
        }
        _write_config(directory, config, chat_template)


def _fingerprint(definition: dict[str, Any]) -> str:
    """Hash of a tokenizer.json's parts that decide ids; free of layout and of how merges are spelled."""
    model = dict(definition["model"])
    vocab = model.pop("vocab")
    # Two spellings are in use: "a b" and ["a", "b"].
    merges = "\0".join(m if isinstance(m, str) else " ".join(m) for m in model.pop("merges", []))
    parts = [definition.get(key) for key in ("normalizer", "pre_tokenizer", "decoder", "added_tokens")]
    digest = hashlib.sha256(json.dumps([model, *parts], sort_keys=True).encode())
    pieces = sorted(vocab, key=vocab.__getitem__)
    digest.update("\0".join(pieces).encode() + repr([vocab[p] for p in pieces]).encode() + merges.encode())
    return digest.hexdigest()


def _decode_known(ids: Sequence[int], size: int, decode: Any) -> str:
    ids = [int(i) for i in ids]
    if all(0 <= i < size for i in ids):
        return decode(ids)
    runs = re.finditer(r"(k+)|u", "".join("k" if 0 <= i < size else "u" for i in ids))
    return "".join(decode(ids[m.start() : m.end()]) if m[1] else "\ufffd" for m in runs)


def _write_config(directory: Path, config: dict[str, Any], chat_template: str | None) -> None:
    if chat_template is not None:
        config = {**config, "chat_template": chat_template}
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
