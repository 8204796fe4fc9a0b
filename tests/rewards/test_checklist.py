"""Checklist scoring against tables worked by hand (in the comments)."""

from __future__ import annotations

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import ChecklistItem
from envace_jax.rewards.checklist import all_of, any_of, item_outcomes, score_checklist, votes_to_stop

pytestmark = pytest.mark.quick
P, F, N = True, False, None


def item(name: str, weight: float, required: bool = False, dependence: tuple[str, ...] = ()) -> ChecklistItem:
    return ChecklistItem(
        id=name, question="?", pass_condition="", focus_on=("assistant.tool_calls",), evidence=(),
        failure_examples=(), required_for_next_turn=required, dependence=dependence, weight=weight, rule=None,
    )  # fmt: skip


A, B, C = item("C0", 0.5), item("C1", 0.3), item("C2", 0.2)


def test_three_valued_connectives():
    # or: one pass decides; and: one fail decides; else a missing verdict stays missing. Value: (or, and)
    table = {(P, N): (P, N), (F, N): (N, F), (F, F): (F, F), (P, F): (P, F), (P, P): (P, P), (N, N): (N, N), (): (F, P)}
    for verdicts, (some, every) in table.items():
        assert any_of(verdicts) is some, verdicts
        assert all_of(verdicts) is every, verdicts


def test_passed_at_any_step_and_unreached_turn_in_the_denominator():
    # turn 0: C0 passes at step 1, C1 never, C2 at both -> .5 + .2 = .7
    # turn 1: C0 fails, C1 passes -> .3 ; turn 2 not reached -> 0 ; R = (.7 + .3 + 0) / 3 = 1/3
    score = score_checklist([[[A, B, C], [A, B], [A]]], [[[[F, P], [F, F], [P, P]], [[F], [P]]]], n_turns=3)
    assert score.turn_scores == pytest.approx((0.7, 0.3, 0.0))
    assert score.reward == pytest.approx(1 / 3)
    assert (score.unreached, score.missing) == (1, 0)


def test_turn_that_ended_unjudged_scores_zero_and_earlier_turns_keep_their_credit():
    # turn 0 full (1.0); turn 1 ended by a fault, empty rows -> 0 ; R = 1/2
    score = score_checklist([[[A, B, C], [A, B]]], [[[[P], [P], [P]], [[], []]]], n_turns=2)
    assert score.turn_scores == pytest.approx((1.0, 0.0))
    assert score.reward == pytest.approx(0.5)


def test_several_variants_are_averaged():
    # variant 0: .5 ; variant 1: .5 + .3 = .8 ; S = (.5 + .8) / 2 = .65 ; T = 1
    score = score_checklist([[[A, B]], [[A, B]]], [[[[P], [F]]], [[[P], [P]]]], n_turns=1)
    assert score.reward == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("verdicts", "honoured", "ignored"),
    [
        # C2 needs C1, C1 needs C0; weights .2 .3 .5 on C0 C1 C2
        ([[P], [P], [P]], 1.0, 1.0),
        ([[F], [P], [P]], 0.0, 0.8),  # C1 and C2 fall with C0 ; ignored: .3 + .5
        ([[P], [F], [P]], 0.2, 0.7),  # C2 falls with C1 ; ignored: .2 + .5
        ([[F, P], [P, F], [P, F]], 1.0, 1.0),  # each passed at some step
        ([[F], [N], [N]], 0.0, None),  # a failed dependence decides what was not judged
        ([[P], [N], [F]], None, None),  # C1 (.3) is open
        ([[N, P], [P, N], [P, P]], 1.0, 1.0),  # a pass at another step decides
    ],
)
def test_dependence_honoured_and_ignored(verdicts, honoured, ignored):
    items = [item("C0", 0.2), item("C1", 0.3, dependence=("C0",)), item("C2", 0.5, dependence=("C1",))]
    for honour, expected in ((True, honoured), (False, ignored)):
        reward = score_checklist([[items]], [[verdicts]], 1, honour_dependence=honour).reward
        assert reward == (None if expected is None else pytest.approx(expected))


def test_missing_verdict_masks_and_is_never_a_fail():
    # turn 0 complete (1.0), turn 1 open: no reward at all, not 1/2
    score = score_checklist([[[A, B, C], [A]]], [[[[P], [P], [P]], [[N]]]], n_turns=2)
    assert score.turn_scores == (1.0, None)
    assert score.reward is None and score.missing == 1
    # an open item without weight cannot change the reward
    assert score_checklist([[[A, item("C1", 0.0)]]], [[[[P], [N]]]], 1).reward == pytest.approx(0.5)
    # one open variant masks, though the other is known
    assert score_checklist([[[A]], [[A]]], [[[[P]]], [[[N]]]], 1).reward is None


def test_vote_needs_a_strict_majority_of_failed_required_items():
    items = [item("C0", 0.5, required=True), item("C1", 0.5)]
    passed, failed, missing = [[P], [F]], [[F], [P]], [[N], [F]]
    assert not votes_to_stop([items], [passed])  # only a required item counts
    assert votes_to_stop([items], [failed])
    assert not votes_to_stop([items, items], [failed, passed])  # 1 of 2 is no majority
    assert votes_to_stop([items, items, items], [failed, passed, failed])  # 2 of 3 is
    assert not votes_to_stop([items], [missing])  # no verdict is not a fail


def test_vote_honours_dependence():
    items = [item("C0", 0.5), item("C1", 0.5, required=True, dependence=("C0",))]
    assert votes_to_stop([items], [[[F], [P]]])
    assert not votes_to_stop([items], [[[F], [P]]], honour_dependence=False)


def test_tables_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="2 items but 1 rows"):
        item_outcomes([A, B], [[P]])
    with pytest.raises(UserError, match="'C9'"):
        item_outcomes([item("C0", 1.0, dependence=("C9",))], [[P]])
    with pytest.raises(UserError, match="depends on itself"):
        item_outcomes([item("C0", 0.5, dependence=("C1",)), item("C1", 0.5, dependence=("C0",))], [[P], [P]])
    with pytest.raises(UserError, match="3 turns"):
        score_checklist([[[A]]], [[[[P]]]], 3)
    with pytest.raises(UserError, match="without a checklist"):
        score_checklist([], [], 1)
    with pytest.raises(UserError, match="1 checklist variants but 2"):
        score_checklist([[[A]]], [[[[P]]], [[[P]]]], 1)
