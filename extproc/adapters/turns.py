"""Work on the event loop in slices, however many tasks have some to do.

A task that pauses now and then is not enough: where a hundred engines' streams have news at once, each would
do its slice before the loop comes to a request again. So whoever has work of this kind takes turns: one at a
time, and when a slice of time has been spent, by whomever, the loop goes round once before anyone goes on.
"""

import asyncio
from collections.abc import Callable


class Turns:
    """Use as `async with turns:` around each piece of work, which must not await.

    Args:
        clock: monotonic seconds.
        slice_s: time to spend before the loop may serve others.
    """

    def __init__(self, clock: Callable[[], float], slice_s: float) -> None:
        self._clock = clock
        self._slice_s = slice_s
        self._lock = asyncio.Lock()
        self._started = 0.0
        self._spent = 0.0

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._started = self._clock()

    async def __aexit__(self, *_: object) -> None:
        self._spent += self._clock() - self._started
        try:
            if self._spent > self._slice_s:
                self._spent = 0.0
                await asyncio.sleep(0)
        finally:
            self._lock.release()
