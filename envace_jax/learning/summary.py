"""Measuring a policy during a run, and what a run says of itself at its end: figures, checks, a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.datasets.records import Task
from envace_jax.evaluation.fidelity import Keep, Pair, nothing
from envace_jax.evaluation.fidelity import report as fidelity_report
from envace_jax.learning.metrics import Metrics, read_metrics, trajectory_metrics
from envace_jax.rehearsal.grounding import Grounding
from envace_jax.rehearsal.rollout import Play, rollout
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.rewards.judge import Judge

FIDELITY_TASKS = 100
"""Of how many held-out tasks without an environment the recorded calls are asked."""

HEADLINES = (
    ("real_greedy", "success in the real environment, greedy"),
    ("real_sampled", "success in the real environment, T = 1"),
    ("rehearsed", "success in rehearsal"),
    ("gap_real", "success in rehearsal less success in reality (T = 1, same tasks)"),
    ("fidelity_json_equal", "fidelity: rehearsed = real response"),
    ("reward", "reward in rehearsal"),
)


def evaluate_policy(
    cfg: ConfigDict,
    tasks: Sequence[Task],
    *,
    engine: Any,
    chat: Any,
    rollout_config: RolloutConfig,
    judge: Judge,
    grounding: Grounding | None,
    play: Play = rollout,
    keep: Keep = nothing,
) -> Metrics:
    """Figures on held-out tasks, `eval/...`: against the real environment where all are quickstart tasks, else the
    reward of rehearsed episodes, and for those of quickstart and BFCL among them also success in both worlds.  `play`
    is `rollout`, or what shares it out to processes; `keep` is given the pairs behind the figures of fidelity."""
    if not tasks:
        return {}
    if all(task.meta.get("environment") == "quickstart" for task in tasks):
        from envace_jax.evaluation.quickstart import evaluate

        figures = evaluate(
            tasks, engine, chat, rollout_config, seed=cfg.seed, grounding=grounding, play=play, keep=keep
        )
        return {f"eval/{name}": float(value) for name, value in figures.items()}
    e = cfg.evaluation
    config = dataclasses.replace(rollout_config, temperature=e.temperature, top_p=e.top_p, top_k=0)
    played = play(
        tasks,
        engine=engine,
        chat=chat,
        cfg=config,
        judge=judge,
        step=-1,
        seed=cfg.seed,
        group_size=e.samples,
        grounding=grounding,
    )
    figures = trajectory_metrics(list(played))
    watched = {}
    if real := [task for task in tasks if task.meta.get("environment") in ("quickstart", "bfcl")]:
        from envace_jax.evaluation.collusion import both_worlds

        watch = both_worlds(real, engine, chat, rollout_config, seed=cfg.seed, grounding=grounding, play=play)
        watched = {f"eval/{name}": value for name, value in watch.figures().items()}
    return watched | {
        "eval/reward": figures["reward/mean"],
        "eval/full": figures["reward/full"],
        "eval/masked": figures["masked/share"],
        "eval/act_parsed": figures["act/parsed"],
        **_to_the_record(tasks, engine, chat, rollout_config, grounding, keep),
    }


def _to_the_record(
    tasks: Sequence[Task],
    engine: Any,
    chat: Any,
    rollout_config: RolloutConfig,
    grounding: Grounding | None,
    keep: Keep,
) -> Metrics:
    """Fidelity to the recorded calls of the first `FIDELITY_TASKS` tasks."""
    from envace_jax.evaluation.recorded_fidelity import recorded_fidelity

    figures = recorded_fidelity(tasks[:FIDELITY_TASKS], engine, chat, rollout_config, grounding, keep)
    return {f"eval/{name}": value for name, value in figures.items()}


def fidelity_page(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """The whole report of each set of pairs: by kind, tool and distance every metric; None where nothing decides it."""
    return {
        name: {
            part: {metric: None if value != value else value for metric, value in figures.items()}
            for part, figures in fidelity_report(of_one).items()
        }
        for name, of_one in pairs.items()
    }


def checks(records: Sequence[Mapping[str, Any]], changed: bool) -> list[tuple[str, bool]]:
    """Whether the run did what a training run does, as (statement, holds)."""
    steps = [r for r in records if "reward/mean" in r]

    def best(name: str) -> float:
        return max((float(r.get(name) or 0.0) for r in steps), default=0.0)

    outputs = sum(float(r.get("outputs/act", 0.0)) for r in steps)
    parsed = sum(float(r.get("act/parsed", 0.0)) * float(r.get("outputs/act", 0.0)) for r in steps) / max(outputs, 1e-9)
    spread = min((float(r.get("groups/without_spread", 1.0)) for r in steps), default=1.0)
    asked = best("outputs/rehearse")
    return [
        (f"at least 30% of ACT outputs parse ({parsed:.0%})", parsed >= 0.3),
        (f"REHEARSE was called ({asked:.1f} times a trajectory at most)", asked > 0),
        (f"some group has spread (at best {1 - spread:.0%} of a step's groups)", spread < 1.0),
        (f"the gradient norm is above 0 ({best('grad_norm'):.3g} at most)", best("grad_norm") > 0),
        ("parameters changed", changed),
    ]


def before_and_after(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """The evaluation before training, empty where there was none, and the last one."""
    found = [r for r in records if any(name.startswith("eval/") for name in r)]
    if not found:
        return {}, {}

    def figures(record: Mapping[str, Any]) -> dict[str, float]:
        return {k.removeprefix("eval/"): v for k, v in record.items() if k.startswith("eval/") and v is not None}

    return figures(found[0]) if found[0]["step"] == 0 else {}, figures(found[-1])


def summary_lines(run_dir: Path, changed: bool) -> tuple[list[str], list[str]]:
    """What is printed at the end of a run, and the checks that failed."""
    records = read_metrics(run_dir)
    steps = [r for r in records if "reward/mean" in r]
    lines = [f"run: {run_dir}"]
    if steps:
        k = max(1, len(steps) // 10)
        first = sum(r["reward/mean"] for r in steps[:k]) / k
        last = sum(r["reward/mean"] for r in steps[-k:]) / k
        lines.append(f"reward in training: {first:.3f} (first {k} steps) -> {last:.3f} (last {k} steps)")
    before, after = before_and_after(records)
    for name, title in HEADLINES:
        if name in after:
            first = f"{before[name]:.3f} before, " if name in before else ""
            lines.append(f"held-out {title}: {first}{after[name]:.3f} after")
    found = checks(records, changed)
    lines += [f"check {'ok    ' if holds else 'FAILED'} {text}" for text, holds in found]
    return lines, [text for text, holds in found if not holds]


def gap_plot(run_dir: Path) -> Path | None:
    """Rehearsed and real success of the same held-out tasks by step, and the gap between them, as a PNG; None without
    two evaluations to draw."""
    points = [r for r in read_metrics(run_dir) if r.get("eval/gap_real") is not None]
    if len(points) < 2:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5), dpi=120, sharex=True)
    x = [r["step"] for r in points]
    for name, label in (("rehearsed", "in rehearsal"), ("real_sampled", "in reality"), ("replayed", "replayed")):
        above.plot(x, [float(r[f"eval/{name}"]) for r in points], "o-", label=label)
    above.set(ylabel="success, T = 1", ylim=(-0.02, 1.02), title=f"{run_dir.name}: the same tasks in both worlds")
    above.legend(fontsize="x-small")
    low, mean, high = ([float(r[f"eval/gap_real{end}"]) for r in points] for end in ("_low", "", "_high"))
    below.plot(x, mean, "o-", color="black")
    below.fill_between(x, low, high, alpha=0.2, color="black")
    below.axhline(0.0, linewidth=0.8)
    below.set(xlabel="step", ylabel="rehearsed less real")
    figure.tight_layout()
    path = run_dir / "gap.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def plot(run_dir: Path) -> Path | None:
    """Reward by step, by role, and the held-out figures, as a PNG; None when there is nothing to draw."""
    records = read_metrics(run_dir)
    steps = [r for r in records if "reward/mean" in r]
    if not steps:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    x = [r["step"] for r in steps]
    for name, label, style in (
        ("reward/mean", "reward", "-"),
        ("reward/act", "reward over ACT outputs", ":"),
        ("reward/rehearse", "reward over REHEARSE outputs", "--"),
    ):
        axes.plot(x, [float(r[name]) for r in steps], style, label=label)
    for name, label in (x for x in HEADLINES if x[0] not in ("gap_real", "reward")):
        points = [(r["step"], r[f"eval/{name}"]) for r in records if r.get(f"eval/{name}") is not None]
        if points:
            axes.plot(*zip(*points), "o-", label=f"held-out {label}")
    axes.set(xlabel="step", ylim=(-0.02, 1.02), title=run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="lower right")
    figure.tight_layout()
    path = run_dir / "reward.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path
