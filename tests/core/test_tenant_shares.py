from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.core.tenancy import TenantBook, TenantPolicy
from extproc.core.tenant_shares import TenantShares
from extproc.core.types import Completion, Outcome, Reason
from tests.support.core import BLOCK, members, request

BOOK = TenantBook(
    {
        "capped": TenantPolicy(cold_quota=0.5),
        "heavy": TenantPolicy(weight=3.0),
        "light": TenantPolicy(weight=1.0),
        "both": TenantPolicy(weight=3.0, cold_quota=0.25),
        "none": TenantPolicy(cold_quota=0.0),
    },
    TenantPolicy(),
)
DONE = Completion(Outcome.FINISHED)


def make_router(workers=4, book=BOOK):
    ids = count()
    costs = CostSettings(prefill_tokens_per_s=1000.0)
    router = Router(
        POLICIES["token-load"](costs),
        Random(1),
        new_lease_id=lambda: f"l{next(ids)}",
        pools={"default": PoolFacts("model", "tokenizer", BLOCK)},
        costs=costs,
        tenants=book,
    )
    router.on_membership(members(workers), 0.0)
    return router


_bases = count(1)


def cold(router, tenant):
    base = next(_bases) * 10_000
    return router.schedule(request(range(base, base + 20 * BLOCK), tenant=tenant), 1.0)


@pytest.mark.parametrize(("tenant", "expected"), [("capped", 2), ("none", 1), ("heavy", 4), ("other", 4)])
def test_cold_requests_of_a_tenant_stay_on_its_part_of_the_workers(tenant, expected):
    router = make_router()
    decisions = [cold(router, tenant) for _ in range(12)]
    assert len({decision.chosen.worker for decision in decisions}) == expected
    limited = {decision.reason for decision in decisions[expected:]} & {Reason.TENANT_LIMIT}
    assert bool(limited) == (expected < 4)
    assert all(len(decision.candidates) == 4 for decision in decisions)  # the others are still fallbacks


def test_weights_share_the_workers_among_tenants_that_have_cold_requests():
    router = make_router()
    light = cold(router, "light")
    assert len({cold(router, "heavy").chosen.worker for _ in range(12)}) == 3
    assert {cold(router, "light").chosen.worker for _ in range(6)} == {light.chosen.worker}
    alone = make_router()
    assert len({cold(alone, "light").chosen.worker for _ in range(12)}) == 4


def test_what_ends_makes_room():
    router = make_router(2)
    first = cold(router, "capped")
    assert cold(router, "capped").chosen.worker == first.chosen.worker
    for lease in list(router.ledger):
        router.release(lease.id, DONE, 2.0)
    assert len(router.tenant_shares) == 0
    others = {cold(router, "capped").chosen.worker for _ in range(1)}
    assert len(others) == 1


def test_warm_requests_are_not_limited():
    router = make_router(2)
    prompt = range(1, 1 + 20 * BLOCK)
    first = router.schedule(request(prompt, tenant="capped"), 1.0)
    busy = cold(router, "capped")
    assert busy.chosen.worker == first.chosen.worker
    again = router.schedule(request(prompt, tenant="capped"), 1.0)
    assert again.chosen.shares.warm is True
    assert again.reason is not Reason.TENANT_LIMIT


def test_a_worker_that_leaves_takes_its_requests_along():
    router = make_router(4)
    for _ in range(6):
        cold(router, "capped")
    router.on_membership((), 2.0)
    assert len(router.tenant_shares) == 0


@given(st.lists(st.tuples(st.sampled_from(sorted([*BOOK.policies, "other"])), st.booleans()), max_size=40))
def test_no_tenant_is_ever_on_more_workers_than_its_limit(steps):
    router = make_router(5)
    open_leases = []
    for tenant, ends in steps:
        if ends and open_leases:
            router.release(open_leases.pop(0).lease_id, DONE, 2.0)
            continue
        limit = router.tenant_shares.limit("default", tenant, 5)
        on = {d.chosen.worker for d in open_leases if d.request.tenant == tenant}
        decision = cold(router, tenant)
        open_leases.append(decision)
        assert limit is None or decision.chosen.worker in on or len(on) < limit


@given(st.floats(0, 1), st.integers(1, 50))
def test_a_limit_is_a_share_and_at_least_one(quota, workers):
    shares = TenantShares(TenantBook({"t": TenantPolicy(cold_quota=quota)}))
    limit = shares.limit("p", "t", workers)
    assert max(1, quota * workers) - 1e-6 <= limit < quota * workers + 1 + 1e-6 or limit == 1
    assert shares.limit("p", "stranger", workers) is None
