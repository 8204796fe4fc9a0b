"""Tasks whose first prompt is longer than the configuration allows are left out, and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Message


def head_tokens(task: Task, chat: ChatFormat) -> int:
    """Tokens of ACT's first prompt: system text, tools as the chat format shows them, first user message."""
    messages = [] if task.system is None else [Message("system", task.system)]
    return len(chat.head_ids([*messages, Message("user", task.user_turns[0])], task.tools))


def within_limit(
    tasks: Sequence[Task], chat: ChatFormat, limit: int, name: str, say: Callable[[str], None]
) -> list[Task]:
    """Tasks with heads of at most `limit` tokens (data.max_head_tokens); says how many were left out.

    Raises:
        UserError: when none is left of some.
    """
    kept = [task for task in tasks if task.user_turns and head_tokens(task, chat) <= limit]
    if tasks and not kept:
        raise UserError(f"data.max_head_tokens={limit}: every {name} task has a longer first prompt; raise the limit")
    if len(kept) < len(tasks):
        say(f"{len(tasks) - len(kept)} of {len(tasks)} {name} tasks left out: first prompt over {limit} tokens")
    return kept
