"""The training loop: tasks, rollouts, advantages, update, hand-over, metrics, checkpoint.

`run_train` is to be read from top to bottom; what a step works with is put together in `setup.py`.  What has to
survive a kill (`Run.position`) is written with every checkpoint, so that the same command goes on with the next step
and ends with the parameters of an unbroken run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.distributed import processes
from envace_jax.evaluation.fidelity import Pair
from envace_jax.interrupts import Preempted
from envace_jax.json_files import read_json
from envace_jax.learning.advantage import (
    Credit,
    duplicate_outputs,
    group_spread,
    output_advantages,
    role_advantages,
)
from envace_jax.learning.arms import Arm
from envace_jax.learning.bucket import checkpoint_place
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.looking import (
    memory,
    peak_flops,
    profiled,
    profiling,
    telling,
    trajectory_text,
    utilisation,
)
from envace_jax.learning.metrics import Metrics, red_flags, trajectory_metrics
from envace_jax.learning.overlap import Batch, playing_ahead, timed
from envace_jax.learning.packing import TrainRow, train_rows
from envace_jax.learning.run_dir import shared_run_dir, write_json
from envace_jax.learning.setup import Run, prepare
from envace_jax.learning.shaping import Marks, Shaping, additions
from envace_jax.learning.shared import agree_to_stop, exchange, follow, in_order, share, shared_rollout
from envace_jax.learning.summary import evaluate_policy, fidelity_page, gap_plot, plot, summary_lines
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.trajectory import Trajectory, TrajectoryWriter
from envace_jax.text.transcript import ROLE_CODES, Role
from envace_jax.worldbook.consistency import consistency_metrics

MAX_DRAWS = 4  # batches of tasks that dynamic sampling may draw for one step
PREEMPTED = 75  # exit status after SIGTERM: the same command goes on


def run_train(cfg: ConfigDict, args: argparse.Namespace | None = None) -> int:
    """Trains until `learning.steps` steps are done; the same command goes on where a killed run stood.

    Returns the exit status: 0, `PREEMPTED` after SIGTERM, or 1 where `learning.require_checks` is set and a check of
    the summary failed.
    """
    if cfg.dry_run:
        from envace_jax.report.dry_run import run_dry

        return run_dry(cfg)
    steps = profiled(cfg.profile_steps)
    team = processes(cfg.mesh.hang_timeout)
    with shared_run_dir(cfg, team) as folder:
        if team.alone and (status := finished_before(cfg, folder)) is not None:
            return status
        with prepare(cfg, folder, team) as run, run.interrupts:
            return train(run, steps)


def finished_before(cfg: ConfigDict, folder: Path) -> int | None:
    """Says again what a finished run said, loading nothing; its exit status, or None where there is work left."""
    if not (folder / "summary.json").exists():
        return None
    told = read_json(folder / "summary.json")
    if "failed" not in told:  # of an older version: told again when the run has been loaded
        return None
    checkpoints = Checkpoints(checkpoint_place(cfg, folder), say=lambda _: None)
    if not cfg.learning.steps == told["steps"] == checkpoints.latest():
        return None
    for line in told["lines"]:
        print(line)
    print(
        f"this run was finished before: learning.steps={told['steps']} are done; a larger number goes on, "
        "--config.overwrite=true begins anew"
    )
    return status_of(cfg, told["failed"])


def train(run: Run, steps: range) -> int:
    """Steps, evaluations and checkpoints until `learning.steps` are done; returns the exit status."""
    try:
        with run.interrupts.as_themselves():
            all_steps(run, steps)
    except KeyboardInterrupt as interrupt:
        agree_to_stop(run.processes, run.interrupts, interrupt)
        run.display.say(f"interrupted: saving step {run.step}; the same command goes on from there")
        run.save()
        run.settle()
        if isinstance(interrupt, Preempted):
            return PREEMPTED
        raise
    run.settle()
    return finish(run)


def all_steps(run: Run, profiled: range) -> None:
    """What `train` does where nothing interrupts it."""
    cfg, folder = run.cfg, run.folder
    if cfg.evaluation.at_start and run.held_out and not run.measured:
        run.sink.write(0, evaluate(run, "before training"))
        run.measured = True
        run.mark()
    while run.step < cfg.learning.steps or run.pending is not None:
        with profiling(profiled, run.step + 1, folder):
            metrics = train_step(run) if run.pending is None else run.pending
        if evaluation_due(run):
            if run.pending is None:
                run.pending = dict(metrics)
                run.mark()
                run.interrupts.let()
            metrics |= evaluate(run, f"after step {run.step}")
            run.interrupts.hold()
        run.sink.write(run.step, metrics)
        run.note_compilations()
        run.pending, run.score = None, metrics.get(cfg.checkpoint.best)
        run.mark()
        if run.step == cfg.learning.steps or run.step % cfg.checkpoint.every == 0:
            run.save()
        report(run, metrics)
        run.interrupts.let()


def evaluation_due(run: Run) -> bool:
    """Whether the step that is done is one whose policy is measured."""
    e = run.cfg.evaluation
    due = bool(e.every and run.step % e.every == 0) or (e.at_end and run.step == run.cfg.learning.steps)
    return due and bool(run.held_out)


def train_step(run: Run) -> Metrics:
    """One step: everything between two states of the parameters.  It returns with interrupts held back."""
    started = time.perf_counter()
    step = run.step
    run.processes.phase(f"the rollout of step {step + 1}")
    metrics: Metrics = {}
    batch, stale = next_batch(run)
    trajectories, timings = batch.trajectories, batch.timings
    metrics |= {"time/rollout": batch.seconds, "staleness": float(stale)}

    unjudged(run, trajectories)
    run.ahead = None  # not before: what is saved until now is saved with it
    consistency = run.consistency(trajectories)
    advantages, copies, shaped = credit(run.cfg, run.arm, trajectories, step, [c.marks for c in consistency])
    if run.watch is not None:
        shaped |= consistency_metrics(consistency)
    began = time.perf_counter()
    trained = [role for roles in run.arm.learners.values() for role in roles]
    with following(run):
        rows = rows_of(trajectories, advantages, copies, trained, run.learners["policy"].update.routing)
        for name, learner in run.learners.items():
            prefix = "" if name == "policy" else f"{name}/"
            with run.processes.waits(f"the update of step {step + 1}"):
                figures = learner.learn(rows, step, run.arm.learners[name])
            metrics |= {prefix + key: value for key, value in figures.items()}
        metrics["time/learn"] = time.perf_counter() - began

    began = time.perf_counter()
    with run.processes.waits(f"the hand-over of step {step + 1}"):
        run.hand_over()
    metrics["time/handover"] = time.perf_counter() - began
    metrics |= run.received()

    metrics |= trajectory_metrics(trajectories, advantages) | shaped
    if run.trajectories is not None:
        for trajectory in trajectories:
            run.trajectories.write(trajectory, step=step)
        for name, trajectory in telling(trajectories).items():
            run.sink.text(step + 1, f"trajectory/{name}", trajectory_text(trajectory))
    guard(run, metrics)
    metrics |= throughput(run, trajectories, timings, metrics)
    metrics["time/step"] = time.perf_counter() - started
    run.step = step + 1
    return metrics


def next_batch(run: Run) -> tuple[Batch, bool]:
    """What this step learns from, and whether it was played ahead; returns with interrupts held back."""
    batch = timed(lambda timings: collect(run, timings))
    if run.ahead is None:
        return batch, False
    return dataclasses.replace(batch, seconds=batch.seconds + run.ahead.seconds), True


@contextlib.contextmanager
def following(run: Run) -> Iterator[None]:
    """While the block runs, the next step's first batch is played, where `learning.max_staleness` allows it."""
    if not run.cfg.learning.max_staleness or run.step + 1 >= run.cfg.learning.steps:
        yield
        return
    begin, what = run.data.get_state(), f"step {run.step + 2}"

    def play(timings: dict[str, float], stop: threading.Event) -> list[Trajectory]:
        follow(run.processes, run.engine, timings)
        played = played_draw(run, run.step + 1, 0, timings)
        return in_order(itertools.takewhile(lambda _: not stop.is_set(), played))

    def keep(mine: Batch) -> None:
        batch = dataclasses.replace(mine, trajectories=exchange(run.processes, mine.trajectories, what))
        if batch.no_verdict_share() <= run.cfg.rewards.max_no_verdict_share:
            run.ahead = batch
        else:  # its step draws the same tasks again, and stops the run if there is still no verdict
            run.data.set_state(begin)

    with playing_ahead(play, keep):
        yield
        run.processes.phase(f"the rollout of {what}")


def played_draw(run: Run, step: int, draw: int, timings: dict[str, float]) -> Iterator[Trajectory]:
    """Plays this process's share of the next batch of tasks, the `draw`-th of a step."""
    wanted = run.cfg.learning.prompts_per_step
    return rollout(
        next(run.data),
        engine=run.engine,
        chat=run.chat,
        cfg=run.rollout,
        judge=run.judge,
        step=step,
        seed=run.cfg.seed,
        group_size=run.cfg.learning.group_size,
        first_group=draw * wanted + run.processes.index * wanted // run.processes.count,
        observe=run.arm.observe,
        grounding=run.grounding,
        timings=timings,
    )


def collect(run: Run, timings: dict[str, float]) -> list[Trajectory]:
    """A step's trajectories by group and member: one batch of tasks, or with dynamic sampling as many batches as it
    takes (at most `MAX_DRAWS`) until enough groups have spread.  The first is the one that was played ahead, where
    there is one.  Returns with interrupts held back.
    """
    wanted, what = run.cfg.learning.prompts_per_step, f"step {run.step + 1}"
    kept: list[Trajectory] = []
    for draw in range(MAX_DRAWS if run.cfg.learning.dynamic_sampling else 1):
        part: dict[str, float] = {}
        if draw:
            run.interrupts.let()
        if draw == 0 and run.ahead is not None:
            run.interrupts.hold()
            exchange(run.processes, [], what)  # all have it; but one may come here to stop
            kept, part = list(run.ahead.trajectories), run.ahead.timings
        else:
            played = played_draw(run, run.step, draw, part)
            kept += share(run.processes, run.interrupts, run.engine, played, part, what)
        for name, seconds in part.items():
            timings[name] = timings.get(name, 0.0) + seconds
        spread = [g for g in sorted({t.group for t in kept}) if has_spread(kept, g)]
        if len(spread) >= wanted:
            break
    if run.cfg.learning.dynamic_sampling:
        rest = [g for g in sorted({t.group for t in kept}) if g not in spread]
        chosen = set((spread + rest)[:wanted])
        kept = [t for t in kept if t.group in chosen]
    return kept


def has_spread(trajectories: Sequence[Trajectory], group: int) -> bool:
    return group_spread([t for t in trajectories if t.group == group])["groups_without_spread"] == 0.0


def credit(
    cfg: ConfigDict, arm: Arm, trajectories: Sequence[Trajectory], step: int, marks: Sequence[Marks] = ()
) -> tuple[list[Credit], list[list[int]] | None, Metrics]:
    """Advantages by trajectory and role (by output where outputs are paid on their own), the reference code's extra
    copies of outputs where they are asked for, and what was paid beside the checklist. `marks`: what a worldbook says
    of each trajectory's answers, where a run has one."""
    rows = cfg.learning.population == "rows"
    copies = duplicate_outputs(trajectories, 128, cfg.seed + step) if rows else None
    options: dict[str, Any] = dict(
        population=cfg.learning.population,
        baseline=arm.baseline,
        std_norm=cfg.learning.std_norm,
        extra_copies=copies,
    )
    shaping = Shaping.from_config(cfg)
    figures: Metrics = {}
    advantages: list[Any]
    if shaping.active:
        added, figures = additions(trajectories, shaping, marks)
        advantages = list(output_advantages(trajectories, added, **options))
    else:
        advantages = list(role_advantages(trajectories, **options))
    if cfg.learning.shuffle_advantages:
        rng = random.Random(f"shuffle/{cfg.seed}/{step}")
        for role in Role:
            places: list[tuple[Any, Any]]  # where an advantage of the role stands
            if shaping.active:
                paired = zip(trajectories, advantages)
                places = [(a, k) for t, a in paired for k in range(len(a)) if t.segments[k].role is role]
            else:
                places = [(a, role) for a in advantages if role in a]
            values = [holder[place] for holder, place in places]
            rng.shuffle(values)
            for (holder, place), value in zip(places, values):
                holder[place] = value
    return advantages, copies, figures


def rows_of(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Credit],
    copies: Sequence[Sequence[int]] | None,
    roles: Sequence[Role],
    routing: tuple[int, int] | None = None,
) -> list[TrainRow]:
    """Training rows of these roles, with the recorded experts where `routing` (layers, experts a token) is given."""
    codes = {ROLE_CODES[role] for role in roles}
    rows = [
        row
        for i, trajectory in enumerate(trajectories)
        for row in train_rows(trajectory, advantages[i], copies[i] if copies is not None else None, routing)
    ]
    return [row for row in rows if int(row.role[0]) in codes]


def guard(run: Run, metrics: Metrics) -> None:
    """Stops the run when going on would make it worse; the state is that of the last good step."""
    cfg = run.cfg
    limit = cfg.learning.max_probability_error
    prefixes = ["" if name == "policy" else f"{name}/" for name in run.learners]
    for prefix in prefixes:
        if metrics.get(f"{prefix}exp_drift", 0.0) > limit:
            raise UserError(
                f"step {run.step + 1}: sampler and learner disagree: mean exp|dlogp| is "
                f"{metrics[f'{prefix}exp_drift']:.3f}, the limit learning.max_probability_error is {limit}. The update "
                "was not taken. Compare model.dtype and model.attention, or look for NaN; the limit is there because "
                "training on wrong probabilities ruins a policy"
            )
    skipped = any(metrics.get(f"{prefix}skipped", 0.0) for prefix in prefixes)
    run.bad_steps = run.bad_steps + 1 if skipped else 0
    if run.bad_steps >= cfg.learning.max_bad_steps:
        raise UserError(
            f"step {run.step + 1}: {run.bad_steps} steps in a row had a gradient that is not finite, or whose norm is "
            f"above learning.spike_limit={cfg.learning.spike_limit:g} (learning.max_bad_steps); their batches "
            f"lie in {run.folder / 'bad_steps'}; lower learning.lr"
        )


def unjudged(run: Run, trajectories: Sequence[Trajectory]) -> None:
    """Stops the run, before anything is learned, when too large a share of a batch has no verdict.

    The state is that of the last whole step, which is saved; the batch is drawn again when the run goes on, and its
    trajectories lie in a file of their own, for `rescore`.
    """
    masked = [t for t in trajectories if t.reward is None]
    limit = run.cfg.rewards.max_no_verdict_share
    if len(masked) <= limit * len(trajectories):
        return
    path = run.folder / "no_verdict" / f"step_{run.step + 1:08d}.jsonl"
    if run.processes.main:
        path.unlink(missing_ok=True)
        with TrajectoryWriter(path) as writer:
            for trajectory in trajectories:
                writer.write(trajectory, step=run.step)
    causes = Counter(t.masked_cause or "no reward" for t in masked)
    run.save()
    run.settle()
    raise UserError(
        f"step {run.step + 1}: {len(masked)} of {len(trajectories)} trajectories have no verdict "
        f"({', '.join(f'{cause} {n}' for cause, n in causes.most_common())}), more than "
        f"rewards.max_no_verdict_share={limit} allows. Nothing was learned from them: they lie in {path}, for "
        f"`envace_jax rescore`. Mend the judge; the same command goes on from step {run.step} with the same tasks"
    )


def throughput(run: Run, trajectories: Sequence[Trajectory], timings: dict[str, float], metrics: Metrics) -> Metrics:
    """Tokens a second, time by part of a rollout, and running totals."""
    sampled = sum(len(s.ids) for t in trajectories for s in t.segments)
    out = {f"time/rollout_{name}": seconds for name, seconds in timings.items()}
    out["tokens_per_s/sampled"] = sampled / max(metrics["time/rollout"], 1e-9)
    out["tokens_per_s/learned"] = metrics.get("tokens_packed", 0.0) / max(metrics["time/learn"], 1e-9)
    stats = run.engine.stats() if hasattr(run.engine, "stats") else {}
    out |= {f"engine/{name}": float(value) for name, value in stats.items()}
    out |= _busy(run, trajectories, stats, sampled, metrics)
    for name, value in (("trajectories", len(trajectories)), ("tokens_sampled", sampled)):
        run.totals[name] = run.totals.get(name, 0.0) + value
        out[f"total/{name}"] = run.totals[name]
    run.totals.setdefault("length_first/act", metrics["length/act"])
    out["length_first/act"] = run.totals["length_first/act"]
    return out


def _busy(
    run: Run, trajectories: Sequence[Trajectory], stats: dict[str, float], sampled: int, metrics: Metrics
) -> Metrics:
    """Model FLOPs by phase with their share of the peak, the host's share of the rollout, memory."""
    gained = {
        name: stats.get(name, 0.0) - run.counted.get(name, 0.0) for name in ("tokens_prefilled", "seconds_waiting")
    }
    run.counted = dict(stats)
    rows = [(len(r.ids), sum(r.sampled)) for t in trajectories for r in t.rows if any(r.sampled)]
    work = (gained["tokens_prefilled"] * run.processes.count, float(sampled))
    seconds = {"learn": metrics["time/learn"], "rollout": metrics["time/rollout"]}
    mesh = run.learners["policy"].update.mesh
    devices = list(mesh.devices.flat) if mesh is not None else jax.local_devices()[:1]
    out = utilisation(run.spec, rows, work, seconds, len(devices), peak_flops(devices[0].device_kind)) | memory()
    if "seconds_waiting" in stats:
        out["host_share"] = 1.0 - min(1.0, gained["seconds_waiting"] / max(metrics["time/rollout"], 1e-9))
    return out


def evaluate(run: Run, when: str) -> Metrics:
    """Held-out figures of the policy as it is."""
    tasks = run.held_out[: run.cfg.evaluation.tasks]
    run.display.phase(f"evaluating {when} on {len(tasks)} held-out tasks")
    began = time.perf_counter()
    answered: dict[str, Sequence[Pair]] = {}
    figures = evaluate_policy(
        run.cfg,
        tasks,
        play=shared_rollout(run.processes, run.interrupts),
        engine=run.engine,
        chat=run.chat,
        rollout_config=run.rollout,
        judge=run.judge,
        grounding=run.grounding,
        keep=answered.__setitem__,
    )
    if run.processes.main:
        (run.folder / "fidelity").mkdir(exist_ok=True)
        write_json(run.folder / "fidelity" / f"step_{run.step:08d}.json", fidelity_page(answered))
    shown = ", ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in figures.items() if not k.endswith("_n"))
    run.display.say(f"held-out, {when}: {shown}")
    return figures | {"time/eval": time.perf_counter() - began}


def report(run: Run, metrics: Metrics) -> None:
    run.display.step(run.step, metrics)
    for line in red_flags(metrics):
        run.display.say(f"step {run.step}: look: {line}")


def finish(run: Run) -> int:
    """Says where the run lies and what it did.  Returns the exit status."""
    run.display.close()
    changed = any(x.digest() != run.initial[name] for name, x in run.learners.items())
    if not run.processes.main:
        return 0
    pictures = [p for p in (plot(run.folder), gap_plot(run.folder)) if p is not None]
    lines, failed = summary_lines(run.folder, changed)
    write_json(run.folder / "summary.json", {"steps": run.step, "lines": lines, "failed": failed})
    for line in lines + [f"plot: {picture}" for picture in pictures]:
        print(line)
    return status_of(run.cfg, failed)


def status_of(cfg: ConfigDict, failed: Sequence[str]) -> int:
    """The exit status of a run with these failed checks, which it tells of."""
    if not failed:
        return 0
    if not cfg.learning.require_checks:
        print(f"{len(failed)} of the checks failed; learning.require_checks=true makes that an error")
        return 0
    print(f"error: {len(failed)} of the run's checks failed (above): {'; '.join(failed)}", file=sys.stderr)
    return 1
