"""`rollout`: plays tasks with a policy and writes every trajectory as a JSON line."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from ml_collections import ConfigDict

from envace_jax.build import chat_format, load_model, make_engine, make_judge, mesh_for
from envace_jax.config import UserError
from envace_jax.datasets.sources import load_tasks
from envace_jax.interrupts import Interrupts
from envace_jax.options import new_file, whole
from envace_jax.rehearsal.grounding import make_grounding
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.rehearsal.trajectory import TrajectoryWriter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="file for the trajectories (JSON lines, new)")
    parser.add_argument("--tasks", type=whole(1), default=16, help="how many held-out tasks")
    parser.add_argument("--train_split", action="store_true", help="training tasks instead of held-out ones")


def run_rollout(cfg: ConfigDict, args: argparse.Namespace) -> None:
    from rich.progress import track

    new_file("--out", args.out)
    train, held_out = load_tasks(cfg.data)
    tasks = (train if args.train_split else held_out)[: args.tasks]
    if not tasks:
        raise UserError("data: no tasks in this split")
    chat = chat_format(cfg)
    mesh = mesh_for(cfg)
    spec, params = load_model(cfg, chat, mesh)
    engine = make_engine(cfg, spec, params, mesh=mesh)
    group_size = cfg.learning.group_size
    interrupts = Interrupts()
    played = rollout(
        tasks,
        engine=engine,
        chat=chat,
        cfg=RolloutConfig.from_config(cfg),
        judge=make_judge(cfg, mesh),
        seed=cfg.seed,
        group_size=group_size,
        grounding=make_grounding(cfg.rollout.grounding, cfg.rollout.worldbook),
        interrupted=lambda: interrupts.pending is not None,
    )
    ends: Counter[str] = Counter()
    rewards = []
    with interrupts, TrajectoryWriter(args.out) as writer:
        interrupts.hold()  # the rollout asks for it; nothing that has been played is lost between it and the file
        for trajectory in track(played, "rollout", total=len(tasks) * group_size):
            writer.write(trajectory)
            ends[trajectory.end_reason] += 1
            rewards += [] if trajectory.reward is None else [trajectory.reward]
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    print(
        f"{args.out}: {sum(ends.values())} trajectories, mean reward {mean}, {sum(ends.values()) - len(rewards)} masked"
    )
    stats = engine.stats()
    if cfg.rollout.control == "device":
        on, handed, diverged = (int(stats[f"device_{name}"]) for name in ("episodes", "handed_over", "diverged"))
        dropped, told = stats["device_tokens_dropped"], stats["device_tokens_told"]
        share = dropped / max(1.0, dropped + told)
        print(
            f"on the device: {on} episodes, {handed} handed over, {diverged} left the automaton's path; "
            f"{share:.1%} of its tokens dropped"
        )
    print("ends: " + ", ".join(f"{name} {n}" for name, n in ends.most_common()))
