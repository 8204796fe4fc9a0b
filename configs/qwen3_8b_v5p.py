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
    # CM2: one file, as JSON, JSON lines or parquet, wherever you like (--config.data.path=FILE); neither publication
    # ships it, data/README.md says how to come by it. A record holds
    #   uuid        the task's name, unlike every other's
    #   messages    the recorded dialogue: one system message at most, user, assistant (content begins with its
    #               <think> block; tool_calls in the OpenAI form), one tool message for each call, in order
    #   tools       the functions on offer with their JSON schemas; every recorded call fits them
    #   checklists  [variant][user turn][item]; an item has id, question, pass_condition, focus_on, weight (1 in all
    #               over a turn), dependence, required_for_next_turn, failure_examples, evidence
    #   meta.split  train or heldout; without any, the first 500 are held out (data.eval_path: a file of their own)
    c.data.source = "cm2"
    # The publication's judge. Serve it and name the address, one that every host reaches
    # (--config.rewards.endpoint.base_url=URL); a key, if it wants one, stands in $OPENAI_API_KEY.
    c.rewards.judge = "endpoint"
    c.rewards.endpoint.model = "Qwen/Qwen3-30B-A3B"
    c.rewards.endpoint.base_url = "http://127.0.0.1:8000/v1"
    # Held-out reward, and fidelity on the held-out tasks' recorded calls: before, every 50 steps and at the end.
    c.evaluation.at_start = True
    c.evaluation.every = 50
    c.evaluation.at_end = True
    c.evaluation.tasks = 100
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
