from extproc.core.evictions import Evictions
from extproc.core.types import BlockRemoved, BlockStored, Tier
from tests.support.core import worker

A, B = worker(0), worker(1)


def removed(*handles, tier=Tier.GPU):
    return BlockRemoved(handles, tier)


def test_what_left_the_gpu_while_a_request_was_there():
    evictions = Evictions()
    evictions.on_events(A, [removed(1)])
    evictions.begin("r", [A])
    evictions.on_events(A, [removed(2, 3), removed(4, tier=Tier.CPU), BlockStored((9,), None, (1,), 1)])
    evictions.on_events(B, [removed(5)])
    assert evictions.end("r", A) == 2
    assert evictions.end("r", A) is None  # it has ended


def test_a_request_that_one_of_several_served():
    evictions = Evictions()
    for who in (A, B):
        evictions.on_events(who, [removed(0)])
    evictions.begin("r", [A, B])
    evictions.on_events(B, [removed(1)])
    assert evictions.end("r", B) == 1


def test_without_events_nothing_is_known():
    evictions = Evictions()
    evictions.begin("r", [A])
    evictions.on_events(A, [removed(1)])
    assert evictions.end("r", A) is None
    evictions.begin("s", [A])
    evictions.forget(A)
    assert evictions.end("s", A) is None
