"""Task data sets prepared by TFDS: written as ArrayRecord, read by random access, both without TensorFlow.

A prepared record is the canonical JSON text of the CM2 record beside its uuid and source. The builders themselves
stand in ``data/``.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import task_from_record, task_to_record
from envace_jax.datasets.records import Task
from envace_jax.datasets.traces import TraceEpisode, episode_from_record
from envace_jax.text.transcript import canonical_json


def task_features() -> tfds.features.FeaturesDict:
    """Features of a prepared task data set."""
    text = tfds.features.Text
    return tfds.features.FeaturesDict({"uuid": text(), "source": text(), "record": text()})


def task_examples(tasks: Iterable[Task]) -> Iterator[tuple[int, dict[str, str]]]:
    """What a TFDS builder generates for tasks, in their order."""
    for number, task in enumerate(tasks):
        record = canonical_json(task_to_record(task))
        yield number, {"uuid": task.uuid, "source": task.source, "record": record}


def prepare(builder: tfds.core.DatasetBuilder) -> Path:
    """Build a data set, unless it is there already; returns its folder."""
    builder.download_and_prepare(file_format="array_record")
    return Path(builder.data_path)


class _PreparedRecords:
    """The JSON records of one split of a prepared data set, read when asked for."""

    def __init__(self, folder: str | Path, split: str):
        folder = Path(folder)
        try:
            builder = tfds.builder_from_directory(str(folder))
            names = list(builder.info.splits)
        except Exception as error:  # TFDS raises its own kinds, by what is missing or broken
            reason = str(error).splitlines()[0][:200]
            raise UserError(f"{folder}: not a prepared data set ({reason})") from None
        if split not in names:
            raise UserError(f"{folder}: has no split {split!r}, only {', '.join(names)}")
        self._where = f"{folder}: {split}"
        self._source = builder.as_data_source(split=split)

    def __len__(self) -> int:
        return len(self._source)

    def _record(self, index: int) -> bytes:
        try:
            return self._source[index]["record"]
        except IndexError:
            raise
        except Exception as error:  # the reader raises its own kinds; it checks a digest of every chunk
            reason = str(error).splitlines()[0][:160]
            raise UserError(
                f"{self._where}: record {index} cannot be read, a shard is damaged ({reason}): remove the folder and "
                "prepare the data again with `python -m data`"
            ) from None


class PreparedTasks(_PreparedRecords):
    """One split of a prepared data set, as a sequence of tasks read when asked for."""

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Task:
        where = f"{self._where}: record {index}"
        return task_from_record(json.loads(self._record(index)), where=where)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of all records in order (`envace_jax.datasets.pipeline.fingerprint`)."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(self._record(index) + b"\n")
        return digest.hexdigest()


class PreparedEpisodes(_PreparedRecords):
    """One split of prepared traces (``python -m data traces``), as episodes in their order."""

    def __iter__(self) -> Iterator[TraceEpisode]:
        for index in range(len(self)):
            yield episode_from_record(json.loads(self._record(index)), f"{self._where}: record {index}")


def is_prepared(path: str | Path) -> bool:
    """Whether a path is the folder of a prepared data set."""
    return (Path(path) / "dataset_info.json").is_file()


def splits_of(folder: str | Path) -> dict[str, int]:
    """Records by split of a prepared data set."""
    info: Any = tfds.builder_from_directory(str(folder)).info
    return {name: split.num_examples for name, split in info.splits.items()}
