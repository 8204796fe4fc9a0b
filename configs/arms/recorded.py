"""Arm `recorded`: no rehearsal: an exact match returns the record, anything else the error NO_RECORDED_RESPONSE.

    python -m envace_jax train --config configs/arms/recorded.py

Hardware: 2 CPU cores, 2 GB of memory.
Expect: docs/studies/arms.md holds what each arm reaches.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "../quickstart.py")
    c.learning.arm = "recorded"
    return c
