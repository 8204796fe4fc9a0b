"""Role-wise GRPO: advantages, loss, packing, update, trainer, checkpoints."""
