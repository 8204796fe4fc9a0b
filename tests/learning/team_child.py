"""One process of a training run of several, for the tests: `team_child.py RUN_DIR [key=value ...]`.

Like `trainer_child.py`, joined to the others by the environment.  `replay=FOLDER` trains from the second step on with
the trajectories that another run wrote instead of playing its own; `engine` is `toy`, `counting` or `real`;
`die=PLACE:N:SIGNAL` sends this process a signal when it comes to a place for the N-th time (`die1=...`: process 1
alone).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from learning_common import counting_engine, rewarded, tiny_config, toy_engine  # noqa: E402
from trainer_child import value  # noqa: E402

from envace_jax import distributed  # noqa: E402
from envace_jax.learning import checkpoint, setup, trainer  # noqa: E402
from envace_jax.learning.step import Update  # noqa: E402
from envace_jax.rewards.judge import RuleJudge  # noqa: E402


def replayed(rollout, folder: str):
    """A rollout that plays the first step and reads what another run played in the others."""
    import json

    from envace_jax.rehearsal.trajectory import Trajectory

    lines = (Path(folder) / "trajectories.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]

    def play(tasks, *, step, first_group, **options):
        if step == 0:
            yield from rollout(tasks, step=step, first_group=first_group, **options)
            return
        groups = range(first_group, first_group + len(list(tasks)))
        for record in records:
            if record["step"] == step and record["group"] in groups:
                yield Trajectory.from_json(record)

    return play


def dies(place: str, number: str, sign: str) -> None:
    """Arms a fault: the signal comes in the middle of the place's N-th call."""
    owner, name = {
        "rollout": (trainer, "collect"),
        "judge": (RuleJudge, "submit"),
        "update": (Update, "update"),
        "save": (checkpoint, "write_manifest"),
    }[place]
    real, calls = getattr(owner, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == int(number):
            os.kill(os.getpid(), getattr(signal, sign))
            time.sleep(0.05)
        return real(*args, **kwargs)

    setattr(owner, name, call)


def run(folder: str, *arguments: str) -> int:
    changes = dict(argument.split("=", 1) for argument in arguments)
    trainer.rollout = rewarded(trainer.rollout)
    if "replay" in changes:
        trainer.rollout = replayed(trainer.rollout, changes.pop("replay"))
    own = f"die{os.environ.get('ENVACE_PROCESS', '')}"
    for name in {"die", own} & changes.keys():
        dies(*changes.pop(name).split(":"))
    changes = {k: v for k, v in changes.items() if not k.startswith("die")}
    engine = changes.pop("engine", "toy")
    if engine != "real":
        setup.make_engine = {"toy": toy_engine, "counting": counting_engine}[engine]
    return trainer.run_train(tiny_config(folder, **{k: value(v) for k, v in changes.items()}))


if __name__ == "__main__":
    with distributed.session():
        status = run(*sys.argv[1:])
    sys.exit(status)
