"""Who sends when: sessions by arrival time (open loop), or by free places (closed loop), in steps or not.

    not started --arrival, or a place is free and its step may begin--> running --last turn ended--> done
                                                                       running --a turn failed--> given up

The workload is read one session ahead, so that it may be as long as it likes.
"""

from collections import Counter
from collections.abc import Iterator

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Turn, Workload


class WorkloadError(WarmrouteError):
    """A workload does not keep to what `extproc.sim.sessions` says."""


class Run:
    """A session under way. Times in seconds."""

    __slots__ = ("began", "key", "measured", "session", "turn", "turns")

    def __init__(self, session: Session, key: int, now: float) -> None:
        self.session = session
        self.key = key  # number of the session in the run
        self.turns: Iterator[Turn] = iter(session.turns)
        self.turn = -1  # index of the turn under way
        self.began = now
        self.measured = True

    def next_turn(self) -> Turn | None:
        """The turn to send now or after its think time; None: the session is over."""
        turn = next(self.turns, None)
        if turn is not None:
            self.turn += 1
        return turn


class Clients:
    """The sessions of one workload.

    `start(now)` gives the sessions that begin at `now`; ask again after each `ended`. `next_arrival` is when
    to ask at the latest.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._source = iter(workload.sessions)
        self._places = workload.concurrency or 0
        self._next: Session | None = None
        self._exhausted = False
        self._steps: Counter[int] = Counter()  # running sessions by step
        self._started = 0
        self._last_arrival = 0.0
        self.running = 0
        self._pull()

    @property
    def done(self) -> bool:
        """Nothing is running and nothing is to come."""
        return self._exhausted and self.running == 0

    @property
    def next_arrival(self) -> float | None:
        """When the next session arrives; None: it waits for a place, or there is none."""
        return None if self._next is None else self._next.arrival_s

    def start(self, now: float) -> list[Run]:
        """Sessions that begin now."""
        begun: list[Run] = []
        while self._next is not None and self._may_start(self._next, now):
            session = self._next
            run = Run(session, self._started, now)
            self._started += 1
            self.running += 1
            if session.arrival_s is None:
                self._places -= 1
            if session.step is not None:
                self._steps[session.step] += 1
            begun.append(run)
            self._pull()
        return begun

    def ended(self, run: Run) -> None:
        """The session is over, for whatever reason."""
        session = run.session
        self.running -= 1
        if session.arrival_s is None:
            self._places += 1
        if session.step is not None:
            self._steps[session.step] -= 1
            if not self._steps[session.step]:
                del self._steps[session.step]

    def _may_start(self, session: Session, now: float) -> bool:
        if session.arrival_s is not None:
            return session.arrival_s <= now
        window = self._workload.steps_in_flight
        if window is not None and session.step is not None and self._steps:
            # Sessions come in ascending order of step, so all of an earlier step have started.
            return self._places > 0 and min(self._steps) > session.step - window
        return self._places > 0

    def _pull(self) -> None:
        session = self._next = next(self._source, None)
        if session is None:
            self._exhausted = True
            return
        if session.arrival_s is None:
            if self._workload.concurrency is None:
                raise WorkloadError(
                    f"session {session.id!r} of {self._workload.name} has no arrival time, and the workload "
                    "has no concurrency; give one of them"
                )
            return
        if session.arrival_s < self._last_arrival:
            raise WorkloadError(
                f"session {session.id!r} of {self._workload.name} arrives at {session.arrival_s:g} s, before "
                "the session in front of it; sort them by arrival"
            )
        self._last_arrival = session.arrival_s
