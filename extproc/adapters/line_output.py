"""Lines to standard output or error, which may be a pipe that nobody empties or a file on a full disk.

A write to a full pipe waits for its reader, and with it would wait every request. So it is written only while
it says that there is room (then PIPE_BUF bytes do not wait, says POSIX). What has no room is kept and goes
first next time, within a bound; beyond it lines are lost, whole ones.
"""

import select
import time
from collections.abc import Callable
from errno import EAGAIN
from os import write as write_now
from typing import TextIO

_AT_ONCE = select.PIPE_BUF
_MOST_WAITING = 1 << 20  # bytes


class LineOutput:
    """One stream.

    Args:
        stream: gives the stream, which is asked for each time: it may be replaced.
        most_waiting: bytes kept while there is no room.
    """

    def __init__(self, stream: Callable[[], TextIO], most_waiting: int = _MOST_WAITING) -> None:
        self._stream = stream
        self._most_waiting = most_waiting
        self._waiting = bytearray()
        self._inside = False  # the line that goes out has begun and has not ended
        self._torn = False  # and never will

    def write(self, line: bytes) -> None:
        """Write a line, or keep it until there is room.

        Raises:
            OSError: it is lost; later ones are tried again.
            ValueError: the stream is closed.
        """
        stream = self._stream()
        try:
            descriptor = stream.fileno()
        except OSError:  # not a file of the system: it never waits
            stream.write(line.decode())
            stream.flush()
            return
        full = len(self._waiting) + len(line) > self._most_waiting
        if not full:
            self._waiting += line
        self._drain(descriptor)
        if full:
            raise BlockingIOError(EAGAIN, "nobody reads what is written")

    def flush(self, wait_s: float = 0.0) -> int:
        """Write what was kept, as far as there is room within so many seconds; how many lines are left.

        Raises:
            OSError: they are lost.
            ValueError: the stream is closed.
        """
        if self._waiting:
            ends = time.monotonic() + wait_s
            self._drain(self._stream().fileno(), ends)
        return self._waiting.count(b"\n")

    def _drain(self, descriptor: int, ends: float | None = None) -> None:
        """Write while there is room, or until the time `ends` where there may be room again."""
        room = select.poll()
        room.register(descriptor, select.POLLOUT)

        def patience_ms() -> float:
            return 0.0 if ends is None else max(0.0, 1000.0 * (ends - time.monotonic()))

        try:
            while self._waiting and room.poll(patience_ms()):
                if self._torn:
                    write_now(descriptor, b"\n")
                    self._torn = self._inside = False
                written = write_now(descriptor, self._waiting[:_AT_ONCE])
                self._inside = not self._waiting[:written].endswith(b"\n")
                del self._waiting[:written]
        except OSError:
            self._torn = self._inside
            self._waiting.clear()
            raise
