"""SentencePiece BPE models that give text back unchanged: training, checking, and conversion to a tokenizer.json.

At its defaults SentencePiece normalises text (NFKC), drops newlines and double spaces, and adds a space in front. The
models made here do none of that; every character outside the vocabulary falls back to its UTF-8 bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from envace_jax.config import UserError
from envace_jax.text.transcript import clean_text

_ModelProto: Any = vars(sentencepiece_model_pb2)["ModelProto"]  # made at run time by protobuf

SPACE = "\u2581"  # SentencePiece writes a space as this character inside pieces
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # ModelProto.SentencePiece.Type
CHAT_TAGS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def train_sentencepiece(
    texts: Iterable[str],
    path: str | Path,
    vocab_size: int,
    tags: Sequence[str] = CHAT_TAGS,
    *,
    split_digits: bool = True,
    split_by_whitespace: bool = False,
    split_by_script: bool = True,
    space_as_suffix: bool = False,
    max_piece_length: int = 16,
) -> int:
    """Train a byte-fallback BPE model on `texts`, write it to `path` (".model") and return its number of pieces.

    Each of `tags` is one piece. A newline is always a piece of its own, so that no piece reaches over the end of a
    line and spans of ids can be cut there. With `split_by_script` no piece joins letters and punctuation; without it
    a whole JSON skeleton can be one piece, up to the space before a number when `space_as_suffix` lets pieces end, not
    begin, with a space. The result depends on the texts and their order alone. The model may have fewer than
    `vocab_size` pieces when the texts do not hold more.

    Raises UserError when `vocab_size` cannot even hold the tags, the 256 bytes and the characters of the texts.
    """
    symbols = [*dict.fromkeys(tags), "\n"]
    # A literal U+2581 would count as a space; the tokenizer encodes it by its bytes.
    sentences = [clean_text(text).replace(SPACE, " ") for text in texts]
    sentences = [text for text in sentences if text]
    if not sentences:
        raise UserError("train_sentencepiece: there is no text to train on")
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=out,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            character_coverage=1.0,
            split_digits=split_digits,
            split_by_whitespace=split_by_whitespace,
            split_by_unicode_script=split_by_script,
            treat_whitespace_as_suffix=space_as_suffix,
            allow_whitespace_only_pieces=True,
            max_sentencepiece_length=max_piece_length,
            max_sentence_length=1 << 24,
            user_defined_symbols=symbols,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as err:
        raise UserError(f"train_sentencepiece: vocab_size={vocab_size} does not work for these texts: {err}") from None
    proto = read_model(out.getvalue(), str(path))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(out.getvalue())
    return len(proto.pieces)


def read_model(raw: bytes, where: str) -> Any:
    """The ModelProto in `raw`, checked with `check_lossless`."""
    proto = _ModelProto.FromString(raw)
    check_lossless(proto, where)
    return proto


def check_lossless(proto: Any, where: str) -> None:
    """Raise UserError, naming the setting, unless the model gives every text back unchanged."""
    spec, bad = proto.normalizer_spec, []
    if spec.precompiled_charsmap or spec.name not in ("identity", ""):
        bad.append(f"normalization_rule_name={spec.name or 'set'!r} (must be 'identity')")
    if spec.add_dummy_prefix:
        bad.append("add_dummy_prefix=True")
    if spec.remove_extra_whitespaces:
        bad.append("remove_extra_whitespaces=True")
    if not proto.trainer_spec.byte_fallback:
        bad.append("byte_fallback=False")
    if proto.trainer_spec.model_type != 2:
        bad.append("model_type is not 'bpe'")
    if bad:
        raise UserError(
            f"{where}: this SentencePiece model does not give text back unchanged: {'; '.join(bad)}. "
            "Train one with envace_jax.text.tokenizer.train_sentencepiece."
        )


def tag_pieces(proto: Any) -> dict[str, int]:
    """Pieces that are tags (user-defined, not mere white space) and their ids."""
    return {p.piece: i for i, p in enumerate(proto.pieces) if p.type == USER_DEFINED and p.piece.strip()}


def without_tags(proto: Any) -> bytes:
    """The same model, same ids, in which no text is ever read as a tag."""
    copy = _ModelProto()
    copy.CopyFrom(proto)
    for index in tag_pieces(proto).values():
        copy.pieces[index].type = CONTROL
    return copy.SerializeToString()


def to_tokenizer_json(proto: Any) -> Any:
    """The `tokenizers.Tokenizer` that gives the same ids as the SentencePiece model.

    SentencePiece joins, again and again, the neighbours whose union is the piece of best score, leftmost first.
    The list of merges holds every way to cut each piece in two, in order of score. A space stays a space in the
    vocabulary, so that a literal U+2581 in a text remains itself (through byte fallback).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tags = tag_pieces(proto)
    vocab = {p.piece if p.type == BYTE else p.piece.replace(SPACE, " "): i for i, p in enumerate(proto.pieces)}
    normal = {p.piece.replace(SPACE, " "): p.score for p in proto.pieces if p.type == 1}
    if len(vocab) != len(proto.pieces):
        raise UserError("two SentencePiece pieces differ only by U+2581 and a space: cannot be converted")
    merges: list[tuple[str, str]] = []
    for piece in sorted(normal, key=lambda p: -normal[p]):
        merges += [
            (piece[:cut], piece[cut:])
            for cut in range(len(piece) - 1, 0, -1)
            if piece[:cut] in normal and piece[cut:] in normal
        ]
    unknown = next((p.piece for p in proto.pieces if p.type == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    turn = [tag for tag in tags if tag.startswith("<|")]
    tokenizer.add_special_tokens([AddedToken(tag, normalized=False, special=True) for tag in turn])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in tags if t not in turn])
    return tokenizer
