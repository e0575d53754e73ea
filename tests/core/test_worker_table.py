from extproc.core.types import EngineMetrics, Member, WorkerId
from extproc.core.worker_table import WorkerTable
from tests.support.core import members, metrics, worker


def table_of(count, **fields):
    table = WorkerTable(**fields)
    table.update(members(count), 0.0)
    return table


def ready(table, now=0.0, subset=None):
    return [state.id for state in table.ready("default", subset, now)]


def test_members_are_ready_until_something_says_otherwise():
    assert ready(table_of(2)) == [worker(0), worker(1)]


def test_every_data_parallel_rank_is_a_worker():
    table = WorkerTable()
    table.update([Member("h:1", dp_size=2)], 0.0)
    assert ready(table) == [WorkerId("h:1", 0), WorkerId("h:1", 1)]


def test_pitfall_74_one_failed_scrape_ejects_nobody_three_in_a_row_do():
    table = table_of(2)
    endpoint = worker(0).endpoint
    assert [table.on_scrape_failure(endpoint) for _ in range(2)] == [False, False]
    table.on_metrics(endpoint, {0: metrics()}, 1.0)
    assert [table.on_scrape_failure(endpoint) for _ in range(4)] == [False, False, True, False]
    assert ready(table) == [worker(1)]
    table.on_metrics(endpoint, {0: metrics()}, 2.0)
    assert ready(table) == [worker(0), worker(1)]


def test_an_unreachable_worker_is_out_until_a_scrape_succeeds():
    table = table_of(2)
    table.on_connect_failure(worker(0).endpoint, 1.0)
    assert ready(table, 2.0) == [worker(1)]
    table.on_metrics(worker(0).endpoint, {0: metrics()}, 2.5)
    assert ready(table, 2.5) == [worker(0), worker(1)]


def test_without_scrapes_a_failed_connection_is_forgiven_after_a_while():
    table = table_of(1, unreachable_s=10.0)
    table.on_connect_failure(worker(0).endpoint, 1.0)
    assert ready(table, 10.9) == []
    assert ready(table, 11.0) == [worker(0)]


def test_a_returning_worker_has_a_new_generation_and_no_past():
    table = table_of(1)
    table.on_metrics(worker(0).endpoint, {0: metrics(running=5)}, 0.5)
    before = table.get(worker(0)).generation
    assert table.update([], 1.0).removed == (worker(0),)
    assert table.update(members(1), 2.0).added == (worker(0),)
    after = table.get(worker(0))
    assert after.generation > before
    assert after.metrics is None


def test_workers_that_stay_keep_their_state():
    table = table_of(1)
    table.on_metrics(worker(0).endpoint, {0: metrics(running=5)}, 0.5)
    change = table.update(members(2), 1.0)
    assert change.added == (worker(1),)
    assert table.get(worker(0)).metrics.running == 5


def test_metrics_have_an_age_and_old_ones_are_not_used():
    table = table_of(1)
    state = table.get(worker(0))
    assert state.metrics_age_s(3.0) is None
    table.on_metrics(worker(0).endpoint, {0: metrics()}, 3.0)
    assert state.metrics_age_s(5.0) == 2.0
    assert state.fresh_metrics(5.0, stale_after_s=5.0) is not None
    assert state.fresh_metrics(9.0, stale_after_s=5.0) is None


def test_a_subset_restricts_and_an_empty_one_leaves_nobody():
    table = table_of(3)
    assert ready(table, subset=frozenset({worker(1).endpoint, "10.9.9.9:1"})) == [worker(1)]
    assert ready(table, subset=frozenset()) == []


def test_counters_that_fall_are_a_restart():
    table = table_of(2)
    endpoint = worker(0).endpoint
    for tokens, expected in ((None, ()), (100.0, ()), (250.0, ()), (40.0, (worker(0),)), (60.0, ())):
        scrape = {0: metrics(prompt_tokens=tokens)}
        assert tuple(state.id for state in table.restarted(endpoint, scrape)) == expected
        table.on_metrics(endpoint, scrape, 1.0)


def test_who_waits_without_prefill_ahead_waits_for_a_place():
    table = table_of(1)
    state = table.get(worker(0))
    assert state.stalled(10) == 0.0
    seen = [(6, 4, 2, 1.0), (2, 4, 2, 0.0), (3, 0, 0, 3.0), (None, 4, 0, 0.0)]
    for waiting, running, queued, stalled in seen:
        table.on_metrics(worker(0).endpoint, {0: metrics(waiting=waiting, running=running)}, 1.0)
        state.note_foreign(10)
        state.note_stalled(queued)
        assert state.stalled(10) == stalled


def test_who_waits_for_a_grammar_is_in_nobodys_way():
    table = table_of(1)
    state = table.get(worker(0))
    table.on_metrics(worker(0).endpoint, {0: metrics(waiting=3, deferred=3, running=0)}, 1.0)
    state.note_foreign(3)
    state.note_stalled(0)
    assert state.stalled(3) == 0.0


def test_who_waited_at_the_last_scrape_has_a_place_when_others_have_ended():
    table = table_of(1)
    state = table.get(worker(0))
    table.on_metrics(worker(0).endpoint, {0: metrics(waiting=3, running=4)}, 1.0)
    state.note_foreign(7)
    state.note_stalled(0)
    assert [state.stalled(sequences) for sequences in (9, 7, 6, 5, 4, 0)] == [0.75, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_foreign_load_is_what_two_scrapes_agree_on():
    table = table_of(1)
    state = table.get(worker(0))

    def scrape(waiting, running, ours):
        table.on_metrics(worker(0).endpoint, {0: metrics(waiting=waiting, running=running)}, 1.0)
        state.note_foreign(ours)
        return state.foreign

    assert scrape(0, 5, 5) == (0, 0)
    assert scrape(0, 5, 0) == (0, 0)  # ours, which have just ended
    assert scrape(3, 8, 2) == (0, 5)
    assert scrape(3, 8, 2) == (3, 6)
    table.on_metrics(worker(0).endpoint, {0: metrics(waiting=None)}, 2.0)
    state.note_foreign(0)
    assert state.foreign is None


def test_a_page_that_names_one_rank_is_that_of_the_only_worker():
    table = WorkerTable()
    table.update([Member("h:1"), Member("h:2", dp_size=2, dp_start_rank=2)], 0.0)
    assert table.on_metrics("h:1", {3: EngineMetrics(prompt_tokens=9.0)}, 1.0) == {
        WorkerId("h:1"): EngineMetrics(prompt_tokens=9.0)
    }
    assert table.get(WorkerId("h:1")).metrics_at == 1.0
    assert [one.id for one in table.restarted("h:1", {3: EngineMetrics(prompt_tokens=1.0)})] == [
        WorkerId("h:1")
    ]
    table.on_metrics("h:2", {2: EngineMetrics(running=2), 3: EngineMetrics(running=3)}, 1.0)
    assert [table.get(WorkerId("h:2", rank)).metrics.running for rank in (2, 3)] == [2, 3]
    assert table.on_metrics("gone:1", {0: EngineMetrics()}, 1.0) == {}


def test_the_worker_at_a_place_of_its_server():
    table = WorkerTable()
    table.update([Member("h:1"), Member("h:2", dp_size=2, dp_start_rank=2)], 0.0)
    assert table.at_place("h:1", 0).id == WorkerId("h:1")
    assert table.at_place("h:2", 1).id == WorkerId("h:2", 3)
    assert table.at_place("h:2", 2) is None
    assert table.at_place("gone:1", 0) is None
