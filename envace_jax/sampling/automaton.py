"""Whole episodes in one device program: ACT and REHEARSE take turns in the same lane, with no host in between.

A lane is one trajectory. Its cache row holds the keys and values of both ledgers, in the order in which they came;
every position has an owner, and a role sees its own positions alone, counted from the beginning of its own ledger. So
whoever's turn it is, every lane is one row of one batch.

When a role stops, the automaton looks for its tags, each of which is one id: the blocks between `<tool_call>` and
`</tool_call>`, or the one between `<tool_response>` and `</tool_response>`. What the other role is to read next (a
block by its ids, between pieces that lie ready) goes to the end of that role's ledger, is prefilled in pieces, and the
lane goes on. What cannot be decided by ids alone is left to the host: the lane is `HANDED` over.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.model import kv_cache, qwen3
from envace_jax.model.kv_cache import KVCache
from envace_jax.model.spec import Qwen3Spec
from envace_jax.sampling.lanes import (
    ACT,
    AFTER_CALL,
    BEFORE,
    BEHIND,
    BETWEEN,
    COUNTERS,
    DONE,
    FRAME,
    GOING,
    HANDED,
    MAX_ACT,
    MAX_ACTS,
    MAX_PROMPT,
    MAX_REHEARSE,
    MAX_ROW,
    MAX_SEGMENTS,
    REHEARSE,
    Book,
    Lanes,
    Protocol,
    Sizes,
    empty_book,
    empty_lanes,
    empty_protocol,
)
from envace_jax.sampling.programs import LENGTH, NAN, RUNNING, STOP, Programs, feed
from envace_jax.sampling.sampler import position_uniforms, sample

# --- small parts -------------------------------------------------------------------------------------------------


def _of_role(pair: tuple[jax.Array, jax.Array] | jax.Array, role_B: jax.Array) -> jax.Array:
    """Each lane's entry for its role, of two arrays or of one [lanes, 2]."""
    act, rehearse = pair if isinstance(pair, tuple) else (pair[:, ACT], pair[:, REHEARSE])
    return jnp.where(role_B.reshape(-1, *(1,) * (act.ndim - 1)) == ACT, act, rehearse)


def _window(rows_BxN: jax.Array, starts_B: jax.Array, width: int) -> jax.Array:
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice(row, (start,), (width,)))(rows_BxN, starts_B)


def _put(rows_BxN: jax.Array, parts_BxW: jax.Array, starts_B: jax.Array) -> jax.Array:
    put = lambda row, part, start: jax.lax.dynamic_update_slice(row, part, (start,))  # noqa: E731
    return jax.vmap(put)(rows_BxN, parts_BxW, starts_B)


def blocks(
    ids_BxW: jax.Array, length_B: jax.Array, open_B: jax.Array, close_B: jax.Array, most: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """What stands between each opening tag and the next closing one in the first `length_B` ids (`ledger.between`).

    Returns spans [B, most, 2], tags excluded; how many blocks there are; whether the last is never closed; and, for
    every id, whether it is one of the tags that open or close a block, and whether it stands inside one.
    """
    at_W = jnp.arange(ids_BxW.shape[1])
    inside_BxW = at_W[None] < length_B[:, None]
    opens_BxW = inside_BxW & (ids_BxW == open_B[:, None])
    closes_BxW = inside_BxW & (ids_BxW == close_B[:, None])

    def last_before(mask_BxW: jax.Array) -> jax.Array:
        """Index of the latest True before each id, -1 where there is none."""
        seen = jax.lax.cummax(jnp.where(mask_BxW, at_W, -1), axis=1)
        return jnp.concatenate([jnp.full((seen.shape[0], 1), -1, seen.dtype), seen[:, :-1]], axis=1)

    last_close_BxW = last_before(closes_BxW)
    # An opening tag counts when no other one came since the latest closing tag.
    opens_BxW &= last_before(opens_BxW) <= last_close_BxW
    last_open_BxW = last_before(opens_BxW)
    within_BxW = last_open_BxW > last_close_BxW
    ends_BxW = closes_BxW & within_BxW
    number_BxW = jnp.cumsum(ends_BxW, axis=1)
    chosen_BxMxW = ends_BxW[:, None] & (number_BxW[:, None] == jnp.arange(1, most + 1)[:, None])
    starts_BxM = jnp.where(chosen_BxMxW, last_open_BxW[:, None] + 1, 0).sum(-1)
    stops_BxM = jnp.where(chosen_BxMxW, at_W, 0).sum(-1)
    last_open_B = jnp.where(opens_BxW, at_W, -1).max(-1)
    last_close_B = jnp.where(closes_BxW, at_W, -1).max(-1)
    spans_BxMx2 = jnp.stack([starts_BxM, stops_BxM], axis=-1)
    return spans_BxMx2, number_BxW[:, -1], last_open_B > last_close_B, opens_BxW | ends_BxW, within_BxW & ~ends_BxW


# --- the three parts of a round -----------------------------------------------------------------------------------


def _fill(
    params: Any,
    main: KVCache,
    lanes: Lanes,
    wanted_B: jax.Array,
    role_B: jax.Array,
    counters: jax.Array,
    *,
    keep: int,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    sizes: Sizes,
) -> tuple[KVCache, Lanes, jax.Array]:
    """Prefills the ledgers of `role_B` of the wanted lanes, all but their last `keep` tokens, neediest lanes first."""
    b, (r, p) = sizes.lanes, sizes.fill
    length = main.length

    def need(lanes: Lanes) -> jax.Array:
        return jnp.where(wanted_B, _of_role(lanes.known, role_B) - keep - _of_role(lanes.valid, role_B), 0)

    def more(state: tuple) -> jax.Array:
        return jnp.any(need(state[1]) > 0)

    def some(state: tuple) -> tuple:
        main, lanes, counters = state
        n_R, chosen_R = jax.lax.top_k(need(lanes), r)
        n_R = jnp.clip(n_R, 0, p)
        role_R, used_R = role_B[chosen_R], lanes.used[chosen_R]
        valid_R = _of_role(lanes.valid[chosen_R], role_R)
        ids_RxN = _of_role((lanes.tokens[ACT][chosen_R], lanes.tokens[REHEARSE][chosen_R]), role_R)
        owner_RxT = lanes.owner[chosen_R]
        before_RxT = jnp.arange(length)[None] < used_R[:, None]
        # Behind a row's end stands its last token again: what is written there is as finite as the row.
        end_RxP = jnp.minimum(jnp.arange(p)[None], jnp.maximum(n_R - 1, 0)[:, None])
        _, main, _ = feed(
            params,
            main,
            jnp.take_along_axis(_window(ids_RxN, valid_R, p), end_RxP, axis=1),
            jnp.where(n_R > 0, chosen_R, b),
            valid_R,
            spec=spec,
            options=options,
            context=length,
            places_R=used_R,
            hidden_RxT=before_RxT & (owner_RxT[:, :length] != role_R[:, None]),
        )
        at_T = jnp.arange(owner_RxT.shape[1])[None]
        written_RxT = (at_T >= used_R[:, None]) & (at_T < (used_R + n_R)[:, None])
        owner_RxT = jnp.where(written_RxT, role_R[:, None].astype(owner_RxT.dtype), owner_RxT)
        lanes = lanes._replace(
            owner=lanes.owner.at[chosen_R].set(owner_RxT),
            used=lanes.used.at[chosen_R].add(n_R),
            valid=lanes.valid.at[chosen_R, role_R].add(n_R),
        )
        return main, lanes, counters + jnp.stack([0, 0, n_R.sum(), r * p])

    return jax.lax.while_loop(more, some, (main, lanes, counters))


def _decode(
    params: Any,
    main: KVCache,
    lanes: Lanes,
    book: Book,
    protocol: Protocol,
    counters: jax.Array,
    *,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    sizes: Sizes,
    patience: float | jax.Array,
) -> tuple[KVCache, Lanes, jax.Array, jax.Array]:
    """Advances every lane that is going by up to a chunk of tokens; as `programs.decode`. Also gives finish codes."""
    b, chunk, role_B = sizes.lanes, sizes.chunk, lanes.role
    each_B = jnp.arange(b)
    going_B = lanes.status == GOING
    known_B, valid_B = _of_role(lanes.known, role_B), _of_role(lanes.valid, role_B)
    limit_B = lanes.limit - (known_B - lanes.start)
    ids_BxN, logps_BxN = _of_role(lanes.tokens, role_B), _of_role(lanes.logps, role_B)
    keys_Bx2 = book.keys[each_B, jnp.minimum(lanes.n_segments, sizes.segments - 1), role_B]
    uniform_BxC = position_uniforms(keys_Bx2, valid_B, chunk)
    hidden_BxT = lanes.owner[:, : main.length] != role_B[:, None]
    temperature_B, top_p_B = (jnp.full(b, x, jnp.float32) for x in (protocol.temperature, protocol.top_p))
    top_k_B = jnp.full(b, protocol.top_k, jnp.int32)
    patience = jnp.maximum(1, jnp.int32(patience * going_B.sum()))
    rules, stacked = options.rules, main.stacked
    heads, rows = rules.spec(None, "heads", None), jax.P(None)
    layer_spec, cache_spec = (kv_cache.cache_spec(rules, stacked=x) for x in (False, stacked))
    specs = (heads, layer_spec, layer_spec, rows, jax.P(), jax.P(None, None))
    read = kv_cache.local(kv_cache.decode_attention, specs, heads)
    merge = kv_cache.local(kv_cache.merge, (cache_spec, cache_spec, rows, rows), cache_spec)

    def attend(carry: KVCache, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, cursor: jax.Array):
        k_BxKx1xDh, v_BxKx1xDh = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        carry = kv_cache.put(carry, layer, k_BxKx1xDh, v_BxKx1xDh, (0, 0, cursor, 0))
        seen = (main.layer(layer), carry.layer(layer), lanes.used, cursor, hidden_BxT)
        return carry, read(q[:, 0], *seen)[:, None]

    def more(state: tuple) -> jax.Array:
        cursor, wasted, live_B = state[0], state[1], state[3]
        return (cursor < chunk) & (wasted < patience) & jnp.any(live_B)

    def advance(state: tuple) -> tuple:
        cursor, wasted, pending_B, live_B, count_B, finish_B, tokens_BxC, logps_BxC, buffer = state
        x_Bx1xD = qwen3.embed(params, pending_B[:, None], options)
        positions_Bx1 = (valid_B + cursor)[:, None]
        reader = functools.partial(attend, cursor=cursor)
        hidden_Bx1xD, buffer = qwen3.decoder(params, spec, x_Bx1xD, positions_Bx1, reader, buffer, options=options)
        logits_BxV = qwen3.unembed(params, hidden_Bx1xD[:, 0], options)
        uniform_B = jax.lax.dynamic_index_in_dim(uniform_BxC, cursor, 1, keepdims=False)
        token_B, logp_B = sample(logits_BxV, uniform_B, temperature_B, top_p_B, top_k_B)
        broken_B = live_B & ~jnp.isfinite(logp_B)
        count_B += live_B & ~broken_B
        stopped_B = live_B & jnp.any(token_B[:, None] == protocol.stops, axis=-1)
        full_B = live_B & (count_B >= limit_B)
        code_B = jnp.where(broken_B, NAN, jnp.where(stopped_B, STOP, jnp.where(full_B, LENGTH, RUNNING)))
        finish_B = jnp.where(live_B, code_B, finish_B)
        live_B &= code_B == RUNNING
        wasted += jnp.sum((finish_B != RUNNING) & going_B, dtype=jnp.int32)
        tokens_BxC = jax.lax.dynamic_update_slice(tokens_BxC, token_B[:, None], (0, cursor))
        logps_BxC = jax.lax.dynamic_update_slice(logps_BxC, logp_B[:, None], (0, cursor))
        return cursor + 1, wasted, token_B, live_B, count_B, finish_B, tokens_BxC, logps_BxC, buffer

    zero_B = jnp.zeros(b, jnp.int32)
    state = (
        jnp.int32(0),
        jnp.int32(0),
        jnp.take_along_axis(ids_BxN, jnp.maximum(known_B - 1, 0)[:, None], axis=1)[:, 0],
        going_B,
        zero_B,
        zero_B,
        jnp.zeros((b, chunk), jnp.int32),
        jnp.zeros((b, chunk), jnp.float32),
        kv_cache.empty_buffer(main, chunk),
    )
    n, _, _, _, count_B, finish_B, tokens_BxC, logps_BxC, buffer = jax.lax.while_loop(more, advance, state)
    main = merge(main, buffer, lanes.used, count_B)
    at_T = jnp.arange(lanes.owner.shape[1])[None]
    written_BxT = (at_T >= lanes.used[:, None]) & (at_T < (lanes.used + count_B)[:, None])

    def back(pair: tuple[jax.Array, jax.Array], part_BxC: jax.Array, rows_BxN: jax.Array) -> tuple[Any, ...]:
        rows_BxN = _put(rows_BxN, part_BxC, known_B)
        mine = lambda role: (role_B == role)[:, None]  # noqa: E731
        return tuple(jnp.where(mine(role), rows_BxN, pair[role]) for role in (ACT, REHEARSE))

    lanes = lanes._replace(
        tokens=back(lanes.tokens, tokens_BxC, ids_BxN),
        logps=back(lanes.logps, logps_BxC, logps_BxN),
        owner=jnp.where(written_BxT, role_B[:, None].astype(lanes.owner.dtype), lanes.owner),
        used=lanes.used + count_B,
        known=lanes.known.at[each_B, role_B].add(count_B),
        valid=lanes.valid.at[each_B, role_B].add(count_B),
    )
    return main, lanes, counters + jnp.stack([n, count_B.sum(), 0, 0]), finish_B


def _settle(lanes: Lanes, book: Book, protocol: Protocol, finish_B: jax.Array, *, sizes: Sizes) -> Lanes:
    """Who goes on where a segment has ended, and with what. Rules and caps are those of `rehearsal.episode`."""
    each_B, role_B, caps = jnp.arange(sizes.lanes), lanes.role, protocol.caps
    ended_B = finish_B != RUNNING
    acted_B, answered_B = ended_B & (role_B == ACT), ended_B & (role_B == REHEARSE)
    known_B = _of_role(lanes.known, role_B)
    count_B = known_B - lanes.start
    record_Bx4 = jnp.stack([role_B, lanes.start, count_B, finish_B], axis=-1)
    segments = lanes.segments.at[each_B, jnp.where(ended_B, lanes.n_segments, sizes.segments)].set(
        record_Bx4, mode="drop"
    )
    n_segments, acts = lanes.n_segments + ended_B, lanes.acts + acted_B

    # What the segment holds.
    ids_BxW = _window(_of_role(lanes.tokens, role_B), lanes.start, sizes.output)
    n_B = count_B - (finish_B == STOP)
    open_B, close_B = (jnp.where(role_B == ACT, protocol.tags[i], protocol.tags[i + 2]) for i in (0, 1))
    spans_BxMx2, n_blocks_B, unclosed_B, edge_BxW, inside_BxW = blocks(ids_BxW, n_B, open_B, close_B, sizes.calls)
    tag_BxW = jnp.any(ids_BxW[..., None] == protocol.all_tags, axis=-1)
    tag_BxW &= (jnp.arange(sizes.output)[None] < n_B[:, None]) & ~edge_BxW
    thinks_BxW = (ids_BxW == protocol.tags[4]) | (ids_BxW == protocol.tags[5])
    odd_B = unclosed_B | jnp.any(tag_BxW & (inside_BxW | ~thinks_BxW), axis=1)
    odd_B |= (n_blocks_B > sizes.calls) | jnp.any(spans_BxMx2[..., 1] - spans_BxMx2[..., 0] > sizes.block, axis=1)
    odd_B |= (role_B == REHEARSE) & ((n_blocks_B == 0) | (finish_B == LENGTH))
    odd_B &= (finish_B == STOP) | (role_B == REHEARSE)
    spans_BxMx2 += lanes.start[:, None, None]
    whole_B = ended_B & (finish_B != NAN) & ~odd_B
    over_B = ended_B & ((finish_B == NAN) | (acted_B & (finish_B == LENGTH)))
    handed_B = ended_B & ~over_B & odd_B

    # ACT's ledger: the next user message, or one more result.
    stopped_B = whole_B & acted_B & ~over_B
    turn_ends_B = stopped_B & (n_blocks_B == 0)
    last_turn_B = turn_ends_B & (lanes.turn + 1 >= lanes.n_turns)
    next_turn_B = turn_ends_B & ~last_turn_B
    turn_B = lanes.turn + next_turn_B
    calls_B = stopped_B & (n_blocks_B > 0)
    result_B = whole_B & answered_B
    n_calls_B = jnp.where(calls_B, n_blocks_B, lanes.n_calls)
    call_B = jnp.where(calls_B, 0, lanes.call + result_B)
    all_B = result_B & (call_B >= n_calls_B)
    call_blocks = jnp.where(calls_B[:, None, None], spans_BxMx2, lanes.blocks)
    user_Bx2 = book.user[each_B, jnp.minimum(turn_B, sizes.turns - 1)]
    frame = lambda i: jnp.broadcast_to(protocol.frame[i], (sizes.lanes, FRAME))  # noqa: E731
    framed = lambda i, where_B: jnp.where(where_B, protocol.frame_lengths[i], 0)  # noqa: E731
    first_B = result_B & (lanes.call == 0)
    act_BxN, act_at_B = lanes.tokens[ACT], lanes.known[:, ACT]
    act_BxN = _put(act_BxN, _window(book.store, user_Bx2[:, 0], sizes.piece), act_at_B)
    act_at_B += jnp.where(next_turn_B, user_Bx2[:, 1], 0)
    # A lane that gets no user message gets a result, or garbage behind its end: either overwrites what was put.
    act_BxN = _put(act_BxN, jnp.where(first_B[:, None], frame(BEFORE), frame(BETWEEN)), act_at_B)
    act_at_B += framed(BEFORE, first_B) + framed(BETWEEN, result_B & ~first_B)
    answer_Bx2 = spans_BxMx2[:, 0]
    act_BxN = _put(act_BxN, _window(lanes.tokens[REHEARSE], answer_Bx2[:, 0], sizes.block), act_at_B)
    act_at_B += jnp.where(result_B, answer_Bx2[:, 1] - answer_Bx2[:, 0], 0)
    act_BxN = _put(act_BxN, frame(BEHIND), act_at_B)
    act_at_B += framed(BEHIND, all_B)

    # REHEARSE's ledger: the next call.
    asks_B = calls_B | (result_B & ~all_B)
    over_B |= asks_B & (n_segments >= caps[MAX_SEGMENTS])
    lead_Bx2 = book.lead[each_B, lanes.told, jnp.minimum(turn_B, sizes.turns - 1)]
    block_Bx2 = jnp.take_along_axis(call_blocks, jnp.minimum(call_B, sizes.calls - 1)[:, None, None], axis=1)[:, 0]
    size_B = block_Bx2[:, 1] - block_Bx2[:, 0]
    length_B = lanes.known[:, REHEARSE] + lead_Bx2[:, 1] + size_B + protocol.frame_lengths[AFTER_CALL]
    # A first prompt may be as long as the limit; a stream that would reach it begins anew, which is the host's.
    fits_B = (lead_Bx2[:, 1] >= 0) & (length_B < caps[MAX_PROMPT] + (lanes.told == 0))
    handed_B |= asks_B & ~over_B & ~fits_B
    asks_B &= ~over_B & fits_B
    rehearse_BxN, at_B = lanes.tokens[REHEARSE], lanes.known[:, REHEARSE]
    rehearse_BxN = _put(rehearse_BxN, _window(book.store, lead_Bx2[:, 0], sizes.piece), at_B)
    at_B += jnp.where(asks_B, lead_Bx2[:, 1], 0)
    rehearse_BxN = _put(rehearse_BxN, _window(lanes.tokens[ACT], block_Bx2[:, 0], sizes.block), at_B)
    at_B += jnp.where(asks_B, size_B, 0)
    rehearse_BxN = _put(rehearse_BxN, frame(AFTER_CALL), at_B)
    at_B += framed(AFTER_CALL, asks_B)

    # Caps before the next ACT output, then who goes on.
    acts_next_B = next_turn_B | all_B
    capped_B = (acts >= caps[MAX_ACTS]) | (n_segments >= caps[MAX_SEGMENTS]) | (act_at_B >= caps[MAX_PROMPT])
    over_B |= last_turn_B | (acts_next_B & capped_B)
    status_B = jnp.where(handed_B, HANDED, jnp.where(over_B, DONE, lanes.status))
    role_B = jnp.where(asks_B, REHEARSE, jnp.where(acts_next_B, ACT, role_B))
    known_Bx2 = jnp.stack([act_at_B, at_B], axis=1)
    start_B = _of_role(known_Bx2, role_B)
    most_B = jnp.where(role_B == ACT, caps[MAX_ACT], caps[MAX_REHEARSE])
    return lanes._replace(
        tokens=(act_BxN, rehearse_BxN),
        known=known_Bx2,
        status=status_B,
        role=role_B,
        turn=turn_B,
        told=jnp.where(asks_B, turn_B + 1, lanes.told),
        acts=acts,
        n_segments=n_segments,
        start=jnp.where(ended_B, start_B, lanes.start),
        limit=jnp.where(ended_B, jnp.minimum(most_B, caps[MAX_ROW] - start_B), lanes.limit),
        call=call_B,
        n_calls=n_calls_B,
        blocks=call_blocks,
        segments=segments,
    )


# --- programs ----------------------------------------------------------------------------------------------------


def crowded(lanes: Any, length: int, sizes: Sizes) -> Any:
    """Lanes that are going and may not have room for their next round in cache rows of `length`."""
    xp = np if isinstance(lanes.known, np.ndarray) else jnp
    missing_B = xp.take_along_axis(lanes.known - lanes.valid, lanes.role[:, None], axis=1)[:, 0]
    room = max(sizes.fill[1], sizes.chunk)
    return (lanes.status == GOING) & (lanes.used + missing_B + room > length)


def play(
    params: Any,
    main: KVCache,
    lanes: Lanes,
    book: Book,
    protocol: Protocol,
    steps: jax.Array,
    enough: jax.Array,
    *,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    sizes: Sizes,
    patience: float,
) -> tuple[KVCache, Lanes, jax.Array]:
    """Plays on until `steps` decode iterations have passed, `enough` lanes have ended, or no lane is going.

    Also returns early when a lane needs a longer cache row. The cache is donated in and aliased out. Returns the
    counters of `COUNTERS` besides.
    """
    fixed: dict[str, Any] = dict(spec=spec, options=options, sizes=sizes)
    began = jnp.sum(lanes.status == GOING)

    def more(state: tuple) -> jax.Array:
        _, lanes, counters = state
        going = jnp.sum(lanes.status == GOING)
        room = ~jnp.any(crowded(lanes, main.length, sizes))
        return (counters[0] < steps) & (going > 0) & (began - going < enough) & room

    def round(state: tuple) -> tuple:
        main, lanes, counters = state
        going_B = lanes.status == GOING
        main, lanes, counters = _fill(params, main, lanes, going_B, lanes.role, counters, keep=1, **fixed)
        main, lanes, counters, finish_B = _decode(
            params, main, lanes, book, protocol, counters, patience=patience, **fixed
        )
        return main, _settle(lanes, book, protocol, finish_B, sizes=sizes), counters

    return jax.lax.while_loop(more, round, (main, lanes, jnp.zeros(len(COUNTERS), jnp.int32)))


def prepare(
    params: Any,
    main: KVCache,
    lanes: Lanes,
    wanted_B: jax.Array,
    *,
    spec: Qwen3Spec,
    options: qwen3.ForwardOptions,
    sizes: Sizes,
) -> tuple[KVCache, Lanes, jax.Array]:
    """Prefills the heads of both ledgers of the wanted lanes: ACT's all but its last token, then REHEARSE's."""
    counters = jnp.zeros(len(COUNTERS), jnp.int32)
    for role in (ACT, REHEARSE):
        role_B = jnp.full(sizes.lanes, role, jnp.int32)
        main, lanes, counters = _fill(
            params,
            main,
            lanes,
            wanted_B,
            role_B,
            counters,
            keep=int(role == ACT),
            spec=spec,
            options=options,
            sizes=sizes,
        )
    return main, lanes, counters


class Stage:
    """The compiled programs, one set for every length of the cache rows; they are shared as those of `Programs`."""

    def __init__(self, run: Programs, sizes: Sizes, patience: float):
        self.run, self.sizes, self.patience = run, sizes, patience

    def cache(self, length: int) -> KVCache:
        return self.run.cache(self.sizes.lanes, length)

    def play(
        self, params: Any, main: KVCache, lanes: Lanes, book: Book, protocol: Protocol, steps: int, enough: int
    ) -> Any:
        args = (params, main, lanes, book, protocol, np.int32(steps), np.int32(enough))
        function = functools.partial(play, patience=self.patience, **self._fixed())
        return self.run.program("play", (main.length, self.sizes, self.patience), function, 1, args)(*args)

    def prepare(self, params: Any, main: KVCache, lanes: Lanes, wanted: np.ndarray) -> Any:
        args = (params, main, lanes, wanted)
        function = functools.partial(prepare, **self._fixed())
        return self.run.program("prepare", (main.length, self.sizes), function, 1, args)(*args)

    def resize(self, main: KVCache, length: int) -> KVCache:
        return self.run.resize(main, length)

    def wipe(self, main: KVCache, lanes: list[int]) -> KVCache:
        """Zeroes whole rows."""
        return self.run.wipe(main, lanes)

    def copy(self, main: KVCache, moves: list[tuple[int, int]]) -> KVCache:
        """Whole rows from one lane to another; all are read before any is written."""
        array = np.full((self.sizes.lanes, 2), [0, self.sizes.lanes], np.int32)
        if moves:
            array[: len(moves)] = moves
        return self.run.copy(main, main, array)

    def warm_up(self, params: Any) -> None:
        """Compiles everything that can be asked for."""
        sizes = self.sizes
        lanes, book, protocol = empty_lanes(sizes), empty_book(sizes), empty_protocol()
        for length in sizes.lengths:
            main = self.wipe(self.copy(self.cache(length), []), [])
            main, _, _ = self.play(params, main, lanes, book, protocol, 1, 1)
            main, _, _ = self.prepare(params, main, lanes, np.zeros(sizes.lanes, bool))
            for other in sizes.lengths:
                if other != length:
                    self.resize(main, other)

    def _fixed(self) -> dict[str, Any]:
        return dict(spec=self.run.spec, options=self.run.options, sizes=self.sizes)
