"""What we know of the engines' caches, for other replicas and for later; and what we were given at our start.

Given memories wait here until their worker is a member that serves the same revision and its event stream is
followed: then the index takes them, and the stream goes on where they stood. The engine is asked for the last
messages again, which shows whether it is still the same (see `protocol.kv_sequence`); until then nothing is
predicted from them, and if it is not, they are forgotten. So are those of workers that do not come in
`KEEP_S`: they may be large.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from extproc.adapters.kv_subscriber import KvSubscriber
from extproc.core.router import Router
from extproc.core.types import WorkerId
from extproc.protocol.index_snapshot import PART_BLOCKS, WorkerMemory, header, pieces
from extproc.protocol.kv_sequence_types import (
    SequenceMemory,
)

KEEP_S = 900.0
TAKEN_S = 60.0  # until it is known that it was taken for the right stream


class IndexMemory:
    """Both directions.

    Args:
        router: whose index it is about.
        clock: seconds, monotonic.
        report: told, in one line, what an operator should know.

    Attributes:
        recalled: workers whose given memory was taken, since the start.
    """

    def __init__(self, router: Router, clock: Callable[[], float], report: Callable[[str], None]) -> None:
        self._router = router
        self._clock = clock
        self._report = report
        self._given: dict[WorkerId, WorkerMemory] = {}
        self._taken: dict[WorkerId, WorkerMemory] = {}
        self.recalled = 0

    def give(self, memories: Mapping[WorkerId, WorkerMemory]) -> None:
        """Memories of another replica, or of an earlier start."""
        self._given = dict(memories)
        asyncio.get_running_loop().call_later(KEEP_S, self._given.clear)

    def recall(self, worker: WorkerId) -> SequenceMemory | None:
        """Its event stream is going to be followed: take its memory into the index, if there is one.

        A memory of another revision is kept: the worker may yet tell that it serves that one.
        """
        given, state = self._given.get(worker), self._router.table.get(worker)
        if given is None or state is None or (given.revision, given.tokenizer_revision) != self._seed(worker):
            return None
        self._taken[worker] = self._given.pop(worker)
        asyncio.get_running_loop().call_later(TAKEN_S, self._taken.pop, worker, None)
        if not self._router.on_kv_restored(worker, given.parts, self._clock()):
            self._report(f"what was known of the cache of {worker} is damaged; it is learned anew")
            return None
        self.recalled += 1
        return given.sequence

    def give_again(self, worker: WorkerId) -> None:
        """Its event stream was followed at the wrong address, where nobody can have told of it."""
        taken = self._taken.pop(worker, None)
        if taken is not None:
            self._given[worker] = taken
            self.recalled -= 1

    async def pieces(self, subscriber: KvSubscriber) -> AsyncGenerator[bytes, None]:
        """What is known now, worker by worker, each as of one moment. Requests are served in between."""
        yield header()
        found: list[WorkerMemory] = []

        def take(worker: WorkerId, sequence: SequenceMemory) -> None:
            if worker in self._router.index and not self._is_unsure(worker):
                revision, tokenizer = self._seed(worker)
                parts = self._router.index.export(worker, PART_BLOCKS)
                found.append(WorkerMemory(worker, revision, tokenizer, sequence, parts))

        async for _ in subscriber.remember(take):
            for memory in found:
                for piece in pieces(memory):
                    yield piece
                    await asyncio.sleep(0)
            found.clear()
            await asyncio.sleep(0)

    def _is_unsure(self, worker: WorkerId) -> bool:
        """Whether it is not known that the engine is the one the claims are about."""
        state = self._router.table.get(worker)
        return state is None or state.kv_suspended

    def _seed(self, worker: WorkerId) -> tuple[str, str]:
        """Revisions that the worker's block hashes rest on."""
        state = self._router.table.get(worker)
        if state is None:
            return "", ""
        facts = self._router.pools.get(state.member.pool)
        return state.revision or "", "" if facts is None else facts.tokenizer_of(state.revision)
