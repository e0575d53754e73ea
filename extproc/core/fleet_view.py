"""What is the same from one decision to the next about the ready workers of a pool.

A view is of one list of ready workers, by identity: the worker table gives the same list as long as the same
workers are ready. What can change without that (a worker's block size, its model revision) is brought up to
date by `renew`. It holds the rows that shortlists are made from, for the expected outputs asked for last.
"""

import math
from collections.abc import Callable, Sequence

from extproc.core.cost import CostSettings
from extproc.core.shortlist import Read, Rows
from extproc.core.types import WorkerId
from extproc.core.worker_facts import worst_of
from extproc.core.worker_table import ForeignLoad, WorkerState

_LENGTHS = 8  # expected outputs with rows of their own, at a time
_WORST_S = 0.25
_LOG_STEP = math.log(2.0) / 2.0  # they are powers of the square root of 2


class FleetView:
    """The ready workers of one pool.

    Args:
        block_size: tells a worker's tokens per KV block.
        told: tells what a worker has lately told of requests that are not ours.
        read: tells what a worker's price is made from.
        settings: coefficients of the price.

    Attributes:
        states: the workers, in the order of membership.
        at: where each is in it.
        ids: the workers, in that order.
        cold_pool: those that serve cold requests only.
    """

    def __init__(
        self,
        block_size: Callable[[WorkerState], int | None],
        told: Callable[[WorkerState, float], ForeignLoad | None],
        read: Read,
        settings: CostSettings,
    ) -> None:
        self._block_size = block_size
        self._told = told
        self._read = read
        self._settings = settings
        self._rows: dict[int, Rows] = {}
        self._sizes: dict[WorkerId, int | None] = {}
        self._one_revision: tuple[str | None, ...] | None = None
        self._revisions: dict[WorkerId, str | None] = {}
        self.states: Sequence[WorkerState] = ()
        self.at: dict[WorkerId, int] = {}
        self.ids: tuple[WorkerId, ...] = ()
        self.cold_pool: tuple[WorkerId, ...] = ()
        self._distinct: tuple[int, ...] | None = None
        # What others have at most on a worker that has told; those that have not are taken to have that.
        self._worst: ForeignLoad | None = None
        self._worst_until = -math.inf
        self._worst_known = False
        self._silent: dict[WorkerId, None] = {}

    def look(self, states: Sequence[WorkerState]) -> None:
        """`states` are ready now. Costs nothing as long as it is the same object."""
        if states is self.states:
            return
        self.states = states
        self._silent.clear()
        self._worst_known = False
        self.ids = tuple(state.id for state in states)
        self.at = {worker: at for at, worker in enumerate(self.ids)}
        self.cold_pool = tuple(state.id for state in states if state.member.cold)
        self._sizes = {state.id: self._block_size(state) for state in states}
        self._revisions = {state.id: state.revision for state in states}
        self._one_revision = self._distinct = None

    def renew(self, worker: WorkerId) -> None:
        """What a worker told of itself may have changed."""
        at = self.at.get(worker)
        if at is None:
            return
        state = self.states[at]
        if state.revision != self._revisions[worker]:
            self._revisions[worker] = state.revision
            self._one_revision = None
        size = self._block_size(state)
        if size != self._sizes[worker]:
            self._sizes[worker] = size
            self._distinct = None
        self._worst_known = False

    def mark(self, worker: WorkerId) -> None:
        """The load of a worker, or what it told of itself, has changed."""
        for rows in self._rows.values():
            rows.mark(worker)

    def block_size(self, worker: WorkerId) -> int | None:
        """Tokens per block of one of them."""
        return self._sizes.get(worker)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """All that there are, ascending."""
        if self._distinct is None:
            self._distinct = tuple(sorted({size for size in self._sizes.values() if size is not None}))
        return self._distinct

    def all_serve(self, revision: str | None) -> bool:
        """Whether this is the model revision of all of them."""
        if self._one_revision is None:
            found = dict.fromkeys(self._revisions.values())
            self._one_revision = tuple(found)
        return self._one_revision == (revision,)

    def foreign(self, state: WorkerState, now: float) -> ForeignLoad:
        """Requests at one of them that are not ours: as it told lately, else the worst that any has told."""
        told = self._told(state, now)
        if told is not None:
            self._silent.pop(state.id, None)
            return told
        self._silent[state.id] = None
        return self._look_for_worst(now)

    def _look_for_worst(self, now: float) -> ForeignLoad:
        if self._worst is None or not self._worst_known or now >= self._worst_until:
            known = [told for state in self.states if (told := self._told(state, now)) is not None]
            worst = worst_of(known)
            if worst != self._worst:
                for worker in self._silent:
                    self.mark(worker)
            self._worst, self._worst_until, self._worst_known = worst, now + _WORST_S, True
        return self._worst

    def rows(self, output: float, chance: int, now: float) -> Rows:
        """Rows for requests that are expected to generate so much, as of now."""
        step = round(math.log(max(1.0, output)) / _LOG_STEP)
        rows = self._rows.pop(step, None)
        if rows is None:
            rows = Rows(math.exp(step * _LOG_STEP), self._read, self._settings)
            if len(self._rows) >= _LENGTHS:
                del self._rows[next(iter(self._rows))]
        self._rows[step] = rows  # the one that was asked for last is the last
        if self._silent:
            self._look_for_worst(now)
        rows.bring(self.ids, chance, now)
        return rows
