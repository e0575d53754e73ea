r"""Requests of one pool that wait because every worker is full: who is next, who has to go.

Theory of operation
-------------------
The queue decides order and bounds and nothing else: whether there is room is asked of its host, which calls
`pop` again and again while there is. The worker is chosen when a request goes, not when it comes.

    state \ event   room found      left       expire, overflow   enter
    unknown         (unknown)       (unknown)  (unknown)          -> held
    held            -> admitted     -> gone    -> refused         ValueError
    gone            (unknown)       (unknown)  (unknown)          -> held (another request of that id)

**Order.** Priorities are strict: a higher level goes first. So that none starves, a level that has had to
stand by for `ageing_s` ranks one level higher for every such interval, until one of its requests has gone:

    rank = priority + floor((now - last served, or empty) / ageing_s)         ties: longest unserved first

**Fairness** between the tenants of a level is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996)
over predicted work, with the tag of a flow kept at its head:

    work    = prompt tokens + OUTPUT_WEIGHT * expected output tokens          [of all sequences]
    start   = max(virtual time, start + work of the flow's last one that went / weight)
    next    = the flow with the lowest start; ties: the request that came first
    virtual time = the start of the last one that went

So while two tenants both have requests waiting, the work of theirs that goes differs, divided by their
weights, by at most that of one request of each. What leaves or expires was not served and is not charged. A
generated token counts as two of a prompt, as in the virtual token counter (Sheng et al., OSDI 2024). In one
tenant and priority it is first come, first served among requests that may go to the same workers (`place`):
one whose own workers are full does not hold up those that may go elsewhere, and keeps its turn.

**Bounds.** A queue that is too long or too large loses the newest request of the tenant that has most work
waiting for its weight, on the lowest level: a tenant that floods displaces itself, not others.

**Time.** Each request has a time by which it must go (`leave_by`), or it is refused: waiting longer helps
nobody. `wait_s` predicts how long one has to wait, from what has gone lately; see there.

Times are monotonic seconds, work is tokens, sizes bytes.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

OUTPUT_WEIGHT = 2.0
_MAX_DEBTS = 1024  # tenants without waiting requests whose last one is remembered, on one level
_RECENT = 64  # requests that went, to tell the rate from
_MIN_RECENT = 4


def work_of(prompt_tokens: int, expected_output: float, sequences: int) -> float:
    """What a request costs its tenant. At least 1: nothing is free."""
    return max(1.0, prompt_tokens + OUTPUT_WEIGHT * expected_output * sequences)


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds.

    Attributes:
        max_requests: that wait at once.
        max_bytes: of their bodies and prompts.
        ageing_s: see the module.
    """

    max_requests: int = 1000
    max_bytes: int = 256 << 20
    ageing_s: float = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request in the queue.

    `place` stands for the workers that may serve it: equal for requests that wait for the same ones.
    `leave_by`: when it must have gone.
    """

    id: str
    tenant: str
    weight: float
    priority: int
    work: float
    size: int
    arrived_at: float
    leave_by: float
    place: Hashable = None


_Line = deque[tuple[int, Waiting]]  # numbers ascend in the order of arrival


@dataclass(slots=True)
class _Flow:
    """One tenant's requests on one level."""

    tenant: str
    start: float
    weight: float = 1.0
    lines: dict[Hashable, _Line] = field(default_factory=dict)  # by place; none is empty
    count: int = 0  # that wait
    work: float = 0.0  # of those

    @property
    def first(self) -> int:
        """The number of the one that has waited the longest."""
        return min(line[0][0] for line in self.lines.values())

    def heads(self) -> list[tuple[int, Waiting]]:
        """The first of each line, in order of arrival."""
        return sorted((line[0] for line in self.lines.values()), key=_number)

    def newest(self) -> tuple[int, Waiting]:
        """The last that came."""
        return max((line[-1] for line in self.lines.values()), key=_number)


@dataclass(slots=True)
class _Level:
    """All requests of one priority."""

    priority: int
    served_at: float
    flows: dict[str, _Flow] = field(default_factory=dict)
    virtual: float = 0.0
    count: int = 0


def _number(numbered: tuple[int, Waiting]) -> int:
    return numbered[0]


class AdmissionQueue:
    """See the module. Deterministic; not thread-safe."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._levels: dict[int, _Level] = {}
        self._entries: dict[str, Waiting] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # when, work
        self._number = 0
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._entries.values()))

    # --- what happens --------------------------------------------------------------------------------

    def enter(self, entry: Waiting, now: float) -> None:
        """A request waits from now on. The bounds are not looked at: see `overflow`.

        Raises:
            ValueError: one of this id waits already.
        """
        if entry.id in self._entries:
            raise ValueError(f"request {entry.id} waits already")
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = _Level(entry.priority, served_at=now)
        flow = level.flows.get(entry.tenant)
        if flow is None:
            flow = level.flows[entry.tenant] = _Flow(entry.tenant, level.virtual)
        elif not flow.count:
            flow.start = max(level.virtual, flow.start)
        self._number += 1
        flow.weight = entry.weight
        flow.lines.setdefault(entry.place, deque()).append((self._number, entry))
        flow.work += entry.work
        flow.count += 1
        level.count += 1
        self._entries[entry.id] = entry
        self.size += entry.size

    def pop(self, now: float, fits: Callable[[Waiting], bool]) -> Waiting | None:
        """The next request for which there is room. None: there is none.

        Args:
            now: the time.
            fits: whether there is room for a request; asked in order of preference, once for each place.
        """
        full: set[Hashable] = set()
        for level in sorted(self._levels.values(), key=lambda one: self._standing(one, now)):
            flows = [(flow.start, flow.first, flow) for flow in level.flows.values() if flow.count]
            heapq.heapify(flows)  # mostly the first of them goes: the order of the others does not matter
            while flows:
                flow = heapq.heappop(flows)[2]
                for _, entry in flow.heads():
                    if entry.place in full:
                        continue
                    if fits(entry):
                        self._serve(level, flow, entry, now)
                        return entry
                    full.add(entry.place)
        return None

    def leave(self, request_id: str) -> Waiting | None:
        """A request no longer waits, and is not served. None: it did not wait."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        level = self._levels[entry.priority]
        self._remove(level, level.flows[entry.tenant], entry)
        self._tidy(level)
        return entry

    def expire(self, now: float) -> list[Waiting]:
        """Requests whose time is up; they no longer wait."""
        late = [entry for entry in self._entries.values() if entry.leave_by <= now]
        for entry in late:
            self.leave(entry.id)
        return late

    def overflow(self) -> list[Waiting]:
        """What has to go so that the bounds hold; it no longer waits."""
        gone = []
        while len(self._entries) > self._settings.max_requests or self.size > self._settings.max_bytes:
            level = self._levels[min(self._levels)]
            flow = max(
                (one for one in level.flows.values() if one.count),
                key=lambda one: (one.work / one.weight, one.newest()[0]),
            )
            _, entry = flow.newest()
            self._remove(level, flow, entry)
            self._tidy(level)
            gone.append(entry)
        return gone

    # --- what is to be expected ----------------------------------------------------------------------

    def rate(self, now: float) -> float | None:
        """Work that goes per second, lately; None: not known.

        Of the last requests that went while others waited: their work but the first's, by the time since it.
        """
        if len(self._recent) < _MIN_RECENT:
            return None
        elapsed = now - self._recent[0][0]
        work = math.fsum(amount for _, amount in self._recent) - self._recent[0][1]
        return work / elapsed if elapsed > 0.0 else None

    def wait_s(self, tenant: str, priority: int, weight: float, now: float) -> float | None:
        """How long one more request of this kind would have to wait; None: not known.

            (work on higher levels + work of its level that goes before it) / rate

        What goes before it on its level, of each tenant: what it has waiting, at most as much as fair
        queueing lets go until the last request of this one's tenant has gone.
        """
        rate = self.rate(now)
        if rate is None or rate <= 0.0:
            return None
        ahead = math.fsum(
            flow.work
            for level in self._levels.values()
            if level.priority > priority
            for flow in level.flows.values()
        )
        own = self._levels.get(priority)
        if own is not None:
            mine = own.flows.get(tenant)
            start = own.virtual if mine is None else max(own.virtual, mine.start)
            until = start + (0.0 if mine is None else mine.work / weight)
            for flow in own.flows.values():
                served = (until - flow.start) * flow.weight
                ahead += flow.work if flow is mine else min(flow.work, max(0.0, served))
        return ahead / rate

    def waiting_by(self) -> dict[tuple[str, int], int]:
        """Number of requests that wait, by tenant and priority."""
        return {
            (flow.tenant, level.priority): flow.count
            for level in sorted(self._levels.values(), key=lambda one: -one.priority)
            for flow in level.flows.values()
            if flow.count
        }

    # --- inside ------------------------------------------------------------------------------------

    def _standing(self, level: _Level, now: float) -> tuple[float, float, int]:
        """Levels with something to serve, the first to be served lowest."""
        aged = math.floor(max(0.0, now - level.served_at) / self._settings.ageing_s)
        return (-(level.priority + aged), level.served_at, -level.priority)

    def _serve(self, level: _Level, flow: _Flow, entry: Waiting, now: float) -> None:
        level.virtual = max(level.virtual, flow.start)
        flow.start += entry.work / flow.weight
        level.served_at = now
        self._remove(level, flow, entry)
        if self._entries:
            self._recent.append((now, entry.work))
        self._tidy(level)

    def _remove(self, level: _Level, flow: _Flow, entry: Waiting) -> None:
        line = flow.lines[entry.place]
        if line[0][1] is entry:
            line.popleft()
        elif line[-1][1] is entry:
            line.pop()
        else:
            flow.lines[entry.place] = line = deque(one for one in line if one[1] is not entry)
        if not line:
            del flow.lines[entry.place]
        del self._entries[entry.id]
        self.size -= entry.size
        level.count -= 1
        flow.count -= 1
        flow.work = flow.work - entry.work if flow.count else 0.0
        if not self._entries:
            self._recent.clear()  # what goes while nobody waits tells no rate

    def _tidy(self, level: _Level) -> None:
        """Nothing is kept of a level that is empty, nor of tenants that owe nothing."""
        if not level.count:
            del self._levels[level.priority]
            return
        if len(level.flows) <= 2 * level.count + _MIN_RECENT:
            return
        idle = [flow for flow in level.flows.values() if not flow.count]
        owing = [flow for flow in idle if flow.start > level.virtual]
        keep = {flow.tenant for flow in owing[-_MAX_DEBTS:]}
        for flow in idle:
            if flow.tenant not in keep:
                del level.flows[flow.tenant]
