"""Benchmarks whose official program is run as a client of `serve`, in an environment of its own."""

from __future__ import annotations

SERVE = "python -m envace_jax serve --model MODEL --name NAME --port 8000     # loopback; 127.0.0.1:8000/v1"

CLIENTS: dict[str, str] = {
    "vita": f"""\
VitaBench is played by its own harness (its checkout; delivery and in-store tasks are public, others are not):

  {SERVE}
  pip install -e VITABENCH            # in a virtual environment of its own
  # models.yaml: one entry NAME with base_url http://127.0.0.1:8000/v1/chat/completions, and entries for user and judge
  VITA_MODEL_CONFIG_PATH=models.yaml vita run --domain delivery --language english --agent-llm NAME \\
      --user-llm USER --evaluator-llm JUDGE --num-trials 4

Its score needs a judge model; state user and judge with every number. With 'NAME+rehearse-parallel-2' for NAME the
policy rehearses first.""",
    "scienceworld": f"""\
ScienceWorld (pip install scienceworld; it needs a Java runtime) has no harness: its simulator is stepped by a loop of
one's own, which asks the model over

  {SERVE}

Score 0-100 is the simulator's; report it by task type, on variations that were not trained on.""",
    "bfcl-cli": f"""\
All categories of BFCL v4 (single-turn, irrelevance, memory) are scored by the official program:

  {SERVE}
  python3.11 -m venv V                # it pins an older numpy: never the environment of this project
  V/bin/pip install --no-deps bfcl-eval==2026.3.23     # and what its metadata requires but sentence-transformers,
                                                       # with soundfile and transformers
  export BFCL_PROJECT_ROOT=RUN        # test_case_ids_to_generate.json lies here, for --run-ids
  REMOTE_OPENAI_BASE_URL=http://127.0.0.1:8000/v1 REMOTE_OPENAI_API_KEY=EMPTY V/bin/bfcl generate \\
      --model Qwen/Qwen3-8B-FC --test-category all_scoring --skip-server-setup --local-model-path MODEL --result-dir R
  V/bin/bfcl evaluate --model Qwen/Qwen3-8B-FC --test-category all_scoring --result-dir R --score-dir S

This route asks raw completions and renders the Qwen3 prompt itself (temperature .001 unless told, no top_p, 4,096
tokens). Categories that were not run count as 0 in its overall: a partial overall is no overall.""",
    "tau2-cli": f"""\
tau2-bench with telecom and its own user simulator is played by the official harness (release 0.2.0 for the judge-free
score of the papers; say which):

  {SERVE}
  tau2 run --domain telecom --agent-llm openai/NAME --agent-llm-args '{{"api_base": "http://127.0.0.1:8000/v1",
      "api_key": "EMPTY", "temperature": 0.6, "top_p": 0.95}}' --user-llm USER --user-llm-args '{{}}' --num-trials 4

Doing nothing but ending politely scores 38.0 on airline, 6.1 on retail and 0 on telecom (0.2.0): give it beside every
score.""",
}


def instructions(name: str) -> str:
    """How the official program of a benchmark is run against a served model."""
    return CLIENTS[name]
