"""Among many workers, what is priced is enough: the choice costs what it would if all were."""

import math
from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.candidates import PoolFacts
from extproc.core.cost import TIE_SHARE, CostSettings, WorkerFacts
from extproc.core.policies import POLICIES, LeastLoad, RoundRobin, TokenLoad
from extproc.core.rollout import Mode
from extproc.core.router import Router
from extproc.core.shortlist import CHEAPEST, IDLE_S, LOOKED_AT, SMALL, Rows, Wanted, pick, row_of
from extproc.core.step_model import StepCoefficients
from extproc.core.tenancy import EVERYTHING, TenantBook, TenantPolicy
from extproc.core.ttft_model import TtftCoefficients
from extproc.core.types import Completion, Member, Outcome, Reason
from tests.support.core import BLOCK, members, metrics, request, stored, worker

COSTS = CostSettings(prefill_tokens_per_s=1000.0)
POOLS = {"default": PoolFacts("model", "tokenizer", BLOCK)}
PROMPTS = 6


def make_router(workers, *, policy=TokenLoad, tenants=EVERYTHING, shadow=(), members_=None, **fields):
    ids = count()
    router = Router(
        policy(COSTS),
        Random(1),
        new_lease_id=lambda: f"lease-{next(ids)}",
        others=[other(COSTS) for other in POLICIES.values()],
        shadow=[one(COSTS) for one in shadow],
        pools=POOLS,
        costs=COSTS,
        tenants=tenants,
        **fields,
    )
    router.on_membership(members(workers) if members_ is None else members_, 0.0)
    return router


class Both:
    """A router, and one beside it that prices every worker and books what the first has chosen."""

    def __init__(self, workers):
        self.wanted = self.chosen = None
        self.fast = make_router(workers)
        self.full = make_router(workers, price_all=True, last_word=self._follow)

    def _follow(self, ordered, reason):
        self.wanted = (ordered[0], min(c.cost.total_ms for c in ordered))
        return sorted(ordered, key=lambda c: c.worker != self.chosen)

    def __getattr__(self, name):
        def told(*arguments, **named):
            getattr(self.full, name)(*arguments, **named)
            return getattr(self.fast, name)(*arguments, **named)

        return told

    def ask(self, ask, now):
        decision = self.fast.schedule(replace(ask), now)
        self.chosen = decision.chosen.worker
        full = self.full.schedule(replace(ask), now)
        return decision, full


def prompt(number, length):
    return range(number * 1000, number * 1000 + length)


step = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, PROMPTS), st.integers(1, 900)),
    st.tuples(st.just("burst"), st.integers(0, PROMPTS), st.integers(1, 8)),
    st.tuples(st.just("heap"), st.integers(0, 63), st.integers(1, 900)),
    st.tuples(st.just("first"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("end"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("events"), st.integers(0, 63), st.integers(0, PROMPTS)),
    st.tuples(st.just("scrape"), st.integers(0, 63), st.integers(0, 8)),
    st.tuples(st.just("wait"), st.integers(0, 40), st.just(0)),
)


class Play:
    """A history, and what is asked in it of both routers."""

    def __init__(self, workers):
        self.workers, self.both, self.now, self.open = workers, Both(workers), 0.0, []

    def fill(self, rng):
        """Put work on every worker: queues, and decoding beside many or few."""
        for n in range(self.workers):
            for at in range(rng.randrange(1, 4)):
                self.heap(1000 + 10 * n + at, n, rng.randrange(50, 4000))
                if rng.random() < 0.5:
                    self.both.on_first_token(self.open[-1], self.now)
        return self

    def run(self, history):
        for number, (kind, a, b) in enumerate(history):
            self.now += 0.02
            getattr(self, kind)(number, a, b)

    def _ask(self, number, tokens, **fields):
        ask = request(tokens, request_id=str(number), stream=True, max_output=None, **fields)
        decision, full = self.both.ask(ask, self.now)
        self.open.append(decision.lease_id)
        return decision, full

    def ask(self, number, n, length):
        decision, full = self._ask(number, [*prompt(n, length), 50_000 + number])
        wanted, least = self.both.wanted
        chosen = decision.chosen
        assert full.chosen.worker == chosen.worker
        assert chosen.cost.total_ms == pytest.approx(full.chosen.cost.total_ms, rel=1e-6)
        assert chosen.cost.ttft_ms == pytest.approx(full.chosen.cost.ttft_ms, rel=1e-6)
        assert decision.considered == self.workers
        assert len(decision.candidates) < self.workers
        tie = max(COSTS.tie_ms, TIE_SHARE * least)
        assert abs(chosen.cost.total_ms - wanted.cost.total_ms) <= tie + 1e-6

    def burst(self, number, n, times):
        for at in range(times):
            self.ask(number * 100 + at, n, 500)

    def heap(self, number, n, length):
        only = frozenset({worker(n % self.workers).endpoint})
        self._ask(number, prompt(200 + number, length), subset=only)

    def first(self, _, index, __):
        if self.open:
            self.both.on_first_token(self.open[index % len(self.open)], self.now)

    def end(self, _, index, __):
        if self.open:
            done = Completion(Outcome.FINISHED, first_body_ms=90.0, duration_ms=400.0, output_tokens=30)
            self.both.release(self.open.pop(index % len(self.open)), done, self.now)

    def events(self, _, n, number):
        event = stored(prompt(number, 640), first_handle=number * 100 + 1)
        self.both.on_kv_events(worker(n % self.workers), [event], self.now)

    def scrape(self, _, n, running):
        page = metrics(running=running, waiting=running // 3, num_gpu_blocks=(400, 10_000)[running % 2])
        self.both.on_metrics(worker(n % self.workers).endpoint, {0: page}, self.now)

    def wait(self, _, tenths, __):
        self.now += tenths / 10
        self.both.tick(self.now)


@settings(max_examples=40, deadline=None)
@given(st.integers(SMALL + 1, 64), st.lists(step, max_size=40))
def test_the_choice_costs_what_it_would_if_every_worker_were_priced(workers, history):
    Play(workers).run(history)


@settings(max_examples=20, deadline=None)
@given(st.integers(SMALL + 1, 64), st.integers(0, 999), st.lists(step, min_size=1, max_size=15))
def test_and_where_every_worker_has_work(workers, seed, history):
    Play(workers).fill(Random(seed)).run([("ask", seed % PROMPTS, 1 + seed % 700), *history])


@pytest.mark.parametrize("seed", range(4))
def test_so_it_is_in_a_fleet_at_work(seed):
    rng, play = Random(seed), Play(40)
    kinds = ["ask"] * 6 + ["heap", "first", "first", "end", "end", "events", "events", "scrape"]
    play.run([(rng.choice(kinds), rng.randrange(64), rng.randrange(1, 7)) for _ in range(200)])
    assert len(play.open) > 5


def test_up_to_so_many_all_are_priced():
    for workers in (SMALL, SMALL + 1):
        decision = make_router(workers).schedule(request(range(400)), 0.0)
        assert decision.considered == workers
        assert (len(decision.candidates) == workers) == (workers == SMALL)


def test_of_many_that_are_equal_chance_decides_not_position():
    router, seen = make_router(48), Counter()
    for number in range(960):
        decision = router.schedule(request(range(number, number + 100)), number * 0.01)
        router.release(decision.lease_id, Completion(Outcome.CANCELLED), number * 0.01)
        seen[decision.chosen.worker] += 1
        assert len(decision.candidates) <= CHEAPEST + 1
    assert len(seen) == 48
    assert max(seen.values()) < 45  # 20 on average


def test_more_than_are_looked_at_are_all_reached():
    router, seen = make_router(3 * LOOKED_AT), set()
    for number in range(3 * LOOKED_AT):
        seen.add(router.schedule(request(range(number, number + 200)), 0.001 * number).chosen.worker)
    assert len(seen) == 3 * LOOKED_AT  # an idle one is always better than one that has a prompt


def test_a_holder_among_very_many_is_found():
    router = make_router(200)
    for n in range(LOOKED_AT + 20):  # a busy fleet, and the holder not the least of them
        router.schedule(
            request(range(n, n + 300), subset=frozenset({worker(199 - n).endpoint}), max_output=None), 0.0
        )
    router.on_kv_events(worker(199), [stored(range(5000, 9000))], 0.0)
    assert router.schedule(request(range(5000, 9000)), 0.1).chosen.worker == worker(199)


def test_a_prefix_that_everybody_holds_does_not_hide_who_holds_more():
    router = make_router(120)
    for n in range(120):
        router.on_kv_events(worker(n), [stored(range(320))], 0.0)
    router.on_kv_events(worker(77), [stored(range(320, 1600), first_handle=500, parent=20)], 0.0)
    decision = router.schedule(request(range(1700)), 0.1)
    assert (decision.chosen.worker, decision.chosen.cached_tokens) == (worker(77), 1600)


def test_a_subset_of_the_gateway_is_kept_to():
    router = make_router(64)
    only = frozenset(worker(n).endpoint for n in range(30, 50))
    decision = router.schedule(request(range(400), subset=only), 0.0)
    assert decision.considered == 20
    assert {c.worker.endpoint for c in decision.candidates} <= only


def test_a_warm_request_is_not_sent_to_the_cold_pool_of_a_large_fleet():
    fleet = [Member(worker(n).endpoint, cold=n < 20) for n in range(40)]
    router = make_router(0, members_=fleet)
    router.on_kv_events(worker(5), [stored(range(1, 1601))], 0.0)
    for n in range(20, 40):  # the others are at work
        busy = request(range(n * 5000, n * 5000 + 900), subset=frozenset({worker(n).endpoint}))
        router.schedule(busy, 1.0)
    warm = router.schedule(request(range(1, 1610)), 1.0)
    assert not warm.chosen.shares.cold_only
    cold = router.schedule(request(range(900_000, 901_000)), 1.0)
    assert (cold.chosen.shares.cold_only, cold.reason) == (True, Reason.COLD_POOL)


def test_a_tenant_at_its_limit_stays_on_its_workers_in_a_large_fleet():
    book = TenantBook({"small": TenantPolicy(cold_quota=0.1)}, TenantPolicy())
    router, used = make_router(40, tenants=book), set()
    for number in range(30):
        ask = request(range(number * 1000, number * 1000 + 400), tenant="small", max_output=None)
        decision = router.schedule(ask, 0.001 * number)
        used.add(decision.chosen.worker)
    assert len(used) == 4
    assert decision.reason is Reason.TENANT_LIMIT


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"token-load"}))
def test_a_policy_that_needs_every_worker_gets_every_worker(policy):
    router = make_router(20, policy=POLICIES[policy])
    assert len(router.schedule(request(range(400)), 0.0).candidates) == 20


def test_round_robin_goes_round_a_large_fleet():
    router = make_router(20, policy=RoundRobin)
    chosen = [router.schedule(request(range(n, n + 50)), 0.0).chosen.worker for n in range(20)]
    assert chosen == [worker(n) for n in range(20)]


def test_a_shadow_that_needs_every_worker_and_an_observed_request_get_every_worker():
    router = make_router(20, shadow=(LeastLoad,))
    assert len(router.schedule(request(range(400)), 0.0).candidates) == 20
    router = make_router(20)
    assert len(router.schedule(request(range(400), mode=Mode.OBSERVE), 0.0).candidates) == 20
    assert len(router.schedule(request(range(400), policy="least-load"), 0.0).candidates) == 20


def test_who_was_not_on_the_shortlist_and_serves_all_the_same_has_the_load():
    router = make_router(40)
    decision = router.schedule(request(range(400)), 0.0)
    other = next(worker(n) for n in range(40) if worker(n) not in {c.worker for c in decision.candidates})
    router.on_served(decision.lease_id, other.endpoint, 0.1)
    assert router.ledger.load(decision.chosen.worker, 0.1).active == 0
    assert router.ledger.load(other, 0.1).active == 1
    assert router.schedule(request(range(400)), 0.2).chosen.worker == other  # and the prefix


def test_a_quote_is_the_price_and_changes_nothing():
    router = make_router(40)
    router.on_kv_events(worker(3), [stored(range(320))], 0.0)
    quoted = router.quote(request(range(400)), worker(3), 0.1)
    decision = router.schedule(request(range(400)), 0.1)
    assert replace(quoted, position=decision.chosen.position) == replace(
        decision.chosen, shares=decision.chosen.shares._replace(cold_demand=quoted.shares.cold_demand)
    )
    assert router.quote(request(range(400)), worker(77), 0.1) is None


def facts(queued_ms=0.0, sequences=0, **fields):
    ttft, decode = TtftCoefficients(10.0, 0.0, 1.0, 0.0), StepCoefficients(10.0, 0.1, 0.02)
    return WorkerFacts(ttft, queued_ms, 0.0, sequences, 0, 0, None, decode, **fields)


WANTED = Wanted(
    prompt=1000,
    output=100.0,
    sequences=1,
    prefill_ms=1000.0,
    twice=0.0,
    twice_ms=0.0,
    per_token_ms=1.0,
    eviction_ms=0.0,
    warm=False,
    named=(),
    chance=1,
)


def who(places):
    return [place[2] for place in places]


def test_a_row_is_read_again_when_its_worker_changes_and_when_it_is_old():
    load, reads = {worker(n): 0.0 for n in range(30)}, Counter()

    def read(name, output, now):
        reads[name] += 1
        return facts(load[name]), 1.0

    rows, names = Rows(100.0, read, COSTS), tuple(load)
    rows.bring(names, 1, 0.0)
    rows.bring(names, 1, 0.5)
    assert set(reads.values()) == {1}
    load[worker(4)] = 500.0
    rows.mark(worker(4))
    rows.bring(names, 1, 0.5)
    assert reads.pop(worker(4)) == 2
    assert set(reads.values()) == {1}
    assert worker(4) not in who(rows.first(29, None))
    rows.bring(names, 1, IDLE_S)
    assert set(reads.values()) == {2}
    rows.bring(names[:20], 1, IDLE_S)
    assert set(who(rows.first(99, None))) == set(names[:20])
    assert who(rows.first(99, {names[3]: None, names[25]: None})) == [names[3]]


def test_a_queue_that_was_read_is_worked_off():
    row = row_of(facts(queued_ms=500.0), 1.0, 100.0, COSTS, 7.0)
    assert row[0] == pytest.approx(7.5)


def test_rows_price_memory_and_slowness():
    row = row_of(facts(unused_tokens=50), 2.0, 100.0, COSTS, 0.0)
    assert row[2] == 2.0
    assert row[6:] == (math.inf, 50.0)


def test_who_answers_soonest_is_priced_though_others_are_cheaper():
    # Decoding beside many is dear, a queue is slow: bounds on cold requests compare the two.
    names = tuple(worker(n) for n in range(40))
    known = {name: facts(3000.0) for name in names} | {
        names[7]: facts(0.0, 2000, beside=200_000.0, context_beside=0.0)
    }
    rows = Rows(100.0, lambda name, *_: (known[name], 1.0), COSTS)
    rows.bring(names, 1, 0.0)
    assert names[7] in pick(rows, WANTED, {}, lambda _: 0.0, COSTS, 0.0)
