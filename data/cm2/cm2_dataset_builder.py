"""TFDS builder of CM2 files (JSON, JSONL or parquet)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from envace_jax.config import UserError
from envace_jax.datasets.prepared import task_examples, task_features
from envace_jax.datasets.sources import split_records


@dataclasses.dataclass(kw_only=True)
class Cm2Config(tfds.core.BuilderConfig):
    """``path``: the file; ``eval_path``: held-out file or empty; ``on_bad_record``: stop | skip.

    The name follows from the files' content, so that a changed file is never answered with an old build.
    """

    name: str = ""
    path: str = ""
    eval_path: str = ""
    on_bad_record: str = "stop"

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.on_bad_record.encode())
        for path in filter(None, (self.path, self.eval_path)):
            if not Path(path).is_file():
                raise UserError(f"{path}: no such file")
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        self.name = f"{Path(self.path).stem}-{digest.hexdigest()[:12]}"


class Builder(tfds.core.GeneratorBasedBuilder):
    """CM2 tasks in splits ``train`` and ``heldout``; records left out are counted in the metadata."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Validated CM2 records."}
    builder_config: Cm2Config

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=task_features(),
            description="Tool-use dialogues with checklists, validated.",
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        del dl_manager
        config = self.builder_config
        train, heldout, bad = split_records(config.path, config.eval_path, config.on_bad_record)
        self.info.metadata["bad_records"] = bad.count
        self.info.metadata["bad_record_messages"] = bad.messages[:100]
        parts = {"train": train, "heldout": heldout}
        return {split: task_examples(tasks) for split, tasks in parts.items() if tasks}

    def _generate_examples(self) -> Any:
        raise NotImplementedError  # every split has its own generator
