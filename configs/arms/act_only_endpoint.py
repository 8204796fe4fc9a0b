r"""Arm `act_only_endpoint`: no rehearsal: an outside simulator answers (rollout.simulator).

    python -m envace_jax train --config configs/arms/act_only_endpoint.py \
        --config.rollout.simulator.base_url=http://127.0.0.1:8000/v1 --config.rollout.simulator.model=NAME

Hardware: 2 CPU cores, 2 GB of memory.
Expect: docs/studies/arms.md holds what each arm reaches.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "../quickstart.py")
    c.learning.arm = "act_only_endpoint"
    return c
