import pytest

from extproc.core.cache_claims import CacheClaims
from extproc.core.candidates import PoolFacts
from extproc.core.load_ledger import LoadLedger
from extproc.core.outcomes import Released
from extproc.core.sent_prefixes import LINGER_S, SentPrefixes
from extproc.core.types import Completion, Outcome
from extproc.core.worker_table import WorkerTable
from tests.core.test_router import PROMPT, make_router
from tests.support.core import BLOCK, decision, hashes, members, metrics, request, stored, worker

CHAIN = tuple(hashes(PROMPT))


class Fleet:
    """Workers, what they claim, and what they were sent. The first `publishing` of them tell by KV events."""

    def __init__(self, publishing=0):
        self.table = WorkerTable()
        self.claims = CacheClaims(self.table, {"default": PoolFacts("model", "tokenizer", BLOCK)})
        self.sent = SentPrefixes(self.table, self.claims)
        self.ledger = LoadLedger()
        self.table.update(members(2), 0.0)
        for n, state in enumerate(self.table.all()):
            self.claims.add(state, "model")
            if n < publishing:
                self.claims.on_events(state.id, [stored(range(9000, 9032), first_handle=900)], 0.0)

    def send(self, lease_id="a"):
        state, chosen = self.table.get(worker(0)), decision(lease_id, prompt_tokens=len(PROMPT))
        self.sent.send(chosen, (CHAIN,), state)
        return self.ledger.admit(chosen, state.generation, (CHAIN,), 0.0, 1e9)

    def end(self, lease, outcome=Outcome.FINISHED, now=1.0, **fields):
        released = Released(lease, Completion(outcome, **fields), now)
        self.sent.end(released)
        self.sent.remember(released)

    def held(self):
        """Blocks of the prompt that count as held, by worker."""
        return {match.worker: match.blocks for match in self.claims.index.match(CHAIN)}


@pytest.mark.parametrize(
    ("publishing", "outcome", "soon", "later"),
    [
        (1, Outcome.FINISHED, True, False),
        (1, Outcome.CANCELLED, False, False),
        (0, Outcome.FINISHED, True, True),
        (0, Outcome.FAILED, False, False),
        (0, Outcome.LOST, False, False),
    ],
)
def test_what_becomes_of_the_blocks_of_a_request_that_ended(publishing, outcome, soon, later):
    fleet, all_of_it = Fleet(publishing), {worker(0): len(CHAIN)}
    lease = fleet.send()
    assert fleet.held() == all_of_it
    fleet.end(lease, outcome)
    assert fleet.held() == (all_of_it if soon else {})
    fleet.sent.tick(1.0 + LINGER_S)
    assert fleet.held() == (all_of_it if later else {})


def test_nothing_lingers_that_events_have_told_of_already():
    fleet = Fleet(1)
    lease = fleet.send()
    fleet.claims.on_events(worker(0), [stored(PROMPT)], 0.5)
    fleet.end(lease)
    assert fleet.claims.index.stats().reservations == 0
    assert fleet.held() == {worker(0): len(CHAIN)}


def test_requests_side_by_side_each_hold_the_prefix_until_they_end():
    fleet = Fleet(1)
    first, second = fleet.send("a"), fleet.send("b")
    fleet.end(first, Outcome.CANCELLED)
    assert fleet.held() == {worker(0): len(CHAIN)}
    fleet.end(second, Outcome.CANCELLED)
    assert fleet.held() == {}


def test_who_really_serves_a_request_holds_its_prefix():
    fleet = Fleet()
    lease = fleet.send()
    fleet.sent.move(lease, worker(1), (CHAIN,))
    assert fleet.held() == {worker(1): len(CHAIN)}


@pytest.mark.parametrize("lingering", [False, True])
def test_a_worker_that_is_new_in_the_index_holds_what_is_not_over(lingering):
    fleet = Fleet(1)
    lease = fleet.send()
    if lingering:
        fleet.end(lease)
    fleet.claims.renew(fleet.table.get(worker(0)), "model")
    assert fleet.held() == {}
    fleet.sent.reserve_again(worker(0), () if lingering else (lease,))
    assert fleet.held() == {worker(0): len(CHAIN)}
    if lingering:
        fleet.sent.tick(9.0)
    else:
        fleet.end(lease, Outcome.CANCELLED)
    assert fleet.held() == {}


def test_of_a_worker_that_left_and_came_back_nothing_is_assumed():
    fleet = Fleet()
    lease = fleet.send()
    fleet.table.update((), 0.5)
    fleet.claims.remove(worker(0))
    fleet.sent.remove(worker(0))
    fleet.table.update(members(2), 0.6)
    fleet.claims.add(fleet.table.get(worker(0)), "model")
    fleet.sent.remember(Released(lease, Completion(Outcome.FINISHED), 1.0))
    assert fleet.held() == {}
    assert fleet.sent.assumed.blocks(worker(0)) == 0


def test_nothing_is_assumed_of_the_choice_when_another_worker_served():
    fleet = Fleet()
    fleet.end(fleet.send(), served_by=worker(1).endpoint)
    assert fleet.held() == {}


def serve(router, tokens, now, *, cached=None):
    decision = router.schedule(request(tokens), now)
    router.release(decision.lease_id, Completion(Outcome.FINISHED, cached_tokens=cached), now + 0.5)
    return decision.chosen


def test_without_kv_events_what_was_sent_is_remembered():
    router = make_router(3)
    first = serve(router, PROMPT, 1.0, cached=0)
    second = serve(router, PROMPT, 2.0)
    assert second.worker == first.worker
    assert second.cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK


def test_the_engines_account_corrects_what_was_assumed():
    router = make_router(1)
    serve(router, PROMPT, 1.0, cached=0)
    other = [*PROMPT[:160], *range(5000, 5100)]
    assert serve(router, other, 2.0, cached=32).cached_tokens == 160
    # It had only two blocks then, but has computed the others again since.
    assert serve(router, other, 3.0).cached_tokens == (len(other) - 1) // BLOCK * BLOCK


def test_assumptions_end_with_the_first_event():
    router = make_router(1)
    serve(router, PROMPT, 1.0)
    router.on_kv_events(worker(0), [stored(range(9000, 9032))], 0.0)
    assert serve(router, PROMPT, 2.0).cached_tokens == 0


def test_assumptions_end_with_a_restart_and_with_membership():
    router = make_router(1)
    router.on_metrics(worker(0).endpoint, {0: metrics(prompt_tokens=500.0)}, 0.5)
    serve(router, PROMPT, 1.0)
    router.on_metrics(worker(0).endpoint, {0: metrics(prompt_tokens=3.0)}, 2.0)
    assert serve(router, PROMPT, 3.0).cached_tokens == 0
    router.on_membership((), 4.0)
    router.on_membership(members(1), 5.0)
    assert serve(router, PROMPT, 6.0).cached_tokens == 0


def test_assumptions_have_the_size_of_the_engines_cache():
    router = make_router(1)
    router.on_metrics(worker(0).endpoint, {0: metrics(num_gpu_blocks=25)}, 0.5)
    for n in range(10):
        serve(router, range(n * 1000, n * 1000 + 200), n + 1.0)
    assert 20 < router.assumed.blocks(worker(0)) <= 24  # the engine keeps one back, and answers take room
    assert serve(router, range(200), 20.0).cached_tokens == 0
    assert serve(router, range(9000, 9200), 21.0).cached_tokens > 0


def test_a_finished_request_counts_until_the_events_about_it_are_here():
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(range(9000, 9032), first_handle=500)], 0.5)
    served = serve(router, PROMPT, 1.0)
    assert served.cached_tokens == 0
    late = router.schedule(request(PROMPT), 1.6)
    assert late.chosen.cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK
    router.release(late.lease_id, Completion(Outcome.CANCELLED), 1.7)
    # What is said now counts: these events do not tell of it, so the engine does not have it.
    router.on_kv_events(worker(0), [stored(range(9100, 9132), first_handle=600)], 1.8)
    assert router.schedule(request(PROMPT), 1.9).chosen.cached_tokens == 0


def test_without_events_a_finished_request_is_forgotten_after_a_second():
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(range(9000, 9032), first_handle=500)], 0.5)
    serve(router, PROMPT, 1.0)
    router.tick(2.4)
    assert router.index.stats(worker(0)).reservations > 0
    router.tick(2.6)
    assert router.index.stats(worker(0)).reservations == 0
