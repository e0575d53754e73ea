"""KV events of one engine on their way to the router: late, perhaps lost, and asked for again.

Batches are numbered: a lost one is noticed when the next one comes. With replay everything missing then comes
`replay_s` later, in order, and what comes meanwhile waits; without, the router is told of the gap and the
events after it still come.
"""

from extproc.core.types import KvEvent

Batch = tuple[KvEvent, ...]


class EventLink:
    """The stream of one engine.

    Args:
        delay_s: from the end of a step to the arrival of its events.
        replay_s: how long the answer to a question for lost batches takes; None: they cannot be asked for.
    """

    __slots__ = ("_delay_s", "_lost", "_replay_s", "_resumes_at")

    def __init__(self, delay_s: float, replay_s: float | None) -> None:
        self._delay_s = delay_s
        self._replay_s = replay_s
        self._lost: list[Batch] = []  # sent since the last batch that came through
        self._resumes_at = 0.0  # nothing is delivered before: a replay is under way

    def lose(self, batch: Batch) -> None:
        """A batch was sent, and does not come."""
        self._lost.append(batch)

    def send(self, batch: Batch, now: float) -> list[tuple[float, Batch | None]]:
        """A batch is sent and comes: what arrives because of that, and when; None: a gap is noticed."""
        at = max(now + self._delay_s, self._resumes_at)
        if not self._lost:
            return [(at, batch)]
        missing, self._lost = self._lost, []
        if self._replay_s is None:
            return [(at, None), (at, batch)]
        at = self._resumes_at = at + self._replay_s
        return [(at, one) for one in (*missing, batch)]
