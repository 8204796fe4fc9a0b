"""Five systems that say what an environment answers, in up to four environments: next observations, and W2R.

    python benchmarks/worldbook_study.py --out runs/worldbook --copying --rehearse configs/quickstart.py
    python benchmarks/worldbook_study.py --out runs/worldbook --endpoint http://127.0.0.1:8000/v1 --model NAME

For every environment (the quickstart desk, BFCL's classes, bash in a throw-away folder, ScienceWorld) traces are
recorded in the real environment, a worldbook is built from the training ones by the deterministic stages, and each
system is asked (1) what the environment answers to calls of held-out traces, given the true history, and (2) for whole
episodes: an agent that knows only what it was told acts in the system's world (WM), and its calls are replayed for real
(W2R). Whose answers they are stands in every line. A cell (environment, model, system) is a file in `--out`; what is
there is not computed again, so the same command goes on where it was stopped and adds a further model to the table.
`--ablations` adds the full system with parts taken away.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import task_from_record, task_to_record
from envace_jax.datasets.records import ChecklistItem, Task, spread
from envace_jax.datasets.traces import episode_from_task
from envace_jax.evaluation.next_observation import Row, evaluate_system, leakage_audit, rows_from_episodes
from envace_jax.evaluation.replay import ReadingAgent, ReferenceDomain, ReplayReport, replay
from envace_jax.evaluation.stats import cluster_bootstrap, paired_cluster_bootstrap
from envace_jax.evaluation.text_worlds import scienceworld_missing
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook.baselines import SYSTEMS, CopyingCompleter, SystemConfig, make_system
from envace_jax.worldbook.build import BuildConfig, build_worldbook
from envace_jax.worldbook.harness import Harness
from envace_jax.worldbook.records import digest
from envace_jax.worldbook.service import WorldbookEnvironment
from envace_jax.worldbook.store import Worldbook, load_worldbook, save_worldbook

RULES = "no model"  # whose answers the rules-alone line shows
SCIENCE_TASKS = ("find-living-thing", "find-animal", "lifespan-longest-lived")
DONE = (((ChecklistItem("done", "Was it done?", "What was asked for was done.", ("tool.content",)),),),)
"""Text worlds have no checklists of their own; the record of a task wants one."""
BUILD_TASKS = {"quickstart": 350, "bfcl": 60, "terminal": 48, "scienceworld": 24}


# --- environments ---------------------------------------------------------------------------------------------------


def quickstart_tasks(split: str, count: int) -> list[Task]:
    from envace_jax.datasets.quickstart.generator import generate_tasks

    return list(generate_tasks(split, count))


def bfcl_tasks(split: str, count: int) -> list[Task]:
    from envace_jax.datasets.bfcl import load_bfcl

    return load_bfcl(("base",), split, limit=count)


def terminal_tasks(split: str, count: int) -> list[Task]:
    from envace_jax.evaluation.terminal_tasks import terminal_tasks

    return terminal_tasks(split, count)


def scienceworld_tasks(split: str, count: int) -> list[Task]:
    from envace_jax.evaluation.scienceworld import load_scienceworld, with_gold_path

    return [with_gold_path(task) for task in load_scienceworld(split, count, SCIENCE_TASKS)]


ENVIRONMENTS: dict[str, Callable[[str, int], list[Task]]] = {
    "quickstart": quickstart_tasks,
    "bfcl": bfcl_tasks,
    "terminal": terminal_tasks,
    "scienceworld": scienceworld_tasks,
}


@dataclass(frozen=True)
class World:
    """An environment of the study: its worldbook, the questions, the held-out tasks for whole episodes."""

    name: str
    book: Worldbook
    rows: Sequence[Row]
    tasks: Sequence[Task]


def prepare(name: str, args: argparse.Namespace) -> World:
    """The environment's world, recorded and built the first time, read back afterwards."""
    folder = args.out / name
    tasks = {split: _recorded(folder / f"{split}.jsonl", name, split, args) for split in ("train", "heldout")}
    if not (folder / "worldbook").exists():
        episodes = [episode_from_task(task) for task in tasks["train"]]
        save_worldbook(build_worldbook(episodes, config=BuildConfig(folds=2)), folder / "worldbook")
    book = load_worldbook(folder / "worldbook")
    rows = rows_from_episodes((replace(episode_from_task(t), split="heldout") for t in tasks["heldout"]), name)
    rows = spread(rows, args.rows)
    leaks = [leak for leak in leakage_audit(book, rows) if leak["kind"] == "group"]
    if leaks:
        raise UserError(f"{name}: {len(leaks)} questions come from groups that the worldbook was built from")
    return World(name, book, rows, spread(tasks["heldout"], args.tasks))


def _recorded(file: Path, name: str, split: str, args: argparse.Namespace) -> list[Task]:
    if not file.exists():
        count = BUILD_TASKS[name] if split == "train" else args.heldout
        tasks = ENVIRONMENTS[name](split, count)
        records = [canonical_json(task_to_record(replace(t, checklists=t.checklists or DONE))) for t in tasks]
        _write(file, "".join(f"{record}\n" for record in records))
    lines = file.read_text(encoding="utf-8").splitlines()
    return [task_from_record(json.loads(line), where=f"{file}: line {k}") for k, line in enumerate(lines, 1)]


def missing(name: str) -> str:
    """Why an environment cannot run here, or an empty text."""
    if name == "scienceworld":
        return scienceworld_missing()
    if name == "bfcl":
        try:
            import bfcl_eval  # noqa: F401
        except ImportError:
            return "BFCL: the package `bfcl-eval` is not installed"
    return ""


# --- systems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One line of the table: a system, its configuration, and whose answers it gives."""

    title: str
    model: str
    config: SystemConfig
    make: Callable[[Worldbook], Harness]


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """All lines, model by model; a model is loaded when its first line needs it."""
    yield Cell("rules alone", RULES, SystemConfig(), lambda book: make_system(book, None))
    for label, loop, system in models(args):
        for name in args.systems:
            yield _cell(name, label, SystemConfig(name, loop=loop), args, system)
        if args.ablations:
            for content in ("schema", "evidence", "abstraction"):
                title = "full, schema only" if content == "schema" else f"full, schema and {content}"
                yield _cell(title, label, SystemConfig("full", content, loop=loop), args, system)
            if loop:
                yield _cell("full, no loop", label, SystemConfig("full", loop=False), args, system)
            yield _cell("full, no state", label, SystemConfig("full", loop=loop, state=False), args, system)


System = Callable[[Worldbook, SystemConfig], Harness]


def _cell(title: str, label: str, config: SystemConfig, args: argparse.Namespace, system: System) -> Cell:
    config = replace(config, temperature=args.temperature, max_tokens=args.max_tokens, parallel=args.parallel)
    return Cell(title, label, config, lambda book: system(book, config))


def models(args: argparse.Namespace) -> Iterator[tuple[str, bool, System]]:
    """(label, whether it can use tools in a loop, how a system with it is made) of every model asked for."""
    if args.copying:
        yield CopyingCompleter.name, True, lambda book, config: make_system(book, CopyingCompleter(), config)
    if args.rehearse:
        yield f"REHEARSE of {args.rehearse}", False, _rehearsing(args.rehearse)
    if args.endpoint:
        yield args.model, not args.single_shot, _asking(args)


def _rehearsing(config: str) -> System:
    loaded: list[Any] = []

    def make(book: Worldbook, system: SystemConfig) -> Harness:
        if not loaded:
            from envace_jax.evaluation.rehearse_agent import RehearseModel

            loaded.append(RehearseModel(config))
        return loaded[0].system(book, system)

    return make


def _asking(args: argparse.Namespace) -> System:
    loaded: list[Any] = []

    def make(book: Worldbook, system: SystemConfig) -> Harness:
        if not loaded:
            from envace_jax.endpoint import Endpoint, EndpointSettings
            from envace_jax.worldbook.completer import EndpointCompleter

            # Answers are kept on disk: a stopped study asks nothing twice.
            settings = EndpointSettings(
                args.endpoint, args.model, args.api_key_env, concurrency=args.parallel, timeout=args.timeout,
                attempts=2, cache_dir=str(args.out / "answers"),
            )  # fmt: skip
            loaded.append(EndpointCompleter(Endpoint(settings)))
        return make_system(book, loaded[0], system)

    return make


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(world: World, cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """The cell's figures: scores by row, and the outcomes of whole episodes."""
    began = time.process_time()
    results = evaluate_system(cell.title, cell.make(world.book), world.rows)
    system = cell.make(world.book)

    def open_episode(task: Task) -> WorldbookEnvironment:
        environment = WorldbookEnvironment(system)
        environment.reset(task)
        return environment

    report = replay(world.tasks, ReferenceDomain(world.name), ReadingAgent(world.name), open_episode, args.steps)
    return {
        "scores": results.scores,
        "sources": results.sources,
        "replay": {name: getattr(report, name) for name in ("tasks", "real", "wm", "w2r", "errors", "divergence")},
        "seconds": round(time.process_time() - began, 1),
    }


def result_of(world: World, cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """The cell's figures, from its file where that is of the same question."""
    question = [world.book.digest, [r.id for r in world.rows], [t.uuid for t in world.tasks], args.steps,
                cell.title, cell.model, asdict(cell.config)]  # fmt: skip
    file = args.out / world.name / "cells" / f"{digest([cell.title, cell.model])[:16]}.json"
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["question"] == digest(question):
            return found
    found = {"question": digest(question), "title": cell.title, "model": cell.model} | measure(world, cell, args)
    _write(file, canonical_json(found))
    return found


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


# --- tables ---------------------------------------------------------------------------------------------------------


def tables(worlds: Sequence[World], found: dict[tuple[str, str, str], dict[str, Any]], resamples: int) -> str:
    """Markdown: equal answers, word F1 and W2R by line and environment with 95% intervals, and paired differences."""
    lines = list(dict.fromkeys((title, model) for _, title, model in found))
    size = ", ".join(f"{w.name} {len(w.rows)} of {len({r.trajectory for r in w.rows})} episodes" for w in worlds)
    out = [f"Rows: {size}; whole episodes: {', '.join(f'{w.name} {len(w.tasks)}' for w in worlds)}."]
    for metric, heading in (("json_equal", "answer equal to the real one"), ("word_f1", "F1 of words")):

        def score(world: World, result: dict[str, Any], metric: str = metric) -> str:
            clusters = [r.trajectory for r in world.rows]
            return _shown(cluster_bootstrap(result["scores"][metric], clusters, resamples=resamples))

        out.append(_table(heading, worlds, lines, found, score))
    out.append(_table("W2R (WM, CR = W2R / Real)", worlds, lines, found, lambda w, r: _episodes(r, resamples)))
    out.append(_differences(worlds, lines, found, resamples))
    return "\n\n".join(out)


def _table(
    heading: str,
    worlds: Sequence[World],
    lines: Sequence[tuple[str, str]],
    found: dict[tuple[str, str, str], dict[str, Any]],
    cell: Callable[[World, dict[str, Any]], str],
) -> str:
    out = [f"| {heading} | answers by | " + " | ".join(w.name for w in worlds) + " |", "|---" * (len(worlds) + 2) + "|"]
    for title, model in lines:
        shown = [cell(w, found[w.name, title, model]) for w in worlds]
        out.append(f"| {title} | {model} | " + " | ".join(shown) + " |")
    return "\n".join(out)


def _shown(interval: Any) -> str:
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _episodes(result: dict[str, Any], resamples: int) -> str:
    part = result["replay"]
    report = ReplayReport(part["tasks"], part["real"], part["wm"], part["w2r"])
    figures = report.summary()
    if figures["CR"] is None:
        return f"{figures['W2R']:.2f} (WM {figures['WM']:.2f}, Real 0)"
    low, high = report.interval(resamples)
    return f"{figures['W2R']:.2f} ({figures['WM']:.2f}, {figures['CR']:.2f} [{low:.2f}, {high:.2f}])"


def _differences(
    worlds: Sequence[World],
    lines: Sequence[tuple[str, str]],
    found: dict[tuple[str, str, str], dict[str, Any]],
    resamples: int,
) -> str:
    """Full less each other line of the same model, on the same rows, trajectories resampled in pairs."""
    out = ["| full less … (equal answers) | answers by | " + " | ".join(w.name for w in worlds) + " |",
           "|---" * (len(worlds) + 2) + "|"]  # fmt: skip
    for title, model in lines:
        if title == "full" or ("full", model) not in lines:
            continue
        shown = []
        for w in worlds:
            a, b = (found[w.name, t, model]["scores"]["json_equal"] for t in ("full", title))
            interval = paired_cluster_bootstrap(a, b, [r.trajectory for r in w.rows], resamples=resamples)
            mark = "" if interval.low <= 0 <= interval.high or math.isnan(interval.low) else "*"
            shown.append(f"{interval.mean:+.2f}{mark} [{interval.low:.2f}, {interval.high:.2f}]")
        out.append(f"| {title} | {model} | " + " | ".join(shown) + " |")
    return "\n".join(out)


# --- the command ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of traces, worldbooks, cells and the tables")
    parser.add_argument("--environments", nargs="+", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS))
    parser.add_argument("--copying", action="store_true", help="a deterministic stand-in that copies what it is shown")
    parser.add_argument(
        "--rehearse", default="", metavar="CONFIG", help="a configuration whose policy's REHEARSE answers"
    )
    parser.add_argument("--endpoint", default="", help="address of an OpenAI-compatible endpoint")
    parser.add_argument("--model", default="", help="its model")
    parser.add_argument("--api_key_env", default="OPENAI_API_KEY", help="environment variable that holds its key")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--single_shot", action="store_true", help="no tool loop for the endpoint's model")
    parser.add_argument("--ablations", action="store_true", help="the full system with parts taken away, as well")
    parser.add_argument("--rows", type=int, default=60, help="questions an environment")
    parser.add_argument("--heldout", type=int, default=30, help="held-out tasks recorded in an environment")
    parser.add_argument("--tasks", type=int, default=12, help="held-out tasks played as whole episodes")
    parser.add_argument("--steps", type=int, default=50, help="calls an episode")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--max_tokens", type=int, default=16_384)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer of the endpoint")
    parser.add_argument("--resamples", type=int, default=10_000)
    args = parser.parse_args(argv)
    for name in ("rows", "heldout", "tasks", "steps", "max_tokens", "parallel", "resamples"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: at least 1")
    if bool(args.endpoint) != bool(args.model):
        parser.error("--endpoint and --model go together")
    return args


def run(args: argparse.Namespace) -> str:
    """Measures what is not there yet; the tables, which also lie in `--out`/table.md."""
    names = []
    for name in args.environments:
        if problem := missing(name):
            print(f"left out: {problem}", flush=True)
        else:
            names.append(name)
    if not names:
        raise UserError("no environment is left to run")
    worlds = [prepare(name, args) for name in names]
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for cell in cells(args):
        for world in worlds:
            result = result_of(world, cell, args)
            found[world.name, cell.title, cell.model] = result
            mean = sum(result["scores"]["json_equal"]) / len(world.rows)
            print(f"{world.name}: {cell.title} ({cell.model}): {mean:.3f} equal, {result['seconds']} s", flush=True)
    text = tables(worlds, found, args.resamples)
    _write(args.out / "table.md", text + "\n")
    return text


if __name__ == "__main__":
    try:
        print(run(parse()))
    except UserError as error:
        sys.exit(f"error: {error}")
