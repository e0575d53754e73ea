"""The service's own log: without what requests contain, and without floods.

An exception's message may quote what caused it (`invalid literal for int(): '…'`), and that may be part of a
prompt. So of exceptions only types and places are written; errors of the operating system, which quote paths
and numbers, keep their words. What anyone can cause again and again is written a few times a minute, and then
counted.
"""

import logging
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MOST = 20
_WINDOW_S = 60.0

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class PrivateFormatter(logging.Formatter):
    """Formats exceptions without their messages."""

    def formatException(self, ei: _Raised) -> str:  # noqa: N802  # the base class's name
        """Types and places of an exception and of those it came from, the first one first."""
        parts: list[str] = []
        error = ei[1]
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            parts.append("".join(_lines(error)).rstrip())
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\nwhich led to:\n".join(reversed(parts))


def _lines(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [*traceback.format_list(frames), f"{type(error).__qualname__}{_words(error)}\n"]


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f": [Errno {error.errno}] {error.strerror}"
    return " (its message is not shown: it may quote a request)"


class FewOfEach(logging.Filter):
    """Lets a warning or error from one place in the code pass `most` times in `window_s` seconds.

    The first one that passes afterwards says how many did not.
    """

    def __init__(
        self, most: int = _MOST, window_s: float = _WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._windows: dict[
            tuple[str, int], tuple[float, int]
        ] = {}  # as many as there are places in the code

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` passes."""
        if record.levelno < logging.WARNING:
            return True
        place, now = (record.pathname, record.lineno), self._clock()
        began, count = self._windows.get(place, (now, 0))
        if now - began >= self._window_s:
            if count > self._most:
                record.msg = f"{record.msg} ({count - self._most} more like this were not logged)"
            began, count = now, 0
        self._windows[place] = (began, count + 1)
        return count < self._most


def start_log(*, verbose: bool, stream: TextIO | None = None) -> logging.Handler:
    """Log warnings, or with `verbose` all there is, to standard error. Returns the handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(PrivateFormatter(_FORMAT))
    handler.addFilter(FewOfEach())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler])
    return handler
