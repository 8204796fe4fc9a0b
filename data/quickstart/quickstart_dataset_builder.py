"""TFDS builder of the generated service-desk tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from envace_jax.datasets.prepared import task_examples, task_features
from envace_jax.datasets.quickstart.generator import generate_tasks


class Builder(tfds.core.GeneratorBasedBuilder):
    """2,000 training tasks and 200 held-out ones with entities of their own."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Seed 0."}

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=task_features(),
            description="Service-desk dialogues made by a seeded generator over a stateful environment.",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        del dl_manager
        return {split: task_examples(generate_tasks(split)) for split in ("train", "heldout")}

    def _generate_examples(self) -> Any:
        raise NotImplementedError  # every split has its own generator
