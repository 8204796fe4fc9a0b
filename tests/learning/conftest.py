"""Makes `learning_common` importable by the tests beside it, and their training runs cheap."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def toy_training(monkeypatch):
    """Training from the repository's root with an engine that costs nothing and rewards that depend on what it said."""
    from learning_common import rewarded, toy_engine

    from envace_jax.learning import setup, trainer

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(trainer, "rollout", rewarded(trainer.rollout))
    monkeypatch.setattr(setup, "make_engine", toy_engine)
