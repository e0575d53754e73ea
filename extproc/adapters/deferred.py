"""Work that need not be done before a reply is written: metrics, log lines, requests that have ended.

It is done in order, a little later: right after a reply, when the one who asked is busy with it (`replied`),
or when no reply follows for a while. It is done in slices, so that a decision never waits for more than one
of them. It is bounded: when too much waits, the oldest is done at once, by whoever brings more. Nothing is
dropped, and whoever wants to see the result calls `flush` first.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_log = logging.getLogger("warmroute.deferred")

DELAY_S = 0.02
"""How long work waits for a reply to follow."""

SLICE_S = 0.001
"""How long the event loop is kept at a time."""

REPLIED_S = 0.0005
"""The same after a reply: about what its request takes until another can follow it."""

MOST = 10_000
"""Pieces of work that wait at most."""

Work = Callable[[], None]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Deferred:
    """Does work later, on the event loop that was running when the first piece was brought.

    Args:
        clock: monotonic seconds.
        most: pieces of work that may wait.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._waiting: deque[Work] = deque()
        self._timer: asyncio.Handle | None = None
        self._doing = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Work) -> None:
        """Have `work` done, after all that was brought before it. What it raises is logged."""
        self._waiting.append(work)
        while len(self._waiting) > self._most and not self._doing:  # what work brings waits for its turn
            self._do_one()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._slice)

    def replied(self) -> None:
        """A reply has just been written: do some of what waits."""
        if self._waiting:
            self._until(self._clock() + REPLIED_S)

    def flush(self) -> None:
        """Do all that waits, now."""
        while self._waiting:
            self._do_one()

    def flushed(self, ask: Callable[_P, _T]) -> Callable[_P, _T]:
        """`ask`, and all that waits is done before it answers."""

        @functools.wraps(ask)
        def asked(*args: _P.args, **named: _P.kwargs) -> _T:
            self.flush()
            return ask(*args, **named)

        return asked

    def close(self) -> None:
        """Do all that waits, and let go of the event loop."""
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _slice(self) -> None:
        self._timer = None
        self._until(self._clock() + SLICE_S)
        if self._waiting and self._timer is None:
            # What has come meanwhile gets its turn first.
            self._timer = asyncio.get_running_loop().call_soon(self._slice)

    def _until(self, ends: float) -> None:
        while self._waiting:
            self._do_one()
            if self._clock() >= ends:
                return

    def _do_one(self) -> None:
        work = self._waiting.popleft()
        self._doing = True
        try:
            work()
        except Exception:
            _log.exception("work that was put off failed; requests are not affected")
        finally:
            self._doing = False
