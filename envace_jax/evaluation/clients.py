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
    "bfcl-cli": f"""\
All categories of BFCL v4 that run offline are played and scored by the official program (web_search asks a search
service, memory_vector needs an encoder from a model hub; with both, --test-category all_scoring):

  {SERVE}
  launch/clients.sh bfcl              # .clients/bfcl: it pins an older numpy, so it has an environment of its own
  export BFCL_PROJECT_ROOT=RUN        # test_case_ids_to_generate.json lies here, for --run-ids
  REMOTE_OPENAI_BASE_URL=http://127.0.0.1:8000/v1 REMOTE_OPENAI_API_KEY=EMPTY \\
      .clients/bfcl/bin/bfcl generate \\
      --model Qwen/Qwen3-8B-FC --test-category non_live,live,multi_turn,memory_kv,memory_rec_sum \\
      --skip-server-setup --local-model-path MODEL --result-dir R
  OPENAI_API_KEY=EMPTY .clients/bfcl/bin/bfcl evaluate --model Qwen/Qwen3-8B-FC \\
      --test-category non_live,live,multi_turn,memory_kv,memory_rec_sum --result-dir R --score-dir S
  python -m envace_jax evaluate import S     # result files for `compare` and `bfcl-average`

This route asks raw completions and renders the Qwen3 prompt itself (temperature .001 unless told, no top_p, 4,096
tokens); it asks for the model by its path, so serve it with --name MODEL. The chat route is --model
openbmb/MiniCPM-SALA-FC with OPENAI_BASE_URL and OPENAI_API_KEY, served with --alias openbmb/MiniCPM-SALA-FC.

Categories that were not run count as 0 in its overall: a partial overall is no overall.""",
    "tau2-cli": f"""\
tau2-bench with telecom and its own user simulator is played by the official harness (release 0.2.0 for the judge-free
score of the papers; say which):

  {SERVE}
  tau2 run --domain telecom --agent-llm openai/NAME --agent-llm-args '{{"api_base": "http://127.0.0.1:8000/v1",
      "api_key": "EMPTY", "temperature": 0.6, "top_p": 0.95}}' --user-llm USER --user-llm-args '{{}}' --num-trials 4 \\
      --save-to OUT
  python -m envace_jax evaluate import OUT.json     # in the harness's data folder; a result file for `compare`

Doing nothing but ending politely scores 38.0 on airline, 6.1 on retail and 0 on telecom (0.2.0): give it beside every
score.""",
}


def instructions(name: str) -> str:
    """How the official program of a benchmark is run against a served model."""
    return CLIENTS[name]
