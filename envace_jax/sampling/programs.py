"""The device programs of the rollout engine, and the one ladder of shapes they are compiled for.

`decode` advances every live row by up to C tokens, `prefill` writes prompts into rows, `copy` clones or moves rows,
`resize` gives the lanes another length. All of them are pure functions of parameters, cache and small arrays;
caches are donated. `Programs` compiles each once for each shape of the ladder and counts what it compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax.model import kv_cache, qwen3
from envace_jax.model.kv_cache import KVCache
from envace_jax.model.moe import Routing
from envace_jax.model.sharding import Rules, param_shardings
from envace_jax.model.spec import Qwen3Spec
from envace_jax.sampling.sampler import position_uniforms, sample

RUNNING, STOP, LENGTH, NAN = range(4)
FINISH = {STOP: "stop", LENGTH: "length", NAN: "nan"}

LENGTH_COLUMN, PENDING, REMAINING, KEY, TOP_K, STOPS = 0, 1, 2, 3, 5, 6
"""Columns of the integer row state: valid positions, token to feed next, tokens still allowed (0 = not live),
two key words, top-k, then the stop ids (-1 where unused). The float state holds temperature and top-p."""

NARROWEST = 8
"""Fewest lanes for which a decode program of its own is worth compiling."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Every static shape the engine may ask for; warm-up and runtime both read it here, and only here."""

    slots: int
    shelf: int
    chunk: int
    stop_ids: int
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]

    @classmethod
    def plan(
        cls, *, slots: int, shelf: int, max_length: int, chunk: int, prefill_chunk: int, stop_ids: int = 4
    ) -> Shapes:
        """Ladders for the sizes of an engine.

        Lanes are a quarter, half or all of `max_length + chunk` long; a decode call may take a quarter or half of them
        where that leaves some (`NARROWEST`). A prefill call takes R rows of P tokens: P in
        at most three steps from 16 to `prefill_chunk`, R such that R * P is `4 * prefill_chunk`, or a quarter of that.
        """
        top = -(-(max_length + chunk) // 16) * 16
        lengths = sorted({max(64, -(-top // (16 * cut)) * 16) for cut in (4, 2)} | {top})
        lengths = [n for n in lengths if n <= top]
        prefill_chunk = min(prefill_chunk, top)
        smallest = min(16, prefill_chunk)
        middle = int((smallest * prefill_chunk) ** 0.5) // 16 * 16
        prefill = []
        for p in sorted({smallest, max(smallest, middle), prefill_chunk}):
            widest = max(1, min(slots, 4 * prefill_chunk // p))
            prefill += [(r, p) for r in sorted({widest, max(1, widest // 4)})]
        copies = tuple(sorted({min(8, slots), slots}))
        widths = (*(n for n in (slots // 4, slots // 2) if n >= NARROWEST), slots)
        return cls(slots, shelf, chunk, stop_ids, tuple(lengths), widths, tuple(prefill), copies)

    def length_for(self, positions: int) -> int:
        """The smallest lane length that holds `positions`."""
        return next(n for n in self.lengths if n >= positions)

    def prefill_for(self, remaining: list[int], length: int) -> tuple[int, int]:
        """(R, P) for a call over rows of `length` that still need `remaining` tokens, longest first."""
        pieces = sorted({p for _, p in self.prefill if p <= length})
        p = next((p for p in pieces if p >= remaining[0]), pieces[-1])
        rows = [r for r, q in self.prefill if q == p]
        return next((r for r in rows if r >= len(remaining)), rows[-1]), p

    def copy_for(self, n: int) -> int:
        return next((r for r in self.copies if r >= n), self.copies[-1])

    def contexts(self, piece: int, length: int) -> tuple[int, ...]:
        """How many positions a prefill of `piece` tokens may read in lanes of `length`.

        For the longest piece, which does most of the work, any length of the ladder, or itself alone where that is much
        shorter; few or all for the others.
        """
        ladder = {self.lengths[0], length}
        if piece == self.prefill[-1][1]:
            ladder |= {*self.lengths} | ({piece} if 2 * piece <= self.lengths[0] else set())
        return tuple(n for n in sorted(ladder) if piece <= n <= length)


def _recorded(routing: Routing | None) -> jax.Array:
    """The experts of a call over T positions a row, int16 [B, T, L, k]."""
    assert routing is not None, "routing is recorded of a mixture of experts only"
    return jnp.moveaxis(routing.ids, 0, 2).astype(jnp.int16)


def decode(
    params: Any,
    main: KVCache,
    ints_BxN: jax.Array,
    floats_Bx2: jax.Array,
    patience: jax.Array,
    rows_B: jax.Array | None = None,
    *,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    chunk: int,
    record: bool = False,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array | None]:
    """Advances every live row by up to `chunk` tokens and appends their keys and values to the rows.

    Each iteration feeds a row's pending token at its next position and samples one. A row stops at a stop id, at
    its token limit, or when its logits are not finite (that token is not counted). The loop returns early once
    the iterations that stopped rows sat through, summed over rows, reach `patience`, or no row is live.

    With `rows_B` only these (distinct) rows of the cache are advanced, and what is returned is of them, in that order:
    they are read out once a chunk, so that the rows in which nothing goes on cost nothing.

    Returns the cache (donated in, aliased out), int32 [B, C + 3] (tokens, number of tokens, finish code, number of
    iterations), float32 [B, C] log-probabilities and, with `record`, int16 [B, C, L, k]: the experts of a mixture that
    the position went through from which each token was sampled (else None).
    """
    b = ints_BxN.shape[0]
    length_B, limit_B = ints_BxN[:, LENGTH_COLUMN], ints_BxN[:, REMAINING]
    keys_Bx2 = jax.lax.bitcast_convert_type(ints_BxN[:, KEY : KEY + 2], jnp.uint32)
    stops_BxS = ints_BxN[:, STOPS:]
    uniform_BxC = position_uniforms(keys_Bx2, length_B, chunk)
    rules, stacked = options.rules, main.stacked
    heads, rows = rules.spec(None, "heads", None), P(None)
    layer_spec, cache_spec = (kv_cache.cache_spec(rules, stacked=x) for x in (False, stacked))
    whole, chosen = main, () if rows_B is None else (rows_B,)
    if rows_B is not None:
        main = kv_cache.local(kv_cache.take_rows, (cache_spec, rows), cache_spec)(whole, rows_B)
    read = kv_cache.local(kv_cache.decode_attention, (heads, layer_spec, layer_spec, rows, P()), heads)
    merge = kv_cache.local(kv_cache.merge, (cache_spec, cache_spec, rows, rows, *(rows for _ in chosen)), cache_spec)
    buffer = kv_cache.empty_buffer(main, chunk)

    def attend(carry: KVCache, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, cursor: jax.Array):
        k_BxKx1xDh, v_BxKx1xDh = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        carry = kv_cache.put(carry, layer, k_BxKx1xDh, v_BxKx1xDh, (0, 0, cursor, 0))
        return carry, read(q[:, 0], main.layer(layer), carry.layer(layer), length_B, cursor)[:, None]

    def more(state: tuple) -> jax.Array:
        cursor, wasted, live_B = state[0], state[1], state[3]
        return (cursor < chunk) & (wasted < patience) & jnp.any(live_B)

    def advance(state: tuple) -> tuple:
        cursor, wasted, pending_B, live_B, count_B, finish_B, tokens_BxC, logps_BxC, experts_BxCxLxK, buffer = state
        x_Bx1xD = qwen3.embed(params, pending_B[:, None], options)
        hidden_Bx1xD, buffer, routing = qwen3.decoder_with_routing(
            params,
            spec,
            x_Bx1xD,
            (length_B + cursor)[:, None],
            functools.partial(attend, cursor=cursor),
            buffer,
            options=options,
        )
        logits_BxV = qwen3.unembed(params, hidden_Bx1xD[:, 0], options)
        uniform_B = jax.lax.dynamic_index_in_dim(uniform_BxC, cursor, 1, keepdims=False)
        token_B, logp_B = sample(logits_BxV, uniform_B, floats_Bx2[:, 0], floats_Bx2[:, 1], ints_BxN[:, TOP_K])
        broken_B = live_B & ~jnp.isfinite(logp_B)
        count_B += live_B & ~broken_B
        stopped_B = live_B & jnp.any(token_B[:, None] == stops_BxS, axis=-1)
        full_B = live_B & (count_B >= limit_B)
        code_B = jnp.where(broken_B, NAN, jnp.where(stopped_B, STOP, jnp.where(full_B, LENGTH, RUNNING)))
        finish_B = jnp.where(live_B, code_B, finish_B)
        live_B &= code_B == RUNNING
        wasted += jnp.sum((finish_B != RUNNING) & (limit_B > 0), dtype=jnp.int32)
        tokens_BxC = jax.lax.dynamic_update_slice(tokens_BxC, token_B[:, None], (0, cursor))
        logps_BxC = jax.lax.dynamic_update_slice(logps_BxC, logp_B[:, None], (0, cursor))
        if record:
            experts_BxCxLxK = jax.lax.dynamic_update_slice(experts_BxCxLxK, _recorded(routing), (0, cursor, 0, 0))
        facts = (token_B, live_B, count_B, finish_B)
        return cursor + 1, wasted, *facts, tokens_BxC, logps_BxC, experts_BxCxLxK, buffer

    zero = jnp.int32(0)
    state = (
        zero,
        zero,
        ints_BxN[:, PENDING],
        limit_B > 0,
        jnp.zeros(b, jnp.int32),
        jnp.zeros(b, jnp.int32),
        jnp.zeros((b, chunk), jnp.int32),
        jnp.zeros((b, chunk), jnp.float32),
        jnp.zeros((b, chunk, spec.n_layers, spec.n_experts_per_token), jnp.int16) if record else None,
        buffer,
    )
    n, _, _, _, count_B, finish_B, tokens_BxC, logps_BxC, experts_BxCxLxK, buffer = jax.lax.while_loop(
        more, advance, state
    )
    main = merge(whole, buffer, length_B, count_B, *chosen)
    facts_Bx3 = jnp.stack([count_B, finish_B, jnp.full_like(count_B, n)], axis=1)
    return main, jnp.concatenate([tokens_BxC, facts_Bx3], axis=1), logps_BxC, experts_BxCxLxK


def prefill(
    params: Any,
    main: KVCache,
    tokens_RxP: jax.Array,
    places_Rx2: jax.Array,
    *,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    context: int,
) -> KVCache:
    """Writes the keys and values of P tokens into R rows; `places_Rx2` holds each row's index and start.

    Rows are read up to `context` positions. A row index out of range computes and writes nothing (padding).
    """
    rows_R, starts_R = places_Rx2[:, 0], places_Rx2[:, 1]
    return feed(params, main, tokens_RxP, rows_R, starts_R, spec=spec, options=options, context=context)[1]


def feed(
    params: Any,
    main: KVCache,
    tokens_RxP: jax.Array,
    rows_R: jax.Array,
    starts_R: jax.Array,
    *,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    context: int,
    places_R: jax.Array | None = None,
    hidden_RxT: jax.Array | None = None,
) -> tuple[jax.Array, KVCache, Routing | None]:
    """Runs P tokens a row through the model, writing keys and values; hidden states [R, P, D], cache, routing.

    `starts_R` are the positions that the model counts; they lie in the cache from there, or from `places_R`. Cache
    positions that `hidden_RxT` marks are not read.
    """
    positions_RxP = starts_R[:, None] + jnp.arange(tokens_RxP.shape[1])[None]
    places_R = starts_R if places_R is None else places_R
    hidden = () if hidden_RxT is None else (hidden_RxT,)
    rules = options.rules
    heads, kv = rules.spec(None, None, "heads", None), rules.spec(None, None, "kv_heads", None)
    cache_spec = kv_cache.cache_spec(rules, stacked=main.stacked)

    def window(layer: Any, carry: KVCache, q: jax.Array, k: jax.Array, v: jax.Array, rows, starts, *hidden):
        positions = starts[:, None] + jnp.arange(q.shape[1])[None]
        k_RxKxPxDh, v_RxKxPxDh = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        carry = kv_cache.write_windows(carry, layer, k_RxKxPxDh, v_RxKxPxDh, rows, starts)
        k_seen, v_seen = (x.at[rows, :, :context].get(mode="clip") for x in carry.layer(layer))
        return carry, kv_cache.prefill_attention(q, k_seen, v_seen, positions, *hidden)

    def attend(carry: KVCache, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array):
        arrays = (carry, q, k, v, rows_R, places_R, *hidden)
        specs = (cache_spec, heads, kv, kv, P(None), P(None), *(P(None, None) for _ in hidden))
        if main.stacked:
            return kv_cache.local(window, (P(), *specs), (cache_spec, heads))(layer, *arrays)
        # Unrolled, the index is a number: it must stay one.
        return kv_cache.local(functools.partial(window, layer), specs, (cache_spec, heads))(*arrays)

    x_RxPxD = qwen3.embed(params, tokens_RxP, options)
    return qwen3.decoder_with_routing(params, spec, x_RxPxD, positions_RxP, attend, main, options=options)


def verify(
    params: Any,
    main: KVCache,
    drafts_BxD: jax.Array,
    allowed_BxV: jax.Array | None,
    ints_BxN: jax.Array,
    floats_Bx2: jax.Array,
    *,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    record: bool = False,
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array | None]:
    """One forward pass over every live row's pending token and D guessed ones; keeps the guesses that come true.

    Each position is sampled with its own key as in `decode`, so the tokens are those that `decode` would give: a guess
    is only ever a way to have them sooner. Guesses of -1 never come true. `allowed_BxV` (with D = 0) takes tokens out
    of the distribution that is sampled and scored. Returns what `decode` returns, for a chunk of D + 1.
    """
    b, d = drafts_BxD.shape
    length_B, limit_B = ints_BxN[:, LENGTH_COLUMN], ints_BxN[:, REMAINING]
    live_B = limit_B > 0
    keys_Bx2 = jax.lax.bitcast_convert_type(ints_BxN[:, KEY : KEY + 2], jnp.uint32)
    pending_Bx1 = ints_BxN[:, PENDING : PENDING + 1]
    # In place of no guess stands a token that the row holds anyway: what is written for it is as finite as the row.
    tokens_BxP = jnp.concatenate([pending_Bx1, jnp.where(drafts_BxD < 0, pending_Bx1, drafts_BxD)], axis=1)
    rows_B = jnp.where(live_B, jnp.arange(b), b)
    hidden_BxPxD, main, routing = feed(
        params, main, tokens_BxP, rows_B, length_B, spec=spec, options=options, context=main.length
    )
    logits_BxPxV = qwen3.unembed(params, hidden_BxPxD, options)
    if allowed_BxV is not None:
        logits_BxPxV = jnp.where(allowed_BxV[:, None], logits_BxPxV, -jnp.inf)
    each = lambda x_B: jnp.repeat(x_B, d + 1)  # noqa: E731
    sampled, logp = sample(
        logits_BxPxV.reshape(b * (d + 1), -1),
        position_uniforms(keys_Bx2, length_B, d + 1).reshape(-1),
        each(floats_Bx2[:, 0]),
        each(floats_Bx2[:, 1]),
        each(ints_BxN[:, TOP_K]),
    )
    sampled_BxP, logp_BxP = sampled.reshape(b, d + 1), logp.reshape(b, d + 1)
    finite_BxP = jnp.isfinite(logp_BxP)
    stops_BxP = jnp.any(sampled_BxP[..., None] == ints_BxN[:, None, STOPS:], axis=-1)
    full_BxP = jnp.arange(1, d + 2)[None] >= limit_B[:, None]
    code_BxP = jnp.where(finite_BxP, jnp.where(stops_BxP, STOP, jnp.where(full_BxP, LENGTH, RUNNING)), NAN)
    goes_on_BxD = (code_BxP[:, :-1] == RUNNING) & (sampled_BxP[:, :-1] == drafts_BxD)
    last_B = jnp.cumprod(goes_on_BxD, axis=1, dtype=jnp.int32).sum(axis=1)
    code_B = jnp.where(live_B, jnp.take_along_axis(code_BxP, last_B[:, None], axis=1)[:, 0], RUNNING)
    count_B = jnp.where(live_B, last_B + (code_B != NAN), 0)
    facts_Bx3 = jnp.stack([count_B, code_B, jnp.ones_like(count_B)], axis=1)
    experts_BxPxLxK = _recorded(routing) if record else None
    return main, jnp.concatenate([sampled_BxP, facts_Bx3], axis=1), logp_BxP, experts_BxPxLxK


def hand_over(params: Any, *, spec: Qwen3Spec, dtype: Any, stacked: bool, specs: Any = None) -> Any:
    """Parameters as the programs read them: in the compute dtype and layout, one tree a layer unless stacked."""
    params = jax.tree.map(lambda w: w.astype(dtype), params)
    if specs is not None:
        params = jax.tree.map(jax.reshard, params, specs)
    if stacked:
        return params
    one = lambda i: jax.tree.map(lambda w: w[i], params["layers"])  # noqa: E731
    return {**params, "layers": tuple(map(one, range(spec.n_layers)))}


def copy(target: KVCache, source: KVCache, moves_Rx2: jax.Array, *, length: int, rules: Rules) -> KVCache:
    """Rows `moves[:, 0]` of the source into rows `moves[:, 1]` of the target (out of range: nothing)."""
    cache = kv_cache.cache_spec(rules, stacked=target.stacked)
    move = kv_cache.local(functools.partial(kv_cache.copy_rows, length=length), (cache, cache, P(None), P(None)), cache)
    return move(target, source, moves_Rx2[:, 1], moves_Rx2[:, 0])


def copy_within(cache: KVCache, moves_Rx2: jax.Array, *, length: int, rules: Rules) -> KVCache:
    """`copy` inside one cache."""
    return copy(cache, cache, moves_Rx2, length=length, rules=rules)


def wipe(cache: KVCache, rows_R: jax.Array, *, rules: Rules) -> KVCache:
    """See `kv_cache.wipe_rows`."""
    layout = kv_cache.cache_spec(rules, stacked=cache.stacked)
    return kv_cache.local(kv_cache.wipe_rows, (layout, P(None)), layout)(cache, rows_R)


def resize(cache: KVCache, *, length: int) -> KVCache:
    """The same rows with another length: cut, or padded with zeros."""

    def one(x: jax.Array) -> jax.Array:
        grow = [(0, 0)] * x.ndim
        grow[-2] = (0, max(0, length - x.shape[-2]))
        return jnp.pad(x[..., :length, :], grow)

    return jax.tree.map(one, cache)


_COMPILED: dict[tuple[Any, ...], Any] = {}
"""Compiled programs of this process: engines of equal sizes share them."""


def _signature(tree: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)


class Programs:
    """The compiled programs of one engine, by name and static sizes. Every parameter set of the spec uses them."""

    def __init__(
        self,
        spec: Qwen3Spec,
        options: qwen3.ForwardOptions,
        shapes: Shapes,
        *,
        stacked: bool,
        mesh: jax.sharding.Mesh | None = None,
        record: bool = False,
    ):
        self.spec, self.options, self.shapes, self.stacked, self.mesh = spec, options, shapes, stacked, mesh
        self.record = record
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self.compiles: list[tuple[str, float]] = []  # what was compiled here, with its seconds
        self._hand_over: dict[Any, Any] = {}

    @property
    def n_compiled(self) -> int:
        """How many programs this engine compiled."""
        return len(self.compiles)

    def active(self) -> contextlib.AbstractContextManager:
        """The mesh of this engine's devices, where it has one."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def hand_over(self, params: Any) -> Any:
        """See `hand_over`, into the sampler's layout; what needs no change is used as it is, without a copy."""
        with self.active():
            target = None if self.mesh is None else param_shardings(params, self.mesh, self.options.rules)
            same = all(x.dtype == self.options.dtype for x in jax.tree.leaves(params))
            if target is not None:
                same &= jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, params, target))
            if same and self.stacked:
                return qwen3.flatten_heads(params)
            function = functools.partial(
                hand_over,
                spec=self.spec,
                dtype=self.options.dtype,
                stacked=self.stacked,
                specs=None if target is None else jax.tree.map(lambda s: s.spec, target),
            )
            key = _signature(params)
            if key not in self._hand_over:
                self._hand_over[key] = jax.jit(function)
            params = self._hand_over[key](params)
            return qwen3.flatten_heads(params) if self.stacked else params

    def cache(self, rows: int, length: int) -> KVCache:
        sharding = None
        if self.mesh is not None:
            sharding = NamedSharding(self.mesh, kv_cache.cache_spec(self.options.rules, stacked=self.stacked))
        return kv_cache.empty_cache(
            self.spec, rows, length, self.options.dtype, stacked=self.stacked, sharding=sharding
        )

    def program(self, name: str, key: tuple[Any, ...], function: Callable, donate: int | None, args: tuple) -> Any:
        program = self.compiled.get((name, *key))
        if program is None:
            everywhere = (name, key, self.spec, self.options, self.shapes, self.record, _signature(args))
            program = _COMPILED.get(everywhere)
            if program is None:
                started = time.monotonic()
                with self.active():
                    program = jax.jit(function, donate_argnums=() if donate is None else donate).lower(*args).compile()
                _COMPILED[everywhere] = program
                sizes = (str(size) for size in key if isinstance(size, int))
                self.compiles.append(("/".join((name, *sizes)), time.monotonic() - started))
            self.compiled[name, *key] = program
        return program

    def decode(
        self,
        params: Any,
        main: KVCache,
        ints: np.ndarray,
        floats: np.ndarray,
        patience: int,
        rows: np.ndarray | None = None,
    ) -> Any:
        args = (params, main, ints, floats, np.int32(patience), rows)
        function = functools.partial(
            decode, spec=self.spec, options=self.options, chunk=self.shapes.chunk, record=self.record
        )
        return self.program("decode", (len(ints), main.length), function, 1, args)(*args)

    def width_for(self, rows: int) -> int:
        """How many lanes a decode call takes for `rows` live ones.

        All of them where layers are stacked: what a narrow call reads out is memory that the plan of a large model does
        not have to spare.
        """
        return self.shapes.slots if self.stacked else next(n for n in self.shapes.widths if n >= rows)

    def verify(
        self,
        params: Any,
        main: KVCache,
        drafts: np.ndarray,
        allowed: np.ndarray | None,
        ints: np.ndarray,
        floats: np.ndarray,
    ) -> Any:
        args = (params, main, drafts, allowed, ints, floats)
        function = functools.partial(verify, spec=self.spec, options=self.options, record=self.record)
        key = (main.length, drafts.shape[1], allowed is not None)
        return self.program("verify", key, function, 1, args)(*args)

    def prefill(self, params: Any, main: KVCache, tokens: np.ndarray, places: np.ndarray, context: int) -> KVCache:
        args = (params, main, tokens, places)
        function = functools.partial(prefill, spec=self.spec, options=self.options, context=context)
        return self.program("prefill", (main.length, *tokens.shape, context), function, 1, args)(*args)

    def copy(self, target: KVCache, source: KVCache, moves: np.ndarray) -> KVCache:
        length = min(target.length, source.length)
        key = (target.rows, target.length, source.rows, source.length, len(moves))
        if target is source:
            function = functools.partial(copy_within, length=length, rules=self.options.rules)
            return self.program("copy_within", key, function, 0, (target, moves))(target, moves)
        function = functools.partial(copy, length=length, rules=self.options.rules)
        return self.program("copy", key, function, 0, (target, source, moves))(target, source, moves)

    def wipe(self, cache: KVCache, rows: list[int]) -> KVCache:
        array = np.full(self.shapes.slots, self.shapes.slots, np.int32)
        array[: len(rows)] = rows
        function = functools.partial(wipe, rules=self.options.rules)
        return self.program("wipe", (cache.length,), function, 0, (cache, array))(cache, array)

    def resize(self, cache: KVCache, length: int) -> KVCache:
        function = functools.partial(resize, length=length)
        return self.program("resize", (cache.length, length), function, None, (cache,))(cache)

    def warm_up(self, params: Any, draft: int, guided: bool) -> Iterator[str]:
        """Compiles everything the ladder can ask for; yields a line per program group."""
        shapes = self.shapes
        for length in shapes.lengths:
            main = self.cache(shapes.slots, length)
            ints = np.zeros((shapes.slots, STOPS + shapes.stop_ids), np.int32)
            floats = np.ones((shapes.slots, 2), np.float32)
            if draft:
                drafts = np.zeros((shapes.slots, draft), np.int32)
                main, *_ = self.verify(params, main, drafts, None, ints, floats)
            else:
                for n in sorted({self.width_for(n) for n in shapes.widths}):
                    some = None if n == shapes.slots else np.arange(n, dtype=np.int32)
                    main, *_ = self.decode(params, main, ints[:n], floats[:n], 1, some)
            if guided:
                allowed = np.ones((shapes.slots, self.spec.vocab_size), bool)
                main, *_ = self.verify(params, main, np.zeros((shapes.slots, 0), np.int32), allowed, ints, floats)
            for rows, piece in shapes.prefill:
                if piece > length:
                    continue
                for context in shapes.contexts(piece, length):
                    places = np.full((rows, 2), [shapes.slots, 0], np.int32)
                    main = self.prefill(params, main, np.zeros((rows, piece), np.int32), places, context)
            for n in shapes.copies:
                moves = np.full((n, 2), [0, max(shapes.slots, shapes.shelf)], np.int32)
                main = self.copy(main, main, moves)
                if shapes.shelf:
                    shelf = self.cache(shapes.shelf, shapes.lengths[-1])
                    main = self.copy(main, shelf, moves)
                    shelf = self.copy(shelf, main, moves)
            main = self.wipe(main, [0])
            for other in shapes.lengths:
                if other != length:
                    self.resize(main, other)
            yield f"lanes of {length}"
