"""Whether this chat protocol and a model folder's own template agree, on a handful of telling conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from envace_jax.config import UserError
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Message, ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find <it> & say so",
        "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    },
}
CALL = ToolCall("look_up", {"id": 7, "note": 'a "b" \u00e9'})

CONVERSATIONS: dict[str, tuple[tuple[Message, ...], tuple[dict, ...]]] = {
    "user alone": ((Message("user", "Hello."),), ()),
    "system and tools": ((Message("system", "Be brief."), Message("user", "Hello.")), (TOOL,)),
    "calls and results": (
        (
            Message("user", "Look 7 up twice."),
            Message("assistant", "", "Two calls.", (CALL, CALL)),
            Message("tool", '{"ok": true}'),
            Message("tool", "[1, 2]"),
        ),
        (TOOL,),
    ),
    "old thinking": (
        (
            Message("user", "One."),
            Message("assistant", "First.", "Some thought."),
            Message("user", "Two."),
        ),
        (),
    ),
}


def official_template(folder: Path) -> str | None:
    """The Jinja template of a tokenizer folder: its own file, else the tokenizer configuration's; None if none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    template = config.get("chat_template") if isinstance(config, dict) else None
    return template if isinstance(template, str) else None


def render_template(template: str, messages: Sequence[Message], tools: Sequence[dict], thinking: bool) -> str:
    """What `transformers` would render, in a sandbox (a template from a model folder is somebody else's code)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda v, indent=None: json.dumps(v, ensure_ascii=False, indent=indent)
    return environment.from_string(template).render(
        messages=[_plain(m) for m in messages],
        tools=list(tools) or None,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
        ]
    return plain


def disagreements(chat: ChatFormat, template: str) -> Iterator[tuple[str, int]]:
    """Conversations whose ids differ, with the position of the first difference."""
    for name, (messages, tools) in CONVERSATIONS.items():
        theirs = chat.tokenizer.encode(render_template(template, messages, tools, chat.thinking))
        ours = chat.encode_prompt(messages, tools)
        if ours != theirs:
            same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            yield name, same


def template_findings(chat: ChatFormat, folder: Path) -> Iterator[tuple[str, str, bool | None]]:
    """(name, what was found, whether it is well) for `doctor`."""
    yield "tokenizer", f"{folder} ({chat.tokenizer.vocab_size} pieces, {chat.tokenizer.fingerprint[:12]})", True
    template = official_template(folder)
    if template is None:
        yield "chat template", "the folder has none; the protocol written here is used", None
        return
    try:
        found = list(disagreements(chat, template))
    except jinja2.TemplateError as e:
        raise UserError(f"{folder}: its chat template does not render: {e}") from e
    if not found:
        yield "chat template", f"ids agree with the folder's template on {len(CONVERSATIONS)} conversations", True
    for name, position in found:
        if chat.tool_docs == "none" and CONVERSATIONS[name][1]:
            yield "chat template", f"'{name}' leaves the tools out, as chat.tool_docs=none asks", None
            continue
        yield "chat template", f"'{name}' differs from id {position}: check chat.* against the serving side", False
