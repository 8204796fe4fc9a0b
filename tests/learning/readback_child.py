"""One process of two that save an array cut in halves, for `test_readback.py`: `readback_child.py FOLDER`.

Step 1 is saved as it is; in step 2 a value of process 1's half differs on its way to the disk.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax import distributed
from envace_jax.config import UserError
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.model.sharding import make_mesh


def cut(values: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(
        values.shape, NamedSharding(make_mesh(fsdp=4), P("fsdp")), lambda index: values[index]
    )


def main(folder: str) -> None:
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"x": cut(values)}, {})
    checkpoints.wait()
    print(f"step {checkpoints.latest()} is whole")
    saver = checkpoints._checkpointer()
    real = saver.save

    def damaged(path, args):
        other = values.copy()
        other[7, 3] = -other[7, 3]
        args["state"].item["x"] = cut(other)
        return real(path, args=args)

    saver.save = damaged
    checkpoints.save(2, {"x": cut(values)}, {})
    try:
        checkpoints.wait()
    except UserError as error:
        print(error)


if __name__ == "__main__":
    with distributed.session():
        main(sys.argv[1])
