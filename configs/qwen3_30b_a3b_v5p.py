"""Qwen3-30B-A3B, the published batch (16 x 4 trajectories, 12,000 + 8,000 tokens), on 32 v5p chips.

    python -m envace_jax plan --config configs/qwen3_30b_a3b_v5p.py
    python -m envace_jax train --config configs/qwen3_30b_a3b_v5p.py --config.model.path=FOLDER --config.data.path=FILE

Hardware: v5p:2x4x4. FOLDER is a checked checkpoint (`envace_jax import Qwen/Qwen3-30B-A3B FOLDER`), FILE a CM2 file.
Expect: docs/plan.md holds what fits and what a step takes at best; no run of this size has been made.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "qwen3_8b_v5p.py")
    c.model.size = "30b-a3b"
    c.model.moe_chunk = 2048
    c.rollout.slots = 8
    c.rollout.live_episodes = 8
    c.learning.logprob_chunk = 16384
    c.mesh.fsdp = 8
    c.mesh.expert = 4
    c.mesh.tensor = 1
    c.mesh.sequence = ""
    c.plan.rollout_tensor = 1
    c.plan.rollout_expert = 4
    c.plan.topology = "v5p:2x4x4"
    return c
