"""What counts as shown: an example of the call with its very answer, in the prompt as it was trimmed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envace_jax.evaluation.recorded_fidelity import recorded_cases
from envace_jax.evaluation.shown import Withheld
from envace_jax.rehearsal.grounding import Brief, NoGrounding, OracleGrounding, PastGrounding
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from tests.rehearsal.helpers import make_task

pytestmark = pytest.mark.quick
CFG = RolloutConfig(EpisodeConfig(rehearse_prompt="compact", max_examples=0))


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer("data/quickstart/tokenizer"), thinking=False)


@pytest.mark.parametrize(
    ("grounding", "shown"),
    [
        (None, [True, True, True]),
        (OracleGrounding(), [True, True, True]),
        (Withheld(OracleGrounding()), [False, False, False]),
        (NoGrounding(), [False, False, False]),
        (PastGrounding(), [False, False, False]),  # a call's own record is never past
    ],
)
def test_what_a_grounding_shows(chat, grounding, shown):
    """Three recorded calls: two of the first turn, one of the second."""
    cases = recorded_cases([make_task()], chat, CFG, grounding)
    assert [case.pair.copyable for case in cases] == shown


class Shows:
    """A grounding of chosen examples."""

    def __init__(self, *examples):
        self.examples = examples

    def brief(self, task, state, call):
        return Brief(self.examples)


@pytest.mark.parametrize("context", ["stateless", "stream"])
def test_a_record_with_another_answer_shows_nothing(chat, context):
    task = make_task()
    cfg = replace(CFG, episode=replace(CFG.episode, context=context))
    first, *rest = task.recorded_calls
    told = Shows(replace(first, result='{"id": "A1", "status": "lost"}'), *rest)
    assert [case.pair.copyable for case in recorded_cases([task], chat, cfg, told)] == [False, True, True]


def test_what_was_trimmed_is_not_shown(chat):
    """The oldest examples go where there is no room: those of the calls themselves, before twenty long ones."""
    task = make_task()
    long = [replace(task.recorded_calls[0], name="other", result='"' + f"{k} " * 400 + '"') for k in range(20)]
    for limit, shown in ((100_000, True), (2000, False)):
        cfg = replace(CFG, episode=replace(CFG.episode, max_input_tokens=limit))
        cases = recorded_cases([task], chat, cfg, Shows(*task.recorded_calls, *long))
        assert [case.pair.copyable for case in cases] == [shown] * 3
