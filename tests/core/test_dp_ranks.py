import pytest

from extproc.core.dp_ranks import by_worker, learns_rank, mismatch, place_of, told_rank
from extproc.core.types import EngineMetrics, Member, WorkerId


def page(*ranks):
    return {rank: EngineMetrics(running=rank) for rank in ranks}


def test_a_member_s_ranks_follow_its_first():
    hybrid, internal = Member("h:1", dp_size=2, dp_start_rank=4), Member("h:1", dp_size=2)
    assert hybrid.workers() == (WorkerId("h:1", 4), WorkerId("h:1", 5))
    for member in (hybrid, internal):
        assert [place_of(member, worker) for worker in member.workers()] == [0, 1]


def test_a_page_with_one_rank_is_its_only_worker_s_whatever_its_number():
    """vLLM with an external load balancer names each server's rank by its number in the deployment."""
    workers = Member("h:1").workers()
    assert by_worker(workers, page(3)) == {WorkerId("h:1"): EngineMetrics(running=3)}
    assert by_worker(workers, page(0, 1)) == {WorkerId("h:1"): EngineMetrics(running=0)}
    assert by_worker(workers, {}) == {}


def test_several_ranks_are_told_apart_by_their_numbers():
    hybrid = Member("h:1", dp_size=2, dp_start_rank=2).workers()
    assert by_worker(hybrid, page(2, 3)) == {
        WorkerId("h:1", 2): EngineMetrics(running=2),
        WorkerId("h:1", 3): EngineMetrics(running=3),
    }
    assert by_worker(hybrid, page(3, 4)) == {WorkerId("h:1", 3): EngineMetrics(running=3)}
    assert by_worker(Member("h:1", dp_size=2).workers(), page(3)) == {}
    assert by_worker((), page(0)) == {}


@pytest.mark.parametrize(
    ("member", "ranks", "told"),
    [
        (Member("h:1"), {3}, 3),
        (Member("h:1"), {0}, 0),
        (Member("h:1"), set(), None),
        (Member("h:1"), {2, 3}, None),
        (Member("h:1", dp_size=2), {3}, None),
        (Member("h:1", dp_start_rank=2), {3}, None),
    ],
)
def test_the_number_of_an_only_rank_is_learned_unless_it_is_described(member, ranks, told):
    assert told_rank(member, ranks) == told
    assert learns_rank(member) == (member == Member("h:1"))


@pytest.mark.parametrize(
    ("member", "ranks"),
    [
        (Member("h:1"), set()),
        (Member("h:1"), {7}),
        (Member("h:1", dp_size=2), {0, 1}),
        (Member("h:1", dp_size=2, dp_start_rank=2), {3, 2}),
        (Member("h:1", dp_start_rank=2), {2}),
    ],
)
def test_ranks_that_are_expected(member, ranks):
    assert mismatch(member, ranks) is None


@pytest.mark.parametrize(
    ("member", "ranks", "detail", "advice"),
    [
        (Member("h:1"), {2, 3}, "ranks 2 to 3, the configuration expects rank 0", ("size: 2", "rank: 2")),
        (Member("h:1", dp_size=2), {4, 5}, "4 to 5, the configuration expects ranks 0 to 1", ("rank: 4",)),
        (Member("h:1", dp_size=2), {0}, "rank 0, the configuration", ("dp_size: 1", "start_rank: 0")),
        (Member("h:1", dp_start_rank=2), {3}, "rank 3, the configuration expects rank 2", ("rank: 3",)),
        (Member("h:1", dp_size=2), {0, 2}, "ranks 0, 2, the configuration", ("follow each other",)),
    ],
)
def test_ranks_that_are_not_expected(member, ranks, detail, advice):
    found = mismatch(member, ranks)
    assert detail in found.detail
    assert all(words in found.advice for words in advice)
