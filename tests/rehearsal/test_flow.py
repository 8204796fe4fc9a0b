"""Flows over one engine: what is left when one of them breaks."""

from __future__ import annotations

import pytest

from envace_jax.rehearsal.flow import Release, run_flows
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.sampling.engine import Request, SamplingParams
from tests.rehearsal.toy import ToyTokenizer

pytestmark = pytest.mark.quick


def asks(name: str, times: int, release: bool = False, broken: bool = False):
    for k in range(times):
        yield Request((1, 2), SamplingParams(max_tokens=4), (k,), affinity=name)
    if broken:
        raise ValueError("a flow of its own")
    if release:
        yield Release(name)
    return name


def test_a_broken_flow_leaves_no_request_and_no_ledger():
    engine = ScriptedEngine(lambda request: "ab", ToyTokenizer(), delay=lambda request: 2)
    flows = [("a", asks("a", 1, release=True)), ("b", asks("b", 2, broken=True)), ("c", asks("c", 9))]
    said = []
    with pytest.raises(ValueError, match="of its own"):
        for key, result in run_flows(flows, engine):
            said.append((key, result))
    assert said == [("a", "a")]
    assert not engine._live
    assert sorted(engine.released) == ["a", "b", "c"]
