"""Qwen3-1.7B, the published batch (16 x 4 trajectories, 12,000 + 8,000 tokens), on 16 v5e chips.

    python -m envace_jax plan --config configs/qwen3_1p7b_v5e.py
    python -m envace_jax train --config configs/qwen3_1p7b_v5e.py --config.model.path=FOLDER --config.data.path=FILE

Hardware: v5e:4x4. FOLDER is a checked checkpoint (`envace_jax import Qwen/Qwen3-1.7B FOLDER`), FILE a CM2 file.
Expect: docs/plan.md holds what fits and what a step takes at best; no run of this size has been made.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "qwen3_8b_v5p.py")
    c.model.size = "1.7b"
    c.rollout.slots = 8
    c.rollout.live_episodes = 8
    c.learning.logprob_chunk = 2048
    c.plan.topology = "v5e:4x4"
    c.plan.chip_hour = 1.2  # dollars, a list price of 2025: use your own
    return c
