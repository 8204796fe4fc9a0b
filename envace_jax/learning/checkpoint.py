"""Checkpoints: written by Orbax in the background, verified by a digest manifest of our own.

Orbax makes a save atomic but holds no checksum that is checked when data is read.  So when a save has been committed,
its arrays are read back and compared with what was in memory (by each process the shards that it holds), every file of
it is hashed, and the digests are written beside it (`step_00000050.sha256`, made whole by a rename); a step counts only
with its manifest, and only while every file still has its digest.  Restore takes the newest such step, and says which
newer ones it passed over and why.  Older steps go when a newer one is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from envace_jax.config import UserError
from envace_jax.distributed import agree
from envace_jax.faults import point, write_whole
from envace_jax.learning import readback
from envace_jax.learning.bucket import place
from envace_jax.model.safetensors_io import sha256_file

_log = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d{8,})$")
BEST = "best.json"
MANIFEST_HEAD = "envace_jax checkpoint digests, sha256"
_SAVES = itertools.count()  # of this process: all processes save alike, and tell each other how by this number


def tree_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by its relative path."""
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(_files(folder))}


def _files(folder: Any) -> Iterator[Any]:
    # Folder by folder: a recursive glob is not to be had in a bucket.
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def write_manifest(folder: Path, manifest: Path) -> None:
    """Hashes a folder's files and writes the digests, atomically and durably."""
    lines = [MANIFEST_HEAD, *(f"{digest}  {name}" for name, digest in tree_digests(folder).items())]
    body = "\n".join(lines)
    text = f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n"
    write_text(manifest, text)


def write_text(path: Any, text: str) -> None:
    """Writes a small file so that it is there whole or not at all, here or in a bucket."""
    if "://" in os.fspath(path):
        path.write_bytes(text.encode())  # in a bucket an object is there whole or not at all
        return
    write_whole(path, text)
    _sync_folder(path.parent)


def manifest_problem(folder: Path, manifest: Path) -> str | None:
    """What is wrong with a folder by its manifest: one line, or None when every file is as it was written."""
    try:
        data = manifest.read_bytes()
    except FileNotFoundError:
        return "its manifest is missing (the save was not finished)"
    except OSError as error:
        return f"its manifest cannot be read ({error})"
    head, _, last = data.removesuffix(b"\n").rpartition(b"\n")
    # The bytes are compared whole: a flip anywhere in the manifest shows, in its line ends too.
    if data != head + b"\n" + hashlib.sha256(head).hexdigest().encode() + b"\n" or not last:
        return "its manifest is damaged"
    lines = head.decode().split("\n")
    if lines[0] != MANIFEST_HEAD:
        return "its manifest has an unknown form"
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines[1:])}
    try:
        found = tree_digests(folder)
    except OSError as error:
        return f"a file cannot be read ({error})"
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"file {name} is missing"
        if name not in expected:
            return f"file {name} does not belong to it"
        if found[name] != expected[name]:
            return f"file {name} is damaged (its sha256 has changed)"
    return None


def _remove(path: Any) -> None:
    """Removes a folder, here or in a bucket."""
    if isinstance(path, Path):
        shutil.rmtree(path)
    else:
        path.rmtree()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        point("fsync")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _everywhere(act: Callable[[], None], name: str) -> BaseException | None:
    """Acts here and waits for the others; returns what went wrong here, else in another one, else None."""
    error: BaseException | None = None
    try:
        act()
    except BaseException as caught:  # handed to the thread that saves next
        error = caught
    lines = agree(None if error is None else _first_line(error), name)
    elsewhere = [f"process {process}: {line}" for process, line in enumerate(lines) if line is not None]
    return error or (OSError("; ".join(elsewhere)) if elsewhere else None)


class Checkpoints:
    """The checkpoints of one run, in one folder.

    `save` returns when the arrays have been copied from the devices; writing, committing, hashing and the removal of
    older steps go on in the background, one save at a time.  An error there is raised by the next `save` or `wait`.
    """

    def __init__(self, folder: str | Path, keep: int = 3, say: Callable[[str], None] = _log.warning):
        self.folder = place(folder)
        self.keep = max(1, keep)
        self.say = say
        self._main = jax.process_index() == 0
        self._saver: ocp.AsyncCheckpointer | None = None
        self._after: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._found: int | None = None  # the step that `latest` or `best` has just found whole

    # Saving

    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        if self._saver is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._saver = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler("state", "meta"))
        return self._saver

    def save(self, step: int, state: Any, meta: dict[str, Any], score: float | None = None) -> None:
        """Begins to save a step: `state` a pytree of arrays, `meta` JSON data.  A step that is whole is left alone.

        score: how good it was found; the step with the highest is kept as long as none is better.
        """
        self.wait()
        if self.problem(step) is None:
            return
        path, self._found = self._path(step), None
        if self._main and path.exists():
            _remove(path)  # left without a manifest by a killed process
        saver = self._checkpointer()
        sums = readback.memory_sums(state)
        saver.save(path, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta)))
        after = (f"save/{next(_SAVES)}", step, saver, sums, score)
        self._after = threading.Thread(target=self._finish, args=after, name="checkpoint", daemon=False)
        self._after.start()

    def _finish(self, name: str, step: int, saver: ocp.AsyncCheckpointer, sums: Any, score: float | None) -> None:
        def compare() -> None:
            saver.wait_until_finished()
            if (wrong := readback.difference(self._path(step), sums)) is not None:
                raise OSError(f"{wrong} is not on the disk as it was in memory")

        def count() -> None:
            if self._main:
                write_manifest(self._path(step), self._manifest(step))
                self._note_score(step, score)
                self._drop_old()

        # Every process has compared its shards before one makes the step count; none goes on before it does.
        self._failed = _everywhere(compare, f"{name}/compared") or _everywhere(count, f"{name}/counts")

    def _note_score(self, step: int, score: float | None) -> None:
        before = self._best()
        if score is not None and (before is None or score > before["score"]):
            write_text(self.folder / BEST, json.dumps({"step": step, "score": score}))

    def score(self, step: int, score: float) -> None:
        """Notes how good a step was found that had been saved before it was measured."""
        self.wait()
        if self._main and self.problem(step) is None:
            self._note_score(step, score)

    def wait(self) -> None:
        """Waits for the save under way; raises `UserError` with its cause when it failed."""
        if self._after is not None:
            self._after.join()
            self._after = None
        if self._failed is not None:
            error, self._failed = self._failed, None
            whole = self.latest()
            kept = f"the last whole checkpoint is step {whole}" if whole is not None else "there is no whole checkpoint"
            raise UserError(f"{self.folder}: the checkpoint could not be written ({error}); {kept}") from error

    def close(self) -> None:
        self.wait()
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _drop_old(self) -> None:
        """Removes what lies behind the newest `keep` steps and is not the best: the manifest first, so that a
        half-removed step is none."""
        finished = [step for step in self._steps() if self._manifest(step).exists()]
        best = (self._best() or {}).get("step")
        for step in finished[: -self.keep]:
            if step == best:
                continue
            self._manifest(step).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                _remove(self._path(step))

    # Finding

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _manifest(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.sha256"

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (_STEP.match(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def problem(self, step: int) -> str | None:
        """Why a step cannot be used, or None when it is whole."""
        if not self._path(step).is_dir():
            return "there is no such step"
        return manifest_problem(self._path(step), self._manifest(step))

    def latest(self) -> int | None:
        """The newest whole step; says which newer ones are not whole."""
        for step in reversed(self._steps()):
            problem = self.problem(step)
            if problem is None:
                self._found = step
                return step
            self.say(f"checkpoint {self._path(step)} is not used: {problem}")
        return None

    def _best(self) -> dict[str, Any] | None:
        """Step and score of the best, where its file can be read and the step is still there."""
        try:
            found = json.loads((self.folder / BEST).read_text())
            step, score = int(found["step"]), float(found["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return {"step": step, "score": score} if self._manifest(step).exists() else None

    def best(self) -> int:
        """The whole step with the highest score; raises `UserError` when there is none."""
        found = self._best()
        if found is None:
            raise UserError(f"{self.folder}: no step there was scored; checkpoint.best names the metric of a run")
        if (problem := self.problem(found["step"])) is not None:
            raise UserError(f"checkpoint {self._path(found['step'])}, the best: {problem}")
        self._found = int(found["step"])
        return self._found

    def _demand(self, step: int) -> None:
        """Raises `UserError` where a step cannot be read; one that has just been found whole is not hashed again."""
        if step == self._found and self._manifest(step).exists():
            return
        if (problem := self.problem(step)) is not None:
            raise UserError(f"checkpoint {self._path(step)}: {problem}")

    def clean_up(self) -> int | None:
        """Makes the newest whole step the newest of all, and returns it: unfinished saves go, damaged ones are put
        aside by name.  Process 0 alone does it."""
        if not (self._main and self.folder.is_dir()):
            return None
        newest = self.latest()
        for path in list(self.folder.iterdir()):
            name, _, rest = path.name.partition(".")
            match = _STEP.match(name)
            if not match:
                continue
            step = int(match.group(1))
            if path.is_dir() and (rest or not self._manifest(step).exists()):
                _remove(path)  # Orbax's temporary folder, or a save without its manifest
            elif rest and rest != "sha256":
                path.unlink()
            elif newest is None or step > newest:
                aside = path.with_name(f"damaged_{path.name}")
                if aside.is_dir():
                    _remove(aside)
                path.replace(aside)
        return newest

    # Restoring

    def read_meta(self, step: int) -> dict[str, Any]:
        """The JSON data of a whole step."""
        self._demand(step)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler("meta")) as reader:
            return dict(reader.restore(self._path(step), args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"])

    def restore(self, step: int, like: Any, *, partial: bool = False) -> Any:
        """The arrays of a whole step, in the shapes, dtypes and layouts of `like` (arrays or ShapeDtypeStructs).

        partial: `like` may name a part of what was saved (the parameters without the optimizer).  Raises `UserError`
        when the step is not whole or does not hold what `like` asks for.
        """
        self._demand(step)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.checkpoint_utils.construct_restore_args(like)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler("state")) as reader:
            try:
                restored = reader.restore(
                    self._path(step),
                    args=ocp.args.Composite(
                        state=ocp.args.PyTreeRestore(item=like, restore_args=arguments, partial_restore=partial)
                    ),
                )["state"]
            except (ValueError, KeyError) as error:
                raise UserError(
                    f"checkpoint {self._path(step)} was made by a run of another shape ({_first_line(error)}): give "
                    "the run its old model and learning.arm back, or start a new run_dir"
                ) from error
        wrong = [
            jax.tree_util.keystr(path)
            for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(like), jax.tree.leaves(restored))
            if want.shape != got.shape or want.dtype != got.dtype
        ]
        if wrong:
            raise UserError(f"checkpoint {self._path(step)}: {wrong[0]} has another shape or dtype than this run's")
        return restored


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
