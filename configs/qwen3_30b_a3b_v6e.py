"""Qwen3-30B-A3B, the published batch (16 x 4 trajectories, 12,000 + 8,000 tokens), on 64 v6e chips.

    python -m envace_jax plan --config configs/qwen3_30b_a3b_v6e.py
    python -m envace_jax train --config configs/qwen3_30b_a3b_v6e.py --config.model.path=FOLDER --config.data.path=FILE

Hardware: v6e:8x8. FOLDER is a checked checkpoint (`envace_jax import Qwen/Qwen3-30B-A3B FOLDER`), FILE a CM2 file.
Expect: docs/plan.md holds what fits and what a step takes at best; no run of this size has been made.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "qwen3_30b_a3b_v5p.py")
    c.mesh.fsdp = 4
    c.mesh.expert = 4
    c.mesh.tensor = 4
    c.mesh.sequence = "tensor"
    c.rollout.slots = 4
    c.rollout.live_episodes = 4
    c.plan.rollout_tensor = 4
    c.plan.rollout_expert = 4
    c.plan.topology = "v6e:8x8"
    c.plan.chip_hour = 2.7  # dollars, a list price of 2025: use your own
    return c
