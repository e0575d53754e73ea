from dataclasses import replace

import pytest

from extproc.adapters.engine_key import Refusal
from extproc.adapters.peer_status import PeerStatus
from extproc.adapters.recent_decisions import Ending
from extproc.adapters.status_warnings import Observed, Severity, warnings
from extproc.core.snapshot import snapshot
from tests.support.core import worker
from tests.support.watched import Watched


@pytest.fixture
async def watched(tmp_path):
    async with Watched(tmp_path) as one:
        yield one


def seen(watched, later_s=0.0, **fields):
    found = snapshot(watched.router, watched.clock() + later_s)
    given = {
        "router": found,
        "pools_with_events": frozenset({"default"}),
        "stale_after_s": 5.0,
        "scrape_errors": {},
        "access_log_streams": 1,
        "recent": (),
    }
    return Observed(**given | fields)


def told(*arguments, **fields):
    return [(one.severity, one.subject) for one in warnings(seen(*arguments, **fields))]


def lines(count, **fields):
    return [Ending(**{"outcome": "finished", "decision": "cold-idle", "load_only": None, **fields})] * count


async def test_where_all_is_well_there_are_none(watched):
    assert warnings(seen(watched, recent=lines(100))) == []


@pytest.mark.parametrize(("connected", "count"), [(True, 0), (False, 1)])
async def test_a_replica_that_is_not_heard(watched, connected, count):
    peer = PeerStatus("b:1", "b/0", connected, None, 0.0, 0, 0, "connection refused")
    found = warnings(seen(watched, peers=(peer,)))
    assert [(one.severity, one.subject, one.cause) for one in found] == [
        (Severity.ODD, "replica b/0", "connection refused")
    ] * count


async def test_a_pool_without_workers(watched):
    watched.router.on_membership([], 0.0)
    assert told(watched) == [(Severity.BAD, "pool default")]


async def test_a_pool_in_which_none_is_ready_comes_first(watched):
    for n in range(3):
        for _ in range(3):
            watched.router.on_scrape_failure(worker(n).endpoint)
    found = warnings(seen(watched, scrape_errors={worker(0).endpoint: "connection refused"}))
    assert found[0].subject == "pool default"
    assert "connection refused" in next(one for one in found if one.subject == str(worker(0))).cause


def out_of_time(watched, *numbers):
    for n in numbers:
        for _ in range(3):
            watched.router.on_page_failure(worker(n).endpoint, watched.clock() - 2.0, slow=True)


async def test_a_worker_whose_page_is_slow_while_others_are_ready(watched):
    out_of_time(watched, 1)
    (one,) = warnings(seen(watched, scrape_errors={worker(1).endpoint: "/metrics did not arrive"}))
    assert (one.severity, one.subject) == (Severity.BAD, str(worker(1)))
    assert "gets only requests that no ready worker may serve" in one.text
    assert "did not arrive" in one.cause
    for _ in range(3):
        watched.router.on_scrape_failure(worker(1).endpoint)
    (one,) = warnings(seen(watched))
    assert "gets no requests" in one.text


async def test_a_pool_in_which_all_are_a_last_resort_is_said_to_be_served(watched):
    out_of_time(watched, 0, 1, 2)
    first, *each = warnings(seen(watched, scrape_errors={worker(1).endpoint: "/metrics did not arrive"}))
    assert (first.severity, first.subject) == (Severity.BAD, "pool default")
    assert "all the same" in first.text
    assert [one.subject for one in each] == [str(worker(n)) for n in range(3)]
    assert all("only because" in one.text for one in each)
    assert "did not arrive" in each[1].cause


async def test_a_worker_that_could_not_be_reached(watched):
    watched.router.table.on_connect_failure(worker(1).endpoint, watched.clock())
    (one,) = warnings(seen(watched))
    assert (one.severity, one.subject) == (Severity.BAD, str(worker(1)))
    assert "delivered" in one.cause


async def test_engines_that_are_asleep(watched):
    watched.scrape(1, awake=False)
    (one,) = warnings(seen(watched))
    assert (one.severity, one.subject) == (Severity.BAD, str(worker(1)))
    assert "no ready worker may serve" in one.text
    assert "asleep" in one.cause
    for n in (0, 2):
        watched.scrape(n, awake=False)
    assert told(watched)[0] == (Severity.BAD, "pool default")
    assert all("asleep" in one.cause for one in warnings(seen(watched)))


async def test_old_metrics(watched):
    assert told(watched, 6.0) == [(Severity.ODD, str(worker(n))) for n in range(3)]
    assert "old" in warnings(seen(watched, 6.0))[0].text


@pytest.mark.parametrize(
    ("prepare", "word"),
    [
        (lambda r: r.on_kv_suspended(worker(1), suspended=True), "restarted"),
        (lambda r: r.on_kv_trust(worker(1), "no KV events yet", trusted=False), "warmroute check"),
    ],
)
async def test_caches_that_are_not_known(watched, prepare, word):
    prepare(watched.router)
    (one,) = warnings(seen(watched))
    assert one.subject == str(worker(1))
    assert word in one.cause
    assert warnings(seen(watched, pools_with_events=frozenset())) == []


async def test_events_that_are_not_complete_name_their_cause(watched):
    watched.warm(1, range(1, 100))
    watched.router.on_kv_trust(worker(1), "messages 3 to 5 were lost", trusted=False)
    (one,) = warnings(seen(watched))
    assert one.cause == "messages 3 to 5 were lost"


async def test_a_complaint_is_said_once_with_its_cause(watched):
    found = snapshot(watched.router, watched.clock())
    broken = replace(found.workers[0], complaint="the tokenizer differs", kv_trusted=False)
    (one,) = warnings(seen(watched, router=replace(found, workers=(broken, *found.workers[1:]))))
    assert one.cause == "the tokenizer differs"


async def test_a_missing_access_log_matters_only_with_requests(watched):
    assert told(watched, access_log_streams=0) == []
    watched.route("open")
    assert told(watched, access_log_streams=0) == [(Severity.BAD, "access log")]
    assert told(watched, access_log_streams=None) == []


async def test_logs_that_cannot_be_written(watched):
    assert told(watched, log_failures=3, journal_error="disk full") == [
        (Severity.ODD, "decision log"),
        (Severity.ODD, "journal"),
    ]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"load_only": "too-long"}, "too-long"),
        ({"outcome": "failed"}, "workers fail"),
        ({"outcome": "lost"}, "access log"),
        ({"decision": "warm-denied-wait"}, "add workers"),
    ],
)
async def test_many_requests_of_a_kind(watched, fields, word):
    (one,) = warnings(seen(watched, recent=[*lines(60), *lines(40, **fields)]))
    assert one.subject == "requests"
    assert word in one.cause
    assert warnings(seen(watched, recent=[*lines(98), *lines(2, **fields)])) == []


async def test_a_few_requests_prove_nothing(watched):
    assert warnings(seen(watched, recent=lines(10, outcome="failed"))) == []


async def test_a_worker_that_does_not_say_what_it_serves(watched):
    why = Refusal("/v1/models answers 401", "name the key")
    found = warnings(seen(watched, models_refused={worker(0).endpoint: why}))
    assert [(one.severity, one.subject, one.text, one.cause) for one in found] == [
        (Severity.ODD, worker(0).endpoint, why.text, why.advice)
    ]
