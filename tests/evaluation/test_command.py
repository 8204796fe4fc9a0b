"""The command over a scripted engine: files, resumption, test-time methods, notes; and the simulated user."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.datasets.tau2 import load_tau2
from envace_jax.endpoint import Completion
from envace_jax.evaluation import command, user
from envace_jax.evaluation.benchmarks import BENCHMARKS
from envace_jax.evaluation.play import play, real_config
from envace_jax.evaluation.results import read_results
from envace_jax.rehearsal.flow import Voice
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.test_time.commit import Committed
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "data" / "quickstart" / "tokenizer"
CONFIG = [
    "--config", str(ROOT / "configs" / "quickstart.py"), "--config.model.path=",
    f"--config.model.tokenizer={TOKENIZER}",
]  # fmt: skip


@pytest.fixture
def engine(monkeypatch):
    """`evaluate` gets an engine that says goodbye to everything; it counts what it was asked."""
    made = ScriptedEngine(lambda request: "Goodbye.", load_tokenizer(TOKENIZER))
    monkeypatch.setattr(command, "policy_engine", lambda cfg, args, chat: made)
    return made


def evaluate(tmp_path, *more: str) -> int:
    return cli.main(["evaluate", *more, *CONFIG, f"--config.run_dir={tmp_path}"])


def test_an_evaluation_is_written_printed_and_taken_up_again(tmp_path, engine, capsys):
    assert evaluate(tmp_path, "quickstart", "--tasks", "3", "--trials", "2") == 0
    printed = capsys.readouterr().out
    assert "quickstart: Avg@2 0.000" in printed and "floor (only ends politely) 0.000" in printed
    assert "not recorded: these tasks may have been seen" in printed
    path = tmp_path / "evaluation" / "quickstart.jsonl"
    header, results = read_results(path)
    assert len(results) == 6 and {r.trial for r in results} == {0, 1}
    assert header.sampling["temperature"] == 0.6 and header.sampling["top_p"] == 0.95
    assert header.template and header.versions["envace_jax"]
    asked = len(engine.requests)
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:4]))
    assert evaluate(tmp_path, "quickstart", "--tasks", "3", "--trials", "2") == 0
    again = {(r.task, r.trial): r for r in read_results(path)[1]}
    assert {k: r.transcript for k, r in again.items()} == {(r.task, r.trial): r.transcript for r in results}
    assert len(engine.requests) - asked < asked  # only what was missing was played
    capsys.readouterr()
    assert evaluate(tmp_path, "quickstart", "--tasks", "3", "--test_time", "rehearse-parallel-2") == 2
    assert "holds another evaluation" in capsys.readouterr().err


def test_a_test_time_method_counts_its_tokens_and_samples_as_published(tmp_path, engine, capsys):
    out = tmp_path / "r.jsonl"
    assert (
        evaluate(tmp_path, "quickstart", "--tasks", "2", "--test_time", "rehearse-parallel-2", "--out", str(out)) == 0
    )
    header, results = read_results(out)
    assert header.benchmark == "quickstart/heldout/rehearse-parallel-2"
    assert (header.sampling["temperature"], header.sampling["top_p"]) == (1.0, 1.0)
    for r in results:
        assert r.tokens == r.parts["tokens_committed"] + sum(r.parts["tokens_private"].values())
    control = tmp_path / "c.jsonl"
    args = ("quickstart", "--tasks", "2", "--test_time", "vote-2", "--match", str(out), "--out", str(control))
    assert evaluate(tmp_path, *args) == 0
    spent = {r.task: r.tokens for r in results}
    for r in read_results(control)[1]:
        assert spent[r.task] <= r.tokens <= 1.5 * spent[r.task]
    for refused in ("none", "rehearse-parallel-1", "rehearse-stepwise-1"):
        assert evaluate(tmp_path, "quickstart", "--test_time", refused, "--match", str(out)) == 2
        assert "--match goes with a benchmark and a control" in capsys.readouterr().err
    assert evaluate(tmp_path, "compare", str(out), "--match", str(out)) == 2
    more = ("quickstart", "--tasks", "3", "--test_time", "trials-2", "--match", str(out))
    assert evaluate(tmp_path, *more, "--out", str(tmp_path / "t.jsonl")) == 2
    assert "no result of " in capsys.readouterr().err
    assert command.budgets(results) == {r.task: (r.tokens, r.acts) for r in results}


def test_other_words_are_answered(tmp_path, capsys):
    predictions = tmp_path / "p.json"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "A"}}]}
    predictions.write_text(json.dumps([{"messages": [call], "messages_pred": [call]}]))
    assert evaluate(tmp_path, "finmcp", str(predictions)) == 0
    assert "TF1 100.00" in capsys.readouterr().out
    for name in ("vita", "bfcl-cli", "tau2-cli"):
        assert evaluate(tmp_path, name) == 0
        assert "python -m envace_jax serve" in capsys.readouterr().out
    assert evaluate(tmp_path, "compare") == 2
    assert "at least one file" in capsys.readouterr().err
    assert evaluate(tmp_path, "quickstart", "--test_time", "magic-2") == 2
    assert "rehearse-parallel-N" in capsys.readouterr().err
    assert evaluate(tmp_path, "quickstart", "--user_url", "http://x", "--user_model", "m") == 2
    assert "has user messages of its own" in capsys.readouterr().err


def test_training_data_is_read_from_the_card(tmp_path):
    from envace_jax.config import default_config
    from envace_jax.model.card import CardFacts, model_card
    from envace_jax.model.spec import PRESETS

    cfg = default_config()
    assert command.seen_in_training(cfg) is None
    cfg.model.path = str(tmp_path)
    facts = CardFacts(config={"data.source": "bfcl+tau2"}, data={"data.source": "bfcl+tau2"})
    (tmp_path / "README.md").write_text(model_card("m", PRESETS["tiny"], facts))
    assert command.seen_in_training(cfg) == ("bfcl_multi_turn", "tau2_airline", "tau2_retail")
    (tmp_path / "README.md").write_text(model_card("m", PRESETS["tiny"], CardFacts()))
    assert command.seen_in_training(cfg) is None
    before = command.folder_digest(str(tmp_path))
    (tmp_path / "README.md").write_text("other")
    assert command.folder_digest(str(tmp_path)) != before != command.folder_digest("")


class Endpoint:
    """Says one line after the other, or fails."""

    def __init__(self, *lines: str | None):
        self.lines, self.asked = list(lines), []

    def submit(self, messages):
        self.asked.append(messages)
        line = self.lines.pop(0)
        future: Future[Completion] = Future()
        future.set_result(Completion(line) if line is not None else Completion(None, "outage", "gone"))
        return future


def play_tau2(endpoint, chat, act):
    benchmark = BENCHMARKS["tau2"]
    task = next(t for t in load_tau2(("airline",)) if not benchmark.floor(t))
    rules = real_config(EpisodeConfig(max_act_tokens=400, max_input_tokens=1 << 20), benchmark)
    method = Committed(chat, rules, simulator=user.EndpointUser(endpoint))
    failed: list[str] = []
    played = play(benchmark, [task], method, ScriptedEngine(act, chat.tokenizer), Voice(), on_failure=failed.append)
    return task, list(played), failed


def test_a_simulated_user_talks_until_it_is_done():
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=False, tool_docs="none")
    endpoint = Endpoint("Hello, it is me.", "My number is 7.", "Thank you. [[END]]")
    said = iter(["Who are you?", "<think>\nhidden\n</think>\n\nDone."])
    task, (result,), failed = play_tau2(endpoint, chat, lambda request: next(said))
    assert not failed and result.end == "completed" and result.score == 0.0
    assert [turn["user"] for turn in result.transcript] == ["Hello, it is me.", "My number is 7."]
    assert task.meta["note"] in endpoint.asked[0][0]["content"]
    assert [m["content"] for m in endpoint.asked[2][2:]] == [
        "Hello, it is me.", "Who are you?", "My number is 7.", "Done.",
    ]  # fmt: skip


def test_a_user_that_is_not_there_gives_no_result():
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=False, tool_docs="none")
    _, results, failed = play_tau2(Endpoint("Hello.", None), chat, lambda request: "Who are you?")
    assert results == [] and "outage: gone" in failed[0]
    _, results, failed = play_tau2(Endpoint("Hello.", "<think>\nI am"), chat, lambda request: "Who are you?")
    assert results == [] and "only thought" in failed[0]
