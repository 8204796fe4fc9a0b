"""Which tasks a run trains on and which it holds out."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import BadRecords, read_tasks
from envace_jax.datasets.records import Task, spread

SPLITS = ("train", "heldout")
# A CM2 file without splits of its own holds out its first records, as its authors do.
CM2_HELD_OUT, CM2_HELD_OUT_SHARE = 500, 0.1

_log = logging.getLogger(__name__)


def load_tasks(data: Any) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks of a run.

    Args:
        data: the ``data`` section of the config: ``source`` (quickstart, cm2, bfcl, tau2 or traces, or several joined
            by "+"), ``path`` and ``eval_path`` (CM2 file, traces, or prepared folder), ``on_bad_record`` (stop | skip),
            ``train_limit`` and ``eval_limit`` (0: all; a limited list is spread evenly over the whole one, and the
            quickstart generator makes as many as asked for).

    Raises:
        UserError: unreadable data, no task at all, or a task on both sides.
    """
    names = str(data.source).split("+")
    shares = {split: _shares(data[f"{key}_limit"], len(names)) for split, key in zip(SPLITS, ("train", "eval"))}
    parts = []
    for number, name in enumerate(names):
        limits = {split: shares[split][number] for split in SPLITS}
        parts.append(_load(name, data, limits))
    train = [task for part, _ in parts for task in part]
    heldout = [task for _, part in parts for task in part]
    if not train:
        raise UserError(f"data.source={data.source}: no training task")
    _check_disjoint(train, heldout)
    return train, heldout


def source_counts(tasks: Iterable[Task]) -> dict[str, int]:
    """How many tasks come from which source: what a model has seen, or is measured on."""
    return dict(Counter(task.source for task in tasks))


def split_records(path: str, eval_path: str, on_bad: str) -> tuple[list[Task], list[Task], BadRecords]:
    """CM2 tasks for training and held-out ones, each marked with its split, and what was left out.

    Held out are: all of ``eval_path``, if given; else the records whose ``meta.split`` is ``heldout``, if any record
    has a split; else the first 500, or the first tenth of a smaller file.
    """
    tasks, bad = read_tasks(path, on_bad)
    if eval_path:
        train = tasks
        heldout, more = read_tasks(eval_path, on_bad)
        bad = BadRecords(bad.count + more.count, bad.messages + more.messages)
    elif any("split" in task.meta for task in tasks):
        train = [task for task in tasks if task.meta.get("split") != "heldout"]
        heldout = [task for task in tasks if task.meta.get("split") == "heldout"]
    else:
        first = min(CM2_HELD_OUT, int(len(tasks) * CM2_HELD_OUT_SHARE))
        train, heldout = tasks[first:], tasks[:first]
    return [_marked(t, "train") for t in train], [_marked(t, "heldout") for t in heldout], bad


def _load(name: str, data: Any, limits: dict[str, int]) -> tuple[list[Task], list[Task]]:
    if name == "quickstart":
        from envace_jax.datasets.quickstart.generator import generate_tasks

        train, heldout = (generate_tasks(split, limits[split] or None) for split in SPLITS)
        return train, heldout
    if name == "bfcl":
        from envace_jax.datasets.bfcl import load_bfcl

        train, heldout = (load_bfcl(split=split, limit=limits[split]) for split in SPLITS)
    elif name == "tau2":
        from envace_jax.datasets.tau2 import load_tau2

        train, heldout = (load_tau2(split=split, limit=limits[split]) for split in SPLITS)
    elif name == "cm2":
        train, heldout = (spread(t, limits[split]) for t, split in zip(_load_cm2(data), SPLITS))
    elif name == "traces":
        train, heldout = (spread(t, limits[split]) for t, split in zip(_load_traces(data), SPLITS))
    else:
        raise UserError(f"data.source: expected quickstart, cm2, bfcl, tau2 or traces, found {name!r}")
    return train, heldout


def _load_cm2(data: Any) -> tuple[list[Task], list[Task]]:
    if not data.path:
        raise UserError("data.path: source=cm2 needs a CM2 file or a prepared folder")
    if Path(data.path).is_dir():
        from envace_jax.datasets.prepared import PreparedTasks, splits_of

        train = PreparedTasks(data.path, "train")
        held_out_folder = data.eval_path or data.path
        held_out_split = ["heldout"] if "heldout" in splits_of(held_out_folder) else []
        held = [PreparedTasks(held_out_folder, split) for split in held_out_split]
        return list(train), [task for part in held for task in part]
    tasks, held_out, bad = split_records(data.path, data.eval_path, data.on_bad_record)
    if bad.count:
        _log.warning("%d broken records left out; the first: %s", bad.count, bad.messages[0])
    return tasks, held_out


def _load_traces(data: Any) -> tuple[list[Task], list[Task]]:
    if not data.path:
        raise UserError("data.path: source=traces needs a file or folder of traces, or a prepared folder")
    from envace_jax.datasets.trace_tasks import load_trace_tasks

    train, heldout, bad = load_trace_tasks(data.path, data.eval_path, data.on_bad_record)
    if bad:
        _log.warning("%d traces left out; the first: %s", len(bad), bad[0])
    return [_marked(t, "train") for t in train], [_marked(t, "heldout") for t in heldout]


def _marked(task: Task, split: str) -> Task:
    return dataclasses.replace(task, meta={**task.meta, "split": split})


def _shares(limit: int, parts: int) -> list[int]:
    """A limit parted among sources; 0 stays "all"."""
    if not limit:
        return [0] * parts
    return [max(1, limit // parts + (k < limit % parts)) for k in range(parts)]


def _scenario(task: Task) -> tuple[str, Any]:
    """What must not stand on both sides: a benchmark's scenario in any variant, else the record itself."""
    scenario = task.meta.get("scenario")
    return (task.source, task.uuid if scenario is None else scenario)


def _check_disjoint(train: Sequence[Task], heldout: Sequence[Task]) -> None:
    seen = {_scenario(task) for task in train} | {("uuid", task.uuid) for task in train}
    both = [task.uuid for task in heldout if _scenario(task) in seen or ("uuid", task.uuid) in seen]
    if both:
        raise UserError(f"{len(both)} held-out tasks are also in the training data (first: {both[0]})")
