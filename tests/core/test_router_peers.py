"""What peers tell, in the router: it counts as load, once, whatever else tells of it too."""

import itertools
from random import Random

import pytest

from extproc.core.candidates import PoolFacts
from extproc.core.peer_loads import PeerNews, ToldLoad
from extproc.core.peer_teller import LoadTeller
from extproc.core.policies.token_load import TokenLoad
from extproc.core.router import Router
from extproc.core.types import Completion, Outcome
from tests.support.core import BLOCK, COSTS, NAMESPACE, hashes, members, metrics, request, worker


def router(count=2, name=None):
    ids = itertools.count()
    made = Router(
        TokenLoad(COSTS),
        Random(1),
        new_lease_id=lambda: f"{name}-{next(ids)}",
        pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, BLOCK)},
        costs=COSTS,
    )
    made.on_membership(members(count), 0.0)
    if name is not None:
        made.teller = LoadTeller(name, 1)
    return made


def exchange(one, other, now):
    for teller, listener in ((one, other), (other, one)):
        number = teller.teller.number
        listener.on_peer_news(teller.tell(now).since(number), now)


def by_worker(decision):
    return {candidate.worker: candidate for candidate in decision.candidates}


def test_a_worker_that_a_peer_has_loaded_is_avoided():
    here = router()
    load = ToldLoad(3, 3, 9000, 0, 9000.0, 9000.0, 30.0)
    here.on_peer_news(PeerNews("b", 1, 1, whole=False, loads=((worker(0), load),)), 0.0)
    for n in range(8):
        ask = request(range(n * 100, n * 100 + 50), request_id=str(n))
        assert here.schedule(ask, 0.0).chosen.worker == worker(1)


def test_what_a_peer_has_there_costs_what_ours_would():
    """One request on a worker, ours or told: the next one is priced alike, but for its decoding."""
    tokens, other = range(400), range(1000, 1400)
    one, two = router(1, "a"), router(1, "b")
    one.schedule(request(tokens), 0.0)
    exchange(one, two, 0.0)
    ours = one.schedule(request(other), 0.0).chosen
    theirs = two.schedule(request(other), 0.0).chosen
    assert theirs.cost.queue_ms == pytest.approx(ours.cost.queue_ms)
    assert theirs.cost.total_ms == pytest.approx(ours.cost.total_ms, rel=0.02)
    assert (theirs.sequences, theirs.active) == (1, 0)


def test_a_burst_of_one_prefix_does_not_scatter_over_replicas():
    one, two = router(4, "a"), router(4, "b")
    prompt = range(3200)
    first = one.schedule(request(prompt), 0.0).chosen.worker
    exchange(one, two, 0.01)
    second = two.schedule(request([*prompt, *range(5000, 5040)]), 0.02).chosen
    assert second.worker == first
    assert second.cached_tokens == 3200 - BLOCK  # of a whole number of blocks, the last is not counted


def test_told_prefixes_end_by_themselves():
    one, two = router(1, "a"), router(1, "b")
    one.schedule(request(range(320)), 0.0)
    exchange(one, two, 0.0)
    chain = hashes(range(320))
    assert two.index.match(chain)
    two.tick(30.0)
    assert not two.index.match(chain)


def test_no_request_counts_as_told_and_as_foreign():
    """The engine's own count includes what peers have there: told, it is no foreign load; silent, it is."""
    one, two = router(1, "a"), router(1, "b")
    endpoint = worker(0).endpoint
    for n in range(4):
        one.schedule(request(range(n * 100, n * 100 + 60), request_id=str(n)), 0.0)
    exchange(one, two, 0.0)
    (state,) = two.table.all()
    total = []
    for at in range(1, 12):
        now = float(at)
        if at <= 3:
            exchange(one, two, now)
        two.on_metrics(endpoint, {0: metrics(running=4)}, now)
        two.on_metrics(endpoint, {0: metrics(running=4)}, now)
        total.append(two.peers.load(worker(0), now).sequences + state.foreign.running)
        two.tick(now)
    assert total == [4] * 11
    assert state.foreign.running == 4


def test_a_peer_waiting_for_prefill_is_not_taken_for_a_stalled_engine():
    one, two = router(1, "a"), router(1, "b")
    for n in range(4):
        one.schedule(request(range(n * 5000, n * 5000 + 4000), request_id=str(n)), 0.0)
    exchange(one, two, 0.0)
    (state,) = two.table.all()
    for _ in range(2):
        two.on_metrics(worker(0).endpoint, {0: metrics(running=1, waiting=3)}, 0.1)
    assert (state.foreign.waiting, state.stalled(4)) == (0, 0.0)


def test_ends_are_told_too():
    one, two = router(1, "a"), router(1, "b")
    lease = one.schedule(request(range(320)), 0.0).lease_id
    exchange(one, two, 0.0)
    assert two.peers.load(worker(0), 0.0).sequences == 1
    one.release(lease, Completion(Outcome.FINISHED), 1.0)
    exchange(one, two, 1.0)
    assert two.peers.load(worker(0), 1.0).sequences == 0


def test_a_worker_that_leaves_takes_what_was_told_of_it_along():
    one, two = router(2, "a"), router(2, "b")
    one.schedule(request(range(320)), 0.0)
    exchange(one, two, 0.0)
    two.on_membership((), 0.0)
    two.on_membership(members(2), 0.0)
    assert [two.peers.load(worker(n), 0.0).sequences for n in range(2)] == [0, 0]
    assert two.index.match(hashes(range(320))) == []
    two.tick(60.0)


def test_a_router_without_a_teller_says_so():
    with pytest.raises(ValueError, match="set `teller` first"):
        router().tell(0.0)
