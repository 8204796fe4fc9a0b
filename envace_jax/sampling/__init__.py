"""Rollout engine: device programs and the host that feeds them."""
