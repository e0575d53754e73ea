import random

import pytest

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.peer_loads import PeerNews, ToldLoad
from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.core.saturation import Full, RoomSettings, Saturation
from extproc.core.types import Completion, Outcome
from tests.support.core import COSTS, NAMESPACE, members, metrics, request, worker

NONE = RoomSettings(max_queue_ms=None, max_kv_usage=None)


class Fleet:
    """A router whose workers prefill 1,000 tokens a second, at time 0."""

    def __init__(self, count=2, settings=NONE, costs=COSTS, **fields):
        numbers = iter(range(10**6))
        self.router = Router(
            POLICIES["token-load"](costs),
            random.Random(1),
            new_lease_id=lambda: f"l{next(numbers)}",
            pools={"default": PoolFacts("model", "tokenizer", 16)},
            costs=costs,
        )
        self.router.on_membership(members(count, **fields), 0.0)
        self.saturation = Saturation(self.router, settings)

    def send(self, tokens=160, now=0.0, **fields):
        return self.router.schedule(request(prompt_tokens=tokens, **fields), now).lease_id

    def end(self, lease_id, now=0.0):
        self.router.release(lease_id, Completion(Outcome.FINISHED), now)

    def room(self, now=0.0, **fields):
        return self.saturation.room(request(prompt_tokens=16, **fields), now)

    def why(self, n=0, now=0.0):
        return self.saturation.full(self.router.table.get(worker(n)), request(prompt_tokens=16), now)

    def scraped(self, n, now=0.0, **fields):
        self.router.on_metrics(worker(n).endpoint, {0: metrics(**fields)}, now)


def test_requests_are_counted_and_freed_when_they_end():
    fleet = Fleet(2, RoomSettings(None, None, max_requests=1))
    first = fleet.send()
    assert fleet.room()
    fleet.send()
    assert not fleet.room()
    assert fleet.why() is Full.REQUESTS
    fleet.end(first)
    assert fleet.room()


def test_a_cap_names_the_workers_below_it():
    fleet = Fleet(2, RoomSettings(None, None, max_requests=1))
    asked = request(prompt_tokens=16)
    assert fleet.saturation.uncapped(asked, 0.0) == {worker(0).endpoint, worker(1).endpoint}
    lease = fleet.router.ledger.get(fleet.send())
    other = {worker(0), worker(1)} - {lease.worker}
    assert fleet.saturation.uncapped(asked, 0.0) == {one.endpoint for one in other}
    assert Fleet(2, NONE).saturation.uncapped(asked, 0.0) is None


def test_others_requests_count_as_long_as_the_figures_are_fresh():
    fleet = Fleet(1, RoomSettings(None, None, max_requests=3))
    for _ in range(2):
        fleet.scraped(0, running=2, waiting=1)
    assert fleet.why() is Full.REQUESTS
    assert fleet.why(now=60.0) is None


def test_a_queue_is_full_until_it_has_been_computed():
    fleet = Fleet(1, RoomSettings(max_queue_ms=500.0, max_kv_usage=None))
    fleet.send(400)
    assert fleet.room()
    fleet.send(400)
    assert fleet.why() is Full.QUEUE
    assert fleet.why(now=0.5) is None  # what is left of both takes less than that


def test_what_others_keep_waiting_is_queue():
    fleet = Fleet(1, RoomSettings(max_queue_ms=50.0, max_kv_usage=None))
    for _ in range(2):
        fleet.scraped(0, running=1, waiting=4)
    assert fleet.why() is Full.QUEUE  # four prompts of 16 tokens, a millisecond each


def test_memory_is_what_requests_hold_by_now():
    fleet = Fleet(1, RoomSettings(max_queue_ms=None, max_kv_usage=0.5))
    fleet.scraped(0, num_gpu_blocks=100, kv_usage=None)
    lease = fleet.send(900)
    assert fleet.saturation.kv_usage(fleet.router.table.get(worker(0)), 0.0) == pytest.approx(0.56, abs=0.02)
    assert fleet.why() is Full.MEMORY
    fleet.end(lease)
    assert fleet.room()


def test_who_may_serve_as_a_last_resort_has_room_or_not():
    fleet = Fleet(3, RoomSettings(None, None, max_requests=1))
    router, law = fleet.router, NAMESPACE._replace(adapter="law")
    for n in (0, 1):
        for began in (1.0, 4.0, 7.0):
            router.on_page_failure(worker(n).endpoint, began, slow=True)
        router.on_models(worker(n).endpoint, None, ["law"])
    router.on_models(worker(2).endpoint, None, [])
    only = frozenset({worker(0).endpoint})
    assert fleet.room(9.0, subset=only)
    router.schedule(request(subset=only), 9.0)
    assert not fleet.room(9.0, subset=only)
    ask = request(namespace=law)
    assert fleet.saturation.uncapped(ask, 9.0) == {worker(1).endpoint}
    router.schedule(ask, 9.0)
    assert not fleet.room(9.0, namespace=law)
    assert fleet.room(9.0)
    assert fleet.saturation.uncapped(request(), 9.0) == {worker(2).endpoint}


def test_blocks_are_of_the_configured_size_until_the_engine_tells():
    fleet = Fleet(1, RoomSettings(max_queue_ms=None, max_kv_usage=0.5))
    fleet.scraped(0, num_gpu_blocks=100, block_size=None, kv_usage=None)
    assert fleet.saturation.kv_usage(fleet.router.table.get(worker(0)), 0.0) == 0.0


class OneEngine(Fleet):
    """A worker of 100,000 tokens, half full at time 3, that prefills 40,000 a second."""

    def __init__(self):
        super().__init__(1, costs=CostSettings(prefill_tokens_per_s=40_000.0))
        for _ in range(20):
            self.send(2500)
        for now in range(4):
            self.told(now, 0.0 if now == 0 else 0.5)

    def told(self, now, usage, generated=None):
        """A scrape finds another figure of generated tokens each time, unless it is given."""
        figures = {"num_gpu_blocks": 6250, "kv_usage": usage, "running": 20}
        self.scraped(0, now, generation_tokens=now if generated is None else generated, **figures)

    def burst(self, now, count=15, tokens=2400):
        for _ in range(count):
            self.send(tokens, now)

    def usage(self, now):
        """As admission sees it, and as a price does, which must be the same."""
        usage = self.saturation.kv_usage(self.router.table.get(worker(0)), now)
        priced = self.router.quote(request(prompt_tokens=16), worker(0), now).priced.worker
        assert priced.held_tokens / priced.capacity_tokens == pytest.approx(usage, abs=1e-4)
        return usage


def test_memory_is_no_more_than_the_engine_says():
    fleet = OneEngine()  # whose requests share prefixes that we do not know of
    fleet.told(4, 0.1)
    fleet.told(5, 0.1)
    assert fleet.usage(5.0) == pytest.approx(0.1)
    assert fleet.saturation.kv_usage(fleet.router.table.get(worker(0)), 60.0) is None


def test_what_requests_of_nobody_we_know_hold_is_what_the_engine_says():
    fleet = Fleet(1)
    fleet.send(1600)
    figures = {"num_gpu_blocks": 1000, "kv_usage": 0.9}
    for now in range(4):
        fleet.scraped(0, now, running=1, generation_tokens=now, **figures)
    state = fleet.router.table.get(worker(0))
    assert fleet.saturation.kv_usage(state, 3.0) == pytest.approx(0.1, abs=0.01)
    for now in range(4, 7):  # the same, but there are two of them
        fleet.scraped(0, now, running=2, generation_tokens=now, **figures)
    assert fleet.saturation.kv_usage(state, 6.0) == pytest.approx(0.9)
    priced = fleet.router.quote(request(prompt_tokens=16), worker(0), 6.0).priced.worker
    assert priced.held_tokens == 0.9 * priced.capacity_tokens
    fleet.send(1600, 6.0)
    assert fleet.saturation.kv_usage(state, 6.0) == pytest.approx(1.0)
    for now in range(7, 10):
        fleet.scraped(0, now, running=2, generation_tokens=now, **figures)  # they have left
    assert fleet.saturation.kv_usage(state, 9.0) == pytest.approx(0.2, abs=0.01)


def test_what_was_sent_and_computed_since_the_last_scrape_is_held():
    fleet = OneEngine()
    fleet.burst(3.05)
    for now in (3.06, 3.5, 3.99):
        assert fleet.usage(now) == pytest.approx(0.86, abs=0.01)
    fleet.told(4, 0.5)  # of a step that began before
    assert fleet.usage(4.5) == pytest.approx(0.86, abs=0.01)


def test_what_waited_for_its_prefill_then_and_is_computed_by_now_is_held():
    fleet = OneEngine()
    fleet.burst(2.99)
    fleet.told(3, 0.5, generated=3.5)
    fleet.told(3.1, 0.5)
    assert fleet.usage(3.98) == pytest.approx(0.86, abs=0.01)


def test_an_engine_that_hangs_fills_up():
    fleet = OneEngine()
    for now in range(4, 15):
        fleet.told(now, 0.5, generated=3)
        fleet.burst(now + 0.1, count=1, tokens=4000)
        assert fleet.usage(now + 0.9) == pytest.approx(0.5 + 0.04 * (now - 3), abs=0.01)
    fleet.told(15, 0.5)  # it goes on, with what came meanwhile
    assert fleet.usage(15.9) == pytest.approx(0.94, abs=0.01)


def test_an_engine_that_hangs_counts_however_many_were_sent():
    fleet = OneEngine()
    for now in range(4, 24):
        fleet.told(now, 0.5, generated=3)
        fleet.burst(now + 0.1, count=100, tokens=20)
    assert fleet.usage(24.0) >= 0.5 + 2000 * 20 / 100_000


def test_requests_that_share_a_prefix_hold_it_once_as_soon_as_a_step_has_told():
    fleet = OneEngine()
    fleet.burst(3.05)
    fleet.told(4, 0.53)
    fleet.told(5, 0.53)
    assert fleet.usage(5.5) == pytest.approx(0.53)
    fleet.burst(5.6, count=1)
    assert fleet.usage(5.9) == pytest.approx(0.53 + 0.024)


def test_what_other_replicas_have_sent_since_is_held():
    fleet = OneEngine()
    for number, (at, context, queued) in enumerate(((2.5, 1000, 0.0), (3.1, 37_000, 36_000.0))):
        told = ToldLoad(15, 0, context, context, queued / 40.0, queued, 30.0)
        news = PeerNews("b", 1, number, whole=False, loads=((worker(0), told),))
        fleet.router.on_peer_news(news, at)
        if not number:
            fleet.told(2.6, 0.5)
            fleet.told(3, 0.5)
    assert fleet.usage(4.1) == pytest.approx(0.86, abs=0.01)


def test_what_the_engine_keeps_waiting_counts_where_it_is_bounded():
    fleet = Fleet(1, RoomSettings(None, None, max_waiting=2))
    fleet.send(16)
    fleet.scraped(0, running=1, waiting=3)
    assert fleet.why() is Full.WAITING
    assert fleet.why(now=60.0) is None


def test_who_waits_for_a_grammar_fills_no_worker():
    fleet = Fleet(1, RoomSettings(100.0, None, max_waiting=2))
    fleet.send(16)
    fleet.send(16)
    fleet.scraped(0, now=5.0, running=0, waiting=3, deferred=3)
    assert fleet.why(now=5.0) is None


def test_who_waits_for_a_place_is_a_queue_until_there_are_places():
    fleet = Fleet(1, RoomSettings(100.0, None))
    first = fleet.send(16)
    fleet.send(16)
    fleet.scraped(0, now=5.0, running=1, waiting=1)
    assert fleet.why(now=5.0) is Full.QUEUE
    fleet.end(first, 5.1)
    assert fleet.why(now=5.1) is None


def test_what_other_replicas_have_sent_counts_like_our_own():
    told = ToldLoad(3, 3, 900, 900, 900.0, 900.0, 30.0)
    for settings, why in (
        (RoomSettings(None, None, max_requests=3), Full.REQUESTS),
        (RoomSettings(max_queue_ms=800.0, max_kv_usage=None), Full.QUEUE),
        (RoomSettings(max_queue_ms=None, max_kv_usage=0.5), Full.MEMORY),
    ):
        fleet = Fleet(1, settings)
        fleet.scraped(0, num_gpu_blocks=100, kv_usage=None)
        assert fleet.why() is None
        fleet.router.on_peer_news(PeerNews("b", 1, 1, whole=False, loads=((worker(0), told),)), 0.0)
        assert fleet.why() is why


def test_an_idle_worker_is_never_full():
    fleet = Fleet(1, RoomSettings(0.0, 0.0, max_requests=1, max_waiting=0))
    fleet.scraped(0, running=0, waiting=0, kv_usage=1.0)
    assert fleet.room()
    fleet.send()
    assert not fleet.room()


def test_only_workers_that_may_serve_a_request_are_asked():
    fleet = Fleet(2, RoomSettings(None, None, max_requests=1))
    fleet.send(subset=frozenset({worker(0).endpoint}))
    assert not fleet.room(subset=frozenset({worker(0).endpoint}))
    assert fleet.room(subset=frozenset({worker(1).endpoint}))


def test_where_nobody_is_ready_there_is_nothing_to_wait_for():
    fleet = Fleet(0, RoomSettings(None, None, max_requests=1))
    assert fleet.room()


def test_all_workers_are_told_with_what_fills_them():
    fleet = Fleet(2, RoomSettings(None, None, max_requests=1))
    fleet.send(subset=frozenset({worker(1).endpoint}))
    assert fleet.saturation.workers("default", 0.0) == [(worker(0), None), (worker(1), Full.REQUESTS)]


def test_looking_changes_no_decision():
    """Two routers told the same, one of them looked at all the time, choose alike."""
    looked_at, other = Fleet(3, RoomSettings(1.0, 0.1)), Fleet(3)
    for step in range(40):
        now = step * 0.1
        looked_at.room(now)
        looked_at.saturation.workers("default", now)
        chosen = [
            fleet.router.schedule(request(prompt_tokens=100), now).chosen for fleet in (looked_at, other)
        ]
        assert chosen[0] == chosen[1]
