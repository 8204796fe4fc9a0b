"""One process of a training run of several, for the tests: `team_child.py RUN_DIR [key=value ...]`.

Like `trainer_child.py`, joined to the others by the environment.  `replay=FOLDER` trains on the trajectories that
another run wrote instead of playing its own; `engine=real` samples with the model.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from learning_common import rewarded, tiny_config, toy_engine  # noqa: E402
from trainer_child import value  # noqa: E402

from envace_jax import distributed  # noqa: E402
from envace_jax.learning import setup, trainer  # noqa: E402


def replayed(folder: str):
    """A rollout that reads what another run played in the same step."""
    import json

    from envace_jax.rehearsal.trajectory import Trajectory

    lines = (Path(folder) / "trajectories.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]

    def play(tasks, *, step, first_group, **_):
        groups = range(first_group, first_group + len(list(tasks)))
        for record in records:
            if record["step"] == step and record["group"] in groups:
                yield Trajectory.from_json(record)

    return play


def run(folder: str, *arguments: str) -> int:
    changes = dict(argument.split("=", 1) for argument in arguments)
    replay = changes.pop("replay", "")
    trainer.rollout = replayed(replay) if replay else rewarded(trainer.rollout)
    if changes.pop("engine", "toy") == "toy":
        setup.make_engine = toy_engine
    return trainer.run_train(tiny_config(folder, **{k: value(v) for k, v in changes.items()}))


if __name__ == "__main__":
    with distributed.session():
        status = run(*sys.argv[1:])
    sys.exit(status)
