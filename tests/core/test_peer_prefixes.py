from extproc.core import peer_prefixes
from extproc.core.kv_index import KvIndex
from extproc.core.peer_loads import SentPrefix
from extproc.core.peer_prefixes import PeerPrefixes
from tests.support.core import worker


def indexed(*workers):
    index = KvIndex()
    for one in workers:
        index.add_worker(one, "", "")
    return index


def blocks(index, *hashes):
    return {match.worker: match.blocks for match in index.match(hashes)}


def test_they_count_as_there_until_their_time_is_up():
    index = indexed(worker(0), worker(1))
    prefixes = PeerPrefixes(index)
    prefixes.take([SentPrefix(worker(0), (1, 2, 3), 2.0)], 10.0)
    prefixes.take([SentPrefix(worker(0), (1, 2), 4.0)], 10.0)
    assert blocks(index, 1, 2, 3, 4) == {worker(0): 3}
    prefixes.tick(11.9)
    assert prefixes.blocks == 5
    prefixes.tick(12.0)
    assert blocks(index, 1, 2, 3, 4) == {worker(0): 2}
    prefixes.tick(14.0)
    assert (blocks(index, 1), prefixes.blocks) == ({}, 0)


def test_unknown_workers_are_passed_over():
    index = indexed()
    prefixes = PeerPrefixes(index)
    prefixes.take([SentPrefix(worker(0), (1,), 2.0)], 0.0)
    assert prefixes.blocks == 0


def test_a_worker_that_left_the_index_took_them_along():
    index = indexed(worker(0))
    prefixes = PeerPrefixes(index)
    prefixes.take([SentPrefix(worker(0), (1, 2), 2.0)], 0.0)
    index.remove_worker(worker(0))
    prefixes.forget(worker(0))
    index.add_worker(worker(0), "", "")
    prefixes.tick(5.0)
    assert prefixes.blocks == 0


def test_memory_and_lifetime_are_bounded(monkeypatch):
    monkeypatch.setattr(peer_prefixes, "MAX_BLOCKS", 10)
    index = indexed(worker(0))
    prefixes = PeerPrefixes(index)
    prefixes.take(
        [SentPrefix(worker(0), tuple(range(8)), 1e9), SentPrefix(worker(0), (20, 21, 22), 1.0)], 0.0
    )
    assert (prefixes.blocks, prefixes.left_out) == (8, 3)
    prefixes.tick(peer_prefixes.MAX_LIFETIME_S)
    assert prefixes.blocks == 0


def test_what_is_no_chain_ends_with_the_others():
    """Whoever tells nonsense: hashes of which the same one follows on different ones."""
    index = indexed(worker(0))
    prefixes = PeerPrefixes(index)
    told = [(1, 2, 3), (1, 9, 3), (1, 9)]
    prefixes.take([SentPrefix(worker(0), hashes, 1.0 + at) for at, hashes in enumerate(told)], 0.0)
    for now in (1.0, 2.0, 3.0):
        prefixes.tick(now)
    assert prefixes.blocks == 0
