import pytest

from extproc.analysis.tally import MOST_GROUPS, OTHERS, Buckets, Groups


def test_a_bucket_holds_what_is_at_most_its_bound():
    buckets = Buckets((1, 10))
    for value in (0, 1, 2, 10, 11):
        buckets.add(value)
    assert (buckets.counts, buckets.total) == ([2, 2, 1], 5)


@pytest.mark.parametrize(("share", "bound"), [(0.2, 1), (0.5, 10), (0.8, 10), (1.0, 10)])
def test_quantiles_are_bounds(share, bound):
    buckets = Buckets((1, 10))
    for value in (0, 1, 2, 10, 11):
        buckets.add(value)
    assert buckets.quantile(share) == bound
    assert Buckets((1,)).quantile(share) is None


def test_groups_beyond_the_limit_are_counted_together():
    groups = Groups()
    for at in range(MOST_GROUPS + 7):
        groups.of(f"tenant {at}").add(10, 5, 3, 4, 1.5)
    assert len(groups.groups) == MOST_GROUPS + 1
    assert (groups.groups[OTHERS].requests, groups.merged) == (7, 7)
    [(name, group)] = groups.largest(1)
    assert (name, group.tokens, group.lost) == (OTHERS, 70, 10.5)
