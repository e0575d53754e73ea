import math

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.types import EngineMetrics, Member, WorkerId
from extproc.core.worker_table import Readiness, WorkerTable
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


def slow(table, n, *began):
    """Scrapes that timed out though the worker was connected to: whether each made it not ready."""
    return [table.on_page_failure(worker(n).endpoint, at, slow=True) for at in began]


def test_slow_pages_eject_a_worker_that_serves_nothing():
    table = table_of(2)
    assert slow(table, 0, 1.0, 4.0, 7.0, 10.0) == [False, False, True, False]
    assert ready(table, 12.0) == [worker(1)]
    table.on_metrics(worker(0).endpoint, {0: metrics()}, 13.0)
    assert ready(table, 13.0) == [worker(0), worker(1)]


def test_slow_pages_count_for_nothing_where_requests_are_served_meanwhile():
    table = table_of(2)
    for began in range(10):
        table.on_served(worker(0).endpoint, began + 0.5)
        assert slow(table, 0, float(began)) == [False]
    assert ready(table, 10.0) == [worker(0), worker(1)]
    assert table.get(worker(0)).scrape_failures == 10  # they are still told


def test_pages_that_are_broken_count_whatever_is_served():
    """Else who is ready would depend on the traffic, for as long as the page is broken."""
    table = table_of(2)
    endpoint = worker(0).endpoint
    for began in range(3):
        table.on_served(endpoint, began + 0.5)
        left = table.on_page_failure(endpoint, float(began), slow=False)
    assert left
    table.on_served(endpoint, 4.0)
    assert ready(table, 4.0) == [worker(1)]


def test_what_was_served_before_a_scrape_began_says_nothing_of_it():
    table = table_of(2)
    table.on_served(worker(0).endpoint, 0.9)
    assert slow(table, 0, 1.0, 4.0, 7.0) == [False, False, True]


def test_a_request_that_is_served_takes_back_all_slow_pages_before_it():
    table = table_of(2)
    slow(table, 0, 1.0, 4.0)
    table.on_served(worker(0).endpoint, 6.5)
    assert slow(table, 0, 7.0, 10.0) == [False, False]
    assert slow(table, 0, 13.0) == [True]
    assert ready(table, 15.5) == [worker(1)]
    table.on_served(worker(0).endpoint, 16.0)  # one that it had before
    assert ready(table, 16.0) == [worker(0), worker(1)]


def test_what_refuses_connections_is_not_believed_alive_by_what_it_still_finishes():
    table = table_of(2)
    endpoint = worker(0).endpoint
    for at in (1.0, 2.0, 3.0):
        table.on_scrape_failure(endpoint)
        table.on_served(endpoint, at + 0.5)
    assert ready(table, 4.0) == [worker(1)]
    # It accepts them again, and serves: what failed then was its page alone.
    slow(table, 0, 4.0)
    assert ready(table, 6.0) == [worker(1)]
    table.on_served(endpoint, 6.5)
    assert ready(table, 6.5) == [worker(0), worker(1)]


def test_a_connection_the_proxy_could_not_make_is_not_forgiven_by_what_is_still_finished():
    table = table_of(2)
    table.on_connect_failure(worker(0).endpoint, 1.0)
    table.on_served(worker(0).endpoint, 1.5)
    assert ready(table, 2.0) == [worker(1)]


def broken(table, n, times=3):
    for _ in range(times):
        table.on_page_failure(worker(n).endpoint, 0.0, slow=False)


def refusing(table, n, times=3):
    for _ in range(times):
        table.on_scrape_failure(worker(n).endpoint)


def test_where_nobody_is_ready_the_slow_serve_then_those_whose_pages_are_broken_then_nobody():
    table = table_of(4)
    refusing(table, 0)
    broken(table, 1)
    slow(table, 2, 1.0, 4.0, 7.0)
    assert ready(table, 9.0) == [worker(3)]
    slow(table, 3, 1.0, 4.0, 7.0)
    assert ready(table, 9.0) == [worker(2), worker(3)]
    assert [table.readiness(state, 9.0) for state in table.all()] == [
        Readiness.OUT,
        Readiness.UNREADABLE,
        Readiness.SLOW,
        Readiness.SLOW,
    ]
    assert not any(table.is_ready(state, 9.0) for state in table.all())
    refusing(table, 2, 1)  # the last news of it counts
    table.on_connect_failure(worker(3).endpoint, 9.0)
    assert ready(table, 9.5) == [worker(1)]
    refusing(table, 1, 1)
    assert ready(table, 9.5) == []
    assert ready(table, 19.0) == [worker(3)]  # the connection is forgiven; its page is as slow as before


def test_who_is_asleep_gets_only_what_nobody_else_can_serve():
    """It serves its page and takes requests, which wait until somebody wakes it up."""
    table = table_of(3)
    asleep, awake = {0: metrics(awake=False)}, {0: metrics(awake=True)}
    assert ready(table) == [worker(0), worker(1), worker(2)]
    table.on_metrics(worker(0).endpoint, asleep, 1.0)
    assert ready(table) == [worker(1), worker(2)]
    assert ready(table, subset={worker(0).endpoint}) == [worker(0)]
    state = table.get(worker(0))
    assert table.readiness(state, 1.0) is Readiness.ASLEEP
    table.on_metrics(worker(1).endpoint, awake, 2.0)
    table.on_metrics(worker(0).endpoint, asleep, 2.0)
    assert ready(table) == [worker(1), worker(2)]
    for n in (1, 2):
        for _ in range(3):
            table.on_page_failure(worker(n).endpoint, 3.0, slow=False)
    assert ready(table) == [worker(1), worker(2)]
    for n in (1, 2):
        table.on_scrape_failure(worker(n).endpoint)
    assert ready(table) == [worker(0)]
    for _ in range(3):
        table.on_page_failure(worker(0).endpoint, 4.0, slow=True)
    assert table.readiness(state, 4.0) is Readiness.ASLEEP
    table.on_metrics(worker(1).endpoint, {0: metrics()}, 5.0)
    assert ready(table) == [worker(1)]
    table.on_metrics(worker(0).endpoint, awake, 6.0)
    assert ready(table) == [worker(0), worker(1)]
    for _ in range(3):
        table.on_scrape_failure(worker(0).endpoint)
    assert table.readiness(state, 6.0) is Readiness.OUT


def test_those_of_a_subset_serve_it_as_a_last_resort_while_others_are_ready():
    table = table_of(3)
    slow(table, 0, 1.0, 4.0, 7.0)
    refusing(table, 1)
    assert ready(table, 9.0) == [worker(2)]
    only = [frozenset({worker(n).endpoint for n in numbers}) for numbers in ((0, 1), (1,), (0, 1, 2))]
    assert [ready(table, 9.0, subset) for subset in only] == [[worker(0)], [], [worker(2)]]
    broken(table, 1)  # it accepts connections again, and is the last of them to be taken
    assert [ready(table, 9.0, subset) for subset in only] == [[worker(0)], [worker(1)], [worker(2)]]
    table.on_connect_failure(worker(1).endpoint, 9.0)
    assert [ready(table, 9.0, subset) for subset in only] == [[worker(0)], [], [worker(2)]]
    slow(table, 2, 1.0, 4.0, 7.0)
    assert [ready(table, 9.0, subset) for subset in only] == [[worker(0)], [], [worker(0), worker(2)]]


def test_those_of_last_resort_are_the_same_list_as_long_as_nothing_changes():
    table = table_of(2)
    for n in range(2):
        slow(table, n, 1.0, 4.0, 7.0)
    found = table.ready("default", None, 9.0)
    slow(table, 0, 10.0)
    assert table.ready("default", None, 12.0) is found
    refusing(table, 0, 1)
    assert ready(table, 12.5) == [worker(1)]


def test_where_all_are_slow_who_has_served_something_is_not_left_with_everything():
    table = table_of(3)
    for n in range(3):
        slow(table, n, 1.0, 4.0, 7.0)
    table.on_served(worker(1).endpoint, 9.5)
    everybody = [worker(n) for n in range(3)]
    assert ready(table, 9.5) == everybody
    assert ready(table, 9.5, frozenset({worker(1).endpoint, worker(2).endpoint})) == everybody[1:]
    assert [table.is_ready(state, 9.5) for state in table.all()] == [False, True, False]
    # Where the page of one can be read, the others have to show that they serve.
    table.on_metrics(worker(0).endpoint, {0: metrics()}, 10.0)
    assert ready(table, 10.0) == everybody[:2]
    assert ready(table, 10.0, frozenset({worker(1).endpoint, worker(2).endpoint})) == everybody[1:]
    # One that is ready is left when its page cannot be read any more either.
    for began in (10.0, 13.0, 16.0):
        table.on_served(worker(0).endpoint, began + 1.0)
        table.on_served(worker(1).endpoint, began + 1.0)
        slow(table, 0, began)
        slow(table, 1, began)
    assert ready(table, 18.0) == everybody


news = st.tuples(
    st.sampled_from(["good", "refused", "slow", "unreadable", "served", "proxy", "nothing"]),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.5, 2.0, 5.0]),
)


def expected(told, now, limit, unreachable_s):
    """How fit a worker is, and whether its page can be read, from all that was told of it.

    That is (time, what, when its scrape began).
    """
    served = [at for at, what, _ in told if what == "served"]
    last_good = max((at for at, what, _ in told if what == "good"), default=-1.0)
    told = [one for one in told if one[0] > last_good]
    failures = [(at, what, began) for at, what, began in told if what in {"refused", "slow", "unreadable"}]
    is_read = len(failures) < limit
    if any(what == "proxy" and now - at < unreachable_s for at, what, _ in told):
        return Readiness.OUT, is_read
    counted = 0
    for at, what, began in failures:
        if what == "slow" and any(began <= end < at for end in served):
            counted = 0
            continue
        following = min((other for other, _, _ in failures if other > at), default=math.inf)
        counted += 1
        if what == "slow" and any(at < end < following for end in served):
            counted = 0
    if counted < limit:
        return Readiness.READY, is_read
    kinds = {"refused": Readiness.OUT, "slow": Readiness.SLOW, "unreadable": Readiness.UNREADABLE}
    return kinds[failures[-1][1]], is_read


def usable(fit):
    """Whom requests may go to, of workers by number."""
    well = [n for n, (readiness, _) in fit.items() if readiness is Readiness.READY]
    if any(fit[n][1] for n in well):
        return well
    slow = [n for n, (readiness, _) in fit.items() if readiness in {Readiness.READY, Readiness.SLOW}]
    return slow or [n for n, (readiness, _) in fit.items() if readiness is Readiness.UNREADABLE]


@settings(max_examples=300, deadline=None)
@given(st.lists(news, max_size=40))
def test_whatever_is_heard_requests_go_to_the_fittest_that_were_reached(history):
    table, now = table_of(3, unreachable_s=4.0), 0.0
    told = {n: [] for n in range(3)}
    for what, n, pause in history:
        now += pause + 0.01
        endpoint, began = worker(n).endpoint, now - 0.6
        match what:
            case "good":
                table.on_metrics(endpoint, {0: metrics()}, now)
            case "refused":
                table.on_scrape_failure(endpoint)
            case "slow" | "unreadable":
                table.on_page_failure(endpoint, began, slow=what == "slow")
            case "served":
                table.on_served(endpoint, now)
            case "proxy":
                table.on_connect_failure(endpoint, now)
        told[n].append((now, what, began))
        fit = {m: expected(told[m], now, 3, 4.0) for m in told}
        assert [table.readiness(table.get(worker(m)), now) for m in told] == [one for one, _ in fit.values()]
        assert ready(table, now) == [worker(m) for m in usable(fit)]
        part = {m: fit[m] for m in (0, 2)}
        subset = frozenset(worker(m).endpoint for m in part)
        assert ready(table, now, subset) == [worker(m) for m in usable(part)]


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
