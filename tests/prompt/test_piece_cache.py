import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from extproc.prompt.piece_cache import PieceCache


def test_what_was_kept_is_found():
    cache = PieceCache(10_000)
    cache.keep(["a", "b"], [b"1", b"2"])
    assert cache.find(["b", "c", "a", "b"]) == [b"2", None, b"1", b"2"]


def test_the_least_recently_found_goes_first():
    cache = PieceCache(1500)
    names = [f"piece {number}" for number in range(7)]
    for name in names:
        cache.keep([name], [b"0123" * 16])
        cache.find([names[0]])
    found = cache.find(names)
    assert found[0] is not None
    assert found[-1] is not None
    assert found[1] is None
    assert cache.stats.evicted == found.count(None)


def test_a_piece_too_large_is_not_kept():
    cache = PieceCache(10_000)
    cache.keep(["small", "x" * 5000], [b"1", b"2"])
    assert cache.find(["small", "x" * 5000]) == [b"1", None]


def test_characters_are_counted():
    cache = PieceCache(1)
    cache.count(known=3, new=4)
    cache.count(known=1, new=0)
    assert (cache.stats.known, cache.stats.new) == (4, 4)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 900), st.booleans()), max_size=60))
def test_size_is_what_is_held_and_within_the_limit(steps):
    cache = PieceCache(3000)
    kept = {}
    for name, length, look in steps:
        piece = name * (length + 1)
        if look:
            (found,) = cache.find([piece])
            assert found is None or found == kept[piece]
        else:
            kept[piece] = bytes(length)
            cache.keep([piece], [kept[piece]])
        held = [one for one in kept if cache.find([one]) != [None]]
        assert cache.stats.pieces == len(held)
        assert sum(sys.getsizeof(one) + sys.getsizeof(kept[one]) for one in held) <= cache.stats.size <= 3000


def test_threads_share_it():
    cache = PieceCache(5000)

    def work(seed):
        random = Random(seed)
        for _ in range(300):
            piece = f"piece {random.randrange(40)}"
            (found,) = cache.find([piece])
            assert found in (None, piece.encode())
            cache.keep([piece], [piece.encode()])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 0 < cache.stats.size <= 5000
    assert cache.stats.pieces == sum(ids is not None for ids in cache.find([f"piece {n}" for n in range(40)]))
