"""Rewards beyond the checklist: which output gets what, advantages against a numpy oracle, and off means off."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from learning_common import FakeSegment, FakeTrajectory

from envace_jax.config import default_config
from envace_jax.config_checks import problems
from envace_jax.learning.advantage import output_advantages, role_advantages
from envace_jax.learning.packing import train_rows
from envace_jax.learning.shaping import Shaping, additions, outputs
from envace_jax.learning.trainer import credit
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import Role
from tests.rehearsal.helpers import ACT_SCRIPT, REHEARSE_SCRIPT, answer, call_text, make_task, play

pytestmark = pytest.mark.quick
LOOK, CANCEL = call_text("get_order", order_id="A1"), call_text("cancel_order", order_id="A1")


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer("data/quickstart/tokenizer"), thinking=True, old_thinking="keep")


def seen(chat, act, rehearse, **options):
    found = outputs(play(make_task(), chat, act, rehearse, **options))
    return [(o.role.value, o.readable, o.empty, None if o.fidelity is None else round(o.fidelity, 6)) for o in found]


# Recorded: get_order A1 -> {"id": "A1", "status": "open"}, cancel_order A1 -> {…cancelled}, get_order A2 -> {…sent}.
# Two leaves each; one right of two predicted and two true: F1 = 2 * 1 / (2 + 2) = 0.5.
REST_ACT, SENT = ("A1 is cancelled.", call_text("get_order", order_id="A2"), "A2 is sent."), REHEARSE_SCRIPT[2]
A, ANSWERED = ("act", True, False, None), ("rehearse", True, False, 1.0)


def test_fidelity_of_recorded_calls(chat):
    assert seen(chat, ACT_SCRIPT, REHEARSE_SCRIPT) == [A, ANSWERED, ANSWERED, A, A, ANSWERED, A]
    half = (answer({"id": "A1", "status": "lost"}), *REHEARSE_SCRIPT[1:])
    assert seen(chat, ACT_SCRIPT, half)[1] == ("rehearse", True, False, 0.5)
    # a second look at A1 is not recorded (its state may have changed), nor is A3
    act = (LOOK + LOOK + call_text("get_order", order_id="A3") + CANCEL, *REST_ACT)
    rehearse = (REHEARSE_SCRIPT[0],) * 3 + REHEARSE_SCRIPT[1:]
    none = ("rehearse", True, False, None)
    assert seen(chat, act, rehearse) == [A, ANSWERED, none, none, ANSWERED, A, A, ANSWERED, A]


@pytest.mark.parametrize(
    ("act", "rehearse", "options", "want"),
    [
        # REHEARSE's answer cannot be read: fidelity 0
        ((LOOK + CANCEL, *REST_ACT), ("open", REHEARSE_SCRIPT[1], SENT), {},
         [A, ("rehearse", False, False, 0.0), ANSWERED, A, A, ANSWERED, A]),
        ((LOOK + CANCEL, *REST_ACT), ("", REHEARSE_SCRIPT[1], SENT), {},
         [A, ("rehearse", False, True, 0.0), ANSWERED, A, A, ANSWERED, A]),
        # the host answers the unknown tool: the one REHEARSE output belongs to the second call
        ((call_text("fly") + CANCEL, *REST_ACT), (REHEARSE_SCRIPT[1], SENT), {}, [A, ANSWERED, A, A, ANSWERED, A]),
        # a malformed ACT output, answered by the host, then by REHEARSE
        (("<tool_call>\n{bad\n</tool_call>", CANCEL, *REST_ACT), (REHEARSE_SCRIPT[1], SENT), {},
         [("act", False, False, None), A, ANSWERED, A, A, ANSWERED, A]),
        (("<tool_call>\n{bad\n</tool_call>", CANCEL, *REST_ACT), ("no", REHEARSE_SCRIPT[1], SENT), {"checks": ()},
         [("act", False, False, None), ("rehearse", False, False, None), A, ANSWERED, A, A, ANSWERED, A]),
        # recorded calls that the host answers are nobody's output
        (ACT_SCRIPT, (), {"checks": ("format", "whitelist", "schema", "exact")}, [A, A, A, A]),
        # cut off
        ((LOOK + CANCEL, ("thinking", "length")), (*REHEARSE_SCRIPT[:1], (REHEARSE_SCRIPT[1], "length")), {},
         [A, ANSWERED, ("rehearse", False, False, 0.0), ("act", False, False, None)]),
        # the required item failed: the checklist ends the episode
        (("",), (), {}, [("act", True, True, None)]),
    ],
)  # fmt: skip
def test_every_output_is_told_apart(chat, act, rehearse, options, want):
    assert seen(chat, act, rehearse, **options) == want


def oracle(trajectories, extras, population, baseline):
    """Advantages the long way: for each output, the mean over its group's outputs of its role."""
    rewards = [t.reward for t in trajectories]
    out = []
    for i, t in enumerate(trajectories):
        row = []
        for m, segment in enumerate(t.segments if rewards[i] is not None else ()):
            pool, weights = [], []
            for j, other in enumerate(trajectories):
                if other.group != t.group or rewards[j] is None:
                    continue
                mine = [n for n, s in enumerate(other.segments) if baseline == "single" or s.role is segment.role]
                pool += [rewards[j] + extras[j][n] for n in mine]
                weights += [1 / len(mine) if population == "trajectories" else 1.0 for _ in mine]
            members = {j for j, o in enumerate(trajectories) if o.group == t.group and rewards[j] is not None}
            mean = np.average(pool, weights=weights)
            row.append(rewards[i] + extras[i][m] - mean if len(members) > 1 and len(set(pool)) > 1 else 0.0)
        out.append(row)
    return out


@pytest.mark.parametrize("baseline", ["role", "single"])
@pytest.mark.parametrize("population", ["outputs", "trajectories"])
def test_output_advantages_equal_the_oracle(population, baseline):
    rng = np.random.default_rng(0)
    for _ in range(60):
        trajectories = [
            FakeTrajectory(
                int(rng.integers(3)),
                None if rng.random() < 0.2 else float(rng.choice([0, 0.5, 1])),
                tuple(FakeSegment(list(Role)[rng.integers(2)]) for _ in range(rng.integers(1, 6))),
            )
            for _ in range(8)
        ]
        extras = [[float(rng.choice([0, 0, -0.1, 0.3])) for _ in t.segments] for t in trajectories]
        got = output_advantages(trajectories, extras, population=population, baseline=baseline)
        want = oracle(trajectories, extras, population, baseline)
        assert [len(row) for row in got] == [len(row) for row in want]
        np.testing.assert_allclose([x for row in got for x in row], [x for row in want for x in row], atol=1e-12)
        # without additions they are the advantages of the roles
        zeros = [[0.0] * len(t.segments) for t in trajectories]
        plain = role_advantages(trajectories, population=population, baseline=baseline)
        flat = output_advantages(trajectories, zeros, population=population, baseline=baseline)
        for t, row, by_role in zip(trajectories, flat, plain):
            assert row == pytest.approx([by_role[s.role] for s in t.segments] if by_role else [])


def test_additions_by_hand(chat):
    act, wrong = ACT_SCRIPT, (answer({"id": "A1", "status": "lost"}), *REHEARSE_SCRIPT[1:])
    good, poor = play(make_task(), chat, act, REHEARSE_SCRIPT), play(make_task(), chat, act, wrong)
    # F: 1 1 1 and .5 1 1, mean 5.5 / 6 = .91667; weight .6: 1 -> +.05, .5 -> -.25
    added, figures = additions([good, poor], Shaping(fidelity_weight=0.6))
    assert added[0] == pytest.approx([0, 0.05, 0.05, 0, 0, 0.05, 0])
    assert added[1] == pytest.approx([0, -0.25, 0.05, 0, 0, 0.05, 0])
    assert figures["shaping/fidelity"] == pytest.approx(5.5 / 6) and figures["shaping/recorded"] == 1.0
    # both did the task: the roles' rewards are equal, and only the false answer has a negative advantage
    got = output_advantages([good, poor], added)
    assert got[1][1] == pytest.approx(-0.25) and got[0][1] == pytest.approx(0.05)
    assert all(got[i][m] == 0.0 for i in (0, 1) for m in (0, 3, 4, 6))
    # format penalties by role, an empty output, a length of 90% of the limit: half of the penalty
    bad = play(make_task(), chat, (LOOK + CANCEL, "", ""), ("open", REHEARSE_SCRIPT[1]))
    shaping = Shaping(rehearse_format_penalty=0.2, act_format_penalty=0.4, empty_penalty=0.1)
    assert additions([bad], shaping)[0][0] == pytest.approx([0, -0.2, 0, -0.1, -0.1])
    length = len(bad.segments[0].ids)
    limits = dict(max_act_tokens=round(length / 0.9), max_rehearse_tokens=1000)
    expected = -((length / limits["max_act_tokens"] - 0.8) / 0.2)
    assert additions([bad], Shaping(length_penalty=1.0, **limits))[0][0] == pytest.approx([expected, 0, 0, 0, 0])
    assert -0.6 < expected < -0.4
    # a rule contradicts the second answer, knows nothing of the first, and agrees with the third
    marks = (None, True, False)
    charged, _ = additions([good, poor], Shaping(contradiction_penalty=0.3), [marks, ()])
    assert charged[0] == pytest.approx([0, 0, -0.3, 0, 0, 0, 0]) and charged[1] == [0.0] * 7
    masked = dataclasses.replace(bad, reward=None, masked_cause="judge:outage")
    assert additions([masked], shaping)[0] == [[0.0] * 5]


def test_an_output_trains_with_its_own_advantage(chat):
    played = play(make_task(), chat, ACT_SCRIPT, REHEARSE_SCRIPT)
    advantages = [0.1, -0.25, 0.5, 0.2, 0.3, 0.6, 0.4]
    found = {}
    for row in train_rows(played, advantages):
        for output in np.unique(row.output[row.sampled]):
            values = set(row.advantages[row.output == output].tolist())
            assert len(values) == 1
            found.setdefault(int(row.role[0]), []).extend(values)
        assert not row.advantages[~row.sampled].any()
    assert found[0] == pytest.approx([0.1, 0.2, 0.3, 0.4]) and found[1] == pytest.approx([-0.25, 0.5, 0.6])


def test_off_is_bit_identical_and_on_is_used(chat):
    cfg = default_config()
    poor = (answer({"id": "A1", "status": "lost"}), *REHEARSE_SCRIPT[1:])
    trajectories = [
        play(make_task(), chat, ACT_SCRIPT, REHEARSE_SCRIPT),
        dataclasses.replace(play(make_task(), chat, ACT_SCRIPT, poor), reward=0.5),
    ]

    class Arm:
        baseline = "role"

    off, _, figures = credit(cfg, Arm, trajectories, 0)
    assert off == role_advantages(trajectories) and figures == {}
    cfg.rewards.fidelity_weight = 0.6
    on, _, figures = credit(cfg, Arm, trajectories, 0)
    assert on[1][1] == pytest.approx(off[1][Role.REHEARSE] - 0.25)
    assert figures["shaping/fidelity"] == pytest.approx(5.5 / 6)
    cfg.learning.shuffle_advantages = True
    shuffled, _, _ = credit(cfg, Arm, trajectories, 0)
    for role in Role:
        dealt, owned = (
            sorted(a for t, row in zip(trajectories, x) for s, a in zip(t.segments, row) if s.role is role)
            for x in (shuffled, on)
        )
        assert dealt == owned


def test_recorded_calls_must_reach_rehearse():
    cfg = default_config()
    cfg.rewards.fidelity_weight = 0.5
    assert not any("fidelity" in text for text in problems(cfg))
    cfg.rollout.checks = ("format", "exact")
    assert any("fidelity_weight" in text for text in problems(cfg))
    cfg.rewards.contradiction_penalty = 0.1
    assert any("contradiction_penalty" in text for text in problems(cfg))
    cfg.rewards.length_penalty = -1.0
    assert any("length_penalty" in text for text in problems(cfg))
