"""Claims to be verified before they are believed: the prefixes of a worker that may be gone without a word.

Theory of operation. While every event of a worker is seen, what its events claim is a fact. When some are
lost, each claim made before may be true or not. Throwing them all away would forget a whole cache for the
sake of a few blocks; believing them all would send prompts after prefixes that are no longer there. So they
are **doubted**, block by block. Of a predicted prefix only what comes before its first doubted block counts
as predicted; what follows is priced with the odds of a doubted claim on that worker. A doubt ends

* when a request has found the block cached there (verified), or an event has stored it again;
* when it is not found: then it is disproved, and worth nothing until an event stores it again;
* when all events of the worker are known again, or its cache was cleared.

Blocks that we have sent there since (reservations) are not doubted: the worker has, or will have, them.

    odds = (right + 2) / (right + wrong + 2) * 2 ** (-age / LIFETIME_S)

right and wrong count requests with doubted blocks that were found, or not, the older ones for less (`FADE`
per request); age is the time since the doubt arose. A block that events claim without a gap, and that
requests did not find `FAILURES` times in a row, is doubted too: each failure is remembered for `LIFETIME_S`.

A block that a request did not find is computed, stored and found by the next one, so one that is claimed too
often (a removal was never told) fails now and then and never twice in a row. Therefore what was not found is
**miscounted** until it is stored the next time: then the engine has one copy, whatever was counted before.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from extproc.core.types import WorkerId

LIFETIME_S = 600.0
FADE = 0.9
FAILURES = 2
_MAX_FAILED = 1024
_DISPROVED = float("-inf")


@dataclass(slots=True)
class _Doubted:
    since: dict[int, float] = field(default_factory=dict)  # block -> when the doubt arose
    right: float = 0.0
    wrong: float = 0.0
    failed: dict[int, tuple[int, float]] = field(default_factory=dict)  # block -> times in a row, last time
    miscounted: dict[int, None] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.since or self.failed or self.miscounted)

    def odds(self, since: float, now: float) -> float:
        if since == _DISPROVED:
            return 0.0
        fresh: float = 2.0 ** (-max(0.0, now - since) / LIFETIME_S)
        share: float = (self.right + 2.0) / (self.right + self.wrong + 2.0)
        return share * fresh


class Doubts:
    """Doubted blocks of all workers. Workers without any cost nothing."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Doubted] = {}

    def __contains__(self, worker: WorkerId) -> bool:
        """Whether anything of `worker` is doubted, or has failed lately."""
        return worker in self._workers

    def blocks(self, worker: WorkerId) -> int:
        """How many blocks of `worker` are doubted."""
        doubted = self._workers.get(worker)
        return 0 if doubted is None else len(doubted.since)

    def doubt(self, worker: WorkerId, blocks: Iterable[int], now: float) -> None:
        """Events of `worker` were lost; `blocks` is what they had claimed. Earlier doubts stay."""
        doubted = self._workers.setdefault(worker, _Doubted())
        before = doubted.since
        doubted.since = {block: before.get(block, now) for block in blocks}
        if doubted.empty:
            del self._workers[worker]

    def is_doubted(self, worker: WorkerId, block: int) -> bool:
        """Whether this block of `worker` is doubted."""
        doubted = self._workers.get(worker)
        return doubted is not None and block in doubted.since

    def is_unsure(self, worker: WorkerId, block: int) -> bool:
        """Whether copies of this block that were counted so far prove nothing: doubted, or miscounted."""
        doubted = self._workers.get(worker)
        return doubted is not None and (block in doubted.since or block in doubted.miscounted)

    def stored(self, worker: WorkerId, blocks: Collection[int]) -> None:
        """An event says that `worker` has just stored these: no doubt is left."""
        doubted = self._workers.get(worker)
        if doubted is None:
            return
        for unsure in (doubted.since, doubted.miscounted):
            if not unsure.keys().isdisjoint(blocks):  # nearly always: what is stored is new
                for block in blocks:
                    unsure.pop(block, None)
        if doubted.empty:
            del self._workers[worker]

    def clear(self, worker: WorkerId) -> None:
        """Everything about `worker` is known, or nothing is claimed any more."""
        self._workers.pop(worker, None)

    def believed(
        self, worker: WorkerId, chain: Sequence[int], blocks: int, sent: int, now: float
    ) -> tuple[int, float]:
        """What of a claim counts: leading blocks beyond doubt, and the odds that the others are there too.

        Args:
            worker: of whom it is claimed.
            chain: block hashes of the prompt.
            blocks: how many of them, from the beginning, are claimed.
            sent: how many of them we have sent there since.
            now: the time.
        """
        doubted = self._workers.get(worker)
        if doubted is None or not doubted.since:
            return blocks, 1.0
        since = doubted.since
        for at in range(min(sent, blocks), blocks):
            block = chain[at]
            if block in since:
                return at, doubted.odds(since[block], now)
        return blocks, 1.0

    def audit(
        self,
        worker: WorkerId,
        chain: Sequence[int],
        *,
        claimed: int,
        actual: int,
        settled: bool,
        now: float,
    ) -> None:
        """A request has ended that had `claimed` leading blocks claimed, and found `actual` of them.

        Args:
            worker: who served it.
            chain: block hashes of its prompt.
            claimed: leading blocks that were claimed, in doubt or not.
            actual: leading blocks that the engine had.
            settled: whether a block that was found may be believed from now on: its worker's events arrive.
            now: the time.
        """
        doubted = self._workers.get(worker)
        if doubted is not None:
            self._verify(doubted, chain, claimed, actual, settled=settled)
        if actual < min(claimed, len(chain)):
            self._note_failure(worker, chain[actual : min(claimed, len(chain))], now)
        if doubted is not None and doubted.empty:
            self._workers.pop(worker, None)

    def _verify(
        self, doubted: _Doubted, chain: Sequence[int], claimed: int, actual: int, *, settled: bool
    ) -> None:
        since = doubted.since
        found = [block for block in chain[:actual] if since.get(block, _DISPROVED) != _DISPROVED]
        missing = [block for block in chain[actual:claimed] if since.get(block, _DISPROVED) != _DISPROVED]
        if found or missing:
            share = len(found) / (len(found) + len(missing))
            doubted.right = doubted.right * FADE + share
            doubted.wrong = doubted.wrong * FADE + 1.0 - share
        for block in missing:
            since[block] = _DISPROVED
        for block in chain[:actual]:
            doubted.failed.pop(block, None)
            if settled:
                since.pop(block, None)

    def _note_failure(self, worker: WorkerId, missing: Sequence[int], now: float) -> None:
        doubted, block = self._workers.setdefault(worker, _Doubted()), missing[0]
        for one in missing[:_MAX_FAILED]:
            if len(doubted.miscounted) >= _MAX_FAILED:
                del doubted.miscounted[next(iter(doubted.miscounted))]
            doubted.miscounted[one] = None
        times, last = doubted.failed.pop(block, (0, now))
        times = times + 1 if now - last <= LIFETIME_S else 1
        if times >= FAILURES:
            doubted.since.setdefault(block, now)
            return
        if len(doubted.failed) >= _MAX_FAILED:
            del doubted.failed[next(iter(doubted.failed))]
        doubted.failed[block] = (times, now)
