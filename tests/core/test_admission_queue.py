import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.core.admission_queue import OUTPUT_WEIGHT, AdmissionQueue, QueueSettings, Waiting, work_of

PATIENCE = 60.0


def waiting(request_id, tenant="a", *, now=0.0, priority=0, weight=1.0, work=100.0, size=10, **fields):
    leave_by = fields.pop("leave_by", now + PATIENCE)
    return Waiting(request_id, tenant, weight, priority, work, size, now, leave_by, **fields)


def queue_of(*entries, **bounds):
    queue = AdmissionQueue(QueueSettings(**bounds))
    for entry in entries:
        queue.enter(entry, entry.arrived_at)
    return queue


def drain(queue, now=0.0, count=math.inf, fits=lambda entry: True):
    out = []
    while len(out) < count and (entry := queue.pop(now, fits)) is not None:
        out.append(entry)
    return out


def ids(entries):
    return [entry.id for entry in entries]


# --- order -------------------------------------------------------------------------------------------


def test_one_tenant_is_served_in_the_order_it_came():
    queue = queue_of(*(waiting(f"r{n}", now=float(n)) for n in range(5)))
    assert ids(drain(queue, 5.0)) == ["r0", "r1", "r2", "r3", "r4"]
    assert not queue
    assert queue.size == 0


def test_a_higher_priority_goes_first():
    queue = queue_of(waiting("low"), waiting("high", priority=1), waiting("lowest", priority=-3))
    assert ids(drain(queue)) == ["high", "low", "lowest"]


def test_who_comes_late_does_not_wait_for_all_that_another_tenant_has_queued():
    flood = [waiting(f"f{n}", "flood") for n in range(50)]
    queue = queue_of(*flood)
    assert ids(drain(queue, count=10)) == [f"f{n}" for n in range(10)]
    queue.enter(waiting("l0", "light"), 1.0)
    queue.enter(waiting("l1", "light"), 1.0)
    # One of the flood may have begun at the same virtual time; then they alternate.
    assert ids(drain(queue, 1.0, 4)) == ["l0", "f10", "l1", "f11"]


def test_shares_follow_work_and_weights():
    small = [waiting(f"s{n}", "small", work=100.0, weight=2.0) for n in range(200)]
    large = [waiting(f"g{n}", "large", work=400.0, weight=1.0) for n in range(200)]
    served = drain(queue_of(*small, *large), count=90)
    work = Counter()
    for entry in served:
        work[entry.tenant] += entry.work
    assert abs(work["small"] / 2.0 - work["large"]) <= 100.0 / 2.0 + 400.0


def test_what_left_before_its_turn_is_not_charged():
    queue = queue_of(*(waiting(f"a{n}", "a", work=1000.0) for n in range(3)))
    queue.enter(waiting("b0", "b", work=1000.0), 0.0)
    queue.enter(waiting("b1", "b", work=1000.0), 0.0)
    assert queue.leave("a0").id == "a0"
    assert queue.leave("a0") is None
    assert ids(drain(queue)) == ["a1", "b0", "a2", "b1"]


def test_a_level_that_stands_by_has_its_turn():
    queue = queue_of(waiting("low", priority=0), ageing_s=5.0)
    served = []
    for second in range(30):
        now = float(second)
        queue.enter(waiting(f"h{second}", priority=2, now=now), now)
        served.append(queue.pop(now, lambda entry: True).id)
    # Two levels below what is always there: after two intervals it is as high, and has waited longer.
    assert served.index("low") == 10


def test_low_requests_all_go_in_the_end_however_much_comes_above_them():
    low = [waiting(f"low{n}", f"tenant{n % 3}", priority=-1) for n in range(12)]
    queue = queue_of(*low, ageing_s=1.0)
    served = set()
    for tick in range(200):
        now = tick * 0.25
        queue.enter(waiting(f"h{tick}", priority=0, now=now), now)
        served.add(queue.pop(now, lambda entry: True).id)
    assert {entry.id for entry in low} <= served


def test_who_waits_for_other_workers_is_not_in_the_way_and_keeps_its_turn():
    queue = queue_of(
        waiting("x0", place="x"), waiting("y0", place="y"), waiting("x1", place="x"), waiting("y1", place="y")
    )
    asked = []

    def only_y(entry):
        asked.append(entry.id)
        return entry.place == "y"

    assert queue.pop(0.0, only_y).id == "y0"
    assert queue.pop(0.0, only_y).id == "y1"
    assert queue.pop(0.0, only_y) is None
    assert asked == ["x0", "y0", "x0", "y1", "x0"]  # once for each place
    assert ids(drain(queue)) == ["x0", "x1"]


# --- bounds and time -----------------------------------------------------------------------------------


def test_a_flood_displaces_itself():
    queue = queue_of(
        waiting("light", "light"), *(waiting(f"f{n}", "flood") for n in range(4)), max_requests=4
    )
    assert ids(queue.overflow()) == ["f3"]
    queue.enter(waiting("late", "light"), 0.0)
    assert ids(queue.overflow()) == ["f2"]
    assert ids(queue.overflow()) == []


def test_the_lowest_level_makes_room():
    queue = queue_of(waiting("low", "a"), waiting("h0", "b", priority=1), max_requests=2)
    queue.enter(waiting("h1", "b", priority=1), 0.0)
    assert ids(queue.overflow()) == ["low"]


def test_bytes_are_bounded_too():
    queue = queue_of(*(waiting(f"r{n}", size=400) for n in range(3)), max_bytes=1000)
    assert ids(queue.overflow()) == ["r2"]
    assert queue.size == 800


def test_whose_time_is_up_has_to_go():
    queue = queue_of(waiting("a", leave_by=3.0), waiting("b", leave_by=2.0), waiting("c", leave_by=9.0))
    assert queue.expire(1.9) == []
    assert sorted(ids(queue.expire(3.0))) == ["a", "b"]
    assert ids(queue) == ["c"]
    assert queue.leave("c") is not None
    assert queue.expire(1e9) == []


def test_one_id_waits_once():
    queue = queue_of(waiting("r"))
    assert "r" in queue
    with pytest.raises(ValueError, match="waits already"):
        queue.enter(waiting("r"), 0.0)


def test_what_waits_is_told_by_tenant_and_priority():
    queue = queue_of(waiting("a"), waiting("b"), waiting("c", "b", priority=1))
    assert queue.waiting_by() == {("b", 1): 1, ("a", 0): 2}


# --- what is to be expected ----------------------------------------------------------------------------


def test_work_counts_output_by_its_weight():
    assert work_of(100, 50.0, 2) == 100 + OUTPUT_WEIGHT * 100
    assert work_of(0, 0.0, 1) == 1.0


def serving(count=10, every_s=0.5):
    """A queue of which so many have gone, one at a time, 200 tokens of work a second."""
    queue = queue_of(*(waiting(f"f{n}", "flood") for n in range(count + 20)))
    for n in range(count):
        queue.pop(n * every_s, lambda entry: True)
    return queue, (count - 1) * every_s


def test_the_rate_is_told_from_what_goes():
    queue, now = serving()
    assert queue.rate(now) == pytest.approx(200.0)
    assert queue.rate(now + 4.5) == pytest.approx(100.0)  # nothing has gone since
    assert AdmissionQueue(QueueSettings()).rate(0.0) is None


def test_the_wait_is_the_work_that_goes_before():
    queue, now = serving()
    assert queue.wait_s("flood", 0, 1.0, now) == pytest.approx(20 * 100.0 / 200.0)
    # Another tenant has its turn next, whatever the flood has waiting.
    assert queue.wait_s("light", 0, 1.0, now) == pytest.approx(0.0)
    assert queue.wait_s("light", -1, 1.0, now) == pytest.approx(20 * 100.0 / 200.0)
    queue.enter(waiting("l0", "light", work=500.0), now)
    assert queue.wait_s("light", 0, 1.0, now) == pytest.approx((500.0 + 400.0) / 200.0)


def test_nothing_is_predicted_before_anything_has_gone():
    assert queue_of(waiting("a")).wait_s("b", 0, 1.0, 1.0) is None


def test_memory_of_tenants_that_have_gone_is_bounded():
    queue = queue_of(waiting("stays", "stays", place="full"))
    for n in range(3000):
        queue.enter(waiting(f"r{n}", f"tenant{n}"), 0.0)
        assert queue.pop(0.0, lambda entry: entry.place != "full").id == f"r{n}"
    assert len(queue._levels[0].flows) <= 1024 + 10
    drain(queue)
    assert not queue._levels


# --- properties ----------------------------------------------------------------------------------------


@dataclass
class Model:
    """What must be true of a run, kept by hand."""

    capacity: int = 0


TENANTS = st.sampled_from(["a", "b", "c"])
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Queueing(RuleBasedStateMachine):
    """Any order of events: bounds hold, nothing is lost or told twice, no more goes than there is room."""

    def __init__(self):
        super().__init__()
        self.bounds = QueueSettings(max_requests=8, max_bytes=500, ageing_s=3.0)
        self.queue = AdmissionQueue(self.bounds)
        self.twin = AdmissionQueue(self.bounds)
        self.now = 0.0
        self.number = 0
        self.open = {}
        self.ended = Counter()
        self.room = 0
        self.running = 0

    def end(self, entries, twins, how):
        assert ids(entries) == ids(twins)
        for entry in entries:
            assert self.open.pop(entry.id).id == entry.id
            self.ended[entry.id, how] += 1

    @rule(tenant=TENANTS, priority=st.integers(-1, 1), work=st.floats(1, 1000), size=st.integers(0, 200))
    def enter(self, tenant, priority, work, size):
        self.number += 1
        entry = waiting(
            f"r{self.number}",
            tenant,
            now=self.now,
            priority=priority,
            weight=WEIGHTS[tenant],
            work=work,
            size=size,
            leave_by=self.now + 10.0,
            place=tenant if size % 2 else None,
        )
        self.open[entry.id] = entry
        for queue in (self.queue, self.twin):
            queue.enter(replace(entry), self.now)
        self.end(self.queue.overflow(), self.twin.overflow(), "refused")

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds):
        self.now += seconds
        late = {entry.id for entry in self.open.values() if entry.leave_by <= self.now}
        gone, twins = self.queue.expire(self.now), self.twin.expire(self.now)
        assert set(ids(gone)) == late
        self.end(gone, twins, "refused")

    @rule(room=st.integers(1, 4), blocked=st.sampled_from([None, "a", "b"]))
    def serve(self, room, blocked):
        left = room

        def fits(entry):
            return left > 0 and entry.place != blocked

        while True:
            entry, twin = self.queue.pop(self.now, fits), self.twin.pop(self.now, fits)
            if entry is None:
                assert twin is None
                break
            first = min(
                (
                    int(one.id[1:])
                    for one in self.open.values()
                    if (one.tenant, one.priority, one.place) == (entry.tenant, entry.priority, entry.place)
                ),
            )
            assert int(entry.id[1:]) == first, "not first come, first served"
            self.end([entry], [twin], "admitted")
            left -= 1
        assert left >= 0
        if left:
            assert all(one.place == blocked for one in self.open.values()), "there was room"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.end([self.queue.leave(request_id)], [self.twin.leave(request_id)], "left")
        assert self.queue.leave(request_id) is None

    @invariant()
    def nothing_is_lost(self):
        assert {entry.id for entry in self.queue} == set(self.open)
        assert len(self.queue) == len(self.open) <= self.bounds.max_requests
        assert self.queue.size == sum(entry.size for entry in self.open.values()) <= self.bounds.max_bytes
        assert sum(self.queue.waiting_by().values()) == len(self.open)
        assert set(self.ended.values()) <= {1}
        assert sum(self.ended.values()) + len(self.open) == self.number


Queueing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueing = Queueing.TestCase


@settings(deadline=None)
@given(
    works=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(1.0, 500.0)), min_size=2, max_size=60),
    weights=st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)),
)
def test_shares_are_fair_within_one_request_of_each(works, weights):
    """Whenever both tenants have requests waiting: the theorem of start-time fair queueing."""
    weight = dict(zip("ab", weights, strict=True))
    queue = queue_of(
        *(
            waiting(f"r{n}", tenant, work=work, weight=weight[tenant])
            for n, (tenant, work) in enumerate(works)
        )
    )
    largest = {tenant: max([w for t, w in works if t == tenant], default=0.0) for tenant in "ab"}
    bound = sum(largest[tenant] / weight[tenant] for tenant in "ab")
    left = Counter(tenant for tenant, _ in works)
    served = Counter()
    while left["a"] and left["b"]:
        entry = queue.pop(0.0, lambda entry: True)
        left[entry.tenant] -= 1
        served[entry.tenant] += entry.work / weight[entry.tenant]
        assert abs(served["a"] - served["b"]) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("how", ["left", "expired", "displaced"])
def test_what_went_before_the_queue_was_empty_tells_no_rate(how):
    queue = queue_of(*(waiting(f"r{n}", now=0.0, leave_by=50.0) for n in range(9)), max_requests=9)
    drain(queue, 1.0, 8)
    assert queue.rate(2.0) is not None
    match how:
        case "left":
            queue.leave("r8")
        case "expired":
            queue.expire(50.0)
        case "displaced":
            queue._settings = QueueSettings(max_requests=0)
            queue.overflow()
    assert queue.rate(60.0) is None
