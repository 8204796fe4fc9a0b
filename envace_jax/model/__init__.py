"""The Qwen3 family in Flax: specification, forward pass, sharding, Hugging Face conversion."""
