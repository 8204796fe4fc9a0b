"""Qwen3-1.7B, the published batch (16 x 4 trajectories, 12,000 + 8,000 tokens), on 4 v5p chips.

    python -m envace_jax plan --config configs/qwen3_1p7b_v5p.py
    python -m envace_jax train --config configs/qwen3_1p7b_v5p.py --config.model.path=FOLDER --config.data.path=FILE

Hardware: v5p:2x2x1. FOLDER is a checked checkpoint (`envace_jax import Qwen/Qwen3-1.7B FOLDER`), FILE a CM2 file.
Expect: docs/plan.md holds what fits and what a step takes at best; no run of this size has been made.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "qwen3_8b_v5p.py")
    c.model.size = "1.7b"
    c.rollout.slots = 32
    c.rollout.live_episodes = 32
    c.learning.logprob_chunk = 1024
    c.mesh.fsdp = 1
    c.plan.topology = "v5p:2x2x1"
    return c
