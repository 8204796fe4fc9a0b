"""A training run in a process of its own, for the tests that kill it: `trainer_child.py RUN_DIR [key=value ...]`.

`engine=real` samples with the model; else a toy engine does.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from learning_common import rewarded, tiny_config, toy_engine  # noqa: E402

from envace_jax.learning import setup, trainer  # noqa: E402


def value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    trainer.rollout = rewarded(trainer.rollout)
    changes = dict(argument.split("=", 1) for argument in sys.argv[2:])
    if changes.pop("engine", "toy") == "toy":
        setup.make_engine = toy_engine
    sys.exit(trainer.run_train(tiny_config(sys.argv[1], **{k: value(v) for k, v in changes.items()})))
