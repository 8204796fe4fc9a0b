"""Reading tasks and traces."""
