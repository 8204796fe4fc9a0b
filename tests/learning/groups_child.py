"""One process of two for `test_groups.py`: `groups_child.py connected|late`.

Process 1 comes 35 seconds late to collectives over each axis of a mesh and over both, of which a group that was never
connected waits for 30.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax import distributed
from envace_jax.learning.groups import connect
from envace_jax.model.sharding import make_mesh


def main(how: str) -> None:
    team = distributed.processes()
    mesh = make_mesh(replica=2, fsdp=2)
    if how == "connected":
        connect(mesh, team)
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    x = jax.make_array_from_callback((2, 4), NamedSharding(mesh, P("replica", "fsdp")), lambda index: values[index])
    with jax.set_mesh(mesh):
        for spec in (P(None, "fsdp"), P("replica", None), P()):
            gather = jax.jit(lambda x: jnp.copy(x) * 2, out_shardings=NamedSharding(mesh, spec)).lower(x).compile()
            if team.index == 1:
                time.sleep(35)
            for shard in gather(x).addressable_shards:
                np.testing.assert_array_equal(shard.data, 2 * values[shard.index])
    print("all came together")
    team.close()


if __name__ == "__main__":
    with distributed.session():
        main(sys.argv[1])
