"""Ahead-of-time compilation for topologies that are not there."""
