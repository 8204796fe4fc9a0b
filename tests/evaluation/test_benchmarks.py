"""Our scores against the official checkers' on the same transcripts: gold, perturbed, malformed."""

from __future__ import annotations

import copy
import itertools
import random

import pytest

from envace_jax.datasets import tau2
from envace_jax.datasets.bfcl import load_bfcl
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.tau2 import load_tau2
from envace_jax.evaluation.benchmarks import BENCHMARKS, calls_by_turn, polite_transcript
from envace_jax.text.tool_calls import parse_assistant
from envace_jax.text.transcript import AssistantOutput, Observation, Step, ToolCall, Turn, canonical_json
from tests.datasets.transcripts import reference_transcript

_serial = itertools.count()


def gold(task):
    return [[ToolCall(c["name"], c["arguments"]) for c in turn] for turn in task.meta["gold"]]


def transcript_of(task, turns, replies=None):
    """Each call in an output of its own, then a reply a turn."""
    out = []
    for number, calls in enumerate(turns):
        steps = [Step(AssistantOutput("", None, "", (call,)), (Observation('"unseen"', "real"),)) for call in calls]
        reply = "Done." if replies is None else replies[number]
        steps.append(Step(AssistantOutput(reply, None, reply, ()), ()))
        out.append(Turn("?", tuple(steps)))
    return tuple(out)


def official_bfcl(task, turns) -> bool:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    def text(call):
        return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"

    entry = {
        "id": task.uuid.removeprefix("bfcl-"),
        "initial_config": task.meta["initial_state"],
        "involved_classes": task.meta["classes"],
    }
    wanted = [[text(call) for call in turn] for turn in gold(task)]
    if len(turns) != len(wanted):
        return False  # the official runner calls this a forced end, before any checking
    decoded = [[[text(call)] for call in turn] for turn in turns]
    name = f"agreement-{next(_serial)}"  # instances outlive an episode under one name
    return multi_turn_checker(decoded, wanted, entry, "multi_turn_base", name)["valid"]


def perturbed(turns, rng: random.Random):
    """One seeded change of a reference: left out, twice, swapped, another turn's, another argument, unknown."""
    turns = [list(turn) for turn in turns]
    full = [k for k, turn in enumerate(turns) if turn]
    k = rng.choice(full)
    at = rng.randrange(len(turns[k]))
    kind = rng.choice(("drop", "twice", "swap", "move", "argument", "unknown", "empty", "short", "extra_read"))
    call = turns[k][at]
    if kind == "drop":
        del turns[k][at]
    elif kind == "twice":
        turns[k].insert(at, call)
    elif kind == "swap":
        rng.shuffle(turns[k])
    elif kind == "move":
        turns[rng.randrange(len(turns))].append(turns[k].pop(at))
    elif kind == "argument" and call.arguments:
        name = rng.choice(sorted(call.arguments))
        old = call.arguments[name]
        new = old + 1 if isinstance(old, int | float) and not isinstance(old, bool) else f"{old}x"
        turns[k][at] = ToolCall(call.name, call.arguments | {name: new})
    elif kind == "unknown":
        turns[k].insert(at, ToolCall("no_such_function", {"a": 1}))
    elif kind == "empty":
        turns[k] = []
    elif kind == "short":
        turns.pop()
    else:
        turns[k].append(ToolCall(call.name, {}))
    return kind, turns


@pytest.mark.quick
def test_200_perturbed_bfcl_transcripts_score_as_the_official_checker_says():
    tasks = load_bfcl(limit=50)
    benchmark, seen, verdicts = BENCHMARKS["bfcl"], set(), []
    for seed in range(200):
        rng = random.Random(f"perturb/{seed}")
        task = tasks[seed % len(tasks)]
        kind, turns = perturbed(gold(task), rng)
        ours = benchmark.score(task, transcript_of(task, turns))["score"]
        theirs = official_bfcl(task, turns)
        assert bool(ours) == theirs, (seed, kind, task.uuid)
        seen.add(kind)
        verdicts.append(theirs)
    assert len(seen) == 9 and 20 < sum(verdicts) < 180  # both answers occur


@pytest.mark.quick
def test_malformed_bfcl_outputs_call_nothing():
    benchmark = BENCHMARKS["bfcl"]
    for task in load_bfcl(("base",), limit=10):
        turns = gold(task)
        good = reference_transcript(task)
        assert benchmark.score(task, good) == {"score": 1.0}
        bad = parse_assistant("<tool_call>\n{'name': nonsense}\n</tool_call>", mode="lenient")
        assert bad.error_code and not bad.calls
        noisy = tuple(Turn(t.user, (Step(bad, ()), *t.steps)) for t in good)
        assert bool(benchmark.score(task, noisy)["score"]) == official_bfcl(task, turns)
        only_bad = tuple(Turn(t.user, (Step(bad, ()),)) for t in good)
        assert benchmark.score(task, only_bad)["score"] == 0.0 == float(official_bfcl(task, [[] for _ in turns]))
        assert benchmark.score(task, good[:-1])["score"] == 0.0
        assert benchmark.score(task, ())["score"] == 0.0


def plain_tau2(task, calls, replies) -> bool:
    """The judge-free check written again on plain copies of the database: equal end states, values communicated."""
    domain = task.meta["environment"].removeprefix("tau2_")
    server = tau2._server(domain)
    ends = []
    for made in (calls, [c for turn in gold(task) for c in turn]):
        database = copy.deepcopy(tau2._base(domain))
        for call in made:
            if call.name == "calculate" or call.name not in server.BUSINESS_TOOLS:
                continue
            try:
                server._execute_tool(database, call.name, copy.deepcopy(call.arguments))
            except Exception:  # the tools raise whatever bad arguments lead to
                continue
        ends.append(database)
    said = " ".join(replies).lower().replace(",", "")
    return ends[0] == ends[1] and all(str(info).lower() in said for info in task.meta["communicate"])


@pytest.mark.parametrize("seeds", [5, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_perturbed_tau2_transcripts_score_as_a_plain_replay_says(seeds):
    """The packages ship tools, tasks and databases, but no evaluator: the oracle is the check written a second time."""
    benchmark, verdicts, kinds = BENCHMARKS["tau2"], [], set()
    for domain in ("airline", "retail"):
        tasks = [task for task in load_tau2((domain,)) if task.meta["gold"][0]]
        for seed in range(seeds):
            rng = random.Random(f"perturb/{domain}/{seed}")
            task = tasks[(7 * seed) % len(tasks)]
            kind, turns = ("gold", gold(task)) if seed == 0 else perturbed(gold(task), rng)
            calls = turns[0] if turns else []
            said = "Nothing." if seed % 3 == 1 else "; ".join(f"{text}" for text in task.meta["communicate"])
            ours = benchmark.score(task, transcript_of(task, [calls], [said]))
            assert bool(ours["score"]) == plain_tau2(task, calls, [said]), (domain, seed, kind)
            verdicts.append(bool(ours["score"]))
            kinds.add(kind)
    assert {True, False} == set(verdicts)
    assert seeds == 5 or len(kinds) == 10


def test_malformed_tau2_outputs_call_nothing():
    benchmark = BENCHMARKS["tau2"]
    tasks = [task for task in load_tau2(("retail",)) if task.meta["gold"][0]][:2]
    texts = ("<tool_call>\n{'name': nonsense}\n</tool_call>", '<tool_call>\n{"name": "x"', "<think>\nnever ends")
    bad = [parse_assistant(text, mode="lenient") for text in texts]
    assert all(output.error_code and not output.calls for output in bad)
    noise = tuple(Step(output, ()) for output in bad)
    for task in tasks:
        said = "; ".join(str(text) for text in task.meta["communicate"])
        good = transcript_of(task, gold(task), [said])
        noisy = tuple(Turn(turn.user, (*noise, *turn.steps)) for turn in good)
        assert benchmark.score(task, noisy) == benchmark.score(task, good) == {
            "score": 1.0, "database": 1.0, "communicate": 1.0
        }  # fmt: skip
        for only in ((Turn("?", noise),), (Turn("?", ()),), ()):
            assert bool(benchmark.score(task, only)["score"]) == plain_tau2(task, [], [""])


@pytest.mark.quick
def test_tau2_parts_and_floor():
    benchmark = BENCHMARKS["tau2"]
    task = next(t for t in load_tau2(("airline",)) if t.meta["communicate"] and t.meta["gold"][0])
    silent = transcript_of(task, gold(task), ["All done."])
    assert benchmark.score(task, silent) == {"score": 0.0, "database": 1.0, "communicate": 0.0}
    said = transcript_of(task, gold(task), [", ".join(task.meta["communicate"])])
    assert benchmark.score(task, said)["score"] == 1.0
    floors = [benchmark.floor(t) for t in load_tau2(("airline",))]
    assert sum(floors) == 23  # of 50 tasks of this release: nothing to change and nothing to say


@pytest.mark.quick
def test_quickstart_references_score_and_the_polite_agent_does_not():
    benchmark = BENCHMARKS["quickstart"]
    tasks = generate_tasks("heldout", 20)
    for task in tasks:
        assert benchmark.score(task, reference_transcript(task)) == {"score": 1.0}
        assert benchmark.floor(task) == 0.0
        assert calls_by_turn(polite_transcript(task)) == [[] for _ in task.user_turns]
    assert benchmark.load("heldout", 3, ()) == tasks[:3]
    with pytest.raises(ValueError, match="choose heldout or train"):
        benchmark.load("all", 0, ())
    assert canonical_json(benchmark.score(tasks[0], ())) == '{"score": 0.0}'
