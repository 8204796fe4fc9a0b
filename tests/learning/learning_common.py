"""Small trajectories and rows that the learning tests share."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from envace_jax.learning.packing import TrainRow
from envace_jax.model.spec import PRESETS
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.text.transcript import ROLE_CODES, Role

SPEC = dataclasses.replace(
    PRESETS["tiny"], vocab_size=96, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64
)


@dataclasses.dataclass(frozen=True)
class FakeSegment:
    role: Role
    index: int = 0
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    row: int = 0
    start: int = 0
    finish: str = "stop"
    text: str = ""


@dataclasses.dataclass(frozen=True)
class FakeRow:
    role: Role
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class FakeTrajectory:
    group: int
    reward: float | None
    segments: tuple[FakeSegment, ...] = ()
    rows: tuple[FakeRow, ...] = ()
    task_id: str = "t"
    member: int = 0


def random_row(
    rng: np.random.Generator,
    length: int,
    vocab: int = 96,
    role: Role = Role.ACT,
    advantage: float | None = None,
) -> TrainRow:
    """A row with one to three outputs at random places."""
    sampled = np.zeros(length, bool)
    at = 1 + int(rng.integers(0, max(length // 4, 1)))
    for _ in range(int(rng.integers(1, 4))):
        end = min(length, at + int(rng.integers(1, max(length // 3, 2))))
        sampled[at:end] = True
        at = end + 1 + int(rng.integers(0, 3))
        if at >= length:
            break
    value = float(rng.normal()) if advantage is None else advantage
    return TrainRow(
        ids=rng.integers(0, vocab, length).astype(np.int32),
        sampled=sampled,
        sampler_logprobs=np.where(sampled, -np.log(vocab) + 0.01 * rng.normal(size=length), 0).astype(np.float32),
        advantages=np.where(sampled, value, 0).astype(np.float32),
        role=np.full(length, ROLE_CODES[role], np.int8),
    )


def random_rows(seed: int, n: int, low: int = 8, high: int = 40, vocab: int = 96) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    roles = list(Role)
    return [random_row(rng, int(rng.integers(low, high)), vocab, roles[i % 2]) for i in range(n)]


def tiny_config(run_dir, **changes):
    """A training run of seconds: a random two-layer model on quickstart tasks, two steps of 2 x 2 trajectories."""
    from envace_jax.config import default_config, set_key

    cfg = default_config()
    values = {
        "run_dir": str(run_dir),
        "model.size": "tiny",
        "model.tokenizer": "data/quickstart/tokenizer",
        "chat.tool_docs": "none",
        "data.train_limit": 12,
        "data.eval_limit": 2,
        "rollout.rehearse_prompt": "compact",
        "rollout.max_act_tokens": 32,
        "rollout.max_rehearse_tokens": 16,
        "rollout.max_input_tokens": 300,
        "rollout.max_acts": 3,
        "rollout.max_segments": 8,
        "rollout.live_episodes": 8,
        "rollout.slots": 4,
        "rollout.chunk": 8,
        "rollout.prefill_chunk": 64,
        "learning.steps": 4,
        "learning.prompts_per_step": 2,
        "learning.group_size": 2,
        "learning.lr": 1e-3,
        "learning.kl_coef": 0.0,
        "learning.row_tokens": 336,
        "learning.rows_per_microbatch": 2,
        "learning.logprob_chunk": 64,
        "learning.max_probability_error": 3.0,
        "checkpoint.every": 2,
        "metrics.tensorboard": False,
        "metrics.progress": False,
    }
    with cfg.unlocked():
        for key, value in (values | changes).items():
            set_key(cfg, key, value)
    return cfg


def rewarded(rollout):
    """A rollout whose trajectories are rewarded by what was sampled, so that a random model has something to learn."""

    def play(*args, **kwargs):
        for t in rollout(*args, **kwargs):
            ids = [i for s in t.segments for i in s.ids]
            yield dataclasses.replace(t, reward=float(sum(ids) % 3) / 2, masked_cause=None)

    return play


IDLE = "Done."


class Actors(ScriptedEngine):
    """Member 0 of every group says what the record says, member 1 says that it is done."""

    def __init__(self, chat, tasks, vocab_size):
        self.chat, self.tasks, self.played, self.said = chat, tasks, {}, {}
        self.logprob = -math.log(vocab_size)  # nearly what random weights give every token
        super().__init__(self.say, chat.tokenizer)

    def say(self, request):
        place, act = request.key[:4], request.key[-2] == ROLE_CODES[Role.ACT]
        if place not in self.played:
            prompt = self.chat.tokenizer.decode(request.prompt_ids)
            self.played[place] = next(t for t in self.tasks if t.user_turns[0] in prompt)
        if place[3] == 1:
            return IDLE
        lines = [m for m in self.played[place].messages if m.role == ("assistant" if act else "tool")]
        number = self.said[place, act] = self.said.get((place, act), -1) + 1
        if act:
            return self.chat.output_text(lines[number])
        return f"<tool_response>\n{lines[number].content}\n</tool_response>"

    def _complete(self, number, request):
        done = super()._complete(number, request)
        return dataclasses.replace(done, logprobs=(self.logprob,) * len(done.ids))

    def set_params(self, params, name="policy"):
        pass

    def warm_up(self, guided=False):
        return []


class ToyEngine:
    """An engine that costs nothing: what it says follows from the request's key and the parameters it was given.

    Whoever resumes with other parameters, keys or order gets other trajectories.
    """

    SAYS = (
        '<tool_call>\n{"name": "get_order", "arguments": {"order": "12"}}\n</tool_call>',
        '<tool_call>\n{"name": "cancel_order", "arguments": {"order": "3"}}\n</tool_call>',
        "Done.",
    )
    ANSWERS = (
        '<tool_response>\n{"status": "paid"}\n</tool_response>',
        '<tool_response>\n{"error": "x"}\n</tool_response>',
    )

    def __init__(self, chat, vocab_size: int):
        self.chat, self.vocab_size = chat, vocab_size
        self.waiting: list = []
        self.digests: dict[str, int] = {}
        self.guided: bool | None = None  # how it was warmed up
        self.count = 0

    def set_params(self, params, name="policy"):
        import zlib

        self.digests[name] = zlib.crc32(np.asarray(params["embed"]).tobytes())

    def warm_up(self, guided=False):
        self.guided = guided
        return []

    def submit(self, request) -> int:
        self.count += 1
        self.waiting.append((self.count, request))
        return self.count

    @property
    def idle(self) -> bool:
        return not self.waiting

    def step(self):
        import random

        from envace_jax.sampling.engine import Completion

        done, self.waiting = self.waiting, []
        out = []
        for number, request in done:
            rng = random.Random(f"{self.digests[request.param_set]}/{request.key}")
            text = rng.choice(self.ANSWERS if request.key[4] else self.SAYS)
            ids = (*self.chat.tokenizer.encode(text), self.chat.tokenizer.eos_id)[: request.params.max_tokens]
            logprob = -float(np.log(self.vocab_size))
            finish = "stop" if ids[-1] == self.chat.tokenizer.eos_id else "length"
            out.append(Completion(number, ids, (logprob,) * len(ids), finish))
        return out

    def cancel(self, request_id):
        self.waiting = [x for x in self.waiting if x[0] != request_id]

    def release(self, affinity):
        pass

    def stats(self):
        return {"requests": float(self.count)}


class CountingEngine(ToyEngine):
    """What it says follows from how often it was given parameters, not from their bits: layouts and compilers round
    initial parameters differently in the last place."""

    def set_params(self, params, name="policy"):
        self.digests[name] = self.digests.get(name, 0) + 1


def counting_engine(cfg, spec, params, *_):
    """Stands in for `build.make_engine`, as `toy_engine` does."""
    from envace_jax.build import chat_format

    engine = CountingEngine(chat_format(cfg), spec.vocab_size)
    engine.set_params(params)
    return engine


def toy_engine(cfg, spec, params, *_):
    """Stands in for `build.make_engine`."""
    from envace_jax.build import chat_format

    engine = ToyEngine(chat_format(cfg), spec.vocab_size)
    engine.set_params(params)
    return engine


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def together(child: str, *arguments: object, limit: float = 600) -> list[str]:
    """What two processes of two virtual devices each say, that run a file beside this one."""
    place = {"ENVACE_COORDINATOR": f"127.0.0.1:{free_port()}", "ENVACE_PROCESSES": "2"}
    environment = os.environ | place | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(child)), *map(str, arguments)],
            env=environment | {"ENVACE_PROCESS": str(k)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(2)
    ]
    try:
        return [process.communicate(timeout=limit)[0] for process in started]
    finally:
        for process in started:
            process.kill()
