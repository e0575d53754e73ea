from random import Random

import pytest

from extproc.sim.routing import PolicyUnavailableError
from loadtests.peers.dynamo import Dynamo
from loadtests.peers.dynamo_formula import DynamoFormula
from tests.loadtests.peers.support import Asking, document, facts, removed, stored


@pytest.fixture
def real():
    try:
        router = Dynamo(facts(), 0)
    except PolicyUnavailableError as error:
        pytest.skip(str(error))
    yield router
    router.close()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("loadtests.peers.dynamo.import_module", missing)
    with pytest.raises(PolicyUnavailableError, match=r"warmroute\[peers\]"):
        Dynamo(facts(), 0)


def test_every_event_is_seen_before_the_next_decision(real):
    asking = Asking(real)
    for number in range(60):
        real.on_kv_events(number % 3, [stored(document(number, 20))], 0.0)
        assert asking.ask(document(number, 20)) == number % 3
        asking.end(number + 1)


@pytest.mark.parametrize("seed", range(3))
def test_the_formula_is_what_the_service_computes(real, seed):
    """The same overlaps, and the worker the formula finds cheapest, on a random history."""
    rng = Random(seed)
    formula = DynamoFormula(facts(), 0)
    asking = Asking(None)
    held = [set() for _ in range(3)]
    under_way: dict[str, bool] = {}
    told_apart = 0
    for step in range(250):
        what, worker = rng.random(), rng.randrange(3)
        blocks = document(rng.randrange(4), rng.randrange(40))
        if what < 0.25:
            new = [block for block in blocks if block not in held[worker]]
            if new:
                at = blocks.index(new[0])
                held[worker].update(new)
                event = stored(new, blocks[at - 1] if at else None)
                for router in (real, formula):
                    router.on_kv_events(worker, [event], step)
        elif what < 0.35:
            old = [block for block in blocks if block in held[worker]]
            tail = old[rng.randrange(len(old)) :] if old else []
            whole = [b for b in held[worker] if tail and b >> 32 == tail[0] >> 32 and b >= tail[0]]
            if whole:
                held[worker] -= set(whole)
                for router in (real, formula):
                    router.on_kv_events(worker, [removed(sorted(whole, reverse=True))], step)
        elif what < 0.5 and under_way:
            request_id = rng.choice(list(under_way))
            for router in (real, formula):
                if under_way[request_id]:
                    router.on_finished(request_id, 0, 1, step)
                else:
                    router.on_first_token(request_id, step)
            if under_way[request_id]:
                del under_way[request_id]
            else:
                under_way[request_id] = True
        else:
            request = asking.request(blocks, extra=rng.randint(1, 16))
            costs = formula.costs(request)
            assert real.overlap(request) == [formula.index.overlap(w, blocks) for w in range(3)]
            chosen = real.route(request, step)
            assert costs[chosen] == min(costs)
            told_apart += costs.count(min(costs)) == 1
            formula.book(request, chosen)
            under_way[request.request_id] = False
    assert told_apart > 60
