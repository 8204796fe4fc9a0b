"""`evaluate`: a policy on a benchmark, one JSON line a task; a stopped evaluation goes on where it was.

evaluate quickstart|bfcl|bfcl-single|tau2|scienceworld   played in process, in the real environment
evaluate bfcl-average RESULT …       BFCL's group means, and its overall where every category is there
evaluate compare RESULT              beside the published numbers
evaluate nl-assertions RESULT        tau2's natural-language assertions, by a judge, apart from the score
evaluate finmcp PREDICTIONS          tool metrics on the benchmark's record format
evaluate fidelity                    rehearsed against real answers, and rehearsed against real success
evaluate import FOLDER|FILE          scores of the official BFCL and tau2 programs, as result files
evaluate vita|bfcl-cli|tau2-cli      how the official program is run as a client of `serve`
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.evaluation.benchmarks import BENCHMARKS, Benchmark
from envace_jax.evaluation.clients import CLIENTS, instructions
from envace_jax.evaluation.results import Header, Result, ResultFile, digest, read_results, table, versions
from envace_jax.options import whole
from envace_jax.test_time.plan import CONTROLS, NAMES, Plan, read_plan

WHAT = (*BENCHMARKS, "fidelity", "finmcp", "bfcl-average", "nl-assertions", *CLIENTS, "import", "compare")
FIDELITY = ("quickstart", "bfcl", "tau2", "scienceworld")
TEST_TIME_SAMPLING = (1.0, 1.0)
"""Temperature and top_p of the published test-time table, for both roles."""


MakeEngine = Callable[[ConfigDict, argparse.Namespace, Any], Any]
"""(configuration, command line, chat format) -> engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="a benchmark, or what to do with a result file")
    parser.add_argument("files", nargs="*", type=Path, help="result or prediction files (compare, finmcp, …)")
    parser.add_argument("--out", type=Path, help="result file; import: folder (default: in RUN_DIR/evaluation)")
    parser.add_argument("--split", choices=("heldout", "train", "all"), default="heldout")
    parser.add_argument("--category", action="append", default=[], help="only this part of the benchmark (repeatable)")
    parser.add_argument("--tasks", type=whole(0), default=0, help="at most so many, evenly over all of them; 0: all")
    parser.add_argument("--trials", type=whole(0), default=0, help="runs a task (default: evaluation.samples)")
    parser.add_argument("--test_time", default="none", metavar="METHOD", help=NAMES)
    parser.add_argument(
        "--match", type=Path, metavar="RESULT", help="a control (best-N, …) spends this result's tokens a task"
    )
    parser.add_argument("--memory_tokens", type=whole(1), default=512, help="budget of the rehearsal memory")
    parser.add_argument("--rehearse_user", action="store_true", help="rehearsals imagine the user's next messages too")
    parser.add_argument("--rehearser", metavar="DIR", help="another model rehearses: a folder of the same shape")
    parser.add_argument("--user_url", default="", help="tau2: endpoint of the user simulator (default: scripted solo)")
    parser.add_argument("--user_model", default="", help="tau2: its model")
    parser.add_argument("--judge_url", default="", help="nl-assertions, fidelity: endpoint of the judge")
    parser.add_argument("--judge_model", default="", help="nl-assertions, fidelity: its model")
    parser.add_argument("--on", default="quickstart", choices=FIDELITY, help="fidelity: whose tasks")


def run_evaluate(cfg: ConfigDict, args: argparse.Namespace, engine: MakeEngine | None = None) -> None:
    """The command; `engine` makes, or has kept, the engine of a benchmark that is played."""
    if args.match and (args.what not in BENCHMARKS or read_plan(args.test_time).kind not in CONTROLS):
        controls = ", ".join(f"{name}-N" for name in CONTROLS)
        raise UserError(f"--match goes with a benchmark and a control (--test_time {controls}), and with nothing else")
    if args.what in BENCHMARKS:
        _benchmark(cfg, args, BENCHMARKS[args.what], engine or policy_engine)
    elif args.what == "fidelity":
        from envace_jax.evaluation.real_fidelity import run_fidelity

        run_fidelity(cfg, args)
    elif args.what == "compare":
        from envace_jax.evaluation.published import compare

        for path in _files(args):
            print("\n".join(compare(*read_results(path))))
    elif args.what == "bfcl-average":
        from envace_jax.evaluation.bfcl_average import report as averages

        print("\n".join(averages(_files(args))))
    elif args.what == "import":
        _import(cfg, args)
    elif args.what == "nl-assertions":
        _nl_assertions(args)
    elif args.what == "finmcp":
        from envace_jax.evaluation.finmcp import report, write

        for path in _files(args):
            print("\n".join(report(path)))
            print(f"results: {write(path)}")
    else:
        print(instructions(args.what))


def _import(cfg: ConfigDict, args: argparse.Namespace) -> None:
    from envace_jax.evaluation.official import official

    for path in _files(args):
        for header, results in official(path):
            name = f"official_{header.benchmark.partition('/')[0]}_{_safe(header.model['name'])}.jsonl"
            out = (args.out or Path(cfg.run_dir) / "evaluation") / name
            with ResultFile(out, header) as file:
                for result in results:
                    if (result.task, result.trial) not in file.done:
                        file.write(result)
            print("\n".join([*table(header, file.results), f"results: {out}"]))


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


def _nl_assertions(args: argparse.Namespace) -> None:
    from envace_jax.datasets.tau2 import load_tau2
    from envace_jax.endpoint import Endpoint, EndpointSettings
    from envace_jax.evaluation import nl_assertions

    if not args.judge_url or not args.judge_model:
        raise UserError("evaluate nl-assertions: --judge_url and --judge_model name the judge")
    tasks = {task.uuid: task for task in load_tau2()}
    settings = EndpointSettings(args.judge_url, args.judge_model, temperature=0.0, top_p=1.0, max_tokens=1024)
    with Endpoint(settings) as endpoint:
        for path in _files(args):
            header, results = read_results(path)
            assessed = nl_assertions.assess(results, tasks, endpoint)
            print("\n".join(nl_assertions.report(header, assessed, args.judge_model)))
            print(f"results: {nl_assertions.write(path, header, assessed, args.judge_model)}")


def _files(args: argparse.Namespace) -> list[Path]:
    if not args.files:
        raise UserError(f"evaluate {args.what}: expected at least one file")
    return args.files


# --- playing a benchmark ----------------------------------------------------------------------------------------------


def _benchmark(cfg: ConfigDict, args: argparse.Namespace, benchmark: Benchmark, engine: MakeEngine) -> None:
    from rich.progress import track

    from envace_jax.build import chat_format
    from envace_jax.evaluation.play import play, real_config
    from envace_jax.rehearsal.flow import Voice
    from envace_jax.rehearsal.settings import EpisodeConfig
    from envace_jax.test_time.commit import Committed

    plan = replace(
        read_plan(args.test_time),
        memory_tokens=args.memory_tokens,
        evaluation_tokens=min(512, cfg.rollout.max_rehearse_tokens),
        user="rehearsed" if args.rehearse_user else "withheld",
        rehearser="rehearser" if args.rehearser else "policy",
    )
    tasks = benchmark.load(args.split, args.tasks, args.category)
    chat = chat_format(cfg)
    episode = EpisodeConfig.from_config(cfg)
    rules = real_config(episode, benchmark)
    temperature, top_p = cfg.evaluation.temperature, cfg.evaluation.top_p
    if plan.kind != "none" and (temperature, top_p) == (0.6, 0.95):
        temperature, top_p = TEST_TIME_SAMPLING
    voice = Voice((cfg.seed,), temperature, top_p)
    simulator, simulated = _simulator(cfg, args, benchmark)
    header = _header(cfg, args, benchmark, plan, chat, rules, voice, tasks, simulated)
    out = args.out or Path(cfg.run_dir) / "evaluation" / f"{benchmark.name}.jsonl"
    failures: list[str] = []
    with ResultFile(out, header) as file:
        left = {(task.uuid, trial) for task in tasks for trial in range(header.trials)} - file.done
        if left:
            method = Committed(
                chat,
                rules,
                replace(episode, parser="lenient", judged=False),
                plan,
                turn_steps=benchmark.turn_steps,
                budgets=_matched(args.match, tasks) if args.match else {},
                simulator=simulator,
            )
            played = play(
                benchmark,
                tasks,
                method,
                engine(cfg, args, chat),
                voice,
                trials=header.trials,
                done=file.done,
                live=benchmark.live or cfg.rollout.live_episodes,
                on_failure=failures.append,
            )
            for result in track(played, benchmark.name, total=len(left)):
                file.write(result)
    if failures:
        print(f"{len(failures)} episodes had no user (first: {failures[0]}); the same command plays them")
    print("\n".join(table(header, file.results) if file.results else ["no results"]))
    print(f"results: {out}")


def budgets(results: Sequence[Result]) -> dict[str, tuple[int, int]]:
    """What each task cost in a result file: mean tokens, and the ACT outputs of its committed runs."""
    by_task: dict[str, list[Result]] = {}
    for result in results:
        by_task.setdefault(result.task, []).append(result)
    return {
        task: (round(sum(r.tokens for r in part) / len(part)), max(1, round(sum(r.acts for r in part) / len(part))))
        for task, part in by_task.items()
    }


def _matched(path: Path, tasks: Sequence[Task]) -> dict[str, tuple[int, int]]:
    """Budgets from a result file that has every task."""
    found = budgets(read_results(path)[1])
    missing = [task.uuid for task in tasks if task.uuid not in found]
    if missing:
        raise UserError(
            f"--match {path}: no result of {len(missing)} of {len(tasks)} tasks (first: {missing[0]}); play them there"
        )
    return found


def policy_engine(cfg: ConfigDict, args: argparse.Namespace, chat: Any) -> Any:
    """An engine with the policy, and the rehearsing policy where there is one."""
    from envace_jax.build import load_model, make_engine, mesh_for
    from envace_jax.model.hf import load_params

    mesh = mesh_for(cfg)
    spec, params = load_model(cfg, chat, mesh)
    engine = make_engine(cfg, spec, params)
    if args.rehearser:
        engine.set_params(load_params(Path(args.rehearser), spec, mesh=mesh, dtype="float32"), "rehearser")
    return engine


def _simulator(cfg: ConfigDict, args: argparse.Namespace, benchmark: Benchmark) -> tuple[Any, str]:
    """The user simulator, and how it is named in the result."""
    if not args.user_url:
        return None, "scripted solo: the whole request in one message" if benchmark.name == "tau2" else "scripted"
    if benchmark.name != "tau2":
        raise UserError(f"--user_url: {benchmark.name} has user messages of its own")
    from envace_jax.endpoint import Endpoint, EndpointSettings
    from envace_jax.evaluation.user import GREETING, RULES, EndpointUser

    settings = EndpointSettings(args.user_url, args.user_model, temperature=0.0, top_p=1.0, max_tokens=512)
    prompt = digest(RULES + GREETING)
    return EndpointUser(Endpoint(settings)), f"{args.user_model} at temperature 0, own prompt (SHA-256 {prompt})"


def _header(
    cfg: ConfigDict,
    args: argparse.Namespace,
    benchmark: Benchmark,
    plan: Plan,
    chat: Any,
    rules: Any,
    voice: Any,
    tasks: Sequence[Task],
    simulated: str,
) -> Header:
    seen = seen_in_training(cfg)
    whole = tasks if benchmark.name == "quickstart" else benchmark.load(args.split, 0, args.category)
    options = [args.split, *sorted(args.category), *([] if plan.kind == "none" else [plan.name])]
    notes = [*benchmark.notes, *_training_notes(benchmark, args, seen)]
    if benchmark.name == "tau2" and not args.user_url:
        notes.append("SOLO: no user simulator; the agent gets the whole request at once, which is another task")
    if plan.kind != "none":
        notes.append(f"test-time method {plan.name}; tokens counted are all that were generated")
    return Header(
        benchmark="/".join([benchmark.name, *options]),
        model={"name": cfg.model.path or f"random {cfg.model.size}", "digest": folder_digest(cfg.model.path)}
        | ({"rehearser": args.rehearser, "rehearser_digest": folder_digest(args.rehearser)} if args.rehearser else {}),
        handler=benchmark.handler,
        template=digest(chat.template()),
        sampling={
            "temperature": voice.temperature,
            "top_p": voice.top_p,
            "max_act_tokens": rules.max_act_tokens,
            "max_input_tokens": rules.max_input_tokens,
            "thinking": chat.thinking,
            "seed": cfg.seed,
            "user": simulated,
            "method": plan.name,
            "memory_tokens": plan.memory_tokens if plan.kind != "none" else 0,
            "user_in_rehearsals": plan.user if plan.kind != "none" else "",
            "match": "" if args.match is None else hashlib.sha256(args.match.read_bytes()).hexdigest(),
        },
        versions=versions(*benchmark.packages),
        tasks=len(tasks),
        trials=args.trials or cfg.evaluation.samples,
        full=_count(benchmark, whole),
        seen=seen,
        notes=tuple(notes),
    )


def folder_digest(path: str) -> str:
    """A digest of a model folder: names, sizes, and the first and last 64 KB of every file; empty for no folder."""
    if not path or not Path(path).is_dir():
        return ""
    total = hashlib.sha256()
    for file in sorted(Path(path).iterdir()):
        if file.is_file():
            with file.open("rb") as f:
                head = f.read(1 << 16)
                f.seek(max(0, file.stat().st_size - (1 << 16)))
                total.update(f"{file.name}/{file.stat().st_size}/".encode() + head + f.read())
    return total.hexdigest()


def seen_in_training(cfg: ConfigDict) -> tuple[str, ...] | None:
    """Sources of tasks that the model was trained on, from its card or its run; None where nothing says so."""
    from envace_jax.datasets.bfcl import SOURCE as BFCL

    names = {"bfcl": (BFCL,), "tau2": ("tau2_airline", "tau2_retail")}
    source = _source_in_card(Path(cfg.model.path)) if cfg.model.path else None
    if source is None:
        return None
    return tuple(sorted(s for name in source.split("+") for s in names.get(name, (name,))))


def _source_in_card(folder: Path) -> str | None:
    try:
        found = re.search(r"^\| data\.source \| ([\w+]+) \|", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return None if found is None or found[1] == "unknown" else found[1]


def _count(benchmark: Benchmark, tasks: Sequence[Task]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for task in tasks:
        counts[benchmark.category(task)] = counts.get(benchmark.category(task), 0) + 1
    return counts


def _training_notes(benchmark: Benchmark, args: argparse.Namespace, seen: tuple[str, ...] | None) -> list[str]:
    notes = []
    if seen is None:
        notes.append("what the model was trained on is not recorded: these tasks may have been seen")
    elif set(seen) & set(benchmark.sources):
        where = "its held-out tasks" if args.split == "heldout" else "these tasks or some of them"
        notes.append(f"SEEN IN TRAINING: the model was trained on tasks of this benchmark; measured on {where}")
    if args.split != "all" and benchmark.name != "quickstart":
        notes.append(f"split {args.split}: not the whole benchmark, so not comparable with published numbers")
    return notes
