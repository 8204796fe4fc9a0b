"""Rows of one parameter set on the device: who sits where, what can be reused, what to run next.

The first `slots` rows are *lanes*: they are decoded together. The rows after them are the *shelf*: rows that wait for
their next turn while their lane is used by others. All bookkeeping is a handful of numpy arrays; the device sees
two small arrays a chunk.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from envace_jax.model.kv_cache import KVCache
from envace_jax.sampling import programs
from envace_jax.sampling.programs import FINISH, NAN, RUNNING, Programs
from envace_jax.sampling.request import Completion, Live
from envace_jax.sampling.sampler import request_key

NGRAMS = (3, 2)
"""Lengths of the runs of tokens that prompt look-up searches for, longest first."""


@dataclasses.dataclass
class _Phase:
    """What one admission phase does on the device, in this order."""

    parks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    prefills: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # lane, start, end


class Pool:
    """Lanes and shelf of one parameter set."""

    def __init__(
        self, run: Programs, seed: int, min_share: int, patience: float, draft: int, counters: dict[str, float]
    ):
        self.run, self.seed, self.min_share, self.patience = run, seed, min_share, patience
        self.draft = draft
        self.counters = counters
        self.params: Any = None
        shapes = run.shapes
        self.slots = shapes.slots
        n, top = shapes.slots + shapes.shelf, shapes.lengths[-1]
        self.lanes: KVCache = run.cache(shapes.slots, shapes.lengths[0])
        self.shelf: KVCache | None = run.cache(shapes.shelf, top) if shapes.shelf else None
        self.tokens = np.zeros((n, top), np.int32)
        self.valid = np.zeros(n, np.int32)  # positions whose keys and values are there
        self.used = np.zeros(n, np.int64)
        self.owned = np.zeros(n, bool)  # a ledger may come back for it
        self.busy = np.zeros(n, bool)  # holds a live request
        self.owners: list[Hashable] = [None] * n
        self.home: dict[Hashable, int] = {}
        self.live: dict[int, Live] = {}  # by lane
        self.ints = np.zeros((self.slots, programs.STOPS + shapes.stop_ids), np.int32)
        self.floats = np.ones((self.slots, 2), np.float32)
        self.waiting: deque[Live] = deque()
        self.clock = itertools.count(1)
        # By its place in what a chunk returns: who was live in it, and in which lane.
        self.flying: tuple[dict[int, tuple[int, Live]], jax.Array, jax.Array, jax.Array | None] | None = None
        self.roomy = 0

    # ---- whose row is what

    def forget(self) -> None:
        """Drops the keys and values of all rows that are not live."""
        self.valid[~self.busy] = 0

    def release(self, affinity: Hashable) -> None:
        """No ledger comes back for this row; what it holds may still be copied until it is overwritten."""
        row = self.home.pop(affinity, None)
        if row is not None:
            self.owners[row], self.owned[row] = None, False

    def _own(self, row: int, affinity: Hashable) -> None:
        self._disown(row)
        if affinity is not None:
            self.release(affinity)
            self.home[affinity] = row
            self.owners[row], self.owned[row] = affinity, True

    def _disown(self, row: int) -> None:
        if self.owners[row] is not None:
            self.home.pop(self.owners[row], None)
            self.owners[row], self.owned[row] = None, False

    def _victim(self, begin: int, end: int, taken: np.ndarray) -> int | None:
        """The row least worth keeping: empty, then nobody's, then longest unused; None when all are in use."""
        if begin == end:
            return None
        held = self.valid[begin:end] > 0
        cost = self.used[begin:end] + (1 << 40) * held + (1 << 41) * (held & self.owned[begin:end])
        cost = np.where(self.busy[begin:end] | taken[begin:end], 1 << 50, cost)
        best = int(cost.argmin())
        return None if cost[best] == 1 << 50 else begin + best

    def _common(self, prompt: np.ndarray) -> np.ndarray:
        """Length of the prefix that each row shares with the prompt (less its last token: decoding feeds that)."""
        n = len(prompt) - 1
        if n == 0:
            return np.zeros(len(self.valid), np.int32)
        same = self.tokens[:, :n] == prompt[None, :n]
        return np.minimum(np.where(same.all(1), n, same.argmin(1)), self.valid)

    # ---- admission

    def admit(self) -> None:
        """Gives lanes to waiting requests in order, copies what is shared and prefills the rest."""
        while self.waiting and self._admit_phase():
            pass

    def _admit_phase(self) -> bool:
        """One round: a prompt that a row of this round will hold most of waits for the next round."""
        phase = _Phase()
        taken = np.zeros(len(self.valid), bool)  # read or written in this phase
        pending = np.zeros(len(self.valid), bool)  # written in this phase, not readable before its end
        later: deque[Live] = deque()
        while self.waiting:
            live = self.waiting.popleft()
            common = np.zeros(len(self.valid), np.int32) if live.alone else self._common(live.prompt)
            readable = np.where(pending, 0, common)
            source = self._source(live, readable, taken)
            shared = int(readable[source])
            if int(np.where(pending, common, 0).max()) >= shared + self.min_share:
                later.append(live)
                continue
            lane = self._lane(live, source, shared, taken)
            if lane is None:
                later.append(live)
                later.extend(self.waiting)
                self.waiting.clear()
                break
            if lane != source and self.owned[lane] and self.valid[lane]:
                taken[source] = True
                place = self._victim(self.slots, len(self.valid), taken)
                if place is not None:
                    phase.parks.append((lane, place))
                    taken[place] = True
                    self._move(lane, place)
            if shared and lane != source:
                phase.copies.append((source, lane))
            taken[source] |= bool(shared)
            taken[lane] = pending[lane] = True
            self._occupy(lane, live)
            live.shares = bool(shared)
            n = len(live.prompt) - 1
            if shared < n:
                phase.prefills.append((lane, shared, n))
            self.counters["tokens_reused"] += shared
            self.counters["tokens_prompt"] += n
        self.waiting = later
        if not pending.any():
            return False
        self._fit_lanes(shrink=False)
        self._copy(phase.parks)
        self._copy([move for move in phase.copies if move[0] < self.slots])
        self._copy([move for move in phase.copies if move[0] >= self.slots])
        self._prefill(phase.prefills)
        return True

    def _source(self, live: Live, common: np.ndarray, taken: np.ndarray) -> int:
        """The row that shares most with the prompt; of equals the ledger's own."""
        best = int(common.argmax())
        own = self.home.get(live.request.affinity, best) if live.request.affinity is not None else best
        return own if common[own] == common[best] and not taken[own] else best

    def _lane(self, live: Live, source: int, shared: int, taken: np.ndarray) -> int | None:
        """Where the request goes: on in the source row itself if that is nobody else's, else into a victim."""
        mine = self.owners[source] is None or self.owners[source] == live.request.affinity
        if shared and source < self.slots and mine and not self.busy[source] and not taken[source]:
            return source
        guarded = taken.copy()
        guarded[source] |= bool(shared)
        return self._victim(0, self.slots, guarded)

    def _move(self, lane: int, place: int) -> None:
        self.tokens[place] = self.tokens[lane]
        self.valid[place], self.used[place] = self.valid[lane], self.used[lane]
        owner = self.owners[lane]
        self._disown(lane)
        self._own(place, owner)

    def _occupy(self, lane: int, live: Live) -> None:
        params, n = live.request.params, len(live.prompt)
        self._own(lane, live.request.affinity)
        self.busy[lane], self.live[lane], self.used[lane] = True, live, next(self.clock)
        self.tokens[lane, :n] = live.prompt
        self.valid[lane] = n - 1
        ints = self.ints[lane]
        ints[programs.LENGTH_COLUMN] = n - 1
        ints[programs.PENDING] = live.prompt[-1]
        ints[programs.REMAINING] = live.limit
        ints[programs.KEY : programs.KEY + 2] = request_key(self.seed, live.request.key).view(np.int32)
        ints[programs.TOP_K] = params.top_k
        ints[programs.STOPS :] = -1
        ints[programs.STOPS : programs.STOPS + len(params.stop_ids)] = params.stop_ids
        self.floats[lane] = params.temperature, params.top_p

    def _fit_lanes(self, shrink: bool) -> None:
        """Brings the lanes to the smallest length that holds every row in them and one chunk more.

        Growing happens at once; shrinking only when the need has been small for some chunks. Rows that nobody
        comes back for do not count: what they hold beyond is dropped.
        """
        shapes = self.run.shapes
        wanted = np.where(self.busy | self.owned, self.valid, 0)[: self.slots]
        need = shapes.length_for(int(wanted.max()) + shapes.chunk)
        if shrink:
            self.roomy = self.roomy + 1 if need < self.lanes.length else 0
        if need > self.lanes.length or self.roomy > 8:
            self.lanes = self.run.resize(self.lanes, need)
            self.roomy = 0
        # A chunk is appended to every lane, so no row in them may reach into the last `chunk` positions.
        room = self.lanes.length - shapes.chunk
        np.minimum(self.valid[: self.slots], room, out=self.valid[: self.slots])
        self.ints[:, programs.LENGTH_COLUMN] = self.valid[: self.slots]

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        """Copies of one kind: lane to shelf, lane to lane or shelf to lane."""
        if not moves:
            return
        shapes, slots = self.run.shapes, self.slots
        from_shelf, to_shelf = moves[0][0] >= slots, moves[0][1] >= slots
        while moves:
            size = shapes.copy_for(len(moves))
            part, moves = moves[:size], moves[size:]
            array = np.full((size, 2), [0, slots + shapes.shelf], np.int32)
            array[: len(part)] = np.array(part) - [slots * from_shelf, slots * to_shelf]
            if to_shelf:
                assert self.shelf is not None
                self.shelf = self.run.copy(self.shelf, self.lanes, array)
            else:
                source = self.shelf if from_shelf else self.lanes
                assert source is not None
                self.lanes = self.run.copy(self.lanes, source, array)

    def _prefill(self, todo: list[tuple[int, int, int]]) -> None:
        """Keys and values for positions start..end of lanes, in pieces of the shape ladder."""
        shapes, length = self.run.shapes, self.lanes.length
        self.counters["tokens_prefilled"] += sum(end - start for _, start, end in todo)
        while todo:
            todo.sort(key=lambda item: item[1] - item[2])
            rows, piece = shapes.prefill_for([end - start for _, start, end in todo], length)
            part, todo = todo[:rows], todo[rows:]
            tokens = np.zeros((rows, piece), np.int32)
            places = np.full((rows, 2), [self.slots, 0], np.int32)
            reach = piece
            for r, (lane, start, end) in enumerate(part):
                stop = min(end, start + piece)
                begin = max(0, min(start, length - piece))  # the window stays inside the row
                tokens[r, : stop - begin] = self.tokens[lane, begin:stop]
                # Written behind the row's end, so of a token that the row holds anyway: as finite as the row is.
                tokens[r, stop - begin :] = self.tokens[lane, stop - 1]
                places[r] = lane, begin
                reach = max(reach, begin + piece)
                if stop < end:
                    todo.append((lane, stop, end))
            context = next(c for c in shapes.contexts(piece, length) if c >= reach)
            self.lanes = self.run.prefill(self.params, self.lanes, tokens, places, context)
            self.counters["tokens_prefill_padded"] += rows * piece

    # ---- decoding

    def launch(self) -> None:
        """Starts one chunk for all live rows; returns at once."""
        if not self.live:
            return
        self._fit_lanes(shrink=True)
        guided = [lane for lane, live in self.live.items() if live.request.guide is not None]
        # Copies: a device may read what it was handed long after this returns, and this changes before the next chunk.
        arrays = (self.ints.copy(), self.floats.copy())
        order = np.arange(self.slots)
        if guided:
            allowed = np.ones((self.slots, self.run.spec.vocab_size), bool)
            for lane in guided:
                guide = self.live[lane].request.guide
                assert guide is not None
                mask = guide.allowed()
                allowed[lane, : len(mask)], allowed[lane, len(mask) :] = mask, False
            drafts = np.zeros((self.slots, 0), np.int32)
            self.lanes, *told = self.run.verify(self.params, self.lanes, drafts, allowed, *arrays)
        elif self.draft:
            drafts = self._guesses()
            self.lanes, *told = self.run.verify(self.params, self.lanes, drafts, None, *arrays)
        else:
            patience = max(1, int(self.patience * len(self.live)))
            width = self.run.width_for(len(self.live))
            if width < self.slots:  # the live lanes, and as many others as fill the program
                order = np.argsort(~np.isin(order, list(self.live)), kind="stable")[:width].astype(np.int32)
                arrays = (self.ints[order], self.floats[order])
            rows = order if width < self.slots else None
            self.lanes, *told = self.run.decode(self.params, self.lanes, *arrays, patience, rows)
        out, logps, experts = told
        live = {at: (lane, self.live[lane]) for at, lane in enumerate(order.tolist()) if lane in self.live}
        self.flying = live, out, logps, experts

    def _guesses(self) -> np.ndarray:
        """Prompt look-up: what followed the last place in the row where its latest tokens stood, -1 where nothing."""
        drafts = np.full((self.slots, self.draft), -1, np.int32)
        for lane in self.live:
            row = self.tokens[lane, : self.valid[lane] + 1]  # the pending token included
            for n in NGRAMS:
                if len(row) <= n:
                    continue
                windows = np.lib.stride_tricks.sliding_window_view(row[:-1], n)
                places = np.flatnonzero((windows == row[-n:]).all(axis=1))
                if len(places):
                    found = row[places[-1] + n :][: self.draft]
                    drafts[lane, : len(found)] = found
                    self.counters["tokens_drafted"] += len(found)
                    break
        return drafts

    def collect(self) -> list[Completion]:
        """Waits for the chunk in flight and returns the requests that it ended."""
        if self.flying is None:
            return []
        flying, out_device, logps_device, experts_device = self.flying
        self.flying = None
        start = time.perf_counter()
        out, logps = np.asarray(out_device), np.asarray(logps_device)
        experts = None if experts_device is None else np.asarray(experts_device)
        self.counters["seconds_waiting"] += time.perf_counter() - start
        chunk = logps.shape[1]
        counts, codes = out[:, chunk], out[:, chunk + 1]
        self.counters["chunks"] += 1
        self.counters["slot_iterations"] += int(out[:, chunk + 2].max()) * len(out)
        self.counters["tokens_sampled"] += int(counts.sum())
        self.counters["tokens_guessed_right"] += int(np.maximum(counts - out[:, chunk + 2], 0).sum())
        finished, broken, again = [], [], []
        for at, (lane, live) in flying.items():
            if self.live.get(lane) is not live:  # cancelled meanwhile
                if codes[at] == NAN:
                    broken.append(lane)
                continue
            n = int(counts[at])
            if n:
                ids = out[at, :n]
                live.ids += ids.tolist()
                if live.request.guide is not None:
                    for token in ids.tolist():
                        live.request.guide.accept(token)
                live.logprobs += logps[at, :n].tolist()
                if experts is not None:
                    live.experts += experts[at, :n].tobytes()
                end = int(self.valid[lane]) + 1
                self.tokens[lane, end : end + n] = ids[: self.tokens.shape[1] - end]
                self.valid[lane] += n
                ints = self.ints[lane]
                ints[programs.LENGTH_COLUMN] += n
                ints[programs.PENDING] = ids[-1]
                ints[programs.REMAINING] -= n
            if codes[at] == NAN:
                broken.append(lane)
                if live.shares and not (live.ids or live.alone):
                    # What it copied may have been broken by a row that shares its prefix and nothing else: once more.
                    live.alone = True
                    again.append(self._leave(lane))
                    continue
                self.counters["rows_nan"] += 1
            if codes[at] != RUNNING:
                finished.append(self._close(lane, FINISH[int(codes[at])]))
        self._wipe(broken)
        self.waiting.extendleft(reversed(again))
        return finished

    def _wipe(self, lanes: list[int]) -> None:
        """Nothing of these lanes may be used again."""
        if lanes:
            self.lanes = self.run.wipe(self.lanes, lanes)
        for lane in lanes:
            self.valid[lane] = 0
            self._disown(lane)

    def _leave(self, lane: int) -> Live:
        """The request in this lane, which is nobody's from here on."""
        self.busy[lane], self.used[lane] = False, next(self.clock)
        self.ints[lane, programs.REMAINING] = 0
        return self.live.pop(lane)

    def _close(self, lane: int, finish: str) -> Completion:
        live = self._leave(lane)
        return Completion(live.id, tuple(live.ids), tuple(live.logprobs), finish, bytes(live.experts))

    def cancel(self, request_id: int) -> Completion | None:
        """Ends a request wherever it is; None when it is not here."""
        for live in self.waiting:
            if live.id == request_id:
                self.waiting.remove(live)
                return Completion(request_id, (), (), "cancelled")
        for lane, live in self.live.items():
            if live.id == request_id:
                flies = self.flying is not None and any(one is live for _, one in self.flying[0].values())
                if not (live.ids or flies):  # nobody has seen yet whether its prompt is sound, and nobody will
                    self._wipe([lane])
                return self._close(lane, "cancelled")
        return None
