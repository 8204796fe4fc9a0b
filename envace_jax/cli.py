"""The one command: `python -m envace_jax COMMAND [--config configs/X.py] [--config.key=value …]`.

Every command is a function in the package that does the work; this file finds it, reads the configuration and
turns the user's mistakes into one message and exit status 2. Nothing here imports jax before the
configuration holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from envace_jax import __version__
from envace_jax.config import UserError, apply_preset, default_config, flat, set_key, unknown_key
from envace_jax.config_checks import validate
from envace_jax.config_file import read_config

Arguments = Callable[[argparse.ArgumentParser], None]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: where its function is (`module:function`), what it says of itself, what it takes.

    The function gets (cfg, args) where `config` is true, else (args,); what it returns is the exit status
    (None is 0). `arguments` names a function that adds options to the parser, in the same module. `device` sets jax up
    (versions, compilation cache) before the function is called. `dry_run` says that it can check all and start nothing.
    `validated`: a configuration that does not hold stops the command before its function is called; what is wrong
    within the sections `unread` does not, for the command has no use for them.
    """

    target: str
    help: str
    config: bool = True
    arguments: str = ""
    device: bool = True
    dry_run: bool = False
    validated: bool = True
    unread: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "train": Command("envace_jax.learning.trainer:run_train", "train a policy (role-wise GRPO)", dry_run=True),
    "warmstart": Command(
        "envace_jax.learning.warmstart:run_warmstart", "train both roles on recorded conversations", dry_run=True
    ),
    "rollout": Command(
        "envace_jax.rehearsal.command:run_rollout", "roll tasks out and write the trajectories", True, "add_arguments"
    ),
    "evaluate": Command(
        "envace_jax.evaluation.command:run_evaluate",
        "measure a policy",
        arguments="add_arguments",
        unread=("data", "rewards"),
    ),
    "study": Command(
        "envace_jax.evaluation.arm_study:run_study", "compare training arms over seeds", False, "add_arguments"
    ),
    "rescore": Command(
        "envace_jax.rewards.rescore:run_rescore", "judge recorded trajectories again, offline", True, "add_arguments"
    ),
    "chat": Command(
        "envace_jax.test_time.chat:run_chat", "talk to a policy in a rehearsed or real world", True, "add_arguments"
    ),
    "serve": Command(
        "envace_jax.serving.command:run_serve",
        "OpenAI-compatible server",
        arguments="add_arguments",
        unread=("data", "rewards"),
    ),
    "import": Command(
        "envace_jax.model.command:run_import", "read a Hugging Face folder into a checkpoint", False, "add_import"
    ),
    "export": Command(
        "envace_jax.model.command:run_export", "write a run's model as a Hugging Face folder", False, "add_export"
    ),
    "show": Command("envace_jax.report.show:run_show", "print one task as the policy sees it", True, "add_arguments"),
    "worldbook": Command(
        "envace_jax.worldbook.commands:run_worldbook",
        "build, show, diff, verify, patch, replay, compare, simulate",
        False,
        "add_arguments",
        device=False,
    ),
    "plan": Command(
        "envace_jax.planning.command:run_plan",
        "does the run fit a slice, and what will it cost",
        arguments="add_arguments",
        device=False,
        unread=("data",),
    ),
    "doctor": Command(
        "envace_jax.report.doctor:run_doctor", "versions, devices, disk, model, endpoints, template",
        device=False,
        validated=False,
    ),
    "config": Command("envace_jax.cli:run_config", "print the resolved configuration as JSON", device=False),
}


def load_config(path: str | None, overrides: Sequence[str] = ()) -> ConfigDict:
    """The tree of a file and a command line, each over what comes before it: defaults, a preset that the file names,
    the file's values, a preset that the command line names (instead of the file's), the command line's values.

    `overrides` are `--config.a.b=value` strings; values are read by the type of the default.
    """
    given = dict(_split(o) for o in overrides)
    preset = given.get("preset")
    cfg = read_config(path, None if preset is None else "default") if path else default_config()
    if preset is not None:
        set_key(cfg, "preset", preset)
        cfg = apply_preset(cfg)
    known = {name for name, _ in flat(cfg)}
    if unknown := [str(unknown_key(cfg, key)) for key in given if key not in known]:
        raise UserError("\n  ".join(unknown))
    values = flags.FlagValues()
    argv = ["envace_jax", *overrides]
    config_flags.DEFINE_config_dict("config", cfg, flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except (flags.Error, TypeError, ValueError, KeyError, AttributeError) as e:
        raise UserError(f"command line: {e}") from None
    cfg = values["config"].value
    assert cfg is not None  # the flag has a default
    if not cfg.run_dir:
        cfg.run_dir = f"runs/{Path(path).stem if path else 'default'}"
    return cfg


def _split(override: str) -> tuple[str, str]:
    key, equals, value = override.removeprefix("--config.").partition("=")
    if not equals:
        raise UserError(f"{override}: a value stands after '=', without a space: --config.{key}=VALUE")
    return key, value


def run_config(cfg: ConfigDict, args: argparse.Namespace) -> None:
    print(json.dumps(dict(flat(cfg)), indent=1, default=list))


def build_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command (its own options; the configuration is read apart)."""
    command = COMMANDS[name]
    epilog = "configuration keys (--config.KEY=VALUE) are listed by `envace_jax config`" if command.config else None
    parser = argparse.ArgumentParser(f"envace_jax {name}", description=command.help, epilog=epilog)
    if command.config:
        parser.add_argument("--config", metavar="FILE", help="configuration file (configs/*.py)")
    if command.dry_run:
        parser.add_argument("--dry_run", action="store_true", help="check everything, estimate, start nothing")
    if command.arguments:
        module = importlib.import_module(command.target.partition(":")[0])
        getattr(module, command.arguments)(parser)
    return parser


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"envace_jax {__version__}: usage: python -m envace_jax COMMAND [options]", ""]
    lines += [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`python -m envace_jax COMMAND --help` says more."])


def run(argv: Sequence[str]) -> int:
    """Runs one command; raises `UserError` for what the user can mend."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise UserError(f"command '{name}' is unknown; expected one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    overrides = [a for a in rest if a.startswith("--config.")]
    if not command.config and overrides:
        raise UserError(f"{overrides[0]}: '{name}' takes no configuration")
    for override in overrides:
        _split(override)  # before the parser meets a value that stands apart
    args = build_parser(name).parse_args([a for a in rest if not a.startswith("--config.")])
    call: list[Any] = [args]
    if command.config:
        cfg = load_config(args.config, overrides)
        if command.dry_run:
            cfg.dry_run = cfg.dry_run or args.dry_run
        elif cfg.dry_run:
            able = " and ".join(n for n, c in COMMANDS.items() if c.dry_run)
            raise UserError(f"dry_run=True: '{name}' has no dry run; {able} have")
        if command.validated:
            validate(cfg, command.unread)
        call = [cfg, args]
    if command.device:
        from envace_jax.compat import set_up_jax

        set_up_jax()
        from envace_jax.distributed import session

        with session():
            return call_target(command, call)
    return call_target(command, call)


def call_target(command: Command, call: Sequence[Any]) -> int:
    module, function = command.target.split(":")
    return getattr(importlib.import_module(module), function)(*call) or 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UserError as e:
        print(f"envace_jax: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("envace_jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except OSError as e:  # a disk, a permission, an address: nothing that a traceback would explain
        place = ", ".join(str(name) for name in (e.filename, e.filename2) if name is not None)
        print(f"envace_jax: {f'{place}: ' if place else ''}{e.strerror or e or type(e).__name__}", file=sys.stderr)
        return 2
