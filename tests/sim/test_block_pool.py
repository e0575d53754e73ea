from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from extproc.sim.block_pool import BlockPool
from tests.support.engine_reference import residents_from

TOKENS = array("I", range(1000))


def store(pool: BlockPool, hashes: list[int]) -> list[int]:
    blocks = pool.allocate(len(hashes))
    pool.cache(blocks, hashes, 0, len(hashes), TOKENS, None, None)
    return blocks


def test_one_block_is_kept_back() -> None:
    pool = BlockPool(4, 16)
    assert pool.free == 3
    assert 0 not in pool.allocate(3)
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)


def test_a_chain_is_evicted_from_its_tail() -> None:
    pool = BlockPool(5, 16)
    pool.release(store(pool, [10, 11, 12, 13]))
    pool.take_events()
    pool.allocate(2)
    assert pool.take_events() == (BlockRemoved((13,)), BlockRemoved((12,)))
    assert pool.residents() == {10: 1, 11: 1}


def test_the_least_recently_released_chain_goes_first() -> None:
    pool = BlockPool(5, 16)
    first, second = store(pool, [10, 11]), store(pool, [20, 21])
    pool.release(second)
    pool.release(first)
    pool.allocate(2)
    assert pool.residents() == {10: 1, 11: 1}


def test_a_hit_saves_a_block_from_eviction() -> None:
    pool = BlockPool(5, 16)
    pool.release(store(pool, [10, 11]))
    pool.release(store(pool, [20, 21]))
    hit = pool.match([10, 11, 12], 3)
    pool.touch(hit)
    assert [pool.references(block) for block in hit] == [1, 1]
    pool.allocate(2)
    assert pool.residents() == {10: 1, 11: 1}


def test_blank_blocks_are_reused_before_any_cached_one() -> None:
    pool = BlockPool(6, 16)
    pool.release(store(pool, [10, 11]))
    blank = pool.allocate(2)
    pool.release(blank)
    assert pool.allocate(2) == blank[::-1]
    assert pool.residents() == {10: 1, 11: 1}


def test_equal_blocks_are_not_merged_and_the_first_one_answers() -> None:
    pool = BlockPool(6, 16)
    first, second = store(pool, [10]), store(pool, [10])
    assert pool.residents() == {10: 2}
    assert pool.match([10], 1) == first
    pool.release(first)
    pool.allocate(4)
    assert pool.match([10], 1) == second
    assert pool.residents() == {10: 1}


def test_a_match_stops_at_the_first_gap_and_at_the_limit() -> None:
    pool = BlockPool(8, 16)
    store(pool, [10, 11, 12])
    assert len(pool.match([10, 99, 12], 3)) == 1
    assert len(pool.match([10, 11, 12], 2)) == 2
    assert pool.match([], 5) == []


def test_a_stored_event_tells_what_a_listener_needs() -> None:
    pool = BlockPool(8, 4)
    blocks = pool.allocate(3)
    pool.cache(blocks, [10, 11, 12], 0, 2, TOKENS, "lora", "salt")
    pool.cache(blocks, [10, 11, 12], 2, 3, TOKENS, "lora", "salt")
    first, second = pool.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent, first.block_hashes, list(first.token_ids)) == (None, (10, 11), list(range(8)))
    assert first.extra_keys == (("lora", "salt"), ("lora",))
    assert (second.parent, second.block_hashes, list(second.token_ids)) == (11, (12,), list(range(8, 12)))
    assert (second.lora_name, second.extra_keys) == ("lora", (("lora",),))


def test_a_salt_marks_only_the_first_block() -> None:
    pool = BlockPool(8, 4)
    pool.cache(pool.allocate(2), [10, 11], 0, 2, TOKENS, None, "salt")
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert event.extra_keys == (("salt",), None)
    assert len(event.token_ids) == 8


def test_without_tokens_the_hashes_are_the_identity() -> None:
    pool = BlockPool(8, 4)
    pool.cache(pool.allocate(2), [10, 11], 0, 2, None, None, None)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert (event.chained, event.block_hashes, event.token_ids) == (True, (10, 11), ())


def test_a_reset_waits_for_running_sequences() -> None:
    pool = BlockPool(6, 16)
    blocks = store(pool, [10, 11])
    assert not pool.reset()
    pool.release(blocks)
    pool.take_events()
    assert pool.reset()
    assert pool.take_events() == (AllBlocksCleared(),)
    assert pool.match([10], 1) == []


def test_without_events_none_are_kept() -> None:
    pool = BlockPool(4, 16, emit_events=False)
    pool.release(store(pool, [10]))
    pool.allocate(3)
    pool.release([1, 2, 3])
    assert pool.reset()
    assert pool.take_events() == ()


class PoolMachine(RuleBasedStateMachine):
    """Any legal use leaves counts, queue and events in agreement."""

    held = Bundle("held")

    @initialize(blocks=st.integers(2, 24))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, 4)
        self.events: list[KvEvent] = []
        self.expected_references: dict[int, int] = {}

    @rule(target=held, family=st.integers(0, 2), length=st.integers(1, 6), full=st.integers(0, 6))
    def run(self, family: int, length: int, full: int) -> list[int]:
        hashes = [family * 100 + index for index in range(length)]
        hits = self.pool.match(hashes, length)
        if length - len(hits) + self.pool.unreferenced(hits) > self.pool.free:
            return []
        self.pool.touch(hits)
        blocks = hits + self.pool.allocate(length - len(hits))
        stop = max(len(hits), min(full, length))
        if stop > len(hits):
            self.pool.cache(blocks, hashes, len(hits), stop, TOKENS, None, None)
        for block in blocks:
            self.expected_references[block] = self.expected_references.get(block, 0) + 1
        return blocks

    @rule(blocks=consumes(held))
    def finish(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.expected_references[block] -= 1

    @rule()
    def reset(self) -> None:
        idle = not any(self.expected_references.values())
        assert self.pool.reset() == idle

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        queue = list(pool.free_queue())
        used = {block for block, count in self.expected_references.items() if count}
        assert len(queue) == len(set(queue)) == pool.free
        assert used.isdisjoint(queue)
        assert len(used) + len(queue) == pool.num_blocks - 1
        for block in range(1, pool.num_blocks):
            assert pool.references(block) == self.expected_references.get(block, 0)
        self.events.extend(pool.take_events())
        assert residents_from(self.events) == pool.residents()
        assert pool.cached_hashes == len(pool.residents())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
