"""Exporters block, some for as long as their collector does not answer: nothing of ours waits for them."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("warmroute.telemetry")

LAST_S = 2.0
"""How long the end of an exporter may take. Who stops us does not wait for long before it kills us."""


async def beside(work: Callable[[], object]) -> None:
    """Have `work` done in a thread. Who stops waiting leaves it alone: the process may end meanwhile.

    What it raises is logged.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        except Exception:
            _log.exception("telemetry could not be exported; the next export tries again")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="otlp", daemon=True).start()
    await done.wait()


async def in_time(last: Callable[[], object], give_up: Callable[[], object]) -> None:
    """Have `last` done within `LAST_S`, else `give_up`, which makes it end."""
    try:
        async with asyncio.timeout(LAST_S):
            await beside(last)
    except TimeoutError:
        _log.warning("the collector does not answer; what was not exported by now is lost")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await beside(give_up)
