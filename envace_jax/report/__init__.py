"""Run and trajectory pages."""
