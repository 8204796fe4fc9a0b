"""The rollout engine: requests in, completions out, ordered by nothing but readiness.

Rows being decoded sit in *lanes*; rows that wait for their next turn (their keys and values are worth keeping)
are moved to the *shelf* when their lane is wanted. What a new prompt shares with any row, waiting, live or just
being prefilled, is found by token ids and copied instead of computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from envace_jax.config import UserError
from envace_jax.model.kv_cache import KVCache
from envace_jax.model.qwen3 import ForwardOptions, Params
from envace_jax.model.spec import Qwen3Spec
from envace_jax.sampling import programs
from envace_jax.sampling.programs import FINISH, RUNNING, Programs, Shapes
from envace_jax.sampling.sampler import request_key


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """One segment to sample.

    `key` is folded with the run's seed into the sampling key: equal keys give equal samples whatever else is in
    the batch. A request whose prompt extends the finished row of the same `affinity` goes on in that row; until
    `Engine.release(affinity)` the row is kept in preference to others.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    key: tuple[int, ...]
    affinity: Hashable = None
    param_set: str = "policy"


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a request got: sampled ids (the stop id included), their log-probabilities, and why it ended.

    `finish` is stop, length, cancelled (what was sampled so far) or nan (what was sampled before).
    """

    request_id: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of one engine.

    slots: rows decoded together (lanes). shelf: waiting rows kept beside them; the number of rows that wait
    while others are live is a good value. max_length: tokens of the longest row, prompt and output.
    chunk: tokens a live row may gain before the host looks. prefill_chunk: tokens of a prompt in one program call.
    min_share: fewest common tokens for which a prompt waits for another one that is being prefilled.
    patience: row-iterations that stopped rows may idle away before a chunk returns early, a share of slots.
    """

    slots: int = 64
    shelf: int = 64
    max_length: int = 1024
    chunk: int = 16
    prefill_chunk: int = 256
    min_share: int = 16
    patience: float = 2.0
    unroll_layers: bool | None = None


class _Row:
    """Host view of one row: whose it is and what its keys and values hold."""

    __slots__ = ("affinity", "live", "ready", "used")

    def __init__(self) -> None:
        self.affinity: Hashable = None
        self.live: _Live | None = None
        self.ready = True  # prefilled; only ready rows can be copied from
        self.used = 0


@dataclasses.dataclass
class _Live:
    """A request in a lane."""

    id: int
    request: Request
    prompt: np.ndarray
    limit: int
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


class _Pool:
    """Lanes and shelf of one parameter set: admission, prefix reuse, decoding."""

    def __init__(self, run: Programs, config: EngineConfig, stats: dict[str, float]):
        self.run, self.config, self.stats = run, config, stats
        shapes = run.shapes
        n, top = shapes.slots + shapes.shelf, shapes.lengths[-1]
        self.lanes: KVCache = run.cache(shapes.slots, shapes.lengths[0])
        self.shelf: KVCache | None = run.cache(shapes.shelf, top) if shapes.shelf else None
        self.rows = [_Row() for _ in range(n)]
        self.tokens = np.zeros((n, top), np.int32)
        self.valid = np.zeros(n, np.int32)  # positions with keys and values
        self.ints = np.zeros((shapes.slots, programs.STOPS + shapes.stop_ids), np.int32)
        self.floats = np.ones((shapes.slots, 2), np.float32)
        self.waiting: deque[_Live] = deque()
        self.clock = itertools.count(1)

    # ---- rows

    def invalidate(self) -> None:
        """Forgets all keys and values (the parameters changed)."""
        self.valid[:] = 0

    def release(self, affinity: Hashable) -> None:
        for row in self.rows:
            if row.affinity == affinity:
                row.affinity = None

    def _victim(self, rows: range, taken: set[int]) -> int | None:
        """The row least worth keeping: empty, then nobody's, then longest unused; None when all are busy."""
        best, best_cost = None, None
        for i in rows:
            row = self.rows[i]
            if row.live is not None or i in taken:
                continue
            cost = (self.valid[i] > 0 and row.affinity is not None, self.valid[i] > 0, row.used)
            if best_cost is None or cost < best_cost:
                best, best_cost = i, cost
        return best

    def _common(self, prompt: np.ndarray) -> np.ndarray:
        """Common prefix of the prompt (less its last token, which decoding feeds) with every row."""
        n = len(prompt) - 1
        same = self.tokens[:, :n] == prompt[None, :n]
        first_difference = np.where(same.all(1), n, same.argmin(1)) if n else np.zeros(len(self.rows), int)
        return np.minimum(first_difference, self.valid)

    # ---- admission

    def admit(self) -> None:
        """Gives lanes to waiting requests, copies what is shared, prefills the rest."""
        while self.waiting:
            if not self._admit_phase():
                return

    def _admit_phase(self) -> bool:
        shapes = self.run.shapes
        lanes = range(shapes.slots)
        shelf_range = range(shapes.slots, shapes.slots + shapes.shelf)
        parks: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        todo: list[tuple[int, int, int]] = []  # lane, start, end
        taken: set[int] = set()  # sources and destinations of this phase
        deferred: deque[_Live] = deque()
        while self.waiting:
            live = self.waiting.popleft()
            common = self._common(live.prompt)
            ready = np.array([r.ready for r in self.rows])
            affinity = live.request.affinity
            own = [
                i
                for i, r in enumerate(self.rows)
                if affinity is not None and r.affinity == affinity and r.live is None and i not in taken
            ]
            score = np.where(ready, common, 0)
            source = own[0] if own and common[own[0]] == score.max() else int(score.argmax())
            shared = int(score[source])
            if int(np.where(ready, 0, common).max()) >= shared + self.config.min_share:
                deferred.append(live)  # a prompt admitted in this phase will hold more of it: wait for that
                continue
            in_place = source in lanes and source not in taken and self.rows[source].live is None
            if in_place and self.rows[source].affinity is not None and source not in own:
                in_place = False
            lane = source if in_place and shared else self._victim(lanes, taken | {source})
            if lane is None:
                deferred.append(live)
                deferred.extend(self.waiting)
                self.waiting.clear()
                break
            if lane != source and self.rows[lane].affinity is not None and self.valid[lane]:
                place = self._victim(shelf_range, taken | {source})
                if place is not None:
                    parks.append((lane, place))
                    taken.add(place)
                    self._move_host(lane, place)
            taken.add(lane)
            if shared and lane != source:
                copies.append((source, lane))
                taken.add(source)
                if source in own:
                    self.rows[source].affinity = None
            self._occupy(lane, live, shared)
            if shared < len(live.prompt) - 1:
                todo.append((lane, shared, len(live.prompt) - 1))
            self.rows[lane].ready = False
            self.stats["tokens_reused"] += shared
            self.stats["tokens_prompt"] += len(live.prompt) - 1
        self.waiting = deferred
        if not taken:
            return False
        self._fit_lanes()
        self._copy(parks)
        self._copy([c for c in copies if c[0] < shapes.slots])
        self._copy([c for c in copies if c[0] >= shapes.slots])
        self._prefill(todo)
        for row in self.rows:
            row.ready = True
        return True

    def _move_host(self, lane: int, place: int) -> None:
        self.tokens[place] = self.tokens[lane]
        self.valid[place] = self.valid[lane]
        row, old = self.rows[place], self.rows[lane]
        row.affinity, row.used, row.ready = old.affinity, old.used, True

    def _occupy(self, lane: int, live: _Live, shared: int) -> None:
        request, params, n = live.request, live.request.params, len(live.prompt)
        row = self.rows[lane]
        row.affinity, row.live, row.ready, row.used = request.affinity, live, True, next(self.clock)
        self.tokens[lane, :n] = live.prompt
        self.valid[lane] = n - 1
        ints = self.ints[lane]
        ints[programs.LENGTH_COLUMN] = n - 1
        ints[programs.PENDING] = live.prompt[-1]
        ints[programs.REMAINING] = live.limit
        ints[programs.KEY : programs.KEY + 2] = request_key(self.seed, request.key).view(np.int32)
        ints[programs.TOP_K] = params.top_k
        ints[programs.STOPS :] = -1
        ints[programs.STOPS : programs.STOPS + len(params.stop_ids)] = params.stop_ids
        self.floats[lane] = params.temperature, params.top_p

    seed = 0

    def _fit_lanes(self) -> None:
        """Brings the lanes to the smallest length of the ladder that holds every row in them and a chunk."""
        slots = self.run.shapes.slots
        need = self.run.shapes.length_for(int(self.valid[:slots].max()) + self.run.shapes.chunk)
        if need > self.lanes.length:
            self.lanes = self.run.resize(self.lanes, need)

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        """One kind of move at a time: lane to shelf, lane to lane or shelf to lane."""
        if not moves:
            return
        shapes = self.run.shapes
        slots = shapes.slots
        from_shelf, to_shelf = moves[0][0] >= slots, moves[0][1] >= slots
        while moves:
            size = shapes.copy_for(len(moves))
            part, moves = moves[:size], moves[size:]
            array = np.full((size, 2), [0, slots + shapes.shelf], np.int32)
            array[: len(part)] = [
                (a - slots if from_shelf else a, b - slots if to_shelf else b) for a, b in part
            ]
            if to_shelf:
                self.shelf = self.run.copy(self.shelf, self.lanes, array)
            else:
                self.lanes = self.run.copy(self.lanes, self.shelf if from_shelf else self.lanes, array)

    def _prefill(self, todo: list[tuple[int, int, int]]) -> None:
        shapes, length = self.run.shapes, self.lanes.length
        self.stats["tokens_prefilled"] += sum(end - start for _, start, end in todo)
        while todo:
            todo.sort(key=lambda item: item[1] - item[2])
            rows, piece = shapes.prefill_for([end - start for _, start, end in todo])
            part, todo = todo[:rows], todo[rows:]
            tokens = np.zeros((rows, piece), np.int32)
            places = np.full((rows, 2), [shapes.slots, 0], np.int32)
            reach = piece
            for r, (lane, start, end) in enumerate(part):
                stop = min(end, start + piece)
                start = max(0, min(start, length - piece))  # the window stays inside the row
                tokens[r, : stop - start] = self.tokens[lane, start:stop]
                places[r] = lane, start
                reach = max(reach, start + piece)
                if stop < end:
                    todo.append((lane, stop, end))
            context = next(c for c in shapes.contexts(piece, length) if c >= reach)
            self.lanes = self.run.prefill(self.params, self.lanes, tokens, places, context)
            self.stats["tokens_prefill_padded"] += rows * piece

    params: Any = None

    # ---- decoding

    @property
    def n_live(self) -> int:
        return sum(row.live is not None for row in self.rows)

    def decode(self) -> list[Completion]:
        """One chunk for all live rows; returns the requests that ended."""
        shapes = self.run.shapes
        live_lanes = [i for i in range(shapes.slots) if self.rows[i].live is not None]
        if not live_lanes:
            return []
        self._fit_lanes()
        patience = max(1, int(self.config.patience * len(live_lanes)))
        self.lanes, out, logps = self.run.decode(self.params, self.lanes, self.ints, self.floats, patience)
        start = time.perf_counter()
        out, logps = np.asarray(out), np.asarray(logps)
        self.stats["seconds_device_wait"] += time.perf_counter() - start
        counts, codes = out[:, shapes.chunk], out[:, shapes.chunk + 1]
        self.stats["chunks"] += 1
        self.stats["slot_iterations"] += int(counts.max()) * shapes.slots
        self.stats["tokens_sampled"] += int(counts.sum())
        finished = []
        for lane in live_lanes:
            row, n = self.rows[lane], int(counts[lane])
            live, ids = row.live, out[lane, :n]
            live.ids += ids.tolist()
            live.logprobs += logps[lane, :n].tolist()
            at = int(self.valid[lane])
            if n:
                self.tokens[lane, at + 1 : at + 1 + n] = ids[: self.tokens.shape[1] - at - 1]
                self.valid[lane] = at + n
                ints = self.ints[lane]
                ints[programs.LENGTH_COLUMN] += n
                ints[programs.PENDING] = ids[-1]
                ints[programs.REMAINING] -= n
            if codes[lane] != RUNNING:
                finish = FINISH[int(codes[lane])]
                if finish == "nan":
                    self.valid[lane] = 0
                    self.stats["rows_nan"] += 1
                finished.append(self.close(lane, finish))
        return finished

    def close(self, lane: int, finish: str) -> Completion:
        row = self.rows[lane]
        live, row.live = row.live, None
        row.used = next(self.clock)
        self.ints[lane, programs.REMAINING] = 0
        if live.request.affinity is None:
            row.affinity = None
        return Completion(live.id, tuple(live.ids), tuple(live.logprobs), finish)

    def cancel(self, request_id: int) -> Completion | None:
        for live in self.waiting:
            if live.id == request_id:
                self.waiting.remove(live)
                return Completion(request_id, (), (), "cancelled")
        for lane in range(self.run.shapes.slots):
            live = self.rows[lane].live
            if live is not None and live.id == request_id:
                return self.close(lane, "cancelled")
        return None


class Engine:
    """Rows on the device for any number of requests; `submit`, then `step` until `idle`.

    One engine serves several named parameter sets of one spec: each has its own rows and shares the programs.
    """

    def __init__(
        self,
        params: Params,
        spec: Qwen3Spec,
        config: EngineConfig = EngineConfig(),
        seed: int = 0,
        options: ForwardOptions = ForwardOptions(),
    ):
        self.spec, self.config, self.seed = spec, config, seed
        shapes = Shapes.plan(
            slots=config.slots,
            shelf=config.shelf,
            max_length=config.max_length,
            chunk=config.chunk,
            prefill_chunk=config.prefill_chunk,
        )
        unroll = config.unroll_layers
        if unroll is None:
            unroll = jax.default_backend() == "cpu"
        self.run = Programs(spec, options, shapes, stacked=not unroll)
        self._cast = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(options.dtype), p))
        self._counters: dict[str, float] = dict.fromkeys(
            (
                "requests",
                "tokens_prompt",
                "tokens_reused",
                "tokens_prefilled",
                "tokens_prefill_padded",
                "tokens_sampled",
                "slot_iterations",
                "chunks",
                "rows_nan",
                "seconds_device_wait",
                "seconds_in_step",
            ),
            0,
        )
        self._pools: dict[str, _Pool] = {}
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
            pool = self._pools[name] = _Pool(self.run, self.config, self._counters)
            pool.seed = self.seed
        if pool.n_live or pool.waiting:
            raise RuntimeError(f"set_params('{name}') while requests are in flight: drain or cancel them first")
        same = all(x.dtype == self.run.options.dtype for x in jax.tree.leaves(params))
        pool.params = params if same else self._cast(params)
        pool.invalidate()

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
        live = _Live(next(self._ids), request, prompt, limit)
        self._pools[request.param_set].waiting.append(live)
        self._counters["requests"] += 1
        return live.id

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is live, nothing is left to return."""
        return not self._done and not any(p.waiting or p.n_live for p in self._pools.values())

    def step(self) -> list[Completion]:
        """Admits what fits, advances the device by one chunk and returns the requests that ended."""
        start = time.perf_counter()
        done, self._done = self._done, []
        for pool in self._pools.values():
            pool.admit()
            done += pool.decode()
        self._counters["seconds_in_step"] += time.perf_counter() - start
        return done

    def cancel(self, request_id: int) -> None:
        """Ends a request now; `step` returns what it had. Unknown or ended ids are ignored."""
        for pool in self._pools.values():
            completion = pool.cancel(request_id)
            if completion is not None:
                self._done.append(completion)
                return

    def partial(self, request_id: int) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """What a live request has so far (ids, log-probabilities); None when it waits or has ended."""
        for pool in self._pools.values():
            for row in pool.rows:
                if row.live is not None and row.live.id == request_id:
                    return tuple(row.live.ids), tuple(row.live.logprobs)
        return None

    def release(self, affinity: Hashable) -> None:
        """The ledger is closed: its row may be overwritten."""
        for pool in self._pools.values():
            pool.release(affinity)

    def warm_up(self) -> Iterable[str]:
        """Compiles every program the engine can ask for; afterwards any further compilation is counted."""
        lines = list(self.run.warm_up(self._pools["policy"].params))
        self._compiled_at_warm_up = len(self.run.compiled)
        return lines

    def stats(self) -> dict[str, float]:
        """Counters since the engine was made, and the ratios drawn from them."""
        c = dict(self._counters)
        before = self._compiled_at_warm_up
        c["programs_compiled"] = len(self.run.compiled)
        c["programs_compiled_after_warm_up"] = 0 if before is None else len(self.run.compiled) - before
        c["occupancy"] = c["tokens_sampled"] / max(1, c["slot_iterations"])
        return c
