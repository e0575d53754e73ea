import pytest

from extproc.core.adapter_slots import AdapterSlots
from extproc.core.cost import CostSettings
from extproc.core.engine_shares import EngineShares
from extproc.core.engine_steps import Mark
from extproc.core.kv_index import KvIndex
from extproc.core.learned import Learned
from extproc.core.load_ledger import LoadLedger
from extproc.core.peer_loads import PeerLoads, PeerNews, ToldLoad
from extproc.core.worker_facts import FactsReader, slowness, worst_of
from extproc.core.worker_table import ForeignLoad, WorkerTable
from tests.support.core import BLOCK, decision, members, metrics, stored, worker

NOBODY = ForeignLoad(0, 0)


class Fleet:
    def __init__(self):
        costs = CostSettings(prefill_tokens_per_s=1000.0)
        self.table, self.ledger, self.index = WorkerTable(), LoadLedger(), KvIndex()
        self.peers, self.learned = PeerLoads(), Learned(costs)
        self.table.update(members(3), 0.0)
        for n in range(3):
            self.index.add_worker(worker(n), "model", "tokenizer")
        self.reader = FactsReader(
            ledger=self.ledger,
            peers=self.peers,
            index=self.index,
            learned=self.learned,
            adapters=AdapterSlots(),
            shares=EngineShares(),
            costs=costs,
            block_size=lambda state, told: BLOCK,
            stale_after_s=5.0,
        )

    def state(self, n=0):
        return self.table.get(worker(n))

    def read(self, n=0, foreign=NOBODY, now=1.0):
        terms = self.reader.terms("default")
        return self.reader.read(self.state(n), foreign, terms, None, 100.0, now)

    def slowness(self, n):
        return slowness(self.read(n).facts.ttft, self.reader.terms("default").ttft.typical)

    def scrape(self, n, now=0.0, **fields):
        self.table.on_metrics(worker(n).endpoint, {0: metrics(**fields)}, now)
        self.state(n).note_foreign(0)


def test_an_idle_worker_has_nothing_and_its_memory_is_not_known():
    facts = Fleet().read().facts
    assert (facts.sequences, facts.queued_prefill_ms, facts.beside) == (0, 0.0, 0.0)
    assert (facts.capacity_tokens, facts.unused_tokens) == (None, None)


def test_load_of_ours_of_other_routers_and_of_others_adds_up():
    fleet = Fleet()
    fleet.ledger.admit(decision("a", prompt_tokens=400, prefill_ms=300.0, uncovered=300), 1, (), 1.0, 1e9)
    told = ToldLoad(2, 1, 1000, 100, 500.0, 600.0, 80.0)
    fleet.peers.take(PeerNews("other", 1, 1, whole=True, loads=((worker(0), told),)), lambda _: True, 1.0)
    reading = fleet.read(foreign=ForeignLoad(1, 4))
    facts = reading.facts
    assert (facts.sequences, facts.prefilling, facts.foreign_waiting) == (1 + 2 + 4, 1 + 1, 1)
    assert facts.queued_prefill_ms == pytest.approx(300.0 + 500.0)
    assert facts.context_tokens == reading.context_tokens == 400 + 1000
    assert facts.beside >= 80.0 + 4 * 100.0
    assert reading.load.active == 1
    assert fleet.read(1).facts.sequences == 0


def test_memory_is_what_metrics_and_events_tell():
    fleet = Fleet()
    fleet.scrape(0, num_gpu_blocks=100)
    fleet.index.apply(worker(0), stored(range(10 * BLOCK)))
    facts = fleet.read().facts
    assert (facts.capacity_tokens, facts.unused_tokens) == (100 * BLOCK, 90 * BLOCK)
    assert fleet.read(now=9.0).facts.capacity_tokens is None  # too old to mean anything


def test_memory_in_use_is_what_is_expected_and_no_more_than_the_engine_tells_and_has_not_seen():
    fleet = Fleet()
    for number in range(4):
        fleet.ledger.admit(decision(str(number), prompt_tokens=400, prefill_ms=0.0), 1, (), 0.0, 1e9)
    steps = fleet.state().steps
    for now in (0.5, 1.5):
        fleet.scrape(0, now, num_gpu_blocks=1000, kv_usage=0.05)
        computed = fleet.ledger.computed_tokens(worker(0), now)
        steps.note(fleet.state().metrics, Mark(now, computed, 0))
    assert fleet.read(now=1.5).facts.held_tokens == 0.05 * 1000 * BLOCK
    fleet.ledger.admit(decision("since", prompt_tokens=500, prefill_ms=0.0, uncovered=500), 1, (), 1.6, 1e9)
    assert fleet.read(now=1.7).facts.held_tokens == 0.05 * 1000 * BLOCK + 500
    for number in range(3):
        fleet.ledger.release(str(number), 1.8)
    assert fleet.read(now=1.9).facts.held_tokens == 400 + 500


def test_who_has_not_told_lately_is_as_bad_as_the_worst_that_has():
    fleet = Fleet()
    fleet.scrape(0, running=3, waiting=1, now=4.0)
    fleet.scrape(1, running=1, waiting=5, now=4.0)
    states = fleet.table.all()
    found = fleet.reader.foreign(states, 5.0)
    assert found[worker(2)] == ForeignLoad(5, 3)
    assert found[worker(0)] == ForeignLoad(1, 3)
    assert fleet.reader.foreign(states, 99.0)[worker(0)] == NOBODY
    assert worst_of([]) == NOBODY


def test_a_worker_that_differs_is_as_slow_as_it_was_seen_to_be():
    fleet = Fleet()
    assert fleet.slowness(0) == 1.0
    model = fleet.learned.ttft.of("default")
    for _ in range(40):
        for n, factor in ((0, 4.0), (1, 1.0), (2, 1.0)):
            took = factor * (10.0 + 1000.0)
            model.observe(worker(n), uncovered=1000, cached=0, sequences=0, ttft_ms=took)
    assert fleet.slowness(0) > 1.5
