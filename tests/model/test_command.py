"""`import` and `export` as a user calls them."""

from __future__ import annotations

import json

import jax
import pytest

from envace_jax import cli
from envace_jax.config import UserError
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.model.hf import load_params, save_params
from envace_jax.model.hf_folder import CHECKSUMS, verify_folder
from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import PRESETS, Qwen3Spec

SPEC = PRESETS["tiny"]


def test_a_set_that_the_arm_does_not_train_is_named(run_dir, tmp_path, capsys):
    folder, _ = run_dir
    assert cli.main(["export", str(folder), str(tmp_path / "model"), "--set", "rehearse"]) == 2
    assert "--set rehearse: learning.arm=envace trains policy" in capsys.readouterr().err


def test_a_damaged_record_of_a_run_is_named(run_dir, tmp_path, capsys):
    folder, _ = run_dir
    values = json.loads((folder / "config.json").read_text())
    for text, words in (
        ("{", "config.json: is not JSON"),
        ("[1]", "config.json: expected a JSON object"),
        (json.dumps(values | {"seed": "x"}), "config.json: seed='x' is not of the key's type"),
        (json.dumps(values | {"zzz": 1}), "config key 'zzz' is unknown"),
    ):
        (folder / "config.json").write_text(text)
        assert cli.main(["export", str(folder), str(tmp_path / "model")]) == 2
        assert words in capsys.readouterr().err


def test_an_export_that_cannot_be_written_is_one_line(run_dir, capsys):
    folder, _ = run_dir
    assert cli.main(["export", str(folder), "/proc/model"]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1 and err[0].startswith("envace_jax: /proc")


def test_export_of_a_run_is_a_whole_model_folder(run_dir, tmp_path, capsys, monkeypatch):
    folder, params = run_dir
    out = tmp_path / "model"
    shapes, restore = [], Checkpoints.restore

    def spy(self, step, like, **options):
        shapes.append(like["policy"]["params"])
        return restore(self, step, like, **options)

    monkeypatch.setattr(Checkpoints, "restore", spy)
    assert cli.main(["export", str(folder), str(out), "--dtype", "float32"]) == 0
    assert "step 3" in capsys.readouterr().out
    assert verify_folder(out) >= 6
    back = load_params(out, Qwen3Spec.from_hf_config(out))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, back))
    embed = shapes[0]["embed"]  # restored over all devices, none of which holds it whole
    assert embed.sharding.shard_shape(embed.shape) == (SPEC.vocab_size, SPEC.d_model // len(jax.devices()))
    card = (out / "README.md").read_text()
    assert "BFCL multi-turn" in card and "feedbeef" in card and "0.75" in card and "3 updates" in card
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "hi" in text and "<|im_end|>" in text
    # Once more into the same place: refused, unless it is asked for.
    assert cli.main(["export", str(folder), str(out)]) == 2
    assert cli.main(["export", str(folder), str(out), "--overwrite"]) == 0


def test_export_keeps_the_base_model_s_sampling_values(run_dir, tmp_path):
    folder, _ = run_dir
    base = tmp_path / "base"
    base.mkdir()
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 7]}
    (base / "generation_config.json").write_text(json.dumps(wanted))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model.path": str(base)}))
    assert cli.main(["export", str(folder), str(tmp_path / "model")]) == 0
    assert json.loads((tmp_path / "model/generation_config.json").read_text()) == wanted
    assert "generation_config.json" in (tmp_path / "model" / CHECKSUMS).read_text()


def test_export_says_what_is_missing(run_dir, tmp_path, capsys):
    folder, _ = run_dir
    assert cli.main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "no config.json" in capsys.readouterr().err
    assert cli.main(["export", str(folder), str(tmp_path / "out"), "--step", "2"]) == 2
    assert "step_00000002" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.quick
def test_import_checks_and_converts(tmp_path, capsys):
    source = save_params(tmp_path / "source", init_params(SPEC, jax.random.key(0)), SPEC, dtype="F32")
    assert cli.main(["import", str(source), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "checked" in capsys.readouterr().out
    assert (tmp_path / "out" / CHECKSUMS).exists()
    assert cli.main(["import", str(tmp_path / "no"), str(tmp_path / "other")]) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        cli.main(["import", str(source), str(tmp_path / "other"), "--shard_gb", "0"])
    assert e.value.code == 2
    assert not (tmp_path / "other").exists() and not (tmp_path / "other.partial").exists()


@pytest.mark.quick
def test_import_refuses_values_that_are_not_finite(tmp_path):
    from envace_jax.model.hf import import_folder

    params = init_params(SPEC, jax.random.key(0))
    params["final_norm"] = params["final_norm"].at[3].set(float("nan"))
    source = save_params(tmp_path / "source", params, SPEC)
    with pytest.raises(UserError, match=r"'model.norm.weight' holds NaN"):
        import_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
