"""Fidelity to recorded calls: the truth scores 1, a world that only copies loses what is withheld."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envace_jax.evaluation.recorded_fidelity import recorded_cases, recorded_fidelity
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from tests.rehearsal.helpers import answer, make_task

pytestmark = pytest.mark.quick
CFG = RolloutConfig(EpisodeConfig())


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer("data/quickstart/tokenizer"), thinking=False)


def copying(chat):
    """An engine that knows nothing but what it is shown: it copies a record, else answers with an open order."""

    def say(request):
        prompt = chat.tokenizer.decode(request.prompt_ids)
        before = prompt.partition("# Conversation so far")[0]
        asked = prompt.rpartition("# Call to answer")[2]
        truths = {'"A2"': {"id": "A2", "status": "sent"}, "cancel_order": {"id": "A1", "status": "cancelled"}}
        for sign, truth in truths.items():
            if sign in asked:
                known = f'"status": "{truth["status"]}"' in before
                return answer(truth if known else {"id": truth["id"], "status": "open"})
        return answer({"id": "A1", "status": "open"})

    return ScriptedEngine(say, chat.tokenizer)


def test_reuse_and_knowledge_are_told_apart(chat):
    """Recorded: A1 open, A1 cancelled, A2 sent. Shown, all three are copied; withheld, only the open one is right, and
    the other two have one of their two leaves right: leaf F1 (1 + .5 + .5) / 3."""
    figures = recorded_fidelity([make_task()], copying(chat), chat, CFG)
    assert figures["fidelity_n"] == figures["fidelity_new_n"] == 3
    assert figures["fidelity_json_equal"] == figures["fidelity_leaf_f1"] == 1.0
    assert figures["fidelity_new_json_equal"] == pytest.approx(1 / 3)
    assert figures["fidelity_new_leaf_f1"] == pytest.approx(2 / 3)
    assert "fidelity_reject_f1" not in figures  # nothing was or should have been refused


def test_calls_that_do_not_fit_are_left_out(chat):
    small = replace(CFG, episode=replace(CFG.episode, max_input_tokens=900))
    assert recorded_cases([make_task()], chat, small, None) == []
    assert recorded_fidelity([make_task()], copying(chat), chat, small)["fidelity_n"] == 0
