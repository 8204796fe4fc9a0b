"""Qwen3-8B, the published batch (16 x 4 trajectories, 12,000 + 8,000 tokens), on 16 v5p chips.

    python -m envace_jax plan --config configs/qwen3_8b_v5p.py
    python -m envace_jax train --config configs/qwen3_8b_v5p.py --config.model.path=FOLDER --config.data.path=FILE

Hardware: v5p:2x2x4. FOLDER is a checked checkpoint (`envace_jax import Qwen/Qwen3-8B FOLDER`), FILE a CM2 file.
Expect: docs/plan.md holds what fits and what a step takes at best; no run of this size has been made.
"""

from envace_jax.config import default_config


def get_config():
    c = default_config()
    c.model.size = "8b"
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.model.attention = "splash"
    c.chat.thinking = True
    c.rollout.slots = 16
    c.rollout.live_episodes = 16
    c.rollout.chunk = 32
    c.rollout.prefill_chunk = 1024
    c.learning.row_tokens = 20480  # one full ledger: 12,000 + 8,000, up to the kernel's block of 1,024
    c.learning.rows_per_microbatch = 1
    c.learning.logprob_chunk = 4096  # over all shards of the batch together
    c.mesh.fsdp = 4
    c.mesh.tensor = 4  # the chips of one host: its engine cuts over them
    c.mesh.sequence = "tensor"
    c.plan.rollout_tensor = 4
    c.plan.topology = "v5p:2x2x4"
    c.plan.chip_hour = 4.2  # dollars, a list price of 2025: use your own
    return c
