"""TFDS builder of recorded episodes, in the canonical form of `envace_jax.datasets.traces`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds

from envace_jax.datasets.traces import TraceEpisode, TraceReport, read_traces
from envace_jax.text.transcript import canonical_json


@dataclasses.dataclass(kw_only=True)
class TracesConfig(tfds.core.BuilderConfig):
    """``path``: file or folder of traces; ``on_bad_record``: stop | skip. Give each corpus a name of its own."""

    path: str = ""
    on_bad_record: str = "stop"


class Builder(tfds.core.GeneratorBasedBuilder):
    """Episodes by their own split; traces left out are counted in the metadata."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Canonical episodes."}
    builder_config: TracesConfig

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"episode_id": text(), "group": text(), "record": text()}),
            description="Recorded episodes of agents in environments.",
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        del dl_manager
        config = self.builder_config
        report = TraceReport()
        parts: dict[str, list[TraceEpisode]] = {}
        for episode in read_traces(config.path, on_bad=config.on_bad_record, report=report):
            parts.setdefault(episode.split, []).append(episode)
        self.info.metadata["bad_records"] = len(report.bad)
        self.info.metadata["bad_record_messages"] = report.bad[:100]
        return {split: _examples(episodes) for split, episodes in parts.items()}

    def _generate_examples(self) -> Any:
        raise NotImplementedError  # every split has its own generator


def _examples(episodes: Iterable[TraceEpisode]) -> Iterator[tuple[int, dict[str, str]]]:
    for number, episode in enumerate(episodes):
        record = canonical_json(episode.to_json())
        yield number, {"episode_id": episode.episode_id, "group": episode.group, "record": record}
