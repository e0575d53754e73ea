import pytest

from extproc.core.destinations import named_rank
from extproc.core.leases import IDLE
from extproc.core.types import Completion, Member, Outcome, WorkerId
from tests.core.test_router import PROMPT, make_router
from tests.support.core import metrics, request, stored

A, B, C = "a:1", "b:1", "c:1"


def fleet(**sizes):
    router = make_router(0)
    router.on_membership([Member(f"{name}:1", dp_size=size) for name, size in sizes.items()], 0.0)
    return router


def routed_to(router, worker):
    """A request that goes there, because its prompt is there."""
    router.on_kv_events(worker, [stored(PROMPT)], 0.0)
    decision = router.schedule(request(PROMPT), 1.0)
    assert decision.chosen.worker == worker
    return decision


def test_endpoints_are_named_once_in_order_of_preference():
    router = fleet(a=1, b=1, c=1)
    decision = routed_to(router, WorkerId(B))
    names = router.destinations(decision, 3)
    assert (names[0], sorted(names)) == (B, [A, B, C])
    assert router.destinations(decision, 2) == names[:2]


@pytest.mark.parametrize(("rank", "named"), [(2, {A, B}), (1, {A, B, C}), (0, {A, B, C, "d:1"})])
def test_only_who_has_the_rank_that_the_request_names_is_a_fallback(rank, named):
    router = fleet(a=3, b=3, c=2, d=1)
    decision = routed_to(router, WorkerId(B, rank))
    names = router.destinations(decision, 9)
    assert (names[0], set(names)) == (B, named)


def test_where_the_chosen_engine_has_one_rank_none_is_named_and_anybody_is_a_fallback():
    router = fleet(a=1, b=3)
    assert set(router.destinations(routed_to(router, WorkerId(A)), 9)) == {A, B}


@pytest.mark.parametrize("subset", [None, frozenset({A})])
def test_a_retry_elsewhere_runs_on_the_rank_that_it_names(subset):
    """Also where nobody has priced it there."""
    router = fleet(a=2, b=2)
    router.on_kv_events(WorkerId(A, 1), [stored(PROMPT)], 0.0)
    decision = router.schedule(request(PROMPT, subset=subset), 1.0)
    assert decision.chosen.worker == WorkerId(A, 1)
    router.on_served(decision.lease_id, B, 1.1)
    loads = {worker: router.ledger.load(worker, 1.2) for worker in (WorkerId(B, 0), WorkerId(B, 1))}
    assert loads[WorkerId(B, 0)] == IDLE
    assert loads[WorkerId(B, 1)].active == 1
    assert router.ledger.load(WorkerId(A, 1), 1.2) == IDLE
    router.release(decision.lease_id, Completion(Outcome.FINISHED, served_by=B), 1.3)
    assert router.ledger.load(WorkerId(B, 1), 1.4) == IDLE


def test_an_endpoint_of_another_pool_has_not_taken_it():
    router = fleet(a=2)
    router.on_membership([Member(A, dp_size=2), Member(B, pool="other", dp_size=2)], 0.5)
    decision = routed_to(router, WorkerId(A, 1))
    router.on_served(decision.lease_id, B, 1.1)
    assert router.ledger.load(WorkerId(A, 1), 1.2).active == 1


def hybrid():
    """Two nodes of a deployment, each with a server of its own for two of its four ranks, and one alone."""
    router = make_router(0)
    nodes = (Member(A, dp_size=2), Member(B, dp_size=2, dp_start_rank=2), Member(C, dp_start_rank=4))
    router.on_membership(nodes, 0.0)
    return router


@pytest.mark.parametrize(("rank", "place", "named"), [(2, 0, {A, B, C}), (3, 1, {A, B})])
def test_a_request_names_the_place_of_a_rank_in_its_server(rank, place, named):
    """vLLM refuses a number in the deployment: "data_parallel_rank 2 is out of range [0, 2)"."""
    router = hybrid()
    decision = routed_to(router, WorkerId(B, rank))
    assert named_rank(decision, router.table) == place
    assert set(router.destinations(decision, 9)) == named


def test_a_retry_on_another_node_runs_at_the_same_place_there():
    router = hybrid()
    router.on_metrics(A, {0: metrics(), 1: metrics(running=9)}, 0.5)  # the better one there is the other
    decision = routed_to(router, WorkerId(B, 3))
    router.on_served(decision.lease_id, A, 1.1)
    assert router.ledger.load(WorkerId(A, 1), 1.2).active == 1
    assert router.ledger.load(WorkerId(B, 3), 1.2) == IDLE
