from loadtests.peers.llmd_prefix_index import ApproximatePrefixIndex
from tests.loadtests.peers.support import Asking, document


def chunks_of(index, blocks, extra=8):
    return index.chunks(Asking(None).request(document(0, blocks), extra))


def test_chunks_are_of_64_tokens_at_least_and_the_rest_counts():
    index = ApproximatePrefixIndex(16)
    assert index.chunk_tokens == 64
    # 168 tokens: two chunks of 64, known by their last blocks, and a rest of 40.
    chunks = chunks_of(index, 10)
    assert chunks[:2] == [document(0, 10)[3], document(0, 10)[7]]
    assert len(chunks) == 3
    assert ApproximatePrefixIndex(128).chunk_tokens == 128
    assert ApproximatePrefixIndex(48).chunk_tokens == 96


def test_nothing_beyond_131072_tokens_is_looked_at():
    index = ApproximatePrefixIndex(16)
    assert len(chunks_of(index, 9000)) == 2048


def test_a_match_counts_chunks_up_to_one_that_nobody_was_sent():
    index = ApproximatePrefixIndex(16)
    index.add([1, 2, 3], 0, None)
    index.add([1, 2, 4], 1, None)
    assert index.match([1, 2, 3, 5]) == {0: 3, 1: 2}
    assert index.match([1, 9, 3]) == {0: 1, 1: 1}
    assert index.match([9, 1]) == {}


def test_a_worker_has_as_many_entries_as_gpu_blocks_and_drops_the_least_recently_sent():
    index = ApproximatePrefixIndex(16)
    index.add([1, 2, 3], 0, 3)
    index.add([1], 0, 3)
    index.add([4], 0, 3)
    assert index.match([2]) == {}
    assert [index.match([chunk]) for chunk in (1, 3, 4)] == [{0: 1}] * 3


def test_the_size_is_fixed_when_a_worker_is_first_sent_something():
    index = ApproximatePrefixIndex(16)
    index.add([1], 0, 2)
    index.add([2, 3], 0, 100)
    assert index.match([1]) == {}


def test_uncached_tokens_are_whole_chunks_and_what_is_beyond_them():
    index = ApproximatePrefixIndex(16)
    assert index.uncached_tokens(168, matched=2, total=3) == 64
    assert index.uncached_tokens(140_000, matched=2048, total=2048) == 140_000 - 131_072
