import pytest
from aiohttp import web

from extproc.adapters.doctor_findings import Status
from extproc.adapters.doctor_ranks import check_ranks, rank_told_by
from extproc.core.types import Member
from tests.support.http import Upstream
from tests.support.ports import free_port
from tests.support.sim_engine import SimEngine


@pytest.mark.parametrize(
    ("member", "ranks", "status", "words"),
    [
        (Member("h:1", dp_size=2), {0, 1}, Status.OK, "data-parallel ranks 0, 1"),
        (Member("h:1"), {3}, Status.OK, "data-parallel rank 3"),
        (
            Member("h:1", dp_size=2),
            {2, 3},
            Status.FAIL,
            "ranks 2 to 3, the configuration expects ranks 0 to 1",
        ),
        (Member("h:1"), {2, 3}, Status.FAIL, "expects rank 0"),
        (Member("h:1"), {0, 1}, Status.WARN, "ranks 0 to 1, the configuration expects rank 0"),
        # Its metrics are found, its KV events are looked for at another port.
        (Member("h:1", dp_start_rank=1), {2}, Status.WARN, "rank 2, the configuration expects rank 1"),
    ],
)
def test_ranks_on_the_page(member, ranks, status, words):
    found = check_ranks(member, ranks)
    assert (found.subject, found.check, found.status) == ("h:1", "ranks", status)
    assert words in found.detail
    assert bool(found.advice) == (status is not Status.OK)


@pytest.mark.parametrize("ranks", [{0}, set()])
def test_an_engine_without_ranks_needs_no_word_about_them(ranks):
    assert check_ranks(Member("h:1"), ranks) is None


async def test_what_an_only_rank_is_called():
    async with SimEngine(dp_rank=3) as engine:
        assert await rank_told_by(Member(engine.endpoint)) == 3
        assert await rank_told_by(Member(engine.endpoint, dp_start_rank=0)) is None
        assert await rank_told_by(Member(engine.endpoint, dp_size=2)) is None

    async def respond(request, received):
        return web.Response(text="no page at all")

    async with Upstream(respond) as other:
        assert await rank_told_by(Member(other.endpoint)) is None
    assert await rank_told_by(Member(f"127.0.0.1:{free_port()}")) is None
