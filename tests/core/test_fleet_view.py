from extproc.core.cost import CostSettings, WorkerFacts
from extproc.core.fleet_view import FleetView
from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_model import TtftCoefficients
from extproc.core.types import Member
from extproc.core.worker_table import ForeignLoad, WorkerTable
from tests.support.core import members, metrics, worker

COSTS = CostSettings()
FACTS = WorkerFacts(
    TtftCoefficients(10.0, 0.0, 1.0, 0.0), 0.0, 0.0, 0, 0, 0, None, StepCoefficients(10.0, 0.1, 0.0)
)


class Fleet:
    """A view of 20 workers, and what was read for it."""

    def __init__(self, fleet=None):
        self.table = WorkerTable()
        self.table.update(members(20) if fleet is None else fleet, 0.0)
        self.read = []
        self.view = FleetView(
            lambda state: None if state.metrics is None else state.metrics.block_size,
            lambda state, now: state.foreign,
            self._facts,
            COSTS,
        )
        self.look()

    def _facts(self, name, output, now):
        self.read.append((name, round(output)))
        return FACTS, 1.0

    def look(self):
        self.view.look(self.table.ready("default", None, 0.0))
        return self.view

    def scrape(self, n, **fields):
        self.table.on_metrics(worker(n).endpoint, {0: metrics(**fields)}, 0.0)
        self.table.get(worker(n)).note_foreign(0)
        self.view.renew(worker(n))


def test_block_sizes_are_those_that_workers_have_told():
    fleet = Fleet()
    assert fleet.view.block_sizes == ()
    fleet.scrape(3, block_size=64)
    fleet.scrape(4)
    assert fleet.view.block_sizes == (16, 64)
    assert [fleet.view.block_size(worker(n)) for n in (3, 4, 5, 99)] == [64, 16, None, None]
    fleet.scrape(3, block_size=16)
    assert fleet.view.block_sizes == (16,)


def test_it_tells_whether_all_serve_one_revision():
    fleet = Fleet()
    assert fleet.view.all_serve(None)
    fleet.table.get(worker(2)).revision = "b"
    fleet.view.renew(worker(2))
    assert not fleet.view.all_serve(None)
    for state in fleet.view.states:
        state.revision = "b"
        fleet.view.renew(state.id)
    assert fleet.view.all_serve("b")


def test_it_follows_who_is_ready():
    fleet = Fleet([*members(19), Member(worker(19).endpoint, cold=True)])
    assert fleet.view.cold_pool == (worker(19),)
    fleet.table.on_connect_failure(worker(19).endpoint, 0.0)
    assert fleet.look().ids == tuple(worker(n) for n in range(19))
    assert fleet.view.cold_pool == ()
    fleet.view.renew(worker(19))  # one that is not there changes nothing
    assert fleet.view.block_sizes == ()


def test_who_is_silent_is_as_bad_as_the_worst_that_has_told():
    fleet = Fleet()
    silent, first = (fleet.table.get(worker(n)) for n in (0, 1))
    assert fleet.view.foreign(silent, 0.0) == ForeignLoad(0, 0)
    fleet.scrape(1, running=4, waiting=2)
    fleet.scrape(2, running=9, waiting=0)
    assert fleet.view.foreign(silent, 0.0) == ForeignLoad(2, 9)
    assert fleet.view.foreign(first, 0.0) == ForeignLoad(2, 4)


def test_rows_of_silent_workers_are_read_again_when_the_worst_is_another():
    fleet = Fleet()
    fleet.view.foreign(fleet.table.get(worker(0)), 0.0)
    fleet.view.rows(128.0, 1, 0.0)
    fleet.read.clear()
    fleet.scrape(1, running=4)
    fleet.view.rows(128.0, 1, 0.0)
    assert fleet.read == [(worker(0), 128)]


def test_lengths_that_are_near_to_each_other_share_rows_and_few_are_kept():
    fleet = Fleet()
    first = fleet.view.rows(128.0, 1, 0.0)
    assert fleet.view.rows(120.0, 1, 0.0) is first
    others = [fleet.view.rows(2.0**power, 1, 0.0) for power in range(8, 16)]
    assert len(set(map(id, others))) == 8
    assert fleet.view.rows(128.0, 1, 0.0) is not first
