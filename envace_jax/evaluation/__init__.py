"""Benchmarks, fidelity, replay and statistics."""
