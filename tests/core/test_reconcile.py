from extproc.core.engine_steps import EngineSteps, Mark
from extproc.core.load_ledger import LoadLedger
from extproc.core.reconcile import Reconciler
from tests.support.core import decision, metrics, worker


class Watch:
    """A reconciler, and the steps of the one engine it is told of."""

    def __init__(self, reconciler):
        self.reconciler, self.steps = reconciler, EngineSteps()

    def check(self, where, seen, now):
        self.steps.note(seen, Mark(now, 0, 0))
        return self.reconciler.check(where, seen, self.steps, now)

    def forget(self, where):
        self.reconciler.forget(where)
        self.steps = EngineSteps()


def setup(count, now=0.0):
    ledger = LoadLedger()
    for n in range(count):
        ledger.admit(decision(str(n), 0, now=now + n / 10), 1, (), now + n / 10, 1e9)
    return ledger, Watch(Reconciler(ledger, settle_s=3.0, rounds=3))


def scrape(reconciler, now, *, running=0, waiting=0):
    return reconciler.check(worker(0), metrics(running=running, waiting=waiting), now)


def test_leases_the_engine_does_not_have_are_found_after_three_short_scrapes():
    _, reconciler = setup(2)
    assert scrape(reconciler, 10.0) == ()
    assert scrape(reconciler, 11.0) == ()
    assert scrape(reconciler, 12.0) == ("0", "1")


def test_young_leases_are_left_alone():
    _, reconciler = setup(2)
    assert [scrape(reconciler, t) for t in (0.5, 1.0, 1.5, 2.0, 2.5)] == [()] * 5


def test_one_scrape_that_agrees_starts_the_count_again():
    _, reconciler = setup(1)
    scrape(reconciler, 10.0)
    scrape(reconciler, 11.0)
    assert scrape(reconciler, 12.0, running=1) == ()
    assert scrape(reconciler, 13.0) == ()


def test_only_the_shortage_is_released_ended_streams_first():
    ledger, reconciler = setup(3)
    ledger.get("2").stream_ended_at = 5.0
    scrape(reconciler, 10.0, running=1, waiting=1)
    scrape(reconciler, 11.0, running=0, waiting=0)
    assert scrape(reconciler, 12.0, running=2) == ("2",)


def test_an_engine_that_does_not_count_proves_nothing():
    _, reconciler = setup(1)
    for now in range(10, 20):
        assert reconciler.check(worker(0), metrics(running=None, waiting=0), float(now)) == ()


def test_an_engine_that_sleeps_lets_requests_wait_and_counts_none_of_them():
    _, reconciler = setup(1)
    asleep = metrics(running=0, waiting=0, awake=False)
    assert [reconciler.check(worker(0), asleep, float(now)) for now in range(10, 20)] == [()] * 10
    assert [scrape(reconciler, t) for t in (20.0, 21.0, 22.0)] == [(), (), ("0",)]


def work(reconciler, now, generated, *, running=0, waiting=0):
    figures = metrics(running=running, waiting=waiting, generation_tokens=float(generated))
    return reconciler.check(worker(0), figures, now)


def test_an_engine_that_hangs_in_a_step_is_not_said_to_have_lost_what_came_since():
    _, reconciler = setup(2)
    assert [work(reconciler, t, 100) for t in range(20)] == [()] * 20
    # It goes on: what came is in its counts.
    assert [work(reconciler, 20 + t, 100 + t, running=2) for t in range(1, 9)] == [()] * 8


def test_an_engine_that_works_on_without_a_lease_has_lost_it():
    _, reconciler = setup(2)
    found = [work(reconciler, float(t), 100 + t, running=1) for t in range(8)]
    assert found == [(), (), (), (), (), (), ("0",), ()]


def test_one_step_may_have_begun_before_the_lease():
    _, reconciler = setup(1)
    work(reconciler, -1.0, 100)
    # A long step ends between 5 and 6; the lease is in the next one, which is long, too.
    found = [work(reconciler, float(t), 100 if t < 6 else 101) for t in range(15)]
    assert found == [()] * 15
    assert work(reconciler, 15.0, 102, running=1) == ()


def test_an_idle_engine_is_believed_after_a_while():
    _, reconciler = setup(2)
    found = [work(reconciler, float(t), 100) for t in range(25)]
    assert found[:22] == [()] * 22
    assert found[22] == ("0",)


def test_an_engine_whose_figures_stand_still_with_requests_running_hangs():
    _, reconciler = setup(3)
    assert [work(reconciler, float(t), 100, running=1) for t in range(120)] == [()] * 120


def test_samples_of_one_request_that_have_ended_are_not_missed():
    ledger, reconciler = setup(3)
    ledger.admit(decision("four", 0, now=1.0, sequences=4), 1, (), 1.0, 1e9)
    assert [scrape(reconciler, float(t), running=4) for t in range(5, 20)] == [()] * 15
    # When the whole of it is gone, one of the four is not there.
    assert [scrape(reconciler, float(t), running=3) for t in range(20, 23)] == [(), (), ("0",)]


def test_a_worker_that_comes_back_begins_anew():
    _, reconciler = setup(1)
    for t in range(5):
        work(reconciler, float(t), 100 + t)
    reconciler.forget(worker(0))
    assert [work(reconciler, 5.0 + t, 0) for t in range(5)] == [()] * 5
