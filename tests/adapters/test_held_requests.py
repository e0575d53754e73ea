import asyncio
import random
import re
from pathlib import Path

import pytest

from extproc.adapters import held_requests
from extproc.adapters.admission import RefusedError
from extproc.adapters.held_requests import HeldRequests
from extproc.adapters.holding import MARGIN_S, Ask, Ending, HoldSettings
from extproc.config import book_of, parse
from extproc.core.admission_queue import QueueSettings
from extproc.core.candidates import PoolFacts
from extproc.core.errors import NoEndpointError
from extproc.core.policies import POLICIES
from extproc.core.rollout import Mode
from extproc.core.router import Router
from extproc.core.saturation import RoomSettings
from extproc.core.tenancy import TenantBook, TenantPolicy
from extproc.core.types import Completion, Outcome
from tests.support.core import COSTS, NAMESPACE, members, request, worker
from tests.support.waiting import until

DOCUMENT = Path(__file__).parents[2] / "deploy" / "admission.md"
ONE_EACH = RoomSettings(max_queue_ms=None, max_kv_usage=None, max_requests=1)


class House:
    """Held requests around a real router, on a clock of the test's."""

    def __init__(self, workers=1, *, tenants=None, room=ONE_EACH, **settings):
        self.now = 100.0
        numbers = iter(range(10**6))
        self.router = Router(
            POLICIES["token-load"](COSTS),
            random.Random(1),
            new_lease_id=lambda: f"l{next(numbers)}",
            pools={"default": PoolFacts("model", "tokenizer", 16), "other": PoolFacts("m", "t", 16)},
            costs=COSTS,
        )
        self.router.on_membership(members(workers), self.now)
        self.waits = []
        self.abandoned = []
        self.held = HeldRequests(
            self.router,
            HoldSettings(room=room, **settings),
            lambda: self.now,
            *(() if tenants is None else (tenants,)),
            on_wait=self.waits.append,
            on_abandoned=lambda lease_id, completion: self.abandoned.append(lease_id),
        )
        self.tasks = {}

    def ask(self, name, headers=None, size=10, more_time=None, tokens=16, mark=None, **fields):
        asked = request(request_id=name, prompt_tokens=tokens, **fields)
        return Ask(asked, headers or {}, size, more_time, mark)

    async def send(self, name, **fields):
        """Begin; it has its answer, or waits, when this returns."""
        task = self.tasks[name] = asyncio.create_task(self.held.schedule(self.ask(name, **fields)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    def end(self, name):
        self.router.release(self.tasks[name].result().lease_id, Completion(Outcome.FINISHED), self.now)
        self.held.look()

    async def admitted(self, *names):
        await until(lambda: all(self.tasks[name].done() for name in names), what=f"{names} to be admitted")
        return [self.tasks[name].result() for name in names]

    def pending(self):
        return [name for name, task in self.tasks.items() if not task.done()]

    def endings(self):
        return {wait.request.request_id: wait.ending for wait in self.waits}


async def test_with_room_nothing_waits():
    house = House(2)
    decision = await (await house.send("a"))
    assert decision.request.admission == (0.0, 0)
    assert house.endings() == {"a": Ending.PASSED}
    assert len(house.held) == 0


async def test_who_waits_goes_when_another_ends():
    house = House()
    await house.send("a")
    await house.send("b")
    await house.send("c")
    assert house.pending() == ["b", "c"]
    house.now += 1.5
    house.end("a")
    (decision,) = await house.admitted("b")
    assert decision.request.admission == (1500.0, 0)
    assert house.pending() == ["c"]
    assert len(house.router.ledger) == 1
    house.end("b")
    await house.admitted("c")
    assert house.endings() == {"a": Ending.PASSED, "b": Ending.ADMITTED, "c": Ending.ADMITTED}


async def test_the_worker_is_the_one_that_has_room_when_it_goes():
    house = House(2)
    await house.send("a")
    await house.send("b")
    await house.send("c")
    free = house.tasks["b"].result().chosen.worker
    house.end("b")
    (decision,) = await house.admitted("c")
    assert decision.chosen.worker == free
    assert {candidate.worker for candidate in decision.candidates} == {free}  # the other one is capped


async def test_a_queue_that_shortens_by_itself_is_noticed():
    house = House(room=RoomSettings(max_queue_ms=500.0, max_kv_usage=None))
    await house.send("a", tokens=900)
    await house.send("b")
    assert house.pending() == ["b"]
    house.now += 0.6
    await house.admitted("b")  # nobody told


async def test_nobody_overtakes_those_who_wait():
    house = House()
    await house.send("a")
    await house.send("b")
    house.router.release(house.tasks["a"].result().lease_id, Completion(Outcome.FINISHED), house.now)
    await house.send("c")  # comes when there is room, before anyone has looked
    await house.admitted("b")
    assert house.pending() == ["c"]


async def test_the_gateway_is_asked_for_the_whole_wait_once():
    house, asked = House(max_wait_s=7.0), []

    async def more_time(seconds):
        asked.append(seconds)

    await house.send("a", more_time=more_time)
    await house.send("b", more_time=more_time)
    house.end("a")
    await house.admitted("b")
    assert asked == [7.0 + MARGIN_S]


async def test_whose_time_is_up_gets_a_429_that_says_when_to_come_back():
    house = House(max_wait_s=4.0)
    await house.send("a")
    task = await house.send("b")
    house.now += 4.0
    with pytest.raises(RefusedError) as refused:
        await task
    reject = refused.value.reject
    assert (reject.status, reject.why, reject.type) == (429, "held_too_long", "rate_limit_error")
    assert reject.headers == {"retry-after": "4"}  # nothing has gone, so nothing else is known
    assert house.waits[-1].ending is Ending.EXPIRED
    assert house.waits[-1].held_ms == 4000.0
    assert len(house.held) == 0


async def test_a_deadline_is_kept_where_it_is_sooner():
    house = House(max_wait_s=30.0)
    await house.send("a")
    late = await house.send("late", headers={"x-request-timeout-ms": "2000"}, stream=True)
    patient = await house.send("patient", headers={"x-request-timeout-ms": "soon"})
    house.now += 2.0
    with pytest.raises(RefusedError):
        await late
    assert not patient.done()


async def test_an_answer_that_is_not_streamed_needs_time_to_be_generated():
    house = House(max_wait_s=30.0)
    await house.send("a")
    timeout = {"x-envoy-expected-rq-timeout-ms": "3000"}
    whole = await house.send("whole", headers=timeout, max_output=200)  # about 10 ms a token
    streamed = await house.send("streamed", headers=timeout, max_output=200, stream=True)
    house.now += 2.0
    with pytest.raises(RefusedError):
        await whole
    assert not streamed.done()


async def test_what_would_wait_hopelessly_long_is_refused_at_once():
    house = House(max_wait_s=10.0)
    for n in range(12):
        await house.send(f"r{n}", tokens=1000)
    for n in range(6):  # one in four seconds
        house.now += 1.5
        house.end(f"r{n}")
        await house.admitted(f"r{n + 1}")
    task = await house.send("late", headers={"x-request-timeout-ms": "1000"}, stream=True)
    with pytest.raises(RefusedError) as refused:
        await task
    assert house.endings()["late"] is Ending.REFUSED
    assert int(refused.value.reject.headers["retry-after"]) in range(6, 10)


async def test_a_queue_that_overflows_displaces_who_has_most_in_it():
    house = House(queue=QueueSettings(max_requests=3))
    await house.send("a", tenant="flood")
    for n in range(3):
        await house.send(f"f{n}", tenant="flood")
    await house.send("l", tenant="light")
    with pytest.raises(RefusedError) as refused:
        await house.tasks["f2"]
    assert refused.value.reject.why == "overloaded"
    assert house.pending() == ["f0", "f1", "l"]


async def test_tenants_have_their_weights_and_priorities():
    book = TenantBook({"a": TenantPolicy(priority=0), "b": TenantPolicy(priority=5, weight=2.0)})
    house = House(tenants=book)
    await house.send("first")
    await house.send("a", tenant="a", headers={"x-warmroute-priority": "9"})  # more than it may
    await house.send("b", tenant="b")
    await house.send("c", tenant="b", priority=-1)
    for before, name in (("first", "b"), ("b", "a"), ("a", "c")):
        house.end(before)
        (decision,) = await house.admitted(name)
    assert decision.request.admission.priority == -1


async def test_a_fault_with_one_that_is_displaced_leaves_no_other_waiting_for_ever():
    told = []

    def broken(stage):
        told.append(stage)
        if len(told) == 1:
            raise RuntimeError("a bug")

    house = House(queue=QueueSettings(max_bytes=45))
    await house.send("a")
    for n in range(4):
        await house.send(f"f{n}", tenant="flood", mark=broken)
    await house.send("large", tenant="light", size=35)  # takes the place of three
    await until(lambda: house.pending() == ["f0"])
    assert house.held.faults == 1
    with pytest.raises(RefusedError):
        await house.tasks["f3"]
    assert [house.tasks[name].result().lease_id for name in ("f1", "f2", "large")]
    house.held.close()
    await house.admitted("f0")


async def test_one_line_of_configuration_bounds_the_priorities_of_everyone():
    """As the document says: what a body asks for, and a header that the gateway forgot to remove."""
    tenants = re.search(r"`tenants: (\{identity: .+\})`, where", DOCUMENT.read_text()).group(1)
    pools = "pools: [{name: default, discovery: {static: ['h:1']}}]"
    house = House(tenants=book_of(parse(f"{pools}\ntenants: {tenants}").tenants))
    await house.send("first")
    await house.send("plain", tenant="t")
    await house.send("body", tenant="made-up", priority=50)
    await house.send("header", headers={"x-warmroute-priority": "50"})
    assert house.held.state()[0].waiting == {("t", 0): 1, ("made-up", 0): 1, ("", 0): 1}
    house.end("first")
    await house.admitted("plain")
    house.held.close()


async def test_a_client_that_leaves_frees_its_place():
    house = House()
    await house.send("a")
    left = await house.send("b")
    await house.send("c")
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert house.endings()["b"] is Ending.LEFT
    house.end("a")
    await house.admitted("c")
    assert len(house.router.ledger) == 1


async def test_a_lease_taken_for_a_client_that_leaves_in_that_moment_is_given_back():
    house = House()
    await house.send("a")
    left = await house.send("b")
    house.router.release(house.tasks["a"].result().lease_id, Completion(Outcome.FINISHED), house.now)
    house.held._look()
    assert len(house.router.ledger) == 1  # it has been scheduled, and has not heard of it
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert house.abandoned == [lease.id for lease in house.router.ledger]


@pytest.mark.parametrize("late", [False, True])
async def test_who_leaves_as_its_turn_comes_takes_no_worker(late):
    house = House(max_wait_s=5.0)
    await house.send("a")
    left, stays = await house.send("b"), await house.send("c", headers={"x-request-timeout-ms": "3000000"})
    house.router.release(house.tasks["a"].result().lease_id, Completion(Outcome.FINISHED), house.now)
    left.cancel()
    if late:
        house.now += 5.0
    house.held._look()  # before it has heard that it is to end
    with pytest.raises(asyncio.CancelledError):
        await left
    if late:
        with pytest.raises(RefusedError):
            await stays
    else:
        await house.admitted("c")
    assert house.held.faults == 0
    assert [wait.ending for wait in house.waits if wait.request.request_id == "b"] == [Ending.LEFT]
    assert len(house.router.ledger) == (0 if late else 1)


@pytest.mark.parametrize(
    "fields",
    [{"mode": Mode.OBSERVE}, {"mode": Mode.SHADOW}, {"load_only": "path"}, {"load_only": "method"}],
)
async def test_what_is_not_ours_to_hold_is_not_held(fields):
    house = House()
    await house.send("a")
    await (await house.send("b", **fields))
    assert "b" not in house.endings()


async def test_generating_requests_without_tokens_are_held():
    house = House()
    await house.send("a")
    await house.send("b", load_only="no-tokenizer")
    assert house.pending() == ["b"]


async def test_pools_do_not_wait_for_each_other():
    house = House()
    await house.send("a")
    await house.send("b")
    elsewhere = house.ask("x")
    elsewhere.request.pool = "other"
    with pytest.raises(NoEndpointError):  # nobody is there to be waited for
        await house.held.schedule(elsewhere)
    assert house.pending() == ["b"]


async def test_an_error_of_ours_lets_requests_go_on(monkeypatch, caplog):
    house = House()
    await house.send("a")
    waiting = await house.send("b")

    def broken(*_args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(house.held.saturation, "room", broken)
    house.held.look()
    assert (await waiting).chosen.worker == worker(0)
    assert (await (await house.send("c"))).chosen.worker == worker(0)
    assert house.held.faults >= 2
    assert caplog.text.count("could not be held") == 1
    assert len(house.held) == 0
    assert len(house.router.ledger) == 3


async def test_a_gateway_that_cannot_be_asked_lets_the_request_go_on(caplog):
    house = House()

    async def more_time(seconds):
        raise RuntimeError("no stream")

    await house.send("a")
    assert (await (await house.send("b", more_time=more_time))).chosen.worker == worker(0)
    assert len(house.held) == 0
    assert "could not be held" in caplog.text


async def test_who_stops_lets_all_go():
    house = House()
    await house.send("a")
    await house.send("b")
    house.held.close()
    await house.admitted("b")
    await house.admitted("a")
    await (await house.send("c"))


async def test_the_state_tells_who_waits_and_why():
    house = House(2)
    for name in ("a", "b", "c"):
        await house.send(name, tenant="t", size=7)
    (state,) = house.held.state()
    assert (state.pool, state.requests, state.bytes) == ("default", 1, 7)
    assert state.waiting == {("t", 0): 1}
    assert state.full == {str(worker(0)): "requests", str(worker(1)): "requests"}
    house.held.close()
    await house.admitted("c")


async def test_never_more_is_admitted_than_there_is_room(monkeypatch):
    """A storm of requests, ends and departures: at no time more than one at each worker."""
    monkeypatch.setattr(held_requests, "POLL_S", 0.001)
    rng = random.Random(5)
    house = House(3, max_wait_s=1e6, queue=QueueSettings(max_requests=10_000))
    names = [f"r{n}" for n in range(300)]
    ended = set()
    for name in names:
        await house.send(name, tenant=rng.choice("abc"), headers={"x-warmroute-priority": rng.choice("012")})
        assert len(house.router.ledger) <= 3
        if rng.random() < 0.3 and (waiting := house.pending()):
            gone = rng.choice(waiting)
            house.tasks[gone].cancel()
            ended.add(gone)
        for one in [n for n, t in house.tasks.items() if n not in ended and t.done()]:
            if rng.random() < 0.5:
                house.end(one)
                ended.add(one)
        house.now += 0.01
    while len(ended) < len(names):
        await until(lambda: any(t.done() for n, t in house.tasks.items() if n not in ended))
        for one in [n for n, t in house.tasks.items() if n not in ended and t.done()]:
            house.end(one)
            ended.add(one)
        assert len(house.router.ledger) <= 3
    assert not house.router.ledger
    assert len(house.held) == 0
    assert sorted(house.endings()) == sorted(names)
    assert len(house.waits) == len(names)


async def test_time_is_up_however_many_come_meanwhile():
    house = House(max_wait_s=0.05)
    house.held._clock = asyncio.get_running_loop().time  # the poll is the loop's
    await house.send("a")
    first = await house.send("b")
    for number in range(500):
        if first.done():
            break
        await house.send(f"more-{number}")
        await asyncio.sleep(held_requests.POLL_S / 4)
    with pytest.raises(RefusedError):
        await asyncio.wait_for(first, 0)
    assert number < 400
    house.held.close()
    await asyncio.gather(*house.tasks.values(), return_exceptions=True)


async def test_who_was_let_go_while_the_gateway_could_not_be_asked_has_its_worker():
    house = House()

    async def more_time(seconds):
        house.end("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise RuntimeError("no stream")

    await house.send("a")
    decision = await (await house.send("b", more_time=more_time))
    assert decision.chosen.worker == worker(0)
    assert [lease.id for lease in house.router.ledger] == [decision.lease_id]


async def test_an_error_in_what_is_a_cap_lets_requests_go_on(monkeypatch):
    house = House()

    def broken(*_args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(house.held.saturation, "room", broken)
    monkeypatch.setattr(house.held.saturation, "uncapped", broken)
    assert (await (await house.send("a"))).chosen.worker == worker(0)


async def test_many_that_can_go_at_once_do_not_go_in_one_turn(monkeypatch):
    monkeypatch.setattr(held_requests, "POLL_S", 3600.0)  # nor do the others wait for the clock
    house = House(1, room=RoomSettings(max_queue_ms=None, max_kv_usage=None, max_requests=40))
    for n in range(40):
        await house.send(f"first {n}")
    for n in range(40):
        await house.send(f"r{n}")
    assert len(house.pending()) == 40
    for n in range(40):
        house.router.release(house.tasks[f"first {n}"].result().lease_id, Completion(Outcome.FINISHED), 100.0)
    house.held.look()
    await asyncio.sleep(0)
    assert 0 < len(house.held) < 40
    await house.admitted(*(f"r{n}" for n in range(40)))


async def test_names_that_clients_make_up_do_not_each_look_for_room_of_their_own():
    """Every look, and every request that comes, would cost the event loop as much as there are names."""
    house = House()
    house.router.on_models(worker().endpoint, "root", ["law"])
    looks = []
    room = house.held.saturation.room
    house.held.saturation.room = lambda asked, now: looks.append(asked) or room(asked, now)
    await house.send("a")
    for number in range(20):
        await house.send(f"r{number}", namespace=NAMESPACE._replace(adapter=f"made-up-{number}"))
    assert len(house.held) == 20
    looks.clear()
    await house.send("law", namespace=NAMESPACE._replace(adapter="law"))
    assert len(looks) == 2
    house.end("a")
    await house.admitted("r0")
    house.held.close()
    await asyncio.gather(*house.tasks.values())


async def test_an_adapter_that_is_loaded_elsewhere_meanwhile_waits_for_nobody_else_s():
    house = House(2)
    first, second = worker().endpoint, worker(1).endpoint
    house.router.on_models(first, "root", ["law", "tax"])
    house.router.on_models(second, "root", [])
    law, tax = (NAMESPACE._replace(adapter=name) for name in ("law", "tax"))
    await house.send("busy", namespace=tax)
    await house.send("tax", namespace=tax)
    await house.send("law", namespace=law)
    assert house.pending() == ["tax", "law"]
    house.router.on_models(second, "root", ["law"])
    house.held.look()
    (decision,) = await house.admitted("law")
    assert decision.chosen.worker == worker(1)
    assert house.pending() == ["tax"]
    house.held.close()
    await asyncio.gather(*house.tasks.values())
