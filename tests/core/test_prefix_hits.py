import pytest

from extproc.core.doubts import Doubts
from extproc.core.hashing import prompt_chain, token_array
from extproc.core.kv_index import KvIndex
from extproc.core.prefix_hits import Hit, look_up
from extproc.core.types import Tier
from extproc.core.worker_table import WorkerTable
from tests.support.core import BLOCK, NAMESPACE, members, stored, worker

PROMPT = list(range(1, 200))


def chain(tokens, size=BLOCK):
    return tuple(prompt_chain(token_array(tokens), size, NAMESPACE.seed))


class Fleet:
    def __init__(self, *sizes):
        self.index, self.doubts, self.table = KvIndex(), Doubts(), WorkerTable()
        self.sizes = {worker(n): size for n, size in enumerate(sizes)}
        self.table.update(members(len(sizes)), 0.0)
        for one in self.sizes:
            self.index.add_worker(one, "model", "tokenizer")

    def store(self, n, tokens, first_handle=1, **fields):
        size = self.sizes[worker(n)]
        self.index.apply(worker(n), stored(tokens, block_size=size, first_handle=first_handle, **fields))

    def look_up(self, *prompts):
        chains = {size: tuple(chain(one, size) for one in prompts) for size in sorted({*self.sizes.values()})}
        return look_up(self.index, self.doubts, chains, self.sizes.get, self.table.get, 1.0)


def test_only_those_that_hold_something_are_found_in_every_tier():
    fleet = Fleet(BLOCK, BLOCK)
    fleet.store(0, PROMPT[:64])
    fleet.store(0, PROMPT[:128], first_handle=100, tier=Tier.CPU)
    found = fleet.look_up(PROMPT)
    assert found.of == {worker(0): Hit(64, 64, 0, 1.0)}
    assert found.sizes == {worker(0): BLOCK}


def test_a_worker_is_looked_up_with_blocks_of_its_own_size():
    fleet = Fleet(BLOCK, 2 * BLOCK)
    fleet.store(0, PROMPT[:48])
    fleet.store(1, PROMPT[:64])
    found = fleet.look_up(PROMPT)
    assert {one: hit.cached for one, hit in found.of.items()} == {worker(0): 48, worker(1): 64}
    assert found.sizes == fleet.sizes


def test_hits_of_several_prompts_add_up():
    fleet, other = Fleet(BLOCK), list(range(1000, 1100))
    fleet.store(0, PROMPT[:64])
    fleet.store(0, other[:32], first_handle=100)
    assert fleet.look_up(PROMPT, other).of == {worker(0): Hit(96, 0, 0, 1.0)}


def test_what_is_doubted_is_told_apart_and_its_odds_are_weighed():
    fleet, other = Fleet(BLOCK), list(range(1000, 1100))
    fleet.store(0, PROMPT[:64])
    fleet.store(0, other[:32], first_handle=100)
    fleet.doubts.doubt(worker(0), chain(PROMPT)[2:4], 1.0)
    assert fleet.look_up(PROMPT).of[worker(0)][:3] == (32, 0, 32)
    assert fleet.look_up(PROMPT, other).of[worker(0)][:3] == (64, 0, 32)
    mixed = Hit(0, 0, 10, 1.0).plus(Hit(0, 0, 30, 0.2))
    assert mixed.doubtful == 40
    assert mixed.odds == pytest.approx(0.4)


def test_who_may_not_serve_the_request_or_may_have_restarted_has_nothing():
    fleet = Fleet(BLOCK, BLOCK)
    for n in range(2):
        fleet.store(n, PROMPT[:64])
    fleet.table.get(worker(0)).kv_suspended = True
    assert set(fleet.look_up(PROMPT).of) == {worker(1)}
    fleet.table.update(members(1), 0.0)
    assert fleet.look_up(PROMPT).of == {}
    fleet.index.reserve(worker(0), chain(PROMPT)[:3])  # but for what was sent there
    assert fleet.look_up(PROMPT).of == {worker(0): Hit(48, 0, 0, 1.0)}
