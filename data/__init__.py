"""TFDS builders, and the data that comes with the repository."""
