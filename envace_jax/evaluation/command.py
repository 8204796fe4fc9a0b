"""`evaluate`: a policy on a benchmark, one JSON line a task; a stopped evaluation goes on where it was."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.evaluation.benchmarks import BENCHMARKS, Benchmark
from envace_jax.evaluation.results import Header, ResultFile, digest, table, versions

WHAT = (*BENCHMARKS, "compare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="a benchmark, or what to do with a result file")
    parser.add_argument("files", nargs="*", type=Path, help="result files (compare)")
    parser.add_argument("--out", type=Path, help="result file (default: RUN_DIR/evaluation/BENCHMARK.jsonl)")
    parser.add_argument("--split", choices=("heldout", "train", "all"), default="heldout")
    parser.add_argument("--category", action="append", default=[], help="only this part of the benchmark (repeatable)")
    parser.add_argument("--tasks", type=int, default=0, help="at most so many tasks, evenly over all of them; 0: all")
    parser.add_argument("--trials", type=int, default=0, help="runs a task (default: evaluation.samples)")


def run_evaluate(cfg: ConfigDict, args: argparse.Namespace) -> None:
    if args.what in BENCHMARKS:
        _benchmark(cfg, args, BENCHMARKS[args.what])
    else:
        raise UserError(f"evaluate {args.what}: not available here")


def seen_in_training(cfg: ConfigDict) -> tuple[str, ...] | None:
    """Sources of tasks that the model was trained on, from the run that made it; None where nothing says so."""
    from envace_jax.datasets.bfcl import SOURCE as BFCL

    names = {"bfcl": (BFCL,), "tau2": ("tau2_airline", "tau2_retail")}
    for folder in filter(None, (cfg.model.path, cfg.run_dir)):
        path = Path(folder) / "config.json"
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        source = values.get("data.source")
        if isinstance(source, str):
            return tuple(sorted(s for name in source.split("+") for s in names.get(name, (name,))))
    return None


def _benchmark(cfg: ConfigDict, args: argparse.Namespace, benchmark: Benchmark) -> None:
    from rich.progress import track

    from envace_jax.build import chat_format, load_model, make_engine, mesh_for
    from envace_jax.evaluation.play import play, real_config
    from envace_jax.rehearsal.flow import Voice
    from envace_jax.rehearsal.settings import EpisodeConfig
    from envace_jax.test_time.commit import Committed

    if args.tasks < 0 or args.trials < 0:
        raise UserError("--tasks and --trials: expected a number of at least 0")
    tasks = benchmark.load(args.split, args.tasks, args.category)
    whole = tasks if not args.tasks else benchmark.load(args.split, 0, args.category)
    trials = args.trials or cfg.evaluation.samples
    chat = chat_format(cfg)
    rules = real_config(EpisodeConfig.from_config(cfg), benchmark)
    voice = Voice((cfg.seed,), cfg.evaluation.temperature, cfg.evaluation.top_p)
    header = Header(
        benchmark=f"{benchmark.name}/{args.split}",
        model={"name": cfg.model.path or f"random {cfg.model.size}"},
        handler=benchmark.handler,
        template=digest(chat.template()),
        sampling={
            "temperature": voice.temperature,
            "top_p": voice.top_p,
            "max_act_tokens": rules.max_act_tokens,
            "max_input_tokens": rules.max_input_tokens,
            "seed": cfg.seed,
        },
        versions=versions(),
        tasks=len(tasks),
        trials=trials,
        full=_count(benchmark, whole),
        seen=seen_in_training(cfg),
        notes=_notes(benchmark, args, seen_in_training(cfg)),
    )
    spec, params = load_model(cfg, chat, mesh_for(cfg))
    engine = make_engine(cfg, spec, params)
    out = args.out or Path(cfg.run_dir) / "evaluation" / f"{benchmark.name}.jsonl"
    with ResultFile(out, header) as file:
        left = len(tasks) * trials - len({(t.uuid, k) for t in tasks for k in range(trials)} & file.done)
        played = play(
            benchmark,
            tasks,
            Committed(chat, rules, turn_steps=benchmark.turn_steps),
            engine,
            voice,
            trials=trials,
            done=file.done,
            live=cfg.rollout.live_episodes,
        )
        for result in track(played, benchmark.name, total=left):
            file.write(result)
    print("\n".join([*table(header, file.results), f"results: {out}"]))


def _count(benchmark: Benchmark, tasks: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for task in tasks:
        counts[benchmark.category(task)] = counts.get(benchmark.category(task), 0) + 1
    return counts


def _notes(benchmark: Benchmark, args: argparse.Namespace, seen: tuple[str, ...] | None) -> tuple[str, ...]:
    notes = list(benchmark.notes)
    if seen is None:
        notes.append("what the model was trained on is not recorded: these tasks may have been seen")
    elif set(seen) & set(benchmark.sources):
        where = "its held-out tasks" if args.split == "heldout" else "these tasks or some of them"
        notes.append(f"SEEN IN TRAINING: the model was trained on tasks of this benchmark; measured on {where}")
    if args.split != "all":
        notes.append(f"split {args.split}: not the whole benchmark, so not comparable with published numbers")
    return tuple(notes)
