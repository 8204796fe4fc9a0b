"""Warm start: what is learnt from a demonstration, and that learning it works."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
from pathlib import Path

import jax
import numpy as np
import pytest
from learning_common import tiny_config

from envace_jax.build import chat_format, load_model
from envace_jax.config import UserError
from envace_jax.datasets.sources import load_tasks
from envace_jax.datasets.traces import episode_from_task
from envace_jax.learning import warmstart
from envace_jax.learning.metrics import Display
from envace_jax.learning.warmstart import demonstration_rows, row_stream, variants, warm_started, with_wrong_call
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.teacher import teacher_rows
from envace_jax.worldbook.build import BuildConfig, build_worldbook
from envace_jax.worldbook.store import save_worldbook


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return tiny_config(
        tmp_path_factory.mktemp("w"),
        **{"warmstart.steps": 3, "warmstart.batch_rows": 6, "warmstart.lr": 1e-2, "learning.row_tokens": 400},
    )


@pytest.fixture(scope="module")
def parts(cfg):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).resolve().parents[2])
        chat = chat_format(cfg)
        tasks, _ = load_tasks(cfg.data)
        spec, params = load_model(cfg, chat, None)
    return tasks, chat, spec, params


def test_targets_are_the_teachers(cfg, parts):
    tasks, chat, _, _ = parts
    episode = EpisodeConfig.from_config(cfg)
    quiet = dataclasses.replace(episode, checks=())
    for task in tasks[:4]:
        rows = demonstration_rows(task, chat, quiet, "oracle", random.Random(0))
        want = teacher_rows(task, chat, quiet)
        assert [tuple(r.ids) for r in rows] == [r.ids for r in want]
        assert [tuple(r.sampled) for r in rows] == [r.sampled for r in want]
        assert {int(r.role[0]) for r in rows} == {0, 1}


def test_a_wrong_call_is_seen_but_not_learnt(cfg, parts, monkeypatch):
    tasks, chat, _, _ = parts
    monkeypatch.setattr(warmstart, "WRONG_SHARE", 1.0)
    # room for the call that is made twice: the tiny configuration's caps would cut the longer dialogues
    episode = dataclasses.replace(
        EpisodeConfig.from_config(cfg), max_acts=30, max_segments=200, max_input_tokens=2000
    )
    seen = 0
    for k, task in enumerate(tasks):
        messages, number = with_wrong_call(task, random.Random(k))
        if number is None:
            continue
        right = sum(int(r.sampled.sum()) for r in demonstration_rows_of(task, chat, episode) if r.role[0] == 0)
        rows = demonstration_rows(task, chat, episode, "oracle", random.Random(k))
        act = [r for r in rows if r.role[0] == 0]
        assert sum(int(r.sampled.sum()) for r in act) == right
        text = "".join(chat.tokenizer.decode(r.ids.tolist()) for r in act)
        assert "error" in text
        assert sum(m.role == "assistant" for m in messages) == sum(m.role == "assistant" for m in task.messages) + 1
        seen += 1
    assert seen >= 4


def demonstration_rows_of(task, chat, episode):
    return demonstration_rows(task, chat, dataclasses.replace(episode, checks=()), "oracle", random.Random(0))


def test_every_context_and_grounding_is_seen(cfg, parts):
    tasks, chat, _, _ = parts
    assert len(variants(cfg)) == 6 and variants(cfg)[0] == ("stateless", "oracle")
    a = list(itertools.islice(row_stream(cfg, tasks, chat, 400, 0), 50))
    b = list(itertools.islice(row_stream(cfg, tasks, chat, 400, 0), 50))
    assert all((x.ids == y.ids).all() for x, y in zip(a, b))
    with pytest.raises(UserError, match="learning.row_tokens=10"):
        next(row_stream(cfg, tasks, chat, 10, 0))


def test_it_learns_and_is_made_once(cfg, parts, tmp_path, monkeypatch):
    tasks, chat, spec, params = parts
    out = io.StringIO()
    display = Display(3, enabled=False, file=out)
    first = warm_started(cfg, tmp_path, tasks, chat, spec, params, None, display)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(params)))
    assert "warm start 3/3" in out.getvalue()
    monkeypatch.setattr(warmstart, "warm_start", None)
    again = warm_started(cfg, tmp_path, tasks, chat, spec, params, None, display)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, again)


def test_demonstrations_under_a_worldbook_show_its_brief(cfg, parts, tmp_path):
    """Warm-starting under the grounding that the run will have: both roles' rows, REHEARSE's with what is recorded."""
    tasks, chat, _, _ = parts
    book = build_worldbook([episode_from_task(t) for t in tasks[:6]], config=BuildConfig(folds=0, symbolic=False))
    save_worldbook(book, tmp_path / "wb")
    episode = dataclasses.replace(EpisodeConfig.from_config(cfg), checks=(), max_input_tokens=1500)
    rows = demonstration_rows(tasks[0], chat, episode, "worldbook", random.Random(0), str(tmp_path / "wb"))
    shown = [chat.tokenizer.decode([int(i) for i in row.ids]) for row in rows if int(row.role[0]) == 1]
    assert shown and all("# Recorded elsewhere" in text or "# Example" in text for text in shown)
    with pytest.raises(UserError, match="needs a worldbook folder"):
        demonstration_rows(tasks[0], chat, episode, "worldbook", random.Random(0))
