"""The limit on first prompts."""

from __future__ import annotations

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.rehearsal.fit import head_tokens, within_limit

pytestmark = pytest.mark.quick


def test_long_heads_are_left_out_and_counted(chat) -> None:
    tasks = generate_tasks("train", 30)
    sizes = sorted(head_tokens(t, chat) for t in tasks)
    limit = sizes[len(sizes) // 2]
    said: list[str] = []
    kept = within_limit(tasks, chat, limit, "training", said.append)
    assert all(head_tokens(t, chat) <= limit for t in kept)
    assert len(kept) == sum(s <= limit for s in sizes)
    assert len(kept) == len(tasks) or str(len(tasks) - len(kept)) in said[0]
    with pytest.raises(UserError, match=r"data\.max_head_tokens=1"):
        within_limit(tasks, chat, 1, "training", said.append)
