"""The model card says what is known, and that the rest is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from envace_jax.model.card import CardFacts, model_card
from envace_jax.model.spec import PRESETS

pytestmark = pytest.mark.quick


def test_card_holds_every_fact_and_flags_seen_benchmarks():
    facts = CardFacts(
        config={"learning.lr": 1e-6},
        data={"fingerprint": "abc123"},
        evaluation=[{"name": "quickstart", "value": 0.81, "tasks": 400}],
        benchmarks_seen=["BFCL multi-turn"],
        step=470,
        base_model="Qwen/Qwen3-8B",
    )
    card = model_card("mine", PRESETS["8b"], facts)
    for text in ("learning.lr", "abc123", "0.81", "400", "seen in training: BFCL multi-turn", "470 updates"):
        assert text in card
    assert "8,190,735,360 parameters" in card


@pytest.mark.parametrize(
    ("base", "named"), [("Qwen/Qwen3-8B", True), ("data/quickstart/model", False), ("tests/text", False)]
)
def test_the_hub_is_told_of_repositories_only(base: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # where tests/text is a folder
    head, _, body = model_card("mine", PRESETS["tiny"], CardFacts(base_model=base)).removeprefix("---").partition("---")
    assert (f'base_model: "{base}"' in head) == named
    assert (f"Training began from `{base}`." in body) != named
    assert "began from" not in model_card("mine", PRESETS["tiny"], CardFacts())


def test_unknown_is_said_and_markup_is_inert():
    card = model_card("x<script>", PRESETS["tiny"], CardFacts(config={"a|b": "<img src=x>\n# head"}))
    assert "Not recorded." in card and "None recorded" in card
    assert "<script>" not in card and "<img" not in card and "\n# head" not in card
