from array import array
from collections import OrderedDict
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.placement import BlockCache, Fleet
from extproc.analysis.prefix_tree import PrefixTree

SIZE = 4


class PlainCache:
    """vLLM's rule block by block: least recently used first, of one prompt the last block first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def request(self, ids: list[int]) -> int:
        full = [tuple(ids[:end]) for end in range(SIZE, len(ids) + 1, SIZE)]
        hit = 0
        for block in full:
            if block not in self.blocks:
                break
            hit += 1
        for block in reversed(full):
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return min(hit, max(0, len(ids) - 1) // SIZE)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=60)


@given(PROMPTS, st.integers(1, 12))
def test_a_cache_hits_what_a_cache_of_single_blocks_hits(prompts, capacity):
    cache = BlockCache(capacity, SIZE)
    tree = PrefixTree(1 << 30, cache.split)
    plain = PlainCache(capacity)
    for now, ids in enumerate(prompts):
        _, path = tree.add("", array("I", ids).tobytes())
        hit = min(cache.hit_blocks(path), max(0, len(ids) - 1) // SIZE)
        cache.store(path, now)
        assert hit == plain.request(ids)
        assert cache.held == len(plain.blocks)


def documents(rng: Random, count: int) -> list[list[int]]:
    texts = [[rng.randrange(1000) for _ in range(64)] for _ in range(20)]
    return [[*rng.choice(texts), *(rng.randrange(1000) for _ in range(8))] for _ in range(count)]


def run(replicas: int, capacity: int, *, prefix: bool) -> Fleet:
    rng = Random(1)
    fleet = Fleet(replicas, capacity, SIZE, Random(2))
    tree = PrefixTree(1 << 30, fleet.split)
    for ids in documents(rng, 400):
        _, path = tree.add("", array("I", ids).tobytes())
        fleet.route(path, len(ids), None if prefix else rng.randrange(replicas))
    return fleet


def test_placement_by_prefix_hits_more_than_random_the_more_replicas_there_are():
    gains = []
    for replicas in (2, 4, 8):
        by_prefix, random = run(replicas, 100, prefix=True), run(replicas, 100, prefix=False)
        gains.append(by_prefix.hit_tokens - random.hit_tokens)
    assert gains == sorted(gains)
    assert gains[0] > 0


def test_a_cache_too_small_for_the_documents_hits_little():
    assert run(2, 40, prefix=False).hit_tokens < run(2, 1000, prefix=False).hit_tokens / 2


def test_one_hot_prefix_does_not_take_all_replicas_load():
    fleet = Fleet(4, 1 << 20, SIZE, Random(3))
    tree = PrefixTree(1 << 30, fleet.split)
    rng = Random(4)
    hot = [1] * 64
    for _ in range(3000):
        ids = [*hot, *(rng.randrange(1000) for _ in range(400))]
        _, path = tree.add("", array("I", ids).tobytes())
        fleet.route(path, len(ids))
    assert fleet.imbalance < 1.6
