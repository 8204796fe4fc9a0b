"""Qwen3-1.7B, the published batch (16 x 4 trajectories, 12,000 + 8,000 tokens), on two nodes of eight H100.

    python -m envace_jax plan --config configs/qwen3_1p7b_gpu16.py
    sbatch --nodes=2 --gpus-per-node=8 launch/slurm_gpu.sbatch train --config configs/qwen3_1p7b_gpu16.py \\
        --config.model.path=FOLDER --config.data.path=FILE

Hardware: h100:16, one sampler a node. FOLDER is a checked checkpoint (`envace_jax import Qwen/Qwen3-1.7B FOLDER`), FILE
a CM2 file. Expect: the plan comes from formulas (nothing can be compiled ahead of time for GPUs); no run of this size
has been made.
"""

from envace_jax.config_file import start_from


def get_config():
    c = start_from(__file__, "qwen3_8b_gpu16.py")
    c.model.size = "1.7b"
    return c
