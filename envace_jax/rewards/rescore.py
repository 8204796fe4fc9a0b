"""`rescore`: recorded trajectories judged again, offline, with another judge or another checklist.

A turn that a fault cut off stays unjudged if it was in the run, so that a change of reward is a change of judgement. A
trajectory that the old judge left without verdicts, or that was played without a judge, gets its reward here. One whose
episode an outage of that judge ended before its last turn keeps none: nobody knows how it would have gone on. The
recording is not touched; the new file holds one line a trajectory with both rewards.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import read_tasks
from envace_jax.datasets.records import ChecklistItem, Task
from envace_jax.options import new_file
from envace_jax.rehearsal.trajectory import Trajectory, read_trajectories
from envace_jax.rewards.checklist import score_checklist
from envace_jax.rewards.judge import Judge, JudgeRequest, JudgeResult

Checklists = Sequence[Sequence[Sequence[ChecklistItem]]]
OPEN_REQUESTS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trajectories", type=Path, help="JSON lines of a run, or the run's folder")
    parser.add_argument("--out", type=Path, required=True, help="file for the new scores (new)")
    parser.add_argument("--checklists", type=Path, help="CM2 file whose checklists replace the recorded tasks' own")


def judged_turns(trajectory: Trajectory, partial: bool) -> range:
    """The turns to judge: all, but a last one that was cut off only where the run judged it.

    partial: whether turns that were cut off count in a trajectory that was played without a judge.
    """
    last = len(trajectory.transcript) - 1
    if trajectory.end_reason in ("completed", "vote", "judge"):
        return range(last + 1)
    known = any(row for table in trajectory.verdicts for row in table[last]) if trajectory.verdicts else partial
    return range(last + 1 if known else last)


def unscorable(trajectory: Trajectory, n_turns: int) -> str | None:
    """Why no judge can score a trajectory any more: what cut it short; None where one can.

    An episode that the old judge ended early stays out whatever the new one says of its last turn: to score those that
    it would have stopped there, and not those that it would have let go on, would be a bias.
    """
    cause = trajectory.masked_cause
    if cause in (None, "not_judged"):
        return None
    return None if str(cause).startswith("judge:") and len(trajectory.transcript) == n_turns else cause


def rescored(
    trajectories: Iterator[Trajectory], judge: Judge, checklists: dict[str, Checklists] | None, cfg: Any
) -> Iterator[tuple[Trajectory, float | None, Counter[str]]]:
    """(trajectory, new reward or None, causes of missing verdicts), in the order in which judging ends."""
    waiting: dict[str, tuple[Trajectory, Checklists, dict[int, JudgeResult], set[int]]] = {}
    where: dict[str, tuple[str, int]] = {}

    def finished() -> Iterator[tuple[Trajectory, float | None, Counter[str]]]:
        for result in judge.poll():
            name, turn = where.pop(result.request_id)
            waiting[name][2][turn] = result
        for name in [n for n, w in waiting.items() if w[2].keys() == w[3]]:
            trajectory, lists, results, _ = waiting.pop(name)
            yield trajectory, *_score(trajectory, lists, results, cfg)

    for number, trajectory in enumerate(trajectories):
        lists = (checklists or {}).get(trajectory.task_id) or (trajectory.task.checklists if trajectory.task else ())
        if not lists:
            raise UserError(f"trajectory {number} (task {trajectory.task_id}): no checklist is recorded or given")
        lists = lists[: cfg.rewards.max_checklists]
        gone = unscorable(trajectory, len(lists[0]))
        turns = judged_turns(trajectory, cfg.rewards.judge_partial_turns) if gone is None else range(0)
        name = str(number)
        waiting[name] = (trajectory, lists, {}, set(turns))
        for turn in turns:
            identity = f"{number}/{turn}"
            where[identity] = (name, turn)
            items = tuple(tuple(variant[turn]) for variant in lists)
            system = trajectory.task.system if trajectory.task else None
            judge.submit(
                JudgeRequest(identity, trajectory.task_id, system, trajectory.transcript[: turn + 1], items)
            )
        yield from finished()
        while len(where) > OPEN_REQUESTS:
            time.sleep(0.01)
            yield from finished()
    while waiting:
        yield from finished()
        if waiting:
            time.sleep(0.01)


def _score(
    trajectory: Trajectory, lists: Checklists, results: dict[int, JudgeResult], cfg: Any
) -> tuple[float | None, Counter[str]]:
    causes: Counter[str] = Counter(c for r in results.values() for c in r.causes.values())
    if (gone := unscorable(trajectory, len(lists[0]))) is not None:
        return None, Counter([gone])
    table = [
        [
            results[turn].verdicts[v] if turn in results else ((),) * len(variant[turn])
            for turn in range(len(trajectory.transcript))
        ]
        for v, variant in enumerate(lists)
    ]
    score = score_checklist(lists, table, len(lists[0]), honour_dependence=cfg.rewards.dependence)
    return score.reward, causes


def run_rescore(cfg: ConfigDict, args: argparse.Namespace) -> None:
    from envace_jax.build import make_judge, mesh_for

    path = args.trajectories / "trajectories.jsonl" if args.trajectories.is_dir() else args.trajectories
    new_file("--out", args.out)
    checklists: dict[str, Checklists] | None = None
    if args.checklists:
        tasks: list[Task] = read_tasks(args.checklists, cfg.data.on_bad_record)[0]
        checklists = {t.uuid: t.checklists for t in tasks}
    old: list[float] = []
    new: list[float] = []
    causes: Counter[str] = Counter()
    total = changed = 0
    with args.out.open("w") as out:
        judge = make_judge(cfg, mesh_for(cfg))
        for trajectory, reward, missing in rescored(read_trajectories(path), judge, checklists, cfg):
            total += 1
            causes += missing
            if reward is not None and trajectory.reward is not None:
                old.append(trajectory.reward)
                new.append(reward)
                changed += abs(reward - trajectory.reward) > 1e-9
            line = {
                "task_id": trajectory.task_id,
                "group": trajectory.group,
                "member": trajectory.member,
                "recorded_reward": trajectory.reward,
                "reward": reward,
                "missing_verdicts": dict(missing),
            }
            out.write(json.dumps(line) + "\n")
    print(f"{args.out}: {total} trajectories, {len(old)} with both rewards, {changed} changed")
    print(f"mean reward {_mean(old)} as recorded, {_mean(new)} now")
    print(f"missing verdicts by cause: {dict(causes) or 'none'}")


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "none"
