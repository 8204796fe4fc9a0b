"""The quickstart model's warm start can also show self-evaluations and memories."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from envace_jax.cli import load_config
from envace_jax.datasets.quickstart import make_model
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.text.build import chat_format

ROOT = Path(__file__).parents[2]


@pytest.mark.quick
def test_reviews_are_an_option_and_change_nothing_without(monkeypatch):
    monkeypatch.chdir(ROOT)
    cfg = load_config("configs/quickstart.py")
    chat, episode = chat_format(cfg), EpisodeConfig.from_config(cfg)
    plain = dataclasses.replace(make_model.PHASES[1], tasks=20)
    assert all(phase.reviews == 0.0 for phase in make_model.PHASES)
    tasks = [make_model.generate_task("train", number) for number in range(plain.tasks)]
    phase = dataclasses.replace(plain, reviews=1.0)
    rows = make_model.review_rows_of(phase, tasks, chat, episode, 0)
    said = [chat.tokenizer.decode([i for i, s in zip(row.ids.tolist(), row.sampled) if s]) for row in rows]
    assert any(text.startswith("good") for text in said) and any(text.startswith("bad") for text in said)
    assert all(len(row.ids) <= phase.row_tokens for row in rows)
    assert not make_model.review_rows_of(plain, tasks, chat, episode, 0)
    first = [row.ids.tolist() for row in next(make_model.batches(plain, chat, episode, 0))]
    again = [row.ids.tolist() for row in next(make_model.batches(dataclasses.replace(plain), chat, episode, 0))]
    assert first == again
