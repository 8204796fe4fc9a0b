"""`show`: one task as the policy sees it: the prompts, and a table of token, role, sampled, advantage.

Without a recorded run the task's own dialogue is played, so that the rows are those of a warm start. With
`--trajectories FILE` the rows are those that were sampled, and the advantages those that the group gave.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.datasets.sources import load_tasks
from envace_jax.learning.arms import make_arm
from envace_jax.learning.packing import train_rows
from envace_jax.learning.trainer import credit
from envace_jax.options import whole
from envace_jax.rehearsal.grounding import make_grounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.rehearsal.trajectory import Trajectory, read_steps
from envace_jax.text.build import chat_format
from envace_jax.text.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="a task's uuid, or its number in the training split (from 0)")
    parser.add_argument("--held_out", action="store_true", help="number in the held-out split")
    parser.add_argument("--trajectories", type=Path, metavar="FILE", help="show what a run sampled (file or folder)")
    parser.add_argument("--member", type=whole(0), default=0, help="which trajectory of the group")
    parser.add_argument("--step", type=whole(0), help="of which training step, from 0 (default: the task's last)")
    parser.add_argument("--tokens", action="store_true", help="the table of every token (else the text of each row)")


def find_task(tasks: Sequence[Task], name: str) -> Task:
    """By uuid, else by number; raises `UserError` that says what there is."""
    for task in tasks:
        if task.uuid == name:
            return task
    if name.isdecimal() and int(name) < len(tasks):
        return tasks[int(name)]
    first = tasks[0].uuid if tasks else "none"
    raise UserError(f"task '{name}': neither a uuid nor a number below {len(tasks)} (the first task is '{first}')")


def visible(text: str) -> str:
    """A token's text on one line, control characters spelled out so that nothing reaches the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def token_table(tokenizer: Tokenizer, trajectory: Trajectory, row: int, advantages: Sequence[float] | None) -> Table:
    """Token, role, sampled, advantage of one ledger row; `advantages` by token, None without a group."""
    ledger = trajectory.rows[row]
    table = Table("#", "id", "token", "role", "sampled", "log-prob", "advantage", title=f"row {row}", box=None)
    for i, (token, sampled, logprob) in enumerate(zip(ledger.ids, ledger.sampled, ledger.logprobs)):
        table.add_row(
            str(i),
            str(token),
            escape(visible(tokenizer.decode([token]))),
            ledger.role.value if sampled else "",
            "yes" if sampled else "",
            f"{logprob:.3f}" if sampled else "",
            f"{advantages[i]:+.3f}" if sampled and advantages is not None else "",
        )
    return table


def row_text(tokenizer: Tokenizer, trajectory: Trajectory, row: int) -> str:
    """The text of a row with its sampled spans in bold (rich markup)."""
    ledger = trajectory.rows[row]
    parts, start = [], 0
    for i in range(1, len(ledger.ids) + 1):
        if i == len(ledger.ids) or ledger.sampled[i] != ledger.sampled[start]:
            lines = tokenizer.decode(ledger.ids[start:i]).split("\n")
            text = escape("\n".join(visible(line) for line in lines))
            parts.append(f"[bold green]{text}[/]" if ledger.sampled[start] else text)
            start = i
    return "".join(parts)


def run_show(cfg: ConfigDict, args: argparse.Namespace) -> None:
    console = Console(highlight=False, soft_wrap=True)
    chat = chat_format(cfg)
    advantages: list[Sequence[float] | None] = []
    if args.trajectories:
        shown, advantages = recorded(cfg, args)
    else:
        train, held_out = load_tasks(cfg.data)
        task = find_task(held_out if args.held_out else train, args.task)
        grounding = make_grounding(cfg.rollout.grounding, cfg.rollout.worldbook)
        shown = demonstrate(task, chat, EpisodeConfig.from_config(cfg), grounding=grounding)
        console.print(f"[bold]task {escape(task.uuid)}[/] from {escape(task.source)}, {len(task.user_turns)} turns")
        for turn, items in enumerate(task.checklists[0] if task.checklists else ()):
            for item in items:
                console.print(f"  turn {turn}, {escape(item.id)} (weight {item.weight:g}): {escape(item.question)}")
    for row, ledger in enumerate(shown.rows):
        console.rule(f"row {row}: {ledger.role.value}, {len(ledger.ids)} tokens, {sum(ledger.sampled)} sampled")
        if args.tokens:
            console.print(token_table(chat.tokenizer, shown, row, advantages[row] if advantages else None))
        else:
            console.print(row_text(chat.tokenizer, shown, row))
    if not args.trajectories:
        console.print("a demonstration: the task's own dialogue. --trajectories FILE shows what a run sampled")
        return
    reward = "none" if shown.reward is None else f"{shown.reward:.3f}"
    console.print(f"end: {shown.end_reason}; reward: {reward}; advantages: {dealt(shown, advantages)}")


def recorded(cfg: ConfigDict, args: argparse.Namespace) -> tuple[Trajectory, list[Sequence[float] | None]]:
    """The trajectory that is asked for, and what each token of its rows was paid: by the step's whole batch, as the
    trainer pays it."""
    path = args.trajectories / "trajectories.jsonl" if args.trajectories.is_dir() else args.trajectories
    name = args.task
    if name.isdecimal():
        train, held_out = load_tasks(cfg.data)
        name = find_task(held_out if args.held_out else train, name).uuid
    steps: dict[int | None, list[Trajectory]] = {}
    for step, trajectory in read_steps(path):
        steps.setdefault(step, []).append(trajectory)
    found = [
        (step, i)
        for step, batch in steps.items()
        for i, t in enumerate(batch)
        if t.task_id == name and t.member == args.member and args.step in (None, step)
    ]
    if not found:
        when = "" if args.step is None else f", step {args.step}"
        there = list(dict.fromkeys(t.task_id for batch in steps.values() for t in batch))
        raise UserError(
            f"{path}: no trajectory of task '{name}', member {args.member}{when}; there are {len(there)} tasks "
            f"({', '.join(there[:3])}…)"
        )
    step, place = found[-1]
    batch = steps[step]
    credits, copies, _ = credit(cfg, make_arm(cfg), batch, step or 0)
    shown = batch[place]
    paid = iter(train_rows(shown, credits[place], copies[place] if copies is not None else None))
    rows: list[Sequence[float] | None] = []
    for row in shown.rows:
        trained = any(row.sampled) and shown.reward is not None
        rows.append(list(next(paid).advantages) + [0.0] * len(row.ids) if trained else None)
    return shown, rows


def dealt(shown: Trajectory, advantages: Sequence[Sequence[float] | None]) -> str:
    """The advantages of each role's outputs, in words."""
    by_role: dict[str, list[str]] = {}
    for segment in shown.segments:
        row = advantages[segment.row]
        if row is not None and segment.ids:
            value = f"{row[segment.start]:+.3f}"
            if value not in by_role.setdefault(segment.role.value, []):
                by_role[segment.role.value].append(value)
    return "; ".join(f"{role} {', '.join(values)}" for role, values in by_role.items()) or "none"
