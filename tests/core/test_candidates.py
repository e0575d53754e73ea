import pytest

from extproc.core.candidates import CandidateBuilder, PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.engine_steps import Mark
from extproc.core.hashing import token_array
from extproc.core.kv_index import KvIndex
from extproc.core.learned import Learned
from extproc.core.load_ledger import LoadLedger
from extproc.core.trust import TrustBook
from extproc.core.types import BlockStored, Tier
from extproc.core.worker_table import WorkerTable
from tests.support.core import BLOCK, decision, members, metrics, request, stored, worker

PROMPT = list(range(1, 200))


class Fleet:
    def __init__(self, count=2, block_size=BLOCK):
        costs = CostSettings(prefill_tokens_per_s=1000.0, overhead_ms=0.0, step_ms_per_sequence=0.0)
        self.table = WorkerTable()
        self.table.update(members(count), 0.0)
        self.builder = CandidateBuilder(
            ledger=LoadLedger(),
            index=KvIndex(),
            learned=Learned(costs),
            trust=TrustBook(),
            pools={"default": PoolFacts(block_size=block_size)},
            costs=costs,
            stale_after_s=5.0,
        )
        for n in range(count):
            self.builder.index.add_worker(worker(n), "model", "tokenizer")

    def build(self, ask, now=1.0):
        candidates, chains, _ = self.builder.build(ask, self.table.ready("default", None, now), now)
        return {c.worker: c for c in candidates}, chains


def test_cached_offloaded_and_uncovered_add_up_to_the_prompt():
    fleet = Fleet()
    fleet.builder.index.apply(worker(0), stored(PROMPT[:64]))
    fleet.builder.index.apply(worker(0), stored(PROMPT[:128], first_handle=100, tier=Tier.CPU))
    candidates, _ = fleet.build(request(PROMPT))
    zero = candidates[worker(0)]
    assert (zero.cached_tokens, zero.offloaded_tokens) == (64, 64)
    assert zero.cached_tokens + zero.offloaded_tokens + zero.uncovered_tokens == len(PROMPT)
    assert candidates[worker(1)].uncovered_tokens == len(PROMPT)


def test_pitfall_47_a_suspended_worker_claims_nothing_and_forgets_nothing():
    fleet = Fleet()
    fleet.builder.index.apply(worker(0), stored(PROMPT[:64]))
    state = fleet.table.get(worker(0))
    for suspended, cached in ((True, 0), (False, 64)):
        state.kv_suspended = suspended
        candidates, _ = fleet.build(request(PROMPT))
        assert candidates[worker(0)].cached_tokens == cached


def test_a_batch_is_matched_prompt_by_prompt():
    fleet = Fleet()
    other = list(range(1000, 1100))
    fleet.builder.index.apply(worker(0), stored(PROMPT[:64]))
    fleet.builder.index.apply(worker(0), stored(other[:32], first_handle=100))
    ask = request(PROMPT, sequences=2)
    ask.prompts = (token_array(PROMPT), token_array(other))
    ask.prompt_tokens = len(PROMPT) + len(other)
    candidates, chains = fleet.build(ask)
    assert candidates[worker(0)].cached_tokens == 64 + 32
    assert len(chains[BLOCK]) == 2


def test_without_a_block_size_no_prefix_is_claimed():
    fleet = Fleet(block_size=None)
    candidates, chains = fleet.build(request(PROMPT))
    assert candidates[worker(0)].block_size is None
    assert chains == {}


def test_workers_of_different_block_size_are_each_matched_on_their_own_chain():
    fleet = Fleet()
    fleet.builder.index.apply(worker(0), stored(PROMPT, block_size=16))
    fleet.builder.index.apply(worker(1), stored(PROMPT, block_size=64))
    candidates, chains = fleet.build(request(PROMPT))
    assert sorted(chains) == [16, 64]
    assert candidates[worker(0)].cached_tokens == 192
    assert candidates[worker(1)].cached_tokens == 192
    assert candidates[worker(1)].block_size == 64


def test_our_own_leases_are_not_taken_for_others_requests():
    fleet = Fleet()
    state = fleet.table.get(worker(0))
    fleet.builder.ledger.admit(decision("a", prefill_ms=0.0), 1, (), 1.0, 1e9)
    fleet.table.on_metrics(worker(0).endpoint, {0: metrics(waiting=1)}, 1.0)
    state.note_foreign(1)
    candidates, _ = fleet.build(request(PROMPT))
    assert candidates[worker(0)].cost.queue_ms == 0.0
    for _ in range(2):
        fleet.table.on_metrics(worker(0).endpoint, {0: metrics(waiting=3, running=4)}, 1.0)
        state.note_foreign(1)
    candidates, _ = fleet.build(request(PROMPT))
    assert candidates[worker(0)].cost.queue_ms == pytest.approx(3 * len(PROMPT))
    assert candidates[worker(0)].sequences == 1 + 3


def test_a_prefix_that_many_requests_share_is_held_once():
    fleet = Fleet()
    for n in range(20):
        fleet.builder.ledger.admit(decision(str(n), prompt_tokens=5000, prefill_ms=0.0), 1, (), 1.0, 1e9)
    full = {"num_gpu_blocks": 1000}
    fleet.table.on_metrics(worker(0).endpoint, {0: metrics(**full)}, 1.0)
    assert fleet.build(request(PROMPT))[0][worker(0)].cost.kv_risk_ms > 0.0
    told = metrics(kv_usage=0.4, **full)
    fleet.table.on_metrics(worker(0).endpoint, {0: told}, 1.0)
    for at in (1.0, 2.0):
        computed = fleet.builder.ledger.computed_tokens(worker(0), at)
        fleet.table.get(worker(0)).steps.note(told, Mark(at, computed, 0))
    assert fleet.build(request(PROMPT))[0][worker(0)].cost.kv_risk_ms == 0.0


def test_a_worker_short_of_memory_is_dearer():
    fleet = Fleet()
    fleet.table.on_metrics(worker(0).endpoint, {0: metrics(num_gpu_blocks=5)}, 1.0)
    fleet.table.on_metrics(worker(1).endpoint, {0: metrics(num_gpu_blocks=5000)}, 1.0)
    candidates, _ = fleet.build(request(PROMPT))
    assert candidates[worker(0)].cost.kv_risk_ms > 0.0
    assert candidates[worker(1)].cost.kv_risk_ms == 0.0


def test_chains_known_beforehand_need_no_prompt():
    fleet = Fleet()
    fleet.builder.index.apply(worker(1), BlockStored((7, 8), None, (), BLOCK, chained=True))
    ask = request(prompt_tokens=3 * BLOCK, chains={BLOCK: ((7, 8),)})
    found, chains = fleet.build(ask)
    assert (found[worker(0)].cached_tokens, found[worker(1)].cached_tokens) == (0, 2 * BLOCK)
    assert chains == {BLOCK: ((7, 8),)}


def test_chains_of_another_block_size_say_nothing():
    fleet = Fleet()
    fleet.builder.index.apply(worker(1), BlockStored((7, 8), None, (), BLOCK, chained=True))
    found, _ = fleet.build(request(prompt_tokens=3 * BLOCK, chains={2 * BLOCK: ((7, 8),)}))
    assert found[worker(1)].cached_tokens == 0


def test_the_price_knows_how_busy_each_worker_has_been():
    fleet = Fleet()
    for n in range(20):
        fleet.builder.shares.book(decision(f"lease-{n}", 0, prefill_ms=100.0), n * 0.2)
    candidates, _ = fleet.build(request(PROMPT), 4.0)
    assert candidates[worker(0)].priced.worker.utilization == pytest.approx(0.5, rel=0.2)
    assert candidates[worker(1)].priced.worker.utilization == 0.0
