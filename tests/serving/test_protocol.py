"""Requests are checked whole before anything is queued."""

from __future__ import annotations

import pytest

from envace_jax.serving.protocol import BadRequest, Sampling, read_sampling

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.1, float("nan"), float("inf"), True, "0.5"])
def test_a_nucleus_is_above_0_and_up_to_1(value: object) -> None:
    with pytest.raises(BadRequest) as e:
        read_sampling({"top_p": value})
    assert e.value.param == "top_p" and e.value.status == 400


def test_a_nucleus_that_is_one() -> None:
    assert read_sampling({"top_p": 1}).top_p == 1
    assert read_sampling({"top_p": 1e-6}).top_p == 1e-6
    assert read_sampling({}, Sampling(top_p=0.7)).top_p == 0.7
