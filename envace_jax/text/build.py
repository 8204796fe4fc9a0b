"""From a configuration to the tokenizer and the chat format (no device needed)."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.text.chat import ChatFormat
from envace_jax.text.qwen3_files import qwen3_tokenizer_dir
from envace_jax.text.tokenizer import load_tokenizer


def tokenizer_folder(cfg: ConfigDict) -> Path:
    """Where the tokenizer lies: `model.tokenizer`, else the model's own folder."""
    if cfg.model.tokenizer == "qwen3":
        return qwen3_tokenizer_dir()
    place = cfg.model.tokenizer or cfg.model.path
    if not place:
        raise UserError("model.tokenizer='': expected a folder or 'qwen3' where model.path is empty")
    path = Path(place)
    return path if path.is_dir() else path.parent


def chat_format(cfg: ConfigDict) -> ChatFormat:
    """The chat format of the configuration."""
    place = cfg.model.tokenizer if cfg.model.tokenizer not in ("", "qwen3") else tokenizer_folder(cfg)
    return ChatFormat(
        load_tokenizer(place),
        thinking=cfg.chat.thinking,
        tool_docs=cfg.chat.tool_docs,
        old_thinking=cfg.chat.old_thinking,
    )
