"""How the blocks of one engine hang together: which are leaves, how old they are, whether there are holes.

Theory of operation
-------------------
Engines store blocks in runs: a prompt's blocks one after the other, later its next ones. A **run** is such a
stretch of handles; it grows at its end, and begins below a handle of another run, or starts a prompt. So the
tree of an engine's blocks costs a place in a list per block and an entry per run.

A run whose end has nothing below it is a **leaf**. Runs know when they grew last; `Ages` finds the leaf that
did so the longest ago, of all engines. A block that an engine removes from the middle leaves a **hole**: it
keeps its place until all behind it is gone too, or it comes back. Where an engine has no holes, a block's
presence proves that of all blocks before it.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence

Handle = int | bytes

_RUN_BYTES = 330  # a run, its list, its places in a map and among the ages


class Run:
    """Consecutive handles of one engine; the last one names the run.

    Attributes:
        handles: in chain order; some may be holes, the last one of a leaf never is.
        parent: the handle that the first one hangs below; None: nothing, or it is not known.
        grown: serial number of its last growth.
        queued: whether `Ages` has an entry for it.
        owner: the runs of its engine.
    """

    __slots__ = ("grown", "handles", "owner", "parent", "queued")

    def __init__(self, owner: "Runs", parent: Handle | None) -> None:
        self.owner = owner
        self.parent = parent
        self.handles: list[Handle] = []
        self.grown = 0
        self.queued = False


class Ages:
    """Leaves of all engines, by when they grew last."""

    __slots__ = ("_heap", "_serial", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[int, Run]] = []
        self._serial = 0
        self._stale = 0

    def grew(self, run: Run) -> None:
        """A leaf has got longer, or is new."""
        self._serial += 1
        run.grown = self._serial
        self.enter(run)

    def enter(self, run: Run) -> None:
        """A run is a leaf now. Its entry may tell an older time than the run's own: `oldest` sees to that."""
        if not run.queued:
            run.queued = True
            heapq.heappush(self._heap, (run.grown, run))

    def ended(self, run: Run) -> None:
        """A run has no handles any more."""
        self._stale += run.queued
        if self._stale > len(self._heap) // 2 + 64:
            self._heap = [entry for entry in self._heap if entry[1].handles]
            heapq.heapify(self._heap)
            self._stale = 0

    def oldest(self) -> Run | None:
        """The leaf that grew the longest ago."""
        heap = self._heap
        while heap:
            grown, run = heap[0]
            if not run.handles or not run.owner.is_leaf(run):
                heapq.heappop(heap)
                run.queued = False
                self._stale -= not run.handles
            elif run.grown != grown:
                heapq.heapreplace(heap, (run.grown, run))
            else:
                return run
        return None


class Runs:
    """The runs of one engine.

    Args:
        ages: of all engines.
        give_up: forgets a handle, and tells how much less there is to keep then.

    Attributes:
        gone: holes, with our hash of the block that was there.
    """

    __slots__ = ("_ages", "_below", "_give_up", "_inner", "_leaves", "gone")

    def __init__(self, ages: Ages, give_up: Callable[[Handle], int]) -> None:
        self._ages = ages
        self._give_up = give_up
        self._leaves: dict[Handle, Run] = {}  # by their last handle
        self._inner: dict[Handle, Run] = {}  # likewise: runs whose end has others below it
        self._below: dict[Handle, int] = {}  # how many runs hang below a handle
        self.gone: dict[Handle, int] = {}

    def is_leaf(self, run: Run) -> bool:
        """Whether nothing hangs below the end of `run`."""
        return self._leaves.get(run.handles[-1]) is run

    def add(self, parent: Handle | None, handles: Sequence[Handle]) -> None:
        """New handles, one after the other, the first below `parent`."""
        run = None if parent is None else self._leaves.pop(parent, None)
        if run is None:
            run = Run(self, parent)
            if parent is not None:
                self._below[parent] = self._below.get(parent, 0) + 1
        run.handles += handles
        self._leaves[handles[-1]] = run
        self._ages.grew(run)

    def evict(self, run: Run) -> int:
        """Give up the last block of a leaf; how much less there is to keep now."""
        return self._give_up(run.handles[-1])

    def remove(self, handle: Handle, block: int) -> None:
        """A handle is gone: with its place, or if something is behind it, leaving a hole."""
        run = self._leaves.pop(handle, None)
        if run is None:
            self.gone[handle] = block
            return
        run.handles.pop()
        self._trim(run)

    def memory_bytes(self, handles: int) -> int:
        """Estimated memory, given how many handles there are."""
        runs = len(self._leaves) + len(self._inner)
        return 9 * handles + _RUN_BYTES * runs + 100 * (len(self._below) + len(self.gone))

    def clear(self) -> None:
        """Everything is gone."""
        for runs in (self._leaves, self._inner):
            for run in runs.values():
                run.handles.clear()
                self._ages.ended(run)
            runs.clear()
        self._below.clear()
        self.gone.clear()

    def __iter__(self) -> Iterator[Run]:
        """Every run, after the one it hangs below."""
        hanging: dict[Handle | None, list[Run]] = {}
        for runs in (self._inner, self._leaves):
            for run in runs.values():
                parent = run.parent if run.parent in self._below else None
                hanging.setdefault(parent, []).append(run)
        found = hanging.pop(None, [])
        for run in found:  # grows meanwhile
            if hanging:
                for handle in run.handles:
                    found += hanging.pop(handle, ())
            yield run

    def _trim(self, run: Run) -> None:
        """The end of a run has changed: forget what is no more, find out what is a leaf."""
        below, gone = self._below, self.gone
        while True:
            handles = run.handles
            while handles and handles[-1] in gone and handles[-1] not in below:
                del gone[handles.pop()]
            if handles:
                end = handles[-1]
                if end in below:
                    self._inner[end] = run
                else:
                    self._leaves[end] = run
                    self._ages.enter(run)
                return
            self._ages.ended(run)
            parent = run.parent
            if parent is None:
                return
            left = below[parent] - 1
            if left:
                below[parent] = left
                return
            del below[parent]
            above = self._inner.pop(parent, None)
            if above is None:
                return
            run = above
