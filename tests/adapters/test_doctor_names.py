from random import Random

import pytest
from aiohttp import web

from extproc.adapters.doctor_findings import Status
from extproc.adapters.doctor_names import (
    check_aliases,
    check_isolation,
    check_revisions,
    check_tenants,
    salted_pools,
    served_by,
)
from extproc.core.tenancy import Isolation, TenantBook, TenantPolicy
from extproc.core.types import Member
from tests.support.http import Upstream
from tests.support.sim_engine import SimEngine

A, B = Member("10.0.0.1:80", "a"), Member("10.0.0.2:80", "b")


def statuses(findings):
    return {finding.subject: finding.status for finding in findings}


def test_aliases_must_lead_to_what_is_served():
    findings = check_aliases({"best": "m", "old": "gone"}, ["m", "lora"])
    assert statuses(findings) == {"alias best": Status.OK, "alias old": Status.FAIL}
    assert "lora, m" in findings[1].advice
    assert check_aliases({"best": "m"}, []) == []  # nobody told: another check's business


@pytest.mark.parametrize(
    ("described", "served", "expected"),
    [
        ([], {"a": "v1", "b": "v1"}, []),
        (["v2"], {"a": "v1", "b": "v2"}, [Status.OK]),
        ([], {"a": "v1", "b": "v2"}, [Status.WARN]),
        ([], {"a": "v2"}, [Status.WARN]),
    ],
)
def test_revisions_that_are_not_described_are_warned_of(described, served, expected):
    assert [one.status for one in check_revisions("p", "v1", described, served)] == expected


def test_a_tenant_without_any_worker_is_a_mistake():
    book = TenantBook(
        {
            "one": TenantPolicy(pools=frozenset({"a"})),
            "lost": TenantPolicy(pools=frozenset({"a"}), workers=frozenset({"10.0.0.2"})),
            "none": TenantPolicy(pools=frozenset()),
        },
        TenantPolicy(isolation=Isolation.SALTED),
    )
    findings = check_tenants(book, {"a": [A], "b": [B]})
    assert statuses(findings) == {
        "tenant one": Status.OK,
        "tenant lost": Status.FAIL,
        "tenant none": Status.OK,
        "tenant (unknown)": Status.OK,
    }
    assert salted_pools(book, ["a", "b"]) == ["a", "b"]
    assert "refused" in check_tenants(TenantBook(), {})[0].detail
    assert salted_pools(TenantBook({"x": TenantPolicy()}), ["a"]) == []


async def test_an_engine_that_keeps_salts_apart():
    async with SimEngine(block_size=16) as engine:
        member = Member(engine.endpoint)
        assert [card.id for card in await served_by(member)] == ["tiny"]
        assert (await check_isolation(member, "tiny", Random(1))).status is Status.OK


@pytest.mark.parametrize(
    ("cached", "status"), [((0, 592, 592), Status.FAIL), ((0, 0, 0), Status.WARN), (None, Status.WARN)]
)
async def test_an_engine_that_does_not(cached, status):
    counts = iter(cached or ())

    async def respond(request, received):
        if cached is None:
            return web.Response(status=500)
        return web.json_response({"usage": {"prompt_tokens_details": {"cached_tokens": next(counts)}}})

    async with Upstream(respond) as engine:
        member = Member(engine.endpoint)
        assert (await check_isolation(member, "m", Random(1))).status is status
        if cached is None:
            assert await served_by(member) == ()
