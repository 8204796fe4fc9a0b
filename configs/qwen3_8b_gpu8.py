"""Qwen3-8B, the published batch (16 x 4 trajectories, 12,000 + 8,000 tokens), on one node of eight H100.

    python -m envace_jax plan --config configs/qwen3_8b_gpu8.py
    sbatch --gpus-per-node=8 launch/slurm_gpu.sbatch train --config configs/qwen3_8b_gpu8.py \\
        --config.model.path=FOLDER --config.data.path=FILE

Hardware: h100:8, one sampler a node. FOLDER is a checked checkpoint (`envace_jax import Qwen/Qwen3-8B FOLDER`), FILE a
CM2 file. Expect: the plan comes from formulas (nothing can be compiled ahead of time for GPUs); no run of this size has
been made.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "qwen3_8b_gpu16.py")
    c.mesh.fsdp = 1
    c.plan.topology = "h100:8"
    return c
