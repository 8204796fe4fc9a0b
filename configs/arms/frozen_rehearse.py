"""Arm `frozen_rehearse`: the initial policy rehearses and is not trained: isolates learning to rehearse.

    python -m envace_jax train --config configs/arms/frozen_rehearse.py

Hardware: 2 CPU cores, 2 GB of memory.
Expect: docs/studies/arms.md holds what each arm reaches.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "../quickstart.py")
    c.learning.arm = "frozen_rehearse"
    return c
