"""Whom to price, where there are too many workers to price them all.

Theory of operation
-------------------
Up to `SMALL` workers are all priced. Of more, a policy that asks for no more (`Needs.SHORTLIST`) is given

* the `CHEAPEST` by estimated cost; of more that are equal, within a policy's tie, so many drawn at random;
* whoever is estimated to answer soonest, of all and of those that hold nothing: bounds compare with them (see
  `extproc.core.share_bounds`);
* for a cold request, where the cheapest do not answer soon enough, the cheapest of those that do;
* the `LONGEST` that hold most of the prompt;
* of those that its caller names, the `NAMED` cheapest.

For a warm request, workers of the cold pool come behind all others. Nothing else is looked at by position.

**Estimates** are the price (see `extproc.core.cost`) made cheap. Of each worker a row is kept, made from the
facts that its price would be made from, and valid until the worker's load changes, at most a quarter of the
time that the request would decode and `BUSY_S`; `IDLE_S` where nothing is running. In a row the price is
linear in what the request brings:

    ttft  = max(0, free at - now) + base + prefills * prefill            [prefills: 1 + others waiting there]
    total = ttft + (step + step_per_token * prompt) * output
            + delay * work done twice
            + max(0, needed - room) * per_token + max(0, needed - unused) * eviction

less what a hit saves. What decodes beside a request is counted for its expected output, rounded to a power of
the square root of 2: each such length has rows of its own.

**Many workers.** Rows are kept in order of what a usual request would cost there, and only the first
`LOOKED_AT` of them are estimated for the request itself, besides those that hold some of the prompt, and kept
fresh; others may be older by `LATE_S`. So a decision among a thousand workers costs what one among a hundred
does.

The estimate only says who is priced; the prices decide. Milliseconds and tokens; `free at` and `until` are
monotonic seconds.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, nlargest, nsmallest
from itertools import islice
from operator import add
from typing import NamedTuple, TypeAlias

from extproc.core.cost import TIE_SHARE, CostSettings, WorkerFacts, delayed
from extproc.core.share_bounds import COLD_SLACK_MS
from extproc.core.types import WorkerId

SMALL = 16
CHEAPEST = 6
LONGEST = 2
NAMED = 4
LOOKED_AT = 96
BUSY_S = 0.25
IDLE_S = 1.0
LATE_S = 2.0
_HOLDERS = 16  # that are estimated for sure, those that hold most
_USUAL_PROMPT = 2048.0
_PART = 1.0 / 4.0
_BEHIND_MS = 1e12
_DRAW = 0x9E3779B97F4A7C15  # what is drawn here is not what the policy draws
_LCG = (6364136223846793005, 1442695040888963407, (1 << 64) - 1)

Row: TypeAlias = tuple[float, float, float, float, float, float, float, float]
"""free at, base, prefills, step, step per token, delay, room, unused: see the module."""

Read: TypeAlias = Callable[[WorkerId, float, float], tuple[WorkerFacts, float]]
"""`read(worker, output, now)`: what a request that is expected to generate so much would be priced with, and
how many times as long as a usual worker this one takes for prefill."""

Place: TypeAlias = tuple[float, int, WorkerId, float, Row]
"""What a usual request costs there, chance: what rows are in order of; who, until when it holds, its row."""


class Wanted(NamedTuple):
    """What one request brings.

    Attributes:
        prompt: tokens.
        output: expected tokens, per sequence.
        sequences: how many.
        prefill_ms: computing all of the prompt.
        twice: share of the delay of others that is charged for prefill that another worker would not have.
        twice_ms: that times such prefill, for a worker that holds nothing.
        per_token_ms: computing a token again.
        eviction_ms: per token that has to leave the cache.
        warm: some worker holds most of the prompt; None: not known.
        named: workers that must not be missed.
        chance: seeds what is drawn.
    """

    prompt: int
    output: float
    sequences: int
    prefill_ms: float
    twice: float
    twice_ms: float
    per_token_ms: float
    eviction_ms: float
    warm: bool | None
    named: Collection[WorkerId]
    chance: int


class Rows:
    """Rows of one pool's workers for one length of output.

    Args:
        output: the length.
        read: tells the facts of a worker.
        settings: coefficients of the price.
    """

    def __init__(self, output: float, read: Read, settings: CostSettings) -> None:
        self._output = output
        self._read = read
        self._settings = settings
        self._places: dict[WorkerId, Place] = {}
        self._order: list[Place] = []
        self._due: list[tuple[float, WorkerId]] = []  # a heap
        self._stale: dict[WorkerId, None] = {}
        self._members: Sequence[WorkerId] = ()
        self._chance = 0

    def mark(self, worker: WorkerId) -> None:
        """Something about a worker has changed."""
        if worker in self._places:
            self._stale[worker] = None

    def bring(self, members: Sequence[WorkerId], chance: int, now: float) -> None:
        """Have rows of `members` that hold now. The same object stands for the same workers."""
        self._chance ^= chance
        if members is not self._members:
            self._align(members, now)
        for worker in self._stale:
            self._renew(worker, now)
        self._stale.clear()
        due = self._due
        while due and due[0][0] <= now:
            until, worker = heappop(due)
            known = self._places.get(worker)
            if known is not None and known[3] + LATE_S == until:
                self._renew(worker, now)
        for place in [place for place in self._order[:LOOKED_AT] if place[3] <= now]:
            self._renew(place[2], now)

    def of(self, workers: Iterable[WorkerId]) -> list[Place]:
        """The places of members."""
        return [self._places[worker] for worker in workers]

    def first(self, count: int, among: Collection[WorkerId] | None) -> list[Place]:
        """The first `count` in order of what a usual request costs there; only of those in `among`."""
        if among is None:
            return self._order[:count]
        return list(islice((place for place in self._order if place[2] in among), count))

    def _align(self, members: Sequence[WorkerId], now: float) -> None:
        here = dict.fromkeys(members)
        self._places = {worker: place for worker, place in self._places.items() if worker in here}
        self._stale = {worker: None for worker in self._stale if worker in here}
        self._order = sorted(self._places.values())
        self._due = [(until + LATE_S, worker) for _, _, worker, until, _ in self._order]
        heapify(self._due)
        for worker in members:
            if worker not in self._places:
                self._renew(worker, now)
        self._members = members

    def _renew(self, worker: WorkerId, now: float) -> None:
        facts, slowness = self._read(worker, self._output, now)
        row = row_of(facts, slowness, self._output, self._settings, now)
        multiplier, increment, mask = _LCG
        self._chance = (self._chance * multiplier + increment) & mask
        free_at, base, prefills, step, per_token, *_ = row
        usual = (
            max(0.0, free_at - now) * 1000.0
            + base
            + prefills / slowness * facts.ttft.prefill_ms(_USUAL_PROMPT, 0.0)
            + (step + per_token * _USUAL_PROMPT) * self._output
        )
        until = now + IDLE_S
        if facts.sequences:
            decoding_ms = self._output * facts.step.tpot_ms(facts.sequences, facts.context_tokens)
            until = now + min(BUSY_S, _PART * decoding_ms / 1000.0)
        known = self._places.get(worker)
        if known is not None:
            del self._order[bisect_left(self._order, known)]
        place = self._places[worker] = (usual, self._chance, worker, until, row)
        insort(self._order, place)
        heappush(self._due, (until + LATE_S, worker))


def row_of(facts: WorkerFacts, slowness: float, output: float, settings: CostSettings, now: float) -> Row:
    """A worker's price, linear in what a request brings that is expected to generate `output` tokens."""
    ttft, step = facts.ttft, facts.step
    base = ttft.wait_ms(facts.decoding) + facts.adapter_ms
    if facts.stalled:
        base += facts.stalled * output * step.tpot_ms(facts.sequences, facts.context_tokens)
    per_token = step.per_1k_context_ms / 1000.0
    steps = facts.sequences if facts.beside is None else facts.beside / output
    context = facts.context_tokens if facts.context_beside is None else facts.context_beside / output
    weight = settings.decode_weight
    capacity, unused = facts.capacity_tokens, facts.unused_tokens
    return (
        now + facts.queued_prefill_ms / 1000.0,
        base,
        (1.0 + facts.foreign_waiting) * slowness,
        weight * (2.0 * step.per_sequence_ms * steps + per_token * context),
        weight * per_token * steps,
        delayed(facts.sequences, facts.utilization, settings),
        math.inf if capacity is None else float(capacity - facts.held_tokens),
        math.inf if unused is None else float(unused),
    )


def pick(
    rows: Rows,
    wanted: Wanted,
    held: Mapping[WorkerId, int],
    saved_ms: Callable[[WorkerId], float],
    settings: CostSettings,
    now: float,
    *,
    among: Collection[WorkerId] | None = None,
    cold_pool: Collection[WorkerId] = (),
    has_time: Callable[[WorkerId], bool] = lambda _: True,
    delay_ms: Callable[[WorkerId], float] | None = None,
) -> list[WorkerId]:
    """Whom to price; see the module. In no order that means anything.

    Args:
        rows: brought to `now`.
        wanted: the request.
        held: tokens of the prompt, in any tier, by worker that holds some.
        saved_ms: of its prefill, what one of these saves.
        settings: coefficients of the price.
        now: the time.
        among: the workers that may serve it; None: all that there are rows of.
        cold_pool: those that serve cold requests only.
        has_time: whether a worker has time left for the prefill of cold requests.
        delay_ms: what a request waits for there besides what is in its row; None: nothing.
    """
    looked, at_of = _looked_at(rows, wanted, held, among)
    workers = [place[2] for place in looked]
    of = [place[4] for place in looked]
    totals, ttfts = _estimates(of, wanted, now)
    if delay_ms is not None:
        delays = [delay_ms(worker) for worker in workers]
        totals, ttfts = list(map(add, totals, delays)), list(map(add, ttfts, delays))
    few, many = (held, at_of) if len(held) < len(at_of) else (at_of, held)
    holders = {at_of[worker]: held[worker] for worker in few if worker in many}
    for at, tokens in holders.items():
        saving_ms = saved_ms(workers[at])
        ttfts[at] -= saving_ms
        totals[at] -= saving_ms + _saved_besides(of[at], saving_ms, tokens, wanted)
    if wanted.warm:
        for at in (at_of[worker] for worker in cold_pool if worker in at_of):
            totals[at] += _BEHIND_MS
            ttfts[at] += _BEHIND_MS
    picked = dict.fromkeys(_cheapest(totals, holders, settings, wanted.chance))
    soonest = ttfts.index(min(ttfts))
    picked[soonest] = None
    everyone = range(len(looked))
    if holders:
        others = [at for at in everyone if at not in holders] if soonest in holders else []
        if others:
            picked[min(others, key=ttfts.__getitem__)] = None
        longest = holders if len(holders) <= LONGEST else nlargest(LONGEST, holders, key=holders.__getitem__)
        picked.update(dict.fromkeys(longest))
    if wanted.warm is False:
        latest = settings.max_cold_slowdown * ttfts[soonest] + COLD_SLACK_MS
        if any(ttfts[at] > latest for at in picked):
            soon = sorted((at for at in everyone if ttfts[at] <= latest), key=totals.__getitem__)
            picked.update(dict.fromkeys(islice((at for at in soon if has_time(workers[at])), NAMED)))
    if wanted.named:
        named = (at_of[worker] for worker in wanted.named if worker in at_of)
        picked.update(dict.fromkeys(nsmallest(NAMED, named, key=totals.__getitem__)))
    return [workers[at] for at in picked]


def _looked_at(
    rows: Rows, wanted: Wanted, held: Mapping[WorkerId, int], among: Collection[WorkerId] | None
) -> tuple[list[Place], dict[WorkerId, int]]:
    """Whom to estimate, and where each of them is in that list: empty where nobody is asked for by name."""
    looked = rows.first(LOOKED_AT, among)
    if not held and not wanted.named and not wanted.warm:
        return looked, {}
    at_of = dict(zip([place[2] for place in looked], range(len(looked)), strict=True))
    further = held if len(held) <= _HOLDERS else nlargest(_HOLDERS, held, key=held.__getitem__)
    looked += rows.of(_new(further, at_of))
    if wanted.named:
        named = wanted.named if among is None else {one: None for one in wanted.named if one in among}
        looked += rows.of(_new([place[2] for place in rows.first(_HOLDERS, named)], at_of))
    return looked, at_of


def _new(workers: Iterable[WorkerId], at_of: dict[WorkerId, int]) -> list[WorkerId]:
    """Those that have no place in `at_of` yet; they get the next ones."""
    new = [worker for worker in workers if worker not in at_of]
    for worker in new:
        at_of[worker] = len(at_of)
    return new


def _estimates(rows: Sequence[Row], wanted: Wanted, now: float) -> tuple[list[float], list[float]]:
    """Totals and times to first token, of workers that hold nothing."""
    prefill, prompt, twice = wanted.prefill_ms, wanted.prompt, wanted.twice_ms
    output = wanted.output * wanted.sequences
    needed, per_token, eviction = prompt + output, wanted.per_token_ms, wanted.eviction_ms
    totals: list[float] = []
    ttfts: list[float] = []
    for free_at, base, prefills, step, step_per_token, delay, room, unused in rows:
        queue = (free_at - now) * 1000.0 if free_at > now else 0.0
        ttft = queue + base + prefills * prefill
        total = ttft + (step + step_per_token * prompt) * output + delay * twice
        if needed > room:
            total += (needed - room) * per_token
        if needed > unused:
            total += (needed - unused) * eviction
        ttfts.append(ttft)
        totals.append(total)
    return totals, ttfts


def _saved_besides(row: Row, saving_ms: float, held: int, wanted: Wanted) -> float:
    """What a hit saves beside its prefill: delay of others, and memory."""
    _, _, _, _, _, delay, room, unused = row
    needed = wanted.prompt + wanted.output * wanted.sequences
    return (
        saving_ms * delay * wanted.twice
        + max(0.0, min(held, needed - room)) * wanted.per_token_ms
        + max(0.0, min(held, needed - unused)) * wanted.eviction_ms
    )


def _cheapest(
    totals: Sequence[float], holders: Mapping[int, int], settings: CostSettings, chance: int
) -> list[int]:
    """Places of the cheapest; where too many are equal, those that hold most, and others by chance."""
    least = min(totals)
    limit = least + max(settings.tie_ms, TIE_SHARE * least)
    equal = [at for at, total in enumerate(totals) if total <= limit]
    if len(equal) <= CHEAPEST:
        enough = sorted(totals)[:CHEAPEST][-1]
        cheap = (at for at, total in enumerate(totals) if total <= enough)
        return sorted(cheap, key=totals.__getitem__)[:CHEAPEST]
    warm = nlargest(CHEAPEST // 2, (at for at in equal if at in holders), key=holders.__getitem__)
    rest = [at for at in equal if at not in warm] if warm else equal
    return [*warm, *_sample(rest, min(len(rest), CHEAPEST - len(warm)), chance ^ _DRAW)]


def _sample(places: Sequence[int], count: int, seed: int) -> list[int]:
    """So many of them, by chance; seeding a `Random` would take longer than all the rest."""
    multiplier, increment, mask = _LCG
    left, state = list(places), seed & mask
    for at in range(count):
        state = (state * multiplier + increment) & mask
        other = at + ((state >> 32) * (len(left) - at) >> 32)
        left[at], left[other] = left[other], left[at]
    return left[:count]
