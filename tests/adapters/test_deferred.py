import asyncio

from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters import deferred
from extproc.adapters.deferred import Deferred


async def drained(work: Deferred) -> None:
    async with asyncio.timeout(30):
        while len(work):  # noqa: ASYNC110 - one turn of the loop at a time
            await asyncio.sleep(0)


async def test_work_is_done_later_and_in_order():
    work, done = Deferred(), []
    for number in range(100):
        work.add(lambda number=number: done.append(number))
    assert done == []
    await drained(work)
    assert done == list(range(100))


async def test_the_loop_gets_its_turn_between_slices(monkeypatch):
    monkeypatch.setattr(deferred, "DELAY_S", 0.0)
    ticks = iter(range(10**6))
    work = Deferred(clock=lambda: next(ticks) * deferred.SLICE_S)  # every look at the clock ends a slice
    done, seen = [], []

    def look() -> None:
        seen.append(len(done))
        if len(done) < 50:
            asyncio.get_running_loop().call_soon(look)

    for number in range(50):
        work.add(lambda number=number: done.append(number))
    look()
    await drained(work)
    await asyncio.sleep(0)
    assert len(set(seen)) > 25  # others ran while most of the work was still waiting


async def test_what_waits_is_bounded_and_nothing_is_dropped():
    work, done = Deferred(most=10), []
    for number in range(25):
        work.add(lambda number=number: done.append(number))
        assert len(work) <= 10
    assert done == list(range(15))
    work.close()
    assert done == list(range(25))


async def test_some_of_it_is_done_after_a_reply():
    ticks = iter(range(10**6))
    work = Deferred(clock=lambda: next(ticks) * deferred.REPLIED_S / 4)
    done = []
    work.replied()
    for number in range(50):
        work.add(lambda number=number: done.append(number))
    work.replied()
    assert done == list(range(4))
    work.replied()
    assert done == list(range(8))
    work.close()
    assert done == list(range(50))


async def test_work_that_fails_stops_nobody(caplog):
    work, done = Deferred(), []
    work.add(lambda: 1 // 0)
    work.add(lambda: done.append(1))
    work.flush()
    assert done == [1]
    assert "put off failed" in caplog.text


async def test_work_brought_by_work_is_done_too():
    work, done = Deferred(), []
    work.add(lambda: work.add(lambda: done.append(2)))
    work.close()
    assert done == [2]
    work.add(lambda: done.append(3))  # and it can be used again
    await drained(work)
    assert done == [2, 3]


@given(st.lists(st.sampled_from(["add", "flush"]), max_size=60), st.integers(1, 5))
def test_order_holds_whatever_comes_between(steps, most):
    async def run() -> None:
        work, done, brought = Deferred(most=most), [], 0
        for step in steps:
            if step == "add":
                work.add(lambda number=brought: done.append(number))
                brought += 1
            else:
                work.flush()
                assert len(done) == brought
        work.close()
        assert done == list(range(brought))

    asyncio.run(run())


async def test_work_that_brings_work_beyond_the_bound_is_done_all_the_same(caplog):
    work, done = Deferred(most=50), []

    def bring(number):
        work.add(lambda: done.append(number))
        work.add(lambda: None)

    for number in range(3000):
        work.add(lambda number=number: bring(number))
    work.close()
    assert sorted(done) == list(range(3000))
    assert caplog.text == ""
