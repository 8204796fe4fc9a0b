"""Arm `real_env`: no rehearsal: observations from the real environment, the only arm that trains in one.

    python -m envace_jax train --config configs/arms/real_env.py

Hardware: 2 CPU cores, 2 GB of memory.
Expect: docs/studies/arms.md holds what each arm reaches.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "../quickstart.py")
    c.learning.arm = "real_env"
    return c
