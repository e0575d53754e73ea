"""Where the time of one decision goes.

A stage is named when it ends, and lasted from the end of the one before. Threads that may be given up on
write into a `fork`, which is joined only if its result was used.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

PARSE = "parse"
NORMALIZE = "normalize"  # only where a route asks for it
WAIT = "wait"  # for one of the threads that encode long prompts
RENDER = "render"
TOKENIZE = "tokenize"
NO_IDS = "no-ids"  # of a prompt that got no token ids: given up, or not supported
HOLD = "hold"  # while every worker was full: no part of what a decision takes
MATCH = "match"
DECIDE = "decide"
STAGES = (PARSE, NORMALIZE, WAIT, RENDER, TOKENIZE, NO_IDS, MATCH, DECIDE)
TOTAL = "total"


class Stage(NamedTuple):
    """One stage. Times are clock seconds."""

    name: str
    start: float
    end: float


class Stages:
    """The stages of one request so far.

    Args:
        clock: monotonic seconds.
        wall_ns: unix nanoseconds, read once, to tell when it all happened.
    """

    __slots__ = ("_clock", "_wall_ns", "about", "marks", "started")

    def __init__(self, clock: Callable[[], float], wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self.marks: list[tuple[str, float]] = []
        self.about: dict[str, str | float] = {}  # what spans say of the request besides
        self.started = clock()
        self._wall_ns = wall_ns()

    def mark(self, stage: str, ago_s: float = 0.0) -> None:
        """`stage` ends now, or has ended some seconds ago, but not before the one before it."""
        at = self._clock() - ago_s
        self.marks.append((stage, max(at, self.ended) if ago_s else at))

    def fork(self) -> "Stages":
        """Another record that begins now, for work that may come to nothing."""
        return Stages(self._clock, lambda: self._wall_ns)

    def join(self, other: "Stages") -> None:
        """What a fork has recorded belongs to this request."""
        self.marks += other.marks

    @property
    def ended(self) -> float:
        """When the last stage ended."""
        return self.marks[-1][1] if self.marks else self.started

    def all(self) -> list[Stage]:
        """The stages in order."""
        stages, start = [], self.started
        for name, end in self.marks:
            stages.append(Stage(name, start, end))
            start = end
        return stages

    def unix_ns(self, at: float) -> int:
        """A clock time of this request as unix nanoseconds."""
        return self._wall_ns + round((at - self.started) * 1e9)
