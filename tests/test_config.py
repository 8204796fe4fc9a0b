"""The configuration tree: every mistake is found at once, by name, before anything is compiled."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.config import UserError, apply_preset, default_config, flat, set_key
from envace_jax.config_checks import CHECKS, UNCHECKED, problems, validate
from envace_jax.config_file import load_module

pytestmark = pytest.mark.quick
CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.py"))


def test_the_default_holds_and_every_check_names_a_key() -> None:
    cfg = default_config()
    assert problems(cfg) == []
    assert set(CHECKS) <= {name for name, _ in flat(cfg)}


def test_every_key_that_is_no_switch_is_checked_or_named_as_free() -> None:
    leaves = {name for name, value in flat(default_config()) if not isinstance(value, bool)}
    assert leaves == set(CHECKS) | set(UNCHECKED) and not set(CHECKS) & set(UNCHECKED)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("learning.lr", ("inf", "nan", "-1")),
        ("learning.beta1", ("7", "1", "-0.1")),
        ("learning.beta2", ("1.0",)),
        ("learning.entropy_coef", ("-1",)),
        ("evaluation.samples", ("0",)),
        ("evaluation.top_p", ("0", "1.1")),
        ("warmstart.batch_rows", ("0",)),
        ("warmstart.lr", ("-1", "inf")),
        ("warmstart.tasks", ("-4",)),
        ("profile_steps", ("abc", "5-3", "0")),
        ("model.size", ("17b", "")),
        ("plan.topology", ("v5p:2x2", "v5p", "h100:0")),
        ("rollout.top_p", ("0",)),
        ("rewards.policy.top_p", ("0", "2")),
        ("rewards.policy.temperature", ("-1", "inf")),
        ("rewards.policy.max_tokens", ("0",)),
        ("rewards.policy.devices", ("-1",)),
        ("rewards.endpoint.temperature", ("nan",)),
        ("rewards.endpoint.base_url", ("judge.local", "https://")),
        ("rewards.endpoint.api_key_env", ("", "sk-123")),
        ("rollout.simulator.top_p", ("0",)),
        ("rollout.simulator.requests_per_minute", ("-1",)),
        ("rollout.simulator.tokens_per_minute", ("-1",)),
        ("data.source", ("quickstart+quickstart", "", "bfcl+bfcl+tau2")),
        ("preset", ("none",)),
    ],
)
def test_values_that_cannot_be_meant(key: str, values: tuple[str, ...]) -> None:
    kind = type(dict(flat(default_config()))[key])
    for value in values:
        cfg = default_config()
        set_key(cfg, key, kind(value))
        assert any(p.startswith(f"{key}=") and "expected" in p for p in problems(cfg)), value


def test_none_is_no_value() -> None:
    cfg = default_config()
    cfg.model.path = None
    cfg.learning.steps = None
    assert {p.partition("=")[0] for p in problems(cfg)} == {"model.path", "learning.steps"}


def test_missing_files_show_beside_wrong_values() -> None:
    cfg = default_config()
    cfg.model.path, cfg.learning.lr, cfg.rollout.grounding = "/nowhere", -1.0, "worldbook"
    assert {p.partition("=")[0] for p in problems(cfg)} == {"model.path", "learning.lr", "rollout.worldbook"}


def test_data_that_no_source_reads_is_refused() -> None:
    cfg = default_config()
    cfg.data.path, cfg.data.eval_path = "data/cm2/example.jsonl", "data/README.md"
    assert [p.partition("=")[0] for p in problems(cfg)] == ["data.path", "data.eval_path"]
    for source in ("quickstart+cm2", "traces"):
        cfg.data.source = source
        assert not problems(cfg)
    cfg.data.source = "cm2+traces"
    assert ["would both read data.path" in p for p in problems(cfg)] == [True]


@pytest.mark.parametrize("key", CHECKS)
def test_every_checked_key_refuses_nonsense_and_is_named(key: str) -> None:
    cfg = default_config()
    with cfg.ignore_type():
        set_key(cfg, key, "no such value" if isinstance(dict(flat(cfg))[key], str) else -7)
    assert any(p.startswith(f"{key}=") and "expected" in p for p in problems(cfg)), problems(cfg)


def test_all_problems_come_in_one_message() -> None:
    cfg = default_config()
    cfg.learning.lr = -1.0
    cfg.rollout.top_p = float("nan")
    cfg.learning.arm = "envase"
    with pytest.raises(UserError) as e:
        validate(cfg)
    assert all(key in str(e.value) for key in ("learning.lr=-1.0", "rollout.top_p=nan", "learning.arm='envase'"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.path": "/nowhere"}, "model.path='/nowhere': no such file"),
        ({"data.source": "cm2"}, "needs the CM2 file"),
        ({"data.source": "traces"}, "needs a file or folder of traces"),
        ({"rollout.control": "device"}, "needs 'stream'"),
        ({"rollout.grounding": "worldbook"}, "needs a worldbook folder"),
        ({"rewards.judge": "endpoint"}, "needs the judge's address"),
        (
            {"rewards.judge": "endpoint", "rewards.endpoint.base_url": "http://x"},
            "rewards.endpoint.model='': rewards.judge=endpoint needs the name of a model",
        ),
        ({"learning.arm": "act_only_endpoint"}, "rollout.simulator.base_url='': "),
        ({"learning.arm": "act_only_endpoint"}, "rollout.simulator.model='': "),
        ({"rewards.judge": "policy"}, "needs a model folder"),
        ({"rewards.policy.devices": 2}, "rewards.policy.devices=2: only rewards.judge=policy has devices of its own"),
        ({"learning.row_tokens": 100}, "the longest ledger"),
    ],
)
def test_keys_that_need_each_other(changes: dict, message: str) -> None:
    cfg = default_config()
    for key, value in changes.items():
        set_key(cfg, key, value)
    assert any(message in p for p in problems(cfg))


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'learning.kl_coef'"):
        set_key(default_config(), "learning.kl_coeff", 1)
    with pytest.raises(UserError, match="is unknown"):
        set_key(default_config(), "learning.lr.x", 1)


def test_presets_change_named_options_only() -> None:
    base = dict(flat(default_config()))

    def differences(name: str) -> dict:
        cfg = default_config()
        cfg.preset = name
        return {k: v for k, v in flat(apply_preset(cfg)) if v != base[k]}

    assert differences("default") == {}
    reference = differences("reference_code")
    assert reference["learning.kl_coef"] == 0.0 and reference["learning.loss_mean"] == "sequence"
    assert reference["rollout.on_invalid_call"] == "terminate" and reference["chat.old_thinking"] == "keep"
    assert reference["rollout.cap_acts"] == "between_turns" and reference["evaluation.every"] == 10
    assert differences("paper")["rollout.rehearse_tag"] == "execution_result"
    for name in ("paper", "reference_code"):  # the published judge, and avg@4
        found = differences(name)
        assert (found["rewards.judge"], found["rewards.endpoint.model"]) == ("endpoint", "Qwen/Qwen3-30B-A3B")
        assert found["evaluation.samples"] == 4
    cfg = default_config()
    cfg.preset = "papper"
    with pytest.raises(UserError, match="preset='papper'"):
        apply_preset(cfg)


def test_overrides_are_typed_and_stand_above_the_preset() -> None:
    cfg = cli.load_config(None, ["--config.preset=reference_code", "--config.learning.kl_coef=0.5"])
    assert cfg.learning.kl_coef == 0.5 and cfg.learning.loss_mean == "sequence"
    for bad in ("--config.learning.lr=fast", "--config.learning.steps=1.5", "--config.nothing=1", "--config.seed"):
        with pytest.raises(UserError):
            cli.load_config(None, [bad])


@pytest.mark.parametrize("file", CONFIGS, ids=lambda p: p.stem)
def test_every_config_file_opens_with_its_command_and_holds(file: Path) -> None:
    text = file.read_text()
    head = text.split('"""')[1]
    named = file.relative_to(Path(__file__).parents[1]).as_posix()
    assert named in head, "the docstring names the command that runs it"
    for word in ("Hardware", "Expect"):
        assert word in head, f"the docstring says '{word}…'"
    if file.parent.name == "studies":  # what they hold has tests of its own
        return
    cfg = cli.load_config(str(file))
    left = [p for p in problems(cfg) if "no such file" not in p and "needs" not in p]
    assert left == []


RECORD = [f for f in CONFIGS if f.name.startswith("qwen3_")]
GIVEN = {"FOLDER": "data/quickstart/model", "FILE": "data/cm2/example.jsonl"}


@pytest.mark.parametrize("file", RECORD, ids=lambda p: p.stem)
def test_every_command_of_a_configuration_of_record_holds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder and a file in their places, nothing is missing; the judge and the evaluations are what was said."""
    monkeypatch.chdir(Path(__file__).parents[1])
    head = load_module(str(file), "get_config").__doc__
    lines = [line for line in re.sub(r"\\\n\s*", "", head).splitlines() if " --config " in line]
    assert [re.search(r"\b(plan|train)\b", line)[0] for line in lines] == ["plan", "train"]
    for line in lines:
        words = shlex.split(line)
        at = words.index("--config")
        values = [re.sub("|".join(GIVEN), lambda m: GIVEN[m[0]], word) for word in words[at + 2 :]]
        cfg = cli.load_config(words[at + 1], values)
        validate(cfg, cli.COMMANDS[words[at - 1]].unread)
    assert (cfg.data.source, cfg.data.path) == ("cm2", GIVEN["FILE"])
    assert (cfg.rewards.judge, cfg.rewards.endpoint.model) == ("endpoint", "Qwen/Qwen3-30B-A3B")
    assert cfg.evaluation.every and cfg.evaluation.at_start and cfg.evaluation.at_end


def run(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "envace_jax", *argv], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )


def test_help_and_version_exit_0() -> None:
    assert run("--help").returncode == 0
    assert run("--version").stdout.strip()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as e:
        cli.run([command, "--help"])
    assert e.value.code == 0
    assert cli.COMMANDS[command].help.split()[0] in capsys.readouterr().out


def test_mistakes_are_one_message_and_status_2(capsys: pytest.CaptureFixture) -> None:
    for argv in (["trian"], ["train", "--config", "configs/none.py"], ["config", "--config.seed=x"]):
        assert cli.main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("envace_jax: ") and "Traceback" not in err and len(err.splitlines()) <= 3
    assert cli.main([]) == 2


def test_all_unknown_keys_of_a_command_line_are_named() -> None:
    with pytest.raises(UserError) as e:
        cli.load_config(None, ["--config.learning.lrr=1", "--config.seed=2", "--config.zzzzzzz=3"])
    assert "'learning.lrr' is unknown; did you mean 'learning.lr'?" in str(e.value)
    assert "'zzzzzzz' is unknown; `envace_jax config` lists the keys" in str(e.value)


def test_a_value_that_stands_apart_is_told_how_to_stand(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["train", "--config.learning.lr", "1e-6"]) == 2
    assert "--config.learning.lr=VALUE" in capsys.readouterr().err


def test_a_dry_run_is_offered_where_there_is_one(capsys: pytest.CaptureFixture) -> None:
    able = {name for name, command in cli.COMMANDS.items() if "--dry_run" in cli.build_parser(name).format_help()}
    assert able == {"train", "warmstart"}
    assert cli.main(["rollout", "--out", "x", "--config.dry_run=true"]) == 2
    assert "'rollout' has no dry run; train and warmstart have" in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        cli.main(["show", "0", "--dry_run"])
    assert e.value.code == 2


def test_a_disk_that_refuses_is_one_line(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "/there/out")

    monkeypatch.setattr(cli, "run_config", refuse)
    assert cli.main(["config"]) == 2
    assert capsys.readouterr().err == "envace_jax: /there/out: Permission denied\n"


def test_mistakes_are_found_without_importing_jax() -> None:
    code = (
        "import sys; from envace_jax.cli import main; status = main(sys.argv[1:]);"
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--config.learning.lr=-1"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 2 and "learning.lr=-1.0" in done.stderr


def test_the_resolved_tree_is_printed_as_json(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["config", "--config.seed=3"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 3


def test_every_reward_option_is_read_somewhere() -> None:
    """An option that nothing reads promises what is not there."""
    package = Path(cli.__file__).parent
    source = "\n".join(p.read_text() for p in package.rglob("*.py") if p.name != "config.py")
    for name, _ in flat(default_config().rewards):
        leaf = name.rpartition(".")[2]
        assert re.search(rf"\b{leaf}\b", source), f"rewards.{name}"
