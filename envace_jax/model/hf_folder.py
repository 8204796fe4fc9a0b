"""A checkpoint folder on disk: staged beside its target, read back, checksummed, published by one rename.

Nothing here knows what the tensors mean; `hf.py` says which there are and makes their values.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envace_jax.config import UserError
from envace_jax.faults import point, write_whole
from envace_jax.model import safetensors_io as st

INDEX = "model.safetensors.index.json"
CHECKSUMS = "SHA256SUMS"
GENERATION_CONFIG = "generation_config.json"
JOURNAL = ".journal.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
Progress = Callable[[int, int, str], None]
"""progress(bytes done, bytes in all, what is being done)."""


def silent(done: int, total: int, what: str) -> None:
    """The progress callback that shows nothing."""


def write_folder(
    folder: Path,
    files: Sequence[Sequence[st.TensorSpec]],
    produce: Callable[[st.TensorSpec], np.ndarray],
    *,
    config: Mapping[str, Any] | None,
    tokenizer_dir: Path | None,
    texts: Mapping[str, str],
    source_id: str | None,
    overwrite: bool = False,
    progress: Progress = silent,
    stem: str = "model",
) -> Path:
    """The writer behind export and import: staging folder, journal, read-back, one rename. See `hf.save_params`.

    config: content of `config.json`, None for a folder without one. stem: what weight files are called.
    """
    if folder.exists() and not overwrite:
        raise UserError(f"{folder}: exists already; choose another folder or remove it")
    for name in texts:
        if Path(name).name != name:
            raise UserError(f"{name!r} is not a plain file name")
    total = sum(tensor.size for file in files for tensor in file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_disk(folder.parent, total)
    staging = folder.with_name(folder.name + ".partial")
    names = [f"{stem}.safetensors"]
    if len(files) > 1:
        names = [f"{stem}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    plan = [[(t.name, t.dtype, list(t.shape)) for t in file] for file in files]
    digests = _resume(staging, source_id, plan, names)
    done = 0

    def advance(tensor: st.TensorSpec) -> None:
        nonlocal done
        done += tensor.size
        progress(done, total, "writing")

    for name, file in zip(names, files):
        if name in digests:
            done += sum(tensor.size for tensor in file)
            progress(done, total, "found whole")
            continue
        digests[name] = st.write_file(staging / name, file, produce, advance)
        write_whole(staging / JOURNAL, json.dumps({"source": source_id, "plan": plan, "files": digests}))
    weight_map = {tensor.name: name for name, file in zip(names, files) for tensor in file}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    small = dict(texts)
    if config is not None:
        small = {"config.json": json.dumps(dict(config), indent=2) + "\n", **texts}
    if len(files) > 1:
        small[INDEX] = json.dumps(index, indent=2) + "\n"
    if tokenizer_dir is not None:
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
            if name not in texts and (tokenizer_dir / name).is_file():
                shutil.copyfile(tokenizer_dir / name, staging / name)
                digests[name] = st.sha256_file(staging / name)
    if config is not None and GENERATION_CONFIG not in digests.keys() | texts.keys():
        small[GENERATION_CONFIG] = json.dumps(_generation_config(config), indent=2) + "\n"
    for name, text in small.items():
        write_whole(staging / name, text)
        digests[name] = st.sha256_file(staging / name)
    write_whole(staging / CHECKSUMS, "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)))
    (staging / JOURNAL).unlink(missing_ok=True)
    verify_folder(staging, progress=progress)
    for name, planned in zip(names, plan):
        header = st.read_header(staging / name)
        if [(info.name, info.dtype, list(info.shape)) for info in header.values()] != planned:
            raise UserError(f"{staging / name}: the file read back does not hold what was written")
    _publish(staging, folder)
    return folder


def _check_disk(parent: Path, need: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < need + (64 << 20):
        raise UserError(f"{parent}: {need / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


def _resume(staging: Path, source_id: str | None, plan: Any, names: Sequence[str]) -> dict[str, str]:
    """Digests of the weight files that an interrupted run left whole; everything else in the staging folder goes."""
    digests: dict[str, str] = {}
    if staging.exists() and source_id is not None:
        try:
            journal = json.loads((staging / JOURNAL).read_text())
            if journal["source"] == source_id and journal["plan"] == json.loads(json.dumps(plan)):
                digests = {name: digest for name, digest in journal["files"].items() if name in names}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            digests = {}
    staging.mkdir(exist_ok=True)
    for path in staging.iterdir():
        if path.name == JOURNAL and digests:
            continue
        if path.name in digests and st.sha256_file(path) == digests[path.name]:
            continue
        digests.pop(path.name, None)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {name: digest for name, digest in digests.items() if (staging / name).exists()}


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None} | {"do_sample": True}


def _publish(staging: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    replaced = folder.exists()
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
        point("rename")
        os.replace(folder, old)
    try:
        point("rename")
        os.replace(staging, folder)
    except OSError:
        if replaced:
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def verify_folder(folder: str | Path, progress: Progress = silent) -> int:
    """Reads every file named in the checksum file and compares; returns how many. `UserError` names the bad one."""
    folder = Path(folder)
    try:
        lines = (folder / CHECKSUMS).read_text().splitlines()
        wanted = [(line[66:], line[:64]) for line in lines]
    except OSError:
        raise UserError(f"{folder}: no {CHECKSUMS} there") from None
    total = sum((folder / name).stat().st_size for name, _ in wanted if (folder / name).is_file())
    done = 0
    for name, digest in wanted:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise UserError(f"{folder / CHECKSUMS}: {name!r} is not a file of this folder")
        if st.sha256_file(path) != digest:
            raise UserError(f"{path}: differs from its checksum; the file is damaged")
        done += path.stat().st_size
        progress(done, total, "checking")
    return len(wanted)
