"""Rollout throughput: the engine against itself in the reference's order, `transformers`, and others where installed.

    python benchmarks/rollout.py                     # 16 tasks x 4, prompts of 500 to 1,500 tokens, 2.4M parameters
    python benchmarks/rollout.py --full              # 64 x 4, prompts to 4,000 tokens, 12M parameters
    python benchmarks/rollout.py --smoke             # seconds: that it runs, nothing to be measured
    python benchmarks/rollout.py --tunix-python V/bin/python   # also google-tunix from an environment of its own
    python benchmarks/rollout.py --vllm-python V/bin/python    # also vLLM's CPU build, likewise
    python benchmarks/rollout.py --control           # episodes of the quickstart: host control and device control
    python benchmarks/rollout.py --draft 4           # the same with and without guessing ahead: how many come true

Every side plays the same conversations with the same weights: ACT and REHEARSE take turns, output lengths come from
`lengths.json` and are forced, so all do the same useful work. Ceilings are measured in the same run. Results are
printed and written as JSON (`--out`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.model import qwen3
from envace_jax.model.spec import Qwen3Spec
from envace_jax.sampling import programs
from envace_jax.sampling.engine import Engine, EngineConfig, Request, SamplingParams

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from conversations import ACT, LONGEST_SIDE, REHEARSE, Conversation, Turn, in_order, save  # noqa: E402
from rollout_episodes import controls, drafts  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Size:
    """One size of the workload."""

    tasks: int
    group: int
    calls: tuple[int, int]
    prompt: tuple[int, int]
    spec: Qwen3Spec
    scale: float = 1.0  # of the output lengths


def _spec(d_model: int, n_layers: int, heads: int, kv: int, d_ff: int, vocab: int) -> Qwen3Spec:
    return Qwen3Spec(
        vocab_size=vocab,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=kv,
        head_dim=32,
        d_ff=d_ff,
        rope_theta=1e6,
        tie_embeddings=True,
    )


SIZES = {
    "default": Size(16, 4, (3, 5), (500, 1500), _spec(192, 4, 6, 2, 576, 2048)),
    "full": Size(64, 4, (3, 8), (500, 4000), _spec(384, 6, 12, 4, 1024, 4096)),
    "smoke": Size(2, 2, (1, 2), (40, 60), _spec(32, 2, 2, 1, 48, 128), 0.1),
}


LONGEST = {"default": 16384, "full": 16384, "smoke": 256}
"""Rows over which decoding is measured beyond those of the workload."""


def workload(size: Size, seed: int = 0) -> tuple[tuple[int, ...], list[Conversation]]:
    """The static head of REHEARSE prompts, and all conversations."""
    lengths = json.loads((HERE / "lengths.json").read_text())
    rng = np.random.default_rng(seed)
    draw = lambda n: tuple(rng.integers(8, size.spec.vocab_size, int(n)).tolist())  # noqa: E731
    head = draw(min(300, size.prompt[0] // 2))
    out = []
    for task in range(size.tasks):
        prompt = draw(rng.integers(*size.prompt, endpoint=True))
        about = draw(len(prompt) // 4)
        for member in range(size.group):
            turns, new = [], prompt
            for _ in range(int(rng.integers(*size.calls, endpoint=True))):
                pick = lambda role: max(1, int(rng.choice(lengths[role]) * size.scale))  # noqa: E731
                turns.append(Turn(ACT, new, pick("act")))
                turns.append(Turn(REHEARSE, about, pick("rehearse")))
                new = draw(6)
            turns.append(Turn(ACT, new, pick("act")))
            out.append(Conversation(task, member, turns))
    return head, out


@dataclasses.dataclass
class Result:
    """What one side did."""

    side: str
    seconds: float
    useful_tokens: int
    facts: dict[str, float]

    @property
    def rate(self) -> float:
        return self.useful_tokens / self.seconds


def longest_row(head: tuple[int, ...], conversations: list[Conversation]) -> int:
    longest = 0
    for c in conversations:
        act = sum(len(t.new_ids) + t.length for t in c.turns if t.role == ACT)
        act += sum(t.length for t in c.turns if t.role == REHEARSE)
        rehearse = len(head) + max(len(t.new_ids) + 400 + t.length for t in c.turns)
        longest = max(longest, act, rehearse)
    return longest + 1


class PerfectCache:
    """How many tokens a cache that forgets nothing would prefill."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.tokens = 0

    def __call__(self, prompt: list[int], sampled: list[int]) -> None:
        code = 0
        for i, token in enumerate([*prompt, *sampled][:-1]):
            code = hash((code, token))
            if code not in self.seen:
                self.seen.add(code)
                self.tokens += i < len(prompt) - 1


def play(engine: Engine, head: tuple[int, ...], conversations: list[Conversation], ordered: bool) -> Result:
    """All conversations over one engine: by readiness, or in the reference's order."""
    perfect, useful = PerfectCache(), 0
    before, began, inside = engine.stats(), time.perf_counter(), 0.0
    asked: dict[int, tuple[Conversation, list[int]]] = {}
    unfinished, at_tail = len(conversations), None  # the tail: fewer conversations than lanes are left

    def ask(c: Conversation) -> None:
        turn, prompt = c.turns[c.at], c.prompt(head)
        ledger = (c.task, c.member) if turn.role == ACT and not ordered else None
        params = SamplingParams(max_tokens=turn.length)
        asked[engine.submit(Request(prompt, params, (c.task, c.member, c.at), ledger))] = c, prompt

    def advance() -> Iterator[Conversation]:
        nonlocal useful, inside, unfinished, at_tail
        start = time.perf_counter()
        done = engine.step()
        inside += time.perf_counter() - start
        for completion in done:
            c, prompt = asked.pop(completion.request_id)
            ids = list(completion.ids)
            assert len(ids) == c.turns[c.at].length, "a row was cut"
            perfect(prompt, ids)
            useful += len(ids)
            c.receive(prompt, ids)
            unfinished -= c.done
            yield c
        if at_tail is None and unfinished < engine.config.slots:
            at_tail = engine.stats()

    if ordered:
        while any(not c.done for c in conversations):
            for role in (ACT, REHEARSE):
                for c in conversations:
                    if not c.done and c.turns[c.at].role == role:
                        ask(c)
                while not engine.idle:
                    list(advance())
                engine.forget()
    else:
        for c in conversations:
            ask(c)
        while not engine.idle:
            for c in advance():
                if not c.done:
                    ask(c)
    seconds = time.perf_counter() - began
    after = engine.stats()
    gained = {k: after[k] - before[k] for k in after}
    until = {k: (at_tail or after)[k] - before[k] for k in after}
    facts = {
        "occupancy": gained["tokens_sampled"] / max(1, gained["slot_iterations"]),
        "occupancy_until_tail": until["tokens_sampled"] / max(1, until["slot_iterations"]),
        "prefilled": gained["tokens_prefilled"],
        "prefilled_over_perfect": gained["tokens_prefilled"] / perfect.tokens,
        "host_share": 1 - gained["seconds_waiting"] / seconds,
        "caller_share": 1 - inside / seconds,
        "compiled": gained["programs_compiled_after_warm_up"],
    }
    return Result("reference order" if ordered else "engine", seconds, useful, facts)


def transformers_side(folder: Path, head: tuple[int, ...], conversations: list[Conversation]) -> Result | None:
    """`generate` in batches: all ACT prompts, then all REHEARSE prompts, left-padded, longest output waits."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        sampled = dict(max_new_tokens=max(lengths), do_sample=True, top_k=0, pad_token_id=0)
        with torch.inference_mode():
            return model.generate(ids, attention_mask=mask, **sampled)[:, width:].tolist()

    began = time.perf_counter()
    useful = in_order((head, conversations), generate, enough=lambda: time.perf_counter() - began > LONGEST_SIDE)
    return Result("transformers", time.perf_counter() - began, useful, {})


def outside_side(name: str, script: str, python: str, folder: Path) -> Result | None:
    """Another engine in its own environment: a script that gets the model's folder and the conversations."""
    command = [python, str(HERE / script), str(folder), str(folder / "conversations.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}:", *(done.stderr.strip().splitlines()[-3:] or ["failed"]), sep="\n  ", file=sys.stderr)
        return None
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    return Result(name, facts.pop("seconds"), facts.pop("useful_tokens"), facts)


# --- ceilings --------------------------------------------------------------------------------------------------


def best_of(call: Callable[[], object], n: int = 5) -> float:
    """Shortest seconds of n calls, after one that is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(n):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def matmul_peak(n: int = 1536) -> float:
    """FLOP/s of one large float32 matrix product."""
    x = jnp.ones((n, n), jnp.float32)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * n**3 / best_of(lambda: product(x, x))


def bandwidth(megabytes: int = 256) -> float:
    """Bytes/s of reading an array that fits no cache, by the fastest of three programs that read all of it once."""
    x = jnp.ones((64, megabytes * 4096), jnp.float32)
    y = jnp.ones(x.shape[1], jnp.float32)
    total, largest, product = jax.jit(jnp.sum), jax.jit(jnp.max), jax.jit(lambda a, b: a @ b)
    return x.nbytes / min(best_of(call) for call in (lambda: total(x), lambda: largest(x), lambda: product(x, y)))


def matrix_params(spec: Qwen3Spec) -> int:
    """Weights that take part in products, the output matrix included."""
    return spec.n_params() - (0 if spec.tie_embeddings else spec.vocab_size * spec.d_model)


@dataclasses.dataclass
class Ceilings:
    """The machine, measured, and how near the two programs come."""

    flops: float
    bytes: float

    def decode(self, engine: Engine, rows: int, context: int) -> tuple[float, float]:
        """(seconds an iteration, share of the roofline) with `rows` live rows of `context` tokens.

        The roofline is the longer of bytes (weights and live keys and values, once) and FLOPs.
        """
        run, spec, shapes = engine.run, engine.spec, engine.run.shapes
        params = engine.params()
        main = run.cache(shapes.slots, shapes.length_for(context + shapes.chunk))
        ints = np.zeros((shapes.slots, programs.STOPS + shapes.stop_ids), np.int32)
        ints[:, programs.STOPS :] = -1
        ints[:rows, programs.LENGTH_COLUMN] = context - shapes.chunk
        ints[:rows, programs.REMAINING] = 1 << 20
        floats = np.ones((shapes.slots, 2), np.float32)
        seconds = 1e9
        for _ in range(4):
            start = time.perf_counter()
            main, out, *_ = run.decode(params, main, ints, floats, 1 << 30)
            out.block_until_ready()
            seconds = min(seconds, (time.perf_counter() - start) / shapes.chunk)
        kv = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * 4
        moved = 4 * matrix_params(spec) + rows * context * kv
        computed = rows * (2 * matrix_params(spec) + 4 * spec.n_layers * spec.n_heads * spec.head_dim * context)
        return seconds, max(moved / self.bytes, computed / self.flops) / seconds

    @staticmethod
    def temporaries(engine: Engine, length: int) -> tuple[float, float]:
        """(bytes, share of one layer's keys and values) that the decode program takes over its cache."""
        run = engine.run
        memory = run.compiled["decode", run.shapes.slots, length].memory_analysis().temp_size_in_bytes
        layer = 2 * run.shapes.slots * engine.spec.n_kv_heads * length * engine.spec.head_dim * 4
        return memory, memory / layer

    def prefill(self, engine: Engine) -> tuple[float, float]:
        """(tokens/s, share of the matrix peak) of the largest prefill program on fresh rows."""
        run, spec, shapes = engine.run, engine.spec, engine.run.shapes
        rows, piece = shapes.prefill[-1]
        params, length = engine.params(), shapes.lengths[-1]
        main = run.cache(shapes.slots, length)
        tokens = np.zeros((rows, piece), np.int32)
        places = np.stack([np.arange(rows) % shapes.slots, np.zeros(rows, int)], axis=1).astype(np.int32)
        context = shapes.contexts(piece, length)[0]
        seconds = 1e9
        for _ in range(4):
            start = time.perf_counter()
            main = run.prefill(params, main, tokens, places, context)
            jax.block_until_ready(main)
            seconds = min(seconds, time.perf_counter() - start)
        computed = rows * piece * 2 * (matrix_params(spec) - spec.vocab_size * spec.d_model)
        computed += rows * 2 * spec.n_layers * spec.n_heads * spec.head_dim * piece * piece  # causal half
        return rows * piece / seconds, computed / seconds / self.flops


# --- the run ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--tunix-python", default="", help="Python of an environment that has google-tunix")
    parser.add_argument("--vllm-python", default="", help="Python of an environment that has vLLM's CPU build")
    parser.add_argument("--skip", default="", help="sides to leave out: reference, transformers")
    parser.add_argument("--control", action="store_true", help="compare host and device control, and nothing else")
    parser.add_argument("--draft", type=int, default=0, help="guess so many tokens ahead, and nothing else")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.control or args.draft:
        sizes = (2, 2, 4) if args.smoke else (16, 4, args.slots)
        facts = controls(*sizes) if args.control else drafts(*sizes, args.draft)
        if args.out:
            Path(args.out).write_text(json.dumps(facts, indent=1) + "\n")
        return
    name = "full" if args.full else "smoke" if args.smoke else "default"
    size = SIZES[name]
    params = qwen3.init_params(size.spec, jax.random.key(0))
    head, conversations = workload(size)
    slots = min(args.slots, len(conversations))
    config = EngineConfig(
        slots=slots, shelf=len(conversations), max_length=longest_row(head, conversations), chunk=args.chunk
    )
    print(f"{name}: {len(conversations)} conversations, {size.spec.n_params():,} parameters, {slots} slots")
    print(f"rows of at most {config.max_length} tokens; jax {jax.__version__}, {jax.devices()[0].device_kind}")
    start = time.perf_counter()
    engine = Engine(params, size.spec, config)
    engine.warm_up()
    print(f"warm-up {time.perf_counter() - start:.1f} s, {engine.stats()['programs_compiled']} programs", flush=True)

    results: list[Result] = []

    def add(result: Result | None) -> None:
        """Keeps a side's result; said at once, since the next side may take minutes."""
        if result is not None:
            results.append(result)
            print(f"{result.side}: {result.seconds:.1f} s, {result.useful_tokens} useful tokens", flush=True)

    add(play(engine, head, conversations, ordered=False))
    if "reference" not in args.skip:
        unshared = Engine(params, size.spec, dataclasses.replace(config, min_share=1 << 30))
        unshared.warm_up()
        add(play(unshared, *workload(size), ordered=True))
    with tempfile.TemporaryDirectory() as place:
        from envace_jax.model.hf import save_params

        folder = save_params(Path(place) / "model", params, size.spec, dtype="F32")
        save(folder / "conversations.json", *workload(size))
        add(None if "transformers" in args.skip else transformers_side(folder, *workload(size)))
        for side, script, python in (
            ("google-tunix", "rollout_tunix.py", args.tunix_python),
            ("vLLM", "rollout_vllm.py", args.vllm_python),
        ):
            add(outside_side(side, script, python, folder) if python else None)
    first = results[0]
    print(f"\n{'side':18s} {'seconds':>9s} {'useful':>8s} {'tok/s':>9s} {'engine is':>10s}")
    for r in results:
        print(f"{r.side:18s} {r.seconds:9.2f} {r.useful_tokens:8d} {r.rate:9.1f} {first.rate / r.rate:9.2f}x")
    for r in results:
        if r.facts:
            print(f"{r.side}: " + ", ".join(f"{k} {v:.3g}" for k, v in r.facts.items()))

    ceilings = Ceilings(matmul_peak(), bandwidth())
    print(f"\nmatrix peak {ceilings.flops / 1e9:.1f} GFLOP/s, reading {ceilings.bytes / 1e9:.1f} GB/s")
    rate, share = ceilings.prefill(engine)
    table = {"prefill": {"tokens_per_second": rate, "share": share}}
    print(f"prefill {rate:.0f} tok/s, {share:.0%} of the matrix peak")
    longer = dataclasses.replace(config, shelf=0, max_length=LONGEST[name])
    for one in (engine, Engine(params, size.spec, longer)):
        for length in one.run.shapes.lengths:
            context = length - config.chunk
            for rows in sorted(n for n in {1, 4, 16, slots} if n <= slots):
                seconds, share = ceilings.decode(one, rows, context)
                table[f"decode {rows} x {context}"] = {"seconds": seconds, "share": share}
                print(
                    f"decode {rows:3d} rows x {context:5d}: {seconds * 1e3:7.2f} ms an iteration, "
                    f"{seconds / rows * 1e6:8.1f} us a token, {share:.0%} of the roofline"
                )
            memory, of_layer = ceilings.temporaries(one, length)
            table[f"temporaries {context}"] = {"bytes": memory, "of_a_layer": of_layer}
            print(f"decode temporaries at {context}: {memory / 2**20:.1f} MiB, {of_layer:.2f} of a layer's cache")
    if args.out:
        facts = {"size": name, "results": [dataclasses.asdict(r) for r in results], "programs": table}
        Path(args.out).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
