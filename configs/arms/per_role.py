"""Arm `per_role`: two parameter sets and optimizers, one a role: isolates sharing.

Both losses are divided by the outputs of both roles, as the loss of the shared set is.

    python -m envace_jax train --config configs/arms/per_role.py

Hardware: 2 CPU cores, 2 GB of memory.
Expect: docs/studies/arms.md holds what each arm reaches.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "../quickstart.py")
    c.learning.arm = "per_role"
    return c
