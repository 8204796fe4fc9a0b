"""Role-wise advantages against an oracle written the long way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_common import FakeSegment, FakeTrajectory

from envace_jax.learning.advantage import duplicate_outputs, group_spread, output_advantages, role_advantages
from envace_jax.text.transcript import Role

pytestmark = pytest.mark.quick


def make(group: int, reward: float | None, acts: int, rehearsals: int) -> FakeTrajectory:
    segments = [FakeSegment(Role.ACT)] * acts + [FakeSegment(Role.REHEARSE)] * rehearsals
    return FakeTrajectory(group, reward, tuple(segments))


def oracle(trajectories, population="outputs", baseline="role", std_norm=False):
    out = []
    for t in trajectories:
        row = {}
        for role in Role:
            pool = []
            for other in trajectories:
                if other.group != t.group or other.reward is None:
                    continue
                outputs = [s for s in other.segments if baseline == "single" or s.role == role]
                n = len(outputs) if population != "trajectories" else min(len(outputs), 1)
                pool += [other.reward] * n
            if t.reward is None or not any(s.role == role for s in t.segments):
                continue
            if len(set(pool)) < 2:
                row[role] = 0.0
                continue
            scale = np.std(pool, ddof=1) + 1e-6 if std_norm else 1.0
            row[role] = (t.reward - np.mean(pool)) / scale
        out.append(row)
    return out


trajectories_strategy = st.lists(
    st.builds(
        make,
        st.integers(0, 3),
        st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0, 1 / 3])),
        st.integers(0, 4),
        st.integers(0, 5),
    ),
    max_size=16,
)


@settings(max_examples=150, deadline=None)
@given(
    trajectories_strategy,
    st.sampled_from(["outputs", "trajectories"]),
    st.sampled_from(["role", "single"]),
    st.booleans(),
)
def test_equals_oracle(trajectories, population, baseline, std_norm):
    got = role_advantages(trajectories, population=population, baseline=baseline, std_norm=std_norm)
    want = oracle(trajectories, population, baseline, std_norm)
    assert [set(a) for a in got] == [set(b) for b in want]
    for a, b in zip(got, want):
        for role in a:
            assert a[role] == pytest.approx(b[role], abs=1e-9)


def test_long_episode_weighs_by_its_outputs():
    # Two trajectories: R = 1 with 1 ACT and 3 REHEARSE outputs, R = 0 with 1 and 1.
    # ACT:      mean = (1 x 1 + 1 x 0) / (1 + 1) = 1/2;  A = 1 - 1/2 = 1/2 and 0 - 1/2 = -1/2
    # REHEARSE: mean = (3 x 1 + 1 x 0) / (3 + 1) = 3/4;  A = 1 - 3/4 = 1/4 and 0 - 3/4 = -3/4
    # By trajectories, whatever their length, it would be (1 + 0) / 2 = 1/2 for both roles.
    a, b = make(0, 1.0, 1, 3), make(0, 0.0, 1, 1)
    got = role_advantages([a, b])
    assert got[0][Role.ACT] == 0.5 and got[1][Role.ACT] == -0.5
    assert got[0][Role.REHEARSE] == 0.25 and got[1][Role.REHEARSE] == -0.75


def test_group_of_one_no_spread_and_masked():
    single = role_advantages([make(0, 1.0, 2, 1)])
    assert single == [{Role.ACT: 0.0, Role.REHEARSE: 0.0}]
    flat = role_advantages([make(0, 1 / 3, 2, 1), make(0, 1 / 3, 1, 5), make(0, 1 / 3, 7, 1)])
    assert all(v == 0.0 for d in flat for v in d.values())
    masked = role_advantages([make(0, None, 9, 9), make(0, 1.0, 1, 0), make(0, 0.0, 1, 0)])
    assert masked == [{}, {Role.ACT: 0.5}, {Role.ACT: -0.5}]


def test_one_member_masked_equals_its_absence():
    rest = [make(0, 1.0, 3, 2), make(0, 0.0, 1, 4)]
    assert role_advantages([make(0, None, 5, 5), *rest])[1:] == role_advantages(rest)


def test_rows_population_counts_duplicates():
    trajectories = [make(0, 1.0, 1, 1), make(0, 0.0, 2, 1)]
    extra = duplicate_outputs(trajectories, 8, seed=0)
    assert sum(map(sum, extra)) == 3
    got = role_advantages(trajectories, population="rows", extra_copies=extra)
    n1 = 1 + extra[0][0]
    n0 = 2 + extra[1][0] + extra[1][1]
    assert got[0][Role.ACT] == pytest.approx(1 - n1 / (n1 + n0))
    assert duplicate_outputs(trajectories, 8, seed=0) == extra
    assert sum(map(sum, duplicate_outputs(trajectories, 128, seed=1))) == 123
    assert sum(map(sum, duplicate_outputs(trajectories, 5, seed=1))) == 0


def test_spread_figures():
    figures = group_spread([make(0, 1.0, 1, 0), make(0, 0.0, 1, 0), make(1, 1.0, 1, 0), make(2, None, 1, 0)])
    assert figures["groups"] == 3
    assert figures["groups_without_spread"] == pytest.approx(2 / 3)
    assert figures["reward_spread"] == pytest.approx(0.25)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown population"):
        role_advantages([], population="tokens")


def test_sums_of_the_same_verdicts_in_another_order_are_no_spread():
    group = [make(0, reward, 2, 1) for reward in (0.1 + 0.2, 0.3)]
    assert group[0].reward != group[1].reward
    for std_norm in (False, True):
        assert role_advantages(group, std_norm=std_norm) == [{Role.ACT: 0.0, Role.REHEARSE: 0.0}] * 2
    assert group_spread(group)["groups_without_spread"] == 1.0


def test_one_trajectory_of_a_role_has_no_deviation():
    """Its outputs weigh 1 together, and a deviation of one value would be divided by 0."""
    group = [make(0, 1.0, 1, 2), make(0, 0.0, 1, 0)]
    got = output_advantages(group, [[0, 0.5, 0.1], [0]], population="trajectories", std_norm=True)
    assert got[0][1:] == [0.0, 0.0] and got[0][0] > 0 > got[1][0]
