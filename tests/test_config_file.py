"""Configuration files: what they do wrong is said by key and line, and a preset is ground for their own values."""

from __future__ import annotations

from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.config import UserError, default_config, flat

pytestmark = pytest.mark.quick
HEAD = "from envace_jax.config import default_config\nfrom envace_jax.config_file import start_from\n\n\n"


def write(folder: Path, *body: str, name: str = "mine.py") -> str:
    """A configuration file with these lines in `get_config`, which begin at line 7."""
    lines = "".join(f"    {line}\n" for line in body)
    path = folder / name
    path.write_text(f"{HEAD}def get_config():\n    c = default_config()\n{lines}")
    return str(path)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (("c.learning.lrr = 1", "return c"), ("'learning.lrr' is unknown", "did you mean 'learning.lr'", "line 7")),
        (("part = c.rewards.endpoint", "part.modell = ''", "return c"), ("'rewards.endpoint.modell'", "line 8")),
        (("c.learning.update({'lrr': 1})", "return c"), ("'learning.lrr' is unknown",)),
        (("c.update({'learning': {'lrr': 1}})", "return c"), ("'learning.lrr' is unknown",)),
        (("x = c.rollout['slotz']", "return c"), ("'rollout.slotz' is unknown",)),
        (("c.learning.steps = 'a'", "return c"), ("learning.steps='a'", "type int")),
        (("c.rollout.checks = 'format'", "return c"), ("rollout.checks='format'", "type tuple")),
        (("c.learning = 3", "return c"), ("learning=3", "section")),
        (("return {}['absent']",), ("KeyError: 'absent'", "line 7")),
        (("return 3",), ("returned int", "default_config()")),
        (("return None",), ("returned NoneType",)),
        (("return c.learning",), ("config key 'arm' is unknown", "more)")),
        (("with c.unlocked():", "    del c.learning.lr", "return c"), ("'learning.lr' is missing",)),
        (("with c.unlocked():", "    c.lerning = 1", "return c"), ("'lerning' is unknown",)),
        (("import sys", "sys.exit(3)"), ("sys.exit", "line 8")),
    ],
)
def test_what_a_file_does_wrong_is_one_message(
    body: tuple, expected: tuple, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = write(tmp_path, *body)
    assert cli.main(["config", "--config", path]) == 2
    message = capsys.readouterr().err
    assert path in message and all(part in message for part in expected), message
    assert "Traceback" not in message and len(message.splitlines()) == 1


def test_a_file_that_ends_the_program_where_it_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "exits.py"
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match="exits.py, line 2: the file ended the program"):
        cli.load_config(str(path))


def test_a_file_that_another_one_starts_from_is_named(tmp_path: Path) -> None:
    write(tmp_path, "c.learning.lrr = 1", "return c", name="base.py")
    path = write(tmp_path, "return start_from(__file__, 'base.py')")
    with pytest.raises(UserError, match=r"base\.py, line 7: config key 'learning\.lrr' is unknown"):
        cli.load_config(path)


def test_a_preset_of_a_file_is_ground_for_the_files_own_values(tmp_path: Path) -> None:
    default = default_config()
    body = (
        "c.preset = 'reference_code'",
        "c.learning.kl_coef = 0.3",
        f"c.learning.loss_mean = {default.learning.loss_mean!r}",  # its default, said in so many words
        "return c",
    )
    cfg = cli.load_config(write(tmp_path, *body))
    assert cfg.preset == "reference_code" and cfg.learning.dual_clip == 3.0  # from the preset
    assert cfg.learning.kl_coef == 0.3 and cfg.learning.loss_mean == default.learning.loss_mean  # from the file
    told = cli.load_config(write(tmp_path, *body), ["--config.learning.dual_clip=0"])
    assert told.learning.dual_clip == 0.0 and told.learning.population == "rows"


def test_a_preset_reaches_a_file_through_the_one_it_starts_from(tmp_path: Path) -> None:
    write(tmp_path, "c.preset = 'reference_code'", "return c", name="base.py")
    cfg = cli.load_config(write(tmp_path, "c = start_from(__file__, 'base.py')", "c.seed = 3", "return c"))
    assert cfg.learning.dual_clip == 3.0 and cfg.seed == 3


def test_a_preset_of_the_command_line_takes_the_place_of_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, "c.preset = 'reference_code'", "c.seed = 3", "return c")
    cfg = cli.load_config(path, ["--config.preset=default"])
    assert cfg.seed == 3 and cfg.run_dir == "runs/mine"
    ours = dict(flat(default_config())) | {"seed": 3, "run_dir": "runs/mine"}
    assert dict(flat(cfg)) == ours


def test_a_preset_that_is_none_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    for path, overrides in ((write(tmp_path, "c.preset = 'papper'", "return c"), []), (None, ["--config.preset=pap"])):
        with pytest.raises(UserError, match="preset='pap.*expected one of default, paper, reference_code"):
            cli.load_config(path, overrides)


def test_a_study_file_is_read_with_the_same_care(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "study.py"
    for text, expected in (
        ("def get_study():\n    return {}['x']\n", "line 2: KeyError: 'x'"),
        ("def get_study():\n    return 3\n", "returned int; expected an ArmStudy"),
        ("x = 1\n", "defines no get_study()"),
    ):
        path.write_text(text)
        assert cli.main(["study", str(path), "--out", str(tmp_path / "out")]) == 2
        assert expected in capsys.readouterr().err
