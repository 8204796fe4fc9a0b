"""Numbers on the command line are refused before anything runs, with what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.options import number, whole

pytestmark = pytest.mark.quick


def numeric(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option of a parser and its sub-commands that is read as something other than text or a path."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from numeric(part)
        elif action.type is not None and not isinstance(action.type, type):
            yield action
        else:
            assert action.type not in (int, float), f"{parser.prog} {action.dest}: give it bounds (envace_jax.options)"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_number_of_every_command_has_bounds(command: str) -> None:
    for action in numeric(cli.build_parser(command)):
        for text in ("-5", "inf", "nan", "many"):
            with pytest.raises(argparse.ArgumentTypeError, match="expected a"):
                action.type(text)  # type: ignore[operator]


def test_a_rollout_of_minus_5_tasks_is_refused(capsys: pytest.CaptureFixture) -> None:
    for text in ("-5", "0"):
        with pytest.raises(SystemExit) as e:
            cli.main(["rollout", "--out", "x", "--tasks", text])
        assert e.value.code == 2
        assert f"argument --tasks: expected a whole number of at least 1, not '{text}'" in capsys.readouterr().err


def test_an_output_that_cannot_be_is_found_first(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "there").write_text("x")
    (tmp_path / "t.jsonl").write_text("")
    for command in (["rollout"], ["rescore", str(tmp_path / "t.jsonl")]):
        for out, words in (("/proc/x/out", "cannot be written"), (str(tmp_path / "there"), "is there already")):
            assert cli.main([*command, "--out", out]) == 2
            err = capsys.readouterr().err
            assert err.startswith(f"envace_jax: --out {out}: {words}") and len(err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "there"]


def test_bounds_are_inclusive() -> None:
    assert [whole(0, 3)(t) for t in ("0", "3")] == [0, 3]
    assert [number(0.5, 2)(t) for t in ("0.5", "2")] == [0.5, 2.0]
    for read, text in ((whole(0, 3), "4"), (whole(0), "1.5"), (number(0.5, 2), "2.01"), (number(0), "-0.1")):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)
