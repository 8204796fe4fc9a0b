"""Parameters and small engines, made once: engines of equal sizes share their compiled programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from plain import SPEC, make_params

from envace_jax.sampling.engine import Engine, EngineConfig

SMALL = EngineConfig(slots=4, shelf=3, max_length=56, chunk=8, prefill_chunk=16, min_share=4)
LONG = EngineConfig(slots=2, shelf=2, max_length=72, chunk=8, prefill_chunk=16, min_share=4)


@pytest.fixture(scope="session")
def params():
    return make_params()


@pytest.fixture(scope="session")
def make_engine(params):
    def make(seed: int = 3, weights=None, config: EngineConfig = SMALL) -> Engine:
        return Engine(params if weights is None else weights, SPEC, config, seed=seed)

    return make
