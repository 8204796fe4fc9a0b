"""Can a policy write what test-time rehearsal asks for? Self-evaluations and memories of held-out dialogues, greedy.

    python benchmarks/review_skills.py runs/warm runs/trained --tasks 100

Every turn of a held-out task's right dialogue, and every turn in which a flawed dialogue of it (`test_time.targets`, as
in the warm start) made other calls. Printed per model, of all answers: those with the right verdict, those equal to the
expected answer to the letter (verdict and advice; the right calls and nothing else), those that cannot be read.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from envace_jax.build import chat_format, load_model, make_engine
from envace_jax.cli import load_config
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.sampling.engine import Request, SamplingParams
from envace_jax.test_time.memory import Evaluation, Rehearsed, Reviewer
from envace_jax.test_time.targets import difference, flawed_messages, remembered, turns_of

KINDS = ("judge a right turn", "judge a flawed turn", "remember a right turn", "remember a flawed turn")


def questions(tasks: int, reviewer: Reviewer, memory_tokens: int) -> Iterator[tuple[str, list[int], str]]:
    """(kind, prompt ids, expected answer)."""
    for task in generate_tasks("heldout", tasks):
        flawed = flawed_messages(task, random.Random(f"skills/{task.uuid}"))
        wrong = turns_of(flawed) if flawed is not None else ()
        for k, right in enumerate(turns_of(task.messages)):
            told = [Rehearsed((right,), Evaluation(1.0))]
            if k < len(wrong) and (advice := difference(right, wrong[k])):
                told.append(Rehearsed((wrong[k],), Evaluation(0.0, "", advice)))
            for one, judge, remember in zip(told, KINDS[:2], KINDS[2:]):
                assert one.evaluation is not None
                yield judge, reviewer.evaluation_prompt(one.turns), reviewer.evaluation_answer(one.evaluation)
                yield remember, reviewer.memory_prompt([one], memory_tokens), remembered(right)


def answers(engine: Any, chat: Any, prompts: list[list[int]], limit: int) -> list[str]:
    """Greedy answers, in order."""
    params = SamplingParams(temperature=0.0, max_tokens=limit, stop_ids=chat.stop_ids)
    waiting = {engine.submit(Request(tuple(prompt), params, (k,))): k for k, prompt in enumerate(prompts)}
    said = [""] * len(prompts)
    while waiting:
        for done in engine.step():
            ids = [i for i in done.ids if i not in chat.stop_ids]
            said[waiting.pop(done.request_id)] = chat.tokenizer.decode(ids).strip()
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description="Self-evaluations and memories that a policy can write.")
    parser.add_argument("models", nargs="+", help="model folders")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--memory_tokens", type=int, default=64)
    args = parser.parse_args()
    for folder in args.models:
        cfg = load_config(args.config, [f"--config.model.path={folder}", "--config.rollout.max_input_tokens=336"])
        chat, rules = chat_format(cfg), EpisodeConfig.from_config(cfg)
        reviewer = Reviewer(chat, compact=rules.rehearse_prompt == "compact", max_input_tokens=rules.max_input_tokens)
        asked = list(questions(args.tasks, reviewer, args.memory_tokens))
        spec, params = load_model(cfg, chat, None)
        said = answers(make_engine(cfg, spec, params), chat, [prompt for _, prompt, _ in asked], args.memory_tokens)
        counts: Counter[tuple[str, str]] = Counter()
        for (kind, _, expected), text in zip(asked, said):
            verdict, wanted = reviewer.read_evaluation(text).score, reviewer.read_evaluation(expected).score
            counts[kind, "all"] += 1
            counts[kind, "equal"] += text == expected
            counts[kind, "verdict"] += kind in KINDS[:2] and verdict == wanted
            counts[kind, "unread"] += kind in KINDS[:2] and verdict is None
        for kind in KINDS:
            n = counts[kind, "all"]
            verdicts = f"right verdict {counts[kind, 'verdict']}, unread {counts[kind, 'unread']}, "
            print(f"{folder}: {kind}: {verdicts if kind in KINDS[:2] else ''}equal {counts[kind, 'equal']} of {n}")


if __name__ == "__main__":
    main()
