"""Parts of a run from a configuration: what is refused before it is built."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from envace_jax import build
from envace_jax.config import UserError, default_config
from envace_jax.config_checks import problems
from envace_jax.datasets.cm2 import read_tasks
from envace_jax.learning.learner import update_config
from envace_jax.learning.step import Update
from envace_jax.model.hf import save_params
from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import PRESETS
from envace_jax.serving.command import within_positions

pytestmark = pytest.mark.quick


def test_cache_bytes_by_hand():
    """2 * 2 layers * (4 lanes + 6 shelf rows) * (30 + 20) tokens * KV heads * head size * 4 bytes."""
    cfg, spec = default_config(), PRESETS["tiny"]
    cfg.model.dtype = "float32"
    cfg.rollout.slots, cfg.rollout.live_episodes, cfg.rollout.max_input_tokens = 4, 6, 30
    cfg.rollout.max_act_tokens, cfg.rollout.max_rehearse_tokens = 20, 10
    assert build.cache_bytes(cfg, spec) == 2 * spec.n_layers * 10 * 50 * spec.n_kv_heads * spec.head_dim * 4


def test_every_parameter_set_and_device_control_have_rows_of_their_own():
    cfg, spec = default_config(), PRESETS["tiny"]
    cfg.rollout.slots, cfg.rollout.live_episodes = 4, 6
    row = build.cache_bytes(cfg, spec) / (4 + 6)
    assert build.cache_bytes(cfg, spec, sets=2) == 20 * row
    cfg.rollout.control = "device"
    assert build.cache_bytes(cfg, spec) == (4 + 6 + 4 * 2) * row


def test_guesses_of_the_engine_are_those_of_the_configuration():
    cfg = default_config()
    cfg.rollout.draft = 5
    assert build.engine_config(cfg).draft == 5 and build.engine_config(default_config()).draft == 0
    assert not problems(cfg)
    cfg.rollout.chunk = 5
    assert problems(cfg) == ["rollout.draft=5: expected less than rollout.chunk=5"]
    cfg.rollout.chunk, cfg.rollout.control, cfg.rollout.context, cfg.chat.old_thinking = 16, "device", "stream", "keep"
    assert problems(cfg) == ["rollout.draft=5: rollout.control=device needs 0"]


def test_a_cache_that_has_no_room_is_refused_with_the_keys(monkeypatch):
    """A host would kill the process without a word."""
    cfg, spec = default_config(), PRESETS["tiny"]
    need = build.cache_bytes(cfg, spec) * build.CPU_COPIES
    monkeypatch.setattr(build, "free_bytes", lambda devices: need)
    build.check_cache(cfg, spec, None)
    monkeypatch.setattr(build, "free_bytes", lambda devices: need - 1)
    with pytest.raises(UserError, match=r"rollout.slots=64: .* 20000 tokens .* lower rollout.max_input_tokens"):
        build.check_cache(cfg, spec, None)
    monkeypatch.setattr(build, "free_bytes", lambda devices: None)  # nobody tells
    build.check_cache(cfg, spec, None)


@pytest.mark.parametrize(("positions", "limits"), [(40_960, (12_000, 8_000)), (1_024, (768, 256)), (2, (1, 1))])
def test_served_rows_end_where_the_model_s_positions_do(positions, limits):
    cfg = default_config()
    within_positions(cfg, positions)
    assert (cfg.rollout.max_input_tokens, cfg.rollout.max_act_tokens) == limits
    assert cfg.rollout.max_rehearse_tokens == cfg.rollout.max_act_tokens and build.longest_row(cfg) <= positions


def test_the_example_of_the_record_format_holds():
    tasks, bad = read_tasks("data/cm2/example.jsonl")
    assert [task.uuid for task in tasks] == ["example-0", "example-1"]
    assert not bad.count and all(item.rule for t in tasks for v in t.checklists for turn in v for item in turn)


def test_an_exchange_that_a_cpu_has_not_is_refused_and_reaches_the_learner_elsewhere(monkeypatch):
    cfg = default_config()
    cfg.model.tokenizer, cfg.model.moe_exchange = "data/quickstart/tokenizer", "ragged"
    chat = build.chat_format(cfg)
    with pytest.raises(UserError, match="model.moe_exchange=ragged: .* expected gather"):
        build.checked_spec(cfg, chat)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    spec = build.checked_spec(cfg, chat)
    assert Update(spec, update_config(cfg)).options.moe_exchange == "ragged"


def test_reading_weights_is_shown_unless_progress_is_off(tmp_path, capsys):
    spec = dataclasses.replace(PRESETS["tiny"], vocab_size=768)  # the tokenizer's
    folder = save_params(tmp_path / "base", init_params(spec, jax.random.key(0)), spec)
    cfg = default_config()
    cfg.model.path, cfg.model.tokenizer = str(folder), "data/quickstart/tokenizer"
    for shown in (True, False):
        cfg.metrics.progress = shown
        _, params = build.load_model(cfg, build.chat_format(cfg), None)
        said = capsys.readouterr()
        assert ("reading" in said.err) == shown and not said.out
    assert params["embed"].dtype == jnp.float32
