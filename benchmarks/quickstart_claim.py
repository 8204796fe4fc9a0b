"""The claim of README about the quickstart: several seeds, a control, real success with intervals.

    python benchmarks/quickstart_claim.py --out runs/claim

Trains the quickstart with `--seeds` seeds, and as often again with the advantages shuffled within each batch (the
control: same updates, no credit), and measures before and after on `--tasks` held-out tasks: success in the real
environment, greedy and at T = 1, rehearsed success, fidelity. One JSON file a run; a run that is there is not made
again. Prints a table with 95% intervals (two-level bootstrap over seeds and tasks).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

FIGURES = ("real_greedy", "real_sampled", "rehearsed")


def measure(run, tasks) -> dict:
    """Per-task results (0 or 1) and fidelity figures of the policy as it is."""
    from envace_jax.evaluation.collusion import real_success, rehearsed_success

    common = (tasks, run.engine, run.chat, run.rollout)
    rehearsed = rehearsed_success(*common, temperature=1.0, seed=10_007, grounding=run.grounding)
    return {
        "real_greedy": [int(x) for x in real_success(*common, temperature=0.0, seed=10_007)],
        "real_sampled": [int(x) for x in real_success(*common, temperature=1.0, seed=10_007)],
        "rehearsed": [int(x) for x in rehearsed.rehearsed],
        "replayed": [int(x) for x in rehearsed.replayed],
        "fidelity": fidelity_of(run, tasks[:100]),
    }


def fidelity_of(run, tasks) -> dict:
    from envace_jax.evaluation.fidelity import summarise
    from envace_jax.evaluation.quickstart import ask_rehearse, fidelity_cases

    cases = fidelity_cases(tasks, run.chat, run.rollout.episode, grounding=run.grounding)
    pairs = ask_rehearse(cases, run.engine, run.chat, max_tokens=run.rollout.episode.max_rehearse_tokens)
    return {k: (None if v != v else v) for k, v in summarise(pairs).items()}


def once(path: Path, make: Callable[[], dict]) -> dict:
    """What lies at `path`; made first when it is not there."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(make()))
        part.replace(path)
    return json.loads(path.read_text())


def one_run(seed: int, control: bool, tasks, folder: Path, overrides: list[str]) -> dict:
    """Trains one seed and returns what was measured before and after."""
    from envace_jax.cli import load_config
    from envace_jax.learning.run_dir import open_run_dir
    from envace_jax.learning.trainer import prepare, train_step

    name = f"{'control' if control else 'envace'}-{seed}"
    cfg = load_config(
        "configs/quickstart.py",
        [
            f"--config.seed={seed}",
            f"--config.learning.shuffle_advantages={control}",
            f"--config.run_dir={folder / name}",
            "--config.checkpoint.resume=False",
            "--config.overwrite=True",
            "--config.metrics.progress=False",
            "--config.metrics.trajectories=False",
            *overrides,
        ],
    )
    with open_run_dir(cfg) as run_dir, prepare(cfg, run_dir) as run:
        before = once(folder / "before.json", lambda: measure(run, tasks))  # every run starts from the same model
        started, rewards = time.perf_counter(), []
        while run.step < cfg.learning.steps:
            rewards.append(train_step(run)["reward/mean"])
            run.step += 1
        seconds = time.perf_counter() - started
        after = measure(run, tasks)
    return {"seed": seed, "control": control, "before": before, "after": after, "rewards": rewards, "seconds": seconds}


def table(runs: list[dict]) -> str:
    """Before, after and gain of both arms, with 95% intervals over seeds and tasks."""
    from envace_jax.evaluation.stats import two_level_bootstrap

    lines = ["| arm | figure | before | after | gain |", "|---|---|---|---|---|"]
    for control in (False, True):
        chosen = [r for r in runs if r["control"] is control]
        if not chosen:
            continue
        arm = "control (shuffled advantages)" if control else "envace"
        for figure in FIGURES:
            before = np.array([r["before"][figure] for r in chosen], float)
            after = np.array([r["after"][figure] for r in chosen], float)
            risen = two_level_bootstrap(after - before)
            lines.append(f"| {arm} | {figure} | {before.mean():.3f} | {two_level_bootstrap(after)} | {risen} |")
        for name in ("json_equal", "reject_f1"):
            pair = [[r[when]["fidelity"][name] for r in chosen] for when in ("before", "after")]
            lines.append(f"| {arm} | fidelity {name} | {np.mean(pair[0]):.3f} | {np.mean(pair[1]):.3f} | |")
    for control in (False, True):
        by_seed = ", ".join(f"{gain(r, 'real_greedy'):+.3f}" for r in runs if r["control"] is control)
        lines += ["", f"Greedy gain by seed, {'control' if control else 'envace'}: {by_seed}"]
    return "\n".join(lines)


def gain(run: dict, figure: str) -> float:
    return float(np.mean(run["after"][figure]) - np.mean(run["before"][figure]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results (resumable)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=400)
    args, overrides = parser.parse_known_args()
    from envace_jax.compat import set_up_jax
    from envace_jax.datasets.quickstart.generator import generate_tasks

    set_up_jax()
    args.out.mkdir(parents=True, exist_ok=True)
    tasks = generate_tasks("heldout", args.tasks)
    runs = []
    for seed in range(args.seeds):
        for control in (False, True):
            path = args.out / f"{'control' if control else 'envace'}-{seed}.json"
            runs.append(once(path, functools.partial(one_run, seed, control, tasks, args.out, overrides)))
            greedy, sampled = (gain(runs[-1], figure) for figure in FIGURES[:2])
            seconds = runs[-1]["seconds"]
            print(f"{path.stem}: greedy {greedy:+.3f}, T = 1 {sampled:+.3f}, {seconds:.0f} s of training", flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
