"""Figures of the worldbook: rule-path steps, forks, builds, and what rules answer on held-out quickstart transitions.

    python benchmarks/worldbook.py --out runs/worldbook_bench

Times are CPU seconds of this process on one core (`taskset -c 0` pins it), the best of several rounds, so that other
programs on the machine count as little as may be. Memory of a build is the growth of the peak resident set in a process
of its own. Counts of transitions do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.traces import TraceEpisode, TraceEvent, episode_from_task, make_episode, write_traces
from envace_jax.worldbook.build import BuildConfig, build_worldbook, load_episodes
from envace_jax.worldbook.compile import replay_rules
from envace_jax.worldbook.harness import Harness
from envace_jax.worldbook.ingest import align
from envace_jax.worldbook.store import Worldbook
from envace_jax.worldbook.workspace import open_session

ENTRIES = 10_000
TARGETS = {"rule_steps_per_s": 10_000, "fork_us": 50, "exact_share": 0.95}


def best(work: Callable[[], Any], rounds: int) -> float:
    """CPU seconds of the fastest of several rounds."""
    seconds = []
    for _ in range(rounds):
        began = time.process_time_ns()
        work()
        seconds.append(time.process_time_ns() - began)
    return min(seconds) / 1e9


def episodes(split: str, count: int) -> list[TraceEpisode]:
    return [episode_from_task(task) for task in generate_tasks(split, count)]


def rule_path(book: Worldbook, held_out: list[TraceEpisode], rounds: int) -> dict[str, float]:
    """Steps a second of whole held-out episodes, one batch a step over all sessions; steps that rules answer count.

    A session that a rule does not answer ends there, as its state is the agent's to say.
    """
    harness = Harness(book)
    plans = [(open_session(e.initial_state), [(t.name, t.arguments) for t in align(e)[0]]) for e in held_out]
    steps = 0

    def run() -> None:
        nonlocal steps
        steps = 0
        live = [(session, calls, 0) for session, calls in plans]
        while live:
            answers = harness.step_batch([(s, *calls[k]) for s, calls, k in live])
            steps += sum(result.source == "rule" for _, result in answers)
            live = [
                (session, calls, k + 1)
                for (_, calls, k), (session, result) in zip(live, answers)
                if result.source == "rule" and k + 1 < len(calls)
            ]

    run()
    seconds = best(run, rounds)
    return {"rule_steps_per_s": steps / seconds, "rule_steps": steps, "sessions": len(plans)}


def forks(rounds: int) -> dict[str, float]:
    """Microseconds of a fork of a state with 10,000 entries, and of a fork with a write that leaves the other alone."""
    session = open_session({"orders": {str(i): {"status": "paid", "total": i} for i in range(ENTRIES)}})
    many = 1_000

    def fork() -> None:
        for _ in range(many):
            session.fork()

    def write() -> None:
        for _ in range(many):
            session.fork().state.apply("set", ("world", "orders", "7", "total"), 1)

    return {"fork_us": best(fork, rounds) / many * 1e6, "fork_and_write_us": best(write, rounds) / many * 1e6}


def answered(book: Worldbook, held_out: list[TraceEpisode]) -> dict[str, float]:
    """What rules answer of the held-out transitions, with the explicit initial state and without."""
    out: dict[str, float] = {}
    for name, with_state in (("", True), ("without_state_", False)):
        count = replay_rules(book, held_out, floor=0.9, with_state=with_state).to_json()
        n = count["transitions"]
        out |= {
            f"{name}transitions": n,
            f"{name}exact_share": count["right"] / n,
            f"{name}wrong": count["wrong"],
            f"{name}handed_over_share": count["handed_over"] / n,
        }
    return out


def peak_kib() -> int:
    """Peak resident set of this process so far (Linux; what `getrusage` says includes the parent before exec)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def long_winded(episode: TraceEpisode, chars: int) -> TraceEpisode:
    """The episode with a page of so many characters read after every observation."""
    events: list[TraceEvent] = []
    for k, event in enumerate(episode.events):
        events.append(event)
        if event.kind == "observation":
            text = f"{episode.episode_id} line {k} "
            call = {"type": "read_page", "arguments": {"page": k}, "raw": ""}
            events.append(TraceEvent("agent", "action", call, {"call_id": f"page{k}"}))
            page = (text * (chars // len(text) + 1))[:chars]
            events.append(TraceEvent("environment", "observation", page, {"call_id": f"page{k}"}))
    return make_episode(events, where="long", episode_id=episode.episode_id, initial_state=episode.initial_state)


def build(traces: int, page: int, folds: int) -> dict[str, float]:
    """CPU seconds and memory of reading traces from a file and building from them; run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traces.jsonl"
        train = (episode_from_task(t) for t in generate_tasks("train", traces))
        write_traces(file, (long_winded(e, page) if page else e for e in train))
        before = peak_kib()
        return {"traces": traces, "file_mb": file.stat().st_size / 1e6} | _built(file, before, folds)


def _built(file: Path, before: int, folds: int) -> dict[str, float]:
    began = time.process_time()
    book = build_worldbook(load_episodes([file])[0], config=BuildConfig(folds=folds))
    peak = peak_kib()
    return {
        "transitions": len(book.evidence),
        "rules": len(book.rules),
        "cpu_s": time.process_time() - began,
        "peak_mib": peak / 1024,
        "growth_mib": (peak - before) / 1024,
    }


def main(argv: list[str] | None = None) -> int:
    """Prints every figure beside its target; the exit status is 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=None, help="folder for figures.json")
    parser.add_argument("--train", type=int, default=400, help="quickstart traces of the worldbook that is measured")
    parser.add_argument("--heldout", type=int, default=400)
    parser.add_argument("--build", type=int, nargs="*", default=[250, 500, 1000], help="sizes of the builds measured")
    parser.add_argument("--page", type=int, default=65_536, help="characters of a page in the traces of the last build")
    parser.add_argument("--rounds", type=int, default=7)
    # What a child process runs: number of traces and characters of a page.
    parser.add_argument("--one_build", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one_build:
        print(json.dumps(build(*args.one_build, 2)))
        return 0
    held_out = episodes("heldout", args.heldout)
    book = build_worldbook(episodes("train", args.train), config=BuildConfig(folds=2))
    figures: dict[str, Any] = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    figures |= answered(book, held_out) | rule_path(book, held_out, args.rounds) | forks(args.rounds)
    for name, value in figures.items():
        print(f"{name:28} {value if isinstance(value, str) else format(value, '.6g')}", flush=True)
    figures["builds"] = []
    sizes = [(size, 0) for size in args.build]
    for size, page in [*sizes, *((size, args.page) for size, _ in sizes[-1:])]:
        command = [sys.executable, __file__, "--one_build", str(size), str(page)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures["builds"].append(json.loads(done.stdout))
        print("build", ", ".join(f"{k} {format(v, '.5g')}" for k, v in figures["builds"][-1].items()), flush=True)
    missed = [
        *(["rule_steps_per_s"] if figures["rule_steps_per_s"] < TARGETS["rule_steps_per_s"] else []),
        *(["fork_us"] if figures["fork_us"] > TARGETS["fork_us"] else []),
        *(["exact_share"] if figures["exact_share"] < TARGETS["exact_share"] or figures["wrong"] else []),
        *(["without_state_wrong"] if figures["without_state_wrong"] else []),
    ]
    figures["missed"] = missed
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"missed: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
