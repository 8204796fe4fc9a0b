"""The whole job on real input: BFCL and tau2 tasks, the real Qwen3 tokenizer, a tiny model warm-started first.

    python -m envace_jax train --config configs/real_tiny.py

Hardware: 2 CPU cores, 8 GB of memory.
Expect: the summary's checks hold: at least 30% of ACT outputs parse, REHEARSE is called, some group has spread, the
gradient norm is above 0 and parameters change; else the exit status is 1. It shows that the machinery runs on real
records; a model of this size does not learn the benchmarks.
"""

from envace_jax.config import default_config


def get_config():
    c = default_config()
    c.model.size = "tiny"
    c.model.tokenizer = "qwen3"
    c.chat.tool_docs = "none"
    c.data.source = "bfcl+tau2"
    c.data.train_limit = 8
    c.data.eval_limit = 8
    c.data.max_head_tokens = 2000
    c.rollout.rehearse_prompt = "compact"
    c.rollout.max_act_tokens = 96
    c.rollout.max_rehearse_tokens = 96
    c.rollout.max_input_tokens = 2400
    c.rollout.max_acts = 8
    c.rollout.max_segments = 24
    c.rollout.temperature = 0.7  # at T = 1 so small a model soon loses the thread
    c.rollout.slots = 16
    c.rollout.live_episodes = 16
    c.rollout.prefill_chunk = 256
    c.model.remat = "full"
    c.warmstart.steps = 240
    c.warmstart.lr = 3e-3
    c.warmstart.tasks = 4  # those of BFCL: the policies of tau2 make rows of 2,000 tokens
    c.warmstart.batch_rows = 8
    c.learning.steps = 3
    c.learning.prompts_per_step = 4
    c.learning.group_size = 4
    c.learning.lr = 1e-4
    c.learning.row_tokens = 2560
    c.learning.kl_coef = 0.0
    c.learning.logprob_chunk = 128  # a token costs 152k logits, and most of a row predicts nothing
    c.learning.rows_per_microbatch = 1
    c.learning.require_checks = True
    c.checkpoint.every = 3
    return c
