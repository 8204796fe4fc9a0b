"""Arm `envace`: shared parameters, role-wise baseline: the method itself.

    python -m envace_jax train --config configs/arms/envace.py

Hardware: 2 CPU cores, 2 GB of memory.
Expect: docs/studies/arms.md holds what each arm reaches.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "../quickstart.py")
    c.learning.arm = "envace"
    return c
