from collections import Counter

import pytest

from loadtests.peers.ray_consistent_hash import SEED, RayConsistentHash, murmur3
from tests.loadtests.peers.support import Asking, facts


@pytest.mark.parametrize(
    ("data", "seed", "low"),
    [
        # From the mmh3 package (5.2), which Ray uses.
        (b"0:7", SEED, 6779420563892278110),
        (b"hello", 0, 14688674573012802306),
        (b"", 0, 0),
    ],
)
def test_the_hash_is_murmur3(data, seed, low):
    assert murmur3(data, seed) == low


def test_a_session_stays_where_it_is_whatever_the_load():
    asking = Asking(RayConsistentHash(facts(4), 0))
    assert len({asking.ask(session_id="rollout-7") for _ in range(100)}) == 1


def test_sessions_are_spread_over_all_workers():
    asking = Asking(RayConsistentHash(facts(4), 0))
    sent = Counter(asking.ask(session_id=f"session-{number}") for number in range(4000))
    assert set(sent) == {0, 1, 2, 3}
    assert min(sent.values()) > 600


def test_a_worker_that_joins_takes_only_its_share():
    three, four = (Asking(RayConsistentHash(facts(n), 0)) for n in (3, 4))
    moved = [
        (before, after)
        for number in range(2000)
        if (before := three.ask(session_id=str(number))) != (after := four.ask(session_id=str(number)))
    ]
    assert {after for _, after in moved} == {3}
    assert len(moved) < 800
