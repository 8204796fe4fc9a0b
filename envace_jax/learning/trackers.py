"""Where metrics go beside `metrics.jsonl`: trackers behind one call, and a file for Prometheus.

A tracker is named in `metrics.sinks`; its package is an extra (`pip install -e '.[wandb]'`).  A run that is taken up
again goes on in the tracker's same run: its id lies in `trackers.json`.  What a tracker raises while it logs is said
once and does not stop a run; `metrics.jsonl` is the record.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from envace_jax.config import UserError

NAMES = ("wandb", "trackio", "mlflow", "prometheus")
PROJECT = "envace_jax"
IDS = "trackers.json"


class Tracker(Protocol):
    """One more place for figures: finite numbers by name, once a step."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    def __init__(self, wandb: Any, folder: Path, values: Mapping[str, Any], ids: dict[str, str]):
        ids.setdefault("wandb", wandb.util.generate_id())
        self.run = wandb.init(
            project=PROJECT,
            name=folder.name,
            id=ids["wandb"],
            resume="allow",
            dir=str(folder),
            config=dict(values),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


class _Trackio:
    def __init__(self, trackio: Any, folder: Path, values: Mapping[str, Any], ids: dict[str, str]):
        self.trackio = trackio
        ids.setdefault("trackio", folder.name)
        trackio.init(project=PROJECT, name=ids["trackio"], resume="allow", config=dict(values))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self.trackio.finish()


class _Mlflow:
    def __init__(self, mlflow: Any, folder: Path, values: Mapping[str, Any], ids: dict[str, str]):
        self.mlflow = mlflow
        mlflow.set_experiment(PROJECT)
        if "mlflow" in ids:
            mlflow.start_run(run_id=ids["mlflow"])
        else:
            ids["mlflow"] = mlflow.start_run(run_name=folder.name).info.run_id
            mlflow.log_params({name: str(value)[:500] for name, value in values.items()})

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # A name may hold letters, digits, and _ - . / and blanks.
        self.mlflow.log_metrics({re.sub(r"[^\w\-./ ]", "_", name): x for name, x in figures.items()}, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class Prometheus:
    """The last step's figures as a text file (`metrics.prom`), which a node exporter's textfile collector reads."""

    def __init__(self, folder: Path):
        self.path, self.run = folder / "metrics.prom", folder.name

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        label = self.run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines = []
        for name, value in {"step": float(step), **figures}.items():
            metric = "envace_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{label}"}} {value!r}']
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n")
        os.replace(temporary, self.path)

    def close(self) -> None: ...


_MAKERS: dict[str, Callable[[Any, Path, Mapping[str, Any], dict[str, str]], Tracker]] = {
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}


class Trackers:
    """The trackers of a run; a run without any costs nothing."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        values: Mapping[str, Any],
        say: Callable[[str], None],
        module: Callable[[str], Any] = importlib.import_module,
    ):
        self.say, self.broken = say, set[str]()
        self.trackers: dict[str, Tracker] = {}
        path = folder / IDS
        ids: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        before = dict(ids)
        for name in names:
            if name == "prometheus":
                self.trackers[name] = Prometheus(folder)
                continue
            try:
                package = module(name)
            except ImportError:
                raise UserError(
                    f"metrics.sinks names {name}, which is not installed: pip install -e '.[{name}]'"
                ) from None
            self.trackers[name] = _MAKERS[name](package, folder, values, ids)
        if ids != before:
            path.write_text(json.dumps(ids))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._each(lambda tracker: tracker.log(step, figures))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in self.trackers.items():
            try:
                act(tracker)
            except Exception as error:  # a tracker's server may be away for hours: the run goes on
                if name not in self.broken:
                    self.broken.add(name)
                    self.say(f"{name} does not take figures ({type(error).__name__}: {error}); metrics.jsonl has them")
