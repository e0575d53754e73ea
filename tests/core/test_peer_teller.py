import pytest

from extproc.core.leases import WorkerLoad
from extproc.core.load_ledger import LoadLedger
from extproc.core.peer_loads import NOTHING_TOLD, ToldLoad
from extproc.core.peer_teller import EVENT_DELAY_S, MAX_BLOCKS, MAX_PREFIX, LoadTeller, told_load
from tests.support.core import decision, worker

LOAD = ToldLoad(4, 2, 8000, 100, 400.0, 3000.0, 600.0)


def lease(blocks, name="l", cached=0):
    made = decision(name, prefill_ms=500.0)
    object.__setattr__(made.candidates[0], "cached_tokens", cached)
    return LoadLedger().admit(made, 1, (tuple(range(blocks)),), 0.0, 9.0)


def test_only_changes_are_told_and_each_listener_all_it_missed():
    teller = LoadTeller("a", 7)
    teller.look([(worker(0), LOAD), (worker(1), NOTHING_TOLD)], 0.0)
    first = teller.since(0)
    assert (first.replica, first.epoch, first.number, first.whole) == ("a", 7, 1, False)
    assert first.loads == ((worker(0), LOAD),)
    teller.look([(worker(0), LOAD), (worker(1), LOAD)], 0.0)
    assert teller.since(1).loads == ((worker(1), LOAD),)
    assert dict(teller.since(0).loads) == {worker(0): LOAD, worker(1): LOAD}
    teller.look([(worker(0), NOTHING_TOLD), (worker(1), LOAD)], 0.0)
    assert teller.since(2).loads == ((worker(0), NOTHING_TOLD),)
    assert teller.snapshot().loads == ((worker(1), LOAD),)
    assert teller.snapshot().whole


def test_prefill_that_is_worked_off_as_expected_is_no_news():
    teller = LoadTeller("a", 1)
    teller.look([(worker(), LOAD)], 0.0)
    teller.look([(worker(), LOAD._replace(queued_prefill_ms=300.0))], 0.1)
    assert teller.since(1).loads == ()
    teller.look([(worker(), LOAD._replace(queued_prefill_ms=300.0))], 0.2)
    assert [load.queued_prefill_ms for _, load in teller.since(2).loads] == [300.0]


def test_a_worker_that_left_is_forgotten():
    teller = LoadTeller("a", 1)
    teller.look([(worker(), LOAD)], 0.0)
    teller.look([], 0.0)
    assert teller.since(0).loads == teller.snapshot().loads == ()


def test_a_prompt_on_its_way_is_told_once():
    teller = LoadTeller("a", 1)
    teller.sent(lease(10, cached=64), 0.0)
    assert teller.since(0).sent == ()  # the next look is the first to tell of it
    teller.look([], 0.0)
    (sent,) = teller.since(0).sent
    assert sent.worker == worker()
    assert sent.hashes == tuple(range(10))
    assert sent.lifetime_s == 0.5 + EVENT_DELAY_S
    teller.look([], 0.0)
    assert teller.since(1).sent == ()


@pytest.mark.parametrize(("blocks", "known"), [(4, 4), (100, 90)])
def test_a_prompt_that_is_nearly_all_there_is_not_told(blocks, known):
    teller = LoadTeller("a", 1)
    teller.sent(lease(blocks, cached=16 * known), 0.0)
    teller.look([], 0.0)
    assert teller.since(0).sent == ()


def test_what_is_kept_of_prompts_is_bounded():
    teller = LoadTeller("a", 1)
    for n in range(20):
        teller.sent(lease(10_000, f"l{n}"), 0.0)
    teller.look([], 0.0)
    sent = teller.since(0).sent
    assert sum(len(one.hashes) for one in sent) == MAX_BLOCKS
    assert {len(one.hashes) for one in sent} == {MAX_PREFIX}


def test_an_idle_worker_is_told_of_as_nothing():
    assert told_load(WorkerLoad(), 5.0) is NOTHING_TOLD
    busy = told_load(WorkerLoad(1, 2, 300, 40.0, 50.0, 6, 1), 70.0)
    assert busy == ToldLoad(2, 1, 300, 6, 40.0, 50.0, 70.0)
