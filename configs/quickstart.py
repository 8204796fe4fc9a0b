"""The embedded default: role-wise GRPO on the service-desk domain, on a laptop.

    python -m envace_jax train --config configs/quickstart.py

Hardware: 2 CPU cores, 2 GB of memory.
Expect: README, "What the quickstart shows".
"""

from envace_jax.config import default_config


def get_config():
    c = default_config()
    c.model.path = "data/quickstart/model"
    c.chat.tool_docs = "none"  # the policy knows its eight tools
    c.chat.thinking = True  # it never thinks, and an empty block before every output would cost tokens
    c.chat.old_thinking = "keep"
    c.model.remat = "full"  # faster than reading everything back, on CPU too
    c.data.source = "quickstart"
    c.rollout.rehearse_prompt = "compact"
    c.rollout.max_act_tokens = 48
    c.rollout.max_rehearse_tokens = 48
    c.rollout.max_input_tokens = 272
    c.rollout.max_acts = 12
    c.rollout.max_segments = 40
    c.rollout.live_episodes = 64
    c.rollout.chunk = 8
    c.rollout.prefill_chunk = 64
    c.learning.steps = 25
    c.learning.lr = 2e-4
    c.learning.kl_coef = 0.0  # groups without spread then cost nothing
    c.learning.row_tokens = 320
    c.learning.rows_per_microbatch = 8
    c.learning.logprob_chunk = 512
    c.checkpoint.every = 10
    c.evaluation.at_start = True
    c.evaluation.at_end = True
    c.evaluation.tasks = 200
    return c
