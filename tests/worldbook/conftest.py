"""Worldbooks that several tests look at, built once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ledger

from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.traces import episode_from_task
from envace_jax.worldbook.build import BuildConfig, build_worldbook
from envace_jax.worldbook.store import Worldbook


@pytest.fixture(scope="session")
def bank_book() -> Worldbook:
    """The bank of `ledger`, from 240 random traces."""
    return build_worldbook(ledger.episodes(240, 1), config=BuildConfig(folds=2))


@pytest.fixture(scope="session")
def desk_book() -> Worldbook:
    """The quickstart desk, from 350 training tasks."""
    return build_worldbook([episode_from_task(t) for t in generate_tasks("train", 350)], config=BuildConfig(folds=2))


@pytest.fixture(scope="session")
def small_bank_book() -> Worldbook:
    """A quick one: 30 traces, rules without replay confidence (they stay candidates)."""
    return build_worldbook(ledger.episodes(30, 5), config=BuildConfig(folds=0))
