"""Arm `single_baseline`: shared parameters, one baseline over both roles: isolates the role-wise term.

    python -m envace_jax train --config configs/arms/single_baseline.py

Hardware: 2 CPU cores, 2 GB of memory.
Expect: docs/studies/arms.md holds what each arm reaches.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "../quickstart.py")
    c.learning.arm = "single_baseline"
    return c
