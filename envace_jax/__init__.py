"""envace_jax: language-model agents that learn by rehearsing the world they act in."""

__version__ = "0.1.0"
