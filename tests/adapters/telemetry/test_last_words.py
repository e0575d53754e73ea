import asyncio
import threading

import pytest

from extproc.adapters.telemetry import last_words
from extproc.adapters.telemetry.last_words import beside, in_time


async def test_work_is_done_beside_the_event_loop_and_waited_for():
    done_by = []
    await beside(lambda: done_by.append(threading.current_thread()))
    assert len(done_by) == 1
    assert done_by[0] is not threading.main_thread()
    assert done_by[0].daemon  # the end of the process does not wait for it


async def test_what_work_raises_is_logged(caplog):
    await beside(lambda: int("none"))
    assert "could not be exported" in caplog.text


async def test_what_is_done_in_time_is_not_given_up():
    gave_up = []
    await in_time(lambda: None, lambda: gave_up.append(True))
    assert not gave_up


@pytest.mark.parametrize("ends_it", [True, False])
async def test_what_is_not_is_given_up_and_nobody_waits_for_that_either(monkeypatch, caplog, ends_it):
    monkeypatch.setattr(last_words, "LAST_S", 0.02)
    told, over = threading.Event(), threading.Event()

    def give_up():
        told.set()
        if not ends_it:
            over.wait()

    async with asyncio.timeout(10.0):
        await in_time(over.wait, give_up)
    over.set()
    assert told.is_set()
    assert "does not answer" in caplog.text
