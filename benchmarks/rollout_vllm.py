"""vLLM on the conversations of `rollout.py`, each going on as soon as it can; run by it with vLLM's Python.

PYTHON benchmarks/rollout_vllm.py MODEL_FOLDER CONVERSATIONS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from conversations import limits, load
from vllm import EngineArgs, LLMEngine, SamplingParams


def main() -> None:
    folder, path = sys.argv[1:]
    head, conversations = load(Path(path))
    longest = sum(limits(load(Path(path))))
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enable_prefix_caching=True,
            max_num_seqs=64,
            max_model_len=longest,
        )
    )
    asked: dict[str, tuple] = {}
    useful = 0

    def ask(c) -> None:
        prompt, n = c.prompt(head), c.turns[c.at].length
        name = f"{c.task}/{c.member}/{c.at}"
        asked[name] = c, prompt
        params = SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)

    began = time.perf_counter()
    for c in conversations:
        ask(c)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            c, prompt = asked.pop(output.request_id)
            ids = list(output.outputs[0].token_ids)
            useful += len(ids)
            c.receive(prompt, ids)
            if not c.done:
                ask(c)
    print(json.dumps({"seconds": time.perf_counter() - began, "useful_tokens": useful}))


if __name__ == "__main__":
    main()
