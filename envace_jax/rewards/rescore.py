"""`rescore`: recorded trajectories judged again, offline, with another judge or another checklist.

Turns that were not judged in the run (cut off by a fault) stay unjudged, so that a change of reward is a change of
judgement. The recording is not touched; the new file holds one line a trajectory with both rewards.
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


def judged_turns(trajectory: Trajectory) -> list[int]:
    """Turns that have verdicts in the recording, or all where it was played without a judge."""
    if not trajectory.verdicts:
        return list(range(len(trajectory.transcript)))
    turns = range(len(trajectory.verdicts[0]))
    return [t for t in turns if any(row for table in trajectory.verdicts for row in table[t])]


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
        turns = judged_turns(trajectory)
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
    if trajectory.masked_cause not in (None, "judge"):
        return None, causes + Counter([str(trajectory.masked_cause)])
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
