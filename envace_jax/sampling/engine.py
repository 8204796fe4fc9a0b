"""The rollout engine: requests in, completions out, ordered by nothing but readiness.

Rows being decoded sit in *lanes*; rows that wait for their next turn (their keys and values are worth keeping)
are moved to the *shelf* when their lane is wanted. What a new prompt shares with any row, waiting, live or just
being prefilled, is found by token ids and copied instead of computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Mapping

import jax
import numpy as np

from envace_jax.config import UserError
from envace_jax.model.qwen3 import ForwardOptions, Params
from envace_jax.model.spec import Qwen3Spec
from envace_jax.sampling.pool import Pool
from envace_jax.sampling.programs import Programs, Shapes
from envace_jax.sampling.request import Completion, Guide, Live, Request, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "Guide", "Request", "SamplingParams"]

COUNTERS = (
    "requests",
    "tokens_prompt",
    "tokens_reused",
    "tokens_prefilled",
    "tokens_prefill_padded",
    "tokens_sampled",
    "slot_iterations",
    "chunks",
    "rows_nan",
    "cancelled",
    "tokens_drafted",
    "tokens_guessed_right",
    "seconds_waiting",
    "seconds_in_step",
    # Episodes in lanes of their own (`rehearsal.device_control`): how many were played there, to their end or to a
    # hand-over; how many of them the device could not go on with; where the host settled something that the device had
    # guessed; how many were never in a lane; tokens that trajectories took from there, and tokens sampled beyond.
    "device_episodes",
    "device_handed_over",
    "device_diverged",
    "device_refused",
    "device_tokens_told",
    "device_tokens_dropped",
)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine.

    slots: rows decoded together (lanes). shelf: waiting rows kept beside them; the number of rows that wait
    while others are live is a good value. max_length: tokens of the longest row, prompt and output.
    chunk: tokens a live row may gain before the host looks. prefill_chunk: tokens of a prompt in one program call.
    min_share: fewest common tokens for which a prompt waits for another one that is being prefilled.
    patience: iterations that the live rows may lose, on average, to rows that stopped before a chunk returns early.
    draft: tokens that prompt look-up guesses ahead of every live row (0: off). Outputs stay the same; it pays where
    few rows are decoded and outputs repeat what their prompts say.
    record_routing: keep the experts that every sampled token came through (mixtures of experts only).
    spare: share of free lanes above which a chunk waits for the caller's next requests.
    unroll_layers: compile layers one by one instead of scanning them; default: on CPU only.
    """

    slots: int = 64
    shelf: int = 64
    max_length: int = 1024
    chunk: int = 16
    prefill_chunk: int = 256
    min_share: int = 16
    patience: float = 1.0
    draft: int = 0
    record_routing: bool = False
    spare: float = 0.1
    unroll_layers: bool | None = None

    def shapes(self) -> Shapes:
        """The ladder of shapes that an engine of these sizes compiles for."""
        return Shapes.plan(
            slots=self.slots,
            shelf=self.shelf,
            max_length=self.max_length,
            chunk=self.chunk,
            prefill_chunk=self.prefill_chunk,
        )


class Engine:
    """Rows on the device for any number of requests; `submit`, then `step` until `idle`.

    One engine serves several named parameter sets of one spec: each has its own rows and shares the programs. On a
    `mesh` heads, feed-forward and vocabulary are cut over the rules' axes and rows are whole; parameters laid out
    otherwise (a learner's) are brought into that layout once per hand-over.
    """

    def __init__(
        self,
        params: Params,
        spec: Qwen3Spec,
        config: EngineConfig = EngineConfig(),
        seed: int = 0,
        options: ForwardOptions = ForwardOptions(),
        mesh: jax.sharding.Mesh | None = None,
    ):
        if config.draft >= config.chunk:
            raise UserError(f"draft={config.draft} must be smaller than chunk={config.chunk}")
        self.spec, self.config, self.seed = spec, config, seed
        unroll = config.unroll_layers
        if unroll is None:
            unroll = jax.default_backend() == "cpu"
        rules = dataclasses.replace(options.rules, batch=None, sequence=None, embed=None, logits=None)
        options = dataclasses.replace(options, remat="none", rules=rules)
        if config.record_routing and not spec.is_moe:
            raise UserError("record_routing: the model has no experts")
        shapes = config.shapes()
        self.run = Programs(spec, options, shapes, stacked=not unroll, mesh=mesh, record=config.record_routing)
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._pools: dict[str, Pool] = {}
        self._ids = itertools.count()
        self._done: list[Completion] = []
        self._compiled_at_warm_up: int | None = None
        self.set_params(params)

    def set_params(self, params: Params, name: str = "policy") -> None:
        """Hands over new weights for a parameter set (made here when the name is new); its rows are forgotten.

        Weights already in the compute dtype are used as they are, without a copy.
        """
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = Pool(
                self.run,
                self.seed,
                min_share=self.config.min_share,
                patience=self.config.patience,
                draft=self.config.draft,
                counters=self._counters,
            )
        if pool.live or pool.waiting:
            raise RuntimeError(f"set_params('{name}') while requests are in flight: drain or cancel them first")
        pool.params = self.run.hand_over(params)
        pool.forget()

    def submit(self, request: Request) -> int:
        """Queues a request and returns its id; raises `UserError` for one that can never run."""
        prompt = np.asarray(request.prompt_ids, np.int32)
        if request.param_set not in self._pools:
            raise UserError(f"no parameter set '{request.param_set}'; there are {sorted(self._pools)}")
        if not 0 < len(prompt) < self.config.max_length:
            raise UserError(
                f"prompt of {len(prompt)} tokens does not fit: a row holds {self.config.max_length} "
                "(rollout.max_length) and needs room for one token more"
            )
        if len(request.params.stop_ids) > self.run.shapes.stop_ids:
            raise UserError(f"at most {self.run.shapes.stop_ids} stop ids, got {request.params.stop_ids}")
        if request.params.max_tokens < 1:
            raise UserError(f"max_tokens={request.params.max_tokens} must be at least 1")
        limit = min(request.params.max_tokens, self.config.max_length - len(prompt))
        live = Live(next(self._ids), request, prompt, limit)
        self._pools[request.param_set].waiting.append(live)
        self._counters["requests"] += 1
        return live.id

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is live, nothing is left to return."""
        return not self._done and not any(p.waiting or p.live for p in self._pools.values())

    def step(self) -> list[Completion]:
        """Admits what fits, advances the device by one chunk and returns the requests that ended.

        With every lane taken the next chunk is started before this returns, so that the caller's work on the
        completions overlaps with it. With lanes to spare it is not: the caller's next requests would miss it.
        """
        start = time.perf_counter()
        done, self._done = self._done, []
        for pool in self._pools.values():  # all of them first: no set's device work waits for another's to be read
            if pool.flying is None:
                pool.admit()
                pool.launch()
        for pool in self._pools.values():
            done += pool.collect()
            pool.admit()
            if len(pool.live) >= (1.0 - self.config.spare) * pool.slots:
                pool.launch()
        self._counters["seconds_in_step"] += time.perf_counter() - start
        return done

    def cancel(self, request_id: int) -> None:
        """Ends a request now; `step` returns what it had. Unknown or ended ids are ignored."""
        for pool in self._pools.values():
            completion = pool.cancel(request_id)
            if completion is not None:
                self._done.append(completion)
                self._counters["cancelled"] += 1
                return

    def news(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """What live requests have beyond what was seen of them: request id -> (ids, log-probabilities).

        `seen` maps request ids to numbers of tokens; requests that wait, have ended or have nothing new are left out.
        """
        found = {}
        for pool in self._pools.values():
            for live in pool.live.values():
                known = seen.get(live.id)
                if known is not None and known < len(live.ids):
                    found[live.id] = live.ids[known:], live.logprobs[known:]
        return found

    def release(self, affinity: Hashable) -> None:
        """The ledger is closed: its row may be overwritten."""
        for pool in self._pools.values():
            pool.release(affinity)

    def forget(self) -> None:
        """Drops all kept keys and values; requests under way are not touched."""
        for pool in self._pools.values():
            pool.forget()

    def params(self, name: str = "policy") -> Params:
        """A parameter set as the programs read it."""
        return self._pools[name].params

    def count(self, **counts: float) -> None:
        """Adds to the counters what was done for this engine's requests outside of it."""
        for name, n in counts.items():
            self._counters[name] += n

    def warm_up(self, guided: bool = False) -> list[str]:
        """Compiles every program the engine can ask for (`guided`: also those of requests with a guide).

        Afterwards any further compilation is counted.
        """
        lines = list(self.run.warm_up(self.params(), self.config.draft, guided))
        self._compiled_at_warm_up = self.run.n_compiled
        return lines

    @property
    def compiles(self) -> list[tuple[str, float]]:
        """The programs that were compiled for this engine, in order, each with its seconds."""
        return self.run.compiles

    def compiled_beside(self, compile: Callable[[], None]) -> None:
        """Compiles programs that others run over this engine; they count as part of its warm-up."""
        compile()
        if self._compiled_at_warm_up is not None:
            self._compiled_at_warm_up = self.run.n_compiled

    def stats(self) -> dict[str, float]:
        """Counters since the engine was made, and the ratios drawn from them."""
        c = dict(self._counters)
        before = self._compiled_at_warm_up
        c["programs_compiled"] = self.run.n_compiled
        c["programs_compiled_after_warm_up"] = 0 if before is None else self.run.n_compiled - before
        c["occupancy"] = c["tokens_sampled"] / max(1, c["slot_iterations"])
        return c
