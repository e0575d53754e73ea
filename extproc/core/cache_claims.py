"""What engines claim of their KV caches, and how far that is believed.

Theory of operation. KV events tell what a worker holds; `index` keeps it. Three things take belief away:

| what is seen | what follows |
|---|---|
| events are lost, or audits show that some are | what was claimed before is doubted, block by block |
| events have stopped although the engine stores blocks | so too, and it counts as a worker without events |
| the connection for events is lost | until it is back they count for nothing: it is one without events |
| the engine is another process, or began its events anew | all is forgotten |
| it serves another model revision | all is forgotten: blocks of one are nothing to the other |

An **audit** holds the prediction of a finished request against the cached tokens its engine reports; trust in
a worker's predictions comes from audits. What the requests we sent leave in a cache, beside what is claimed
of it, is kept in `extproc.core.sent_prefixes`.
"""

from collections.abc import Mapping, Sequence

from extproc.core.candidates import NOTHING_CONFIGURED, PoolFacts
from extproc.core.divergence import Audit
from extproc.core.doubts import Doubts
from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.kv_index import KvIndex
from extproc.core.kv_transfer import EnginePart
from extproc.core.outcomes import Released
from extproc.core.trust import TrustBook, Verdict
from extproc.core.types import AllBlocksCleared, BlockStored, KvEvent, WorkerId
from extproc.core.worker_table import WorkerState, WorkerTable


class CacheClaims:
    """Claims of all workers.

    Args:
        table: the members. What is known of a worker's KV events (`kv_...`) is written there.
        pools: facts by pool name; a pool that is not named has none.
        event_hashes: tells the hashes of blocks that KV events are about.
        max_blocks: ceiling of the index; 0: none.

    Attributes:
        index: which worker holds which block.
        trust: how well predictions for each worker have held.
        doubts: which claims have to be verified before they are believed.
    """

    def __init__(
        self,
        table: WorkerTable,
        pools: Mapping[str, PoolFacts],
        event_hashes: EventHashes = event_chain,
        max_blocks: int = 0,
    ) -> None:
        self._table = table
        self._pools = pools
        self.index = KvIndex(event_hashes=event_hashes, max_blocks=max_blocks)
        self.trust = TrustBook()
        self.doubts = Doubts()
        self._complete: dict[WorkerId, str] = {}  # whose events are said to be, in the words it was said in

    def publishes(self, state: WorkerState) -> bool:
        """Whether KV events tell what a worker holds, now."""
        return self._has_published(state) and not state.kv_suspended

    def revision_of(self, state: WorkerState) -> str | None:
        """The model revision a worker serves: as configured, else as it told."""
        if state.member.revision is not None:
            return state.member.revision
        pool = self._pool(state)
        return state.revision if pool.learn_revision else pool.model_revision

    def learns_revision(self, state: WorkerState) -> bool:
        """Whether the model revision of a worker is the one it tells."""
        return state.member.revision is None and self._pool(state).learn_revision

    def add(self, state: WorkerState, revision: str | None) -> None:
        """A worker that is not in the index serves this model revision."""
        state.revision = revision
        self.index.add_worker(state.id, revision or "", self._pool(state).tokenizer_of(revision))

    def renew(self, state: WorkerState, revision: str | None) -> None:
        """A worker serves another model revision now: its claims, and all reservations, are forgotten."""
        self.on_reset(state.id)
        self.index.remove_worker(state.id)
        self.add(state, revision)

    def remove(self, worker: WorkerId) -> None:
        """The worker is gone, and all reservations of its blocks with it."""
        self.index.remove_worker(worker)
        self.trust.forget(worker)
        self.doubts.clear(worker)
        self._complete.pop(worker, None)

    def on_events(self, worker: WorkerId, events: Sequence[KvEvent], now: float) -> None:
        """An engine told what it stored and removed."""
        self.trust.on_events(worker, now)
        state = self._table.get(worker)
        if state is not None and state.kv_silent:
            state.kv_silent = False
            cause = self._complete.get(worker)
            if cause is not None:  # nothing is missing: they were late
                self.on_trust(worker, cause, trusted=True)
        for event in events:
            if worker in self.doubts:
                self._apply_in_doubt(worker, event)
            else:
                self.index.apply(worker, event)

    def on_reset(self, worker: WorkerId) -> None:
        """Its KV events begin anew: what it held is no longer known."""
        state = self._table.get(worker)
        if state is not None:
            state.kv_reset = True
        self._forget(worker)

    def on_restart(self, state: WorkerState) -> None:
        """Its counters say that the engine is another process. Events that have told of it already win."""
        if self._has_published(state):
            state.kv_trusted = False
            state.kv_cause = "the engine restarted, and its KV events did not say so"
            self._complete.pop(state.id, None)
        self._forget(state.id)

    def on_trust(self, worker: WorkerId, cause: str, *, trusted: bool) -> None:
        """Whether every event of the worker has been seen. News that some were not make it doubtful."""
        state = self._table.get(worker)
        if state is None:
            return
        if trusted:
            self.doubts.clear(worker)
            self._complete[worker] = cause
        else:
            self._complete.pop(worker, None)
            if state.kv_trusted or state.kv_cause != cause:
                self._doubt(worker)
        state.kv_trusted = trusted
        state.kv_cause = cause

    def on_restored(self, worker: WorkerId, parts: Sequence[EnginePart], now: float) -> bool:
        """What another router has known of the worker's cache; False when it cannot be used: it is damaged.

        All of it is doubted, and counts for nothing while the engine is not known to be the same.
        """
        state = self._table.get(worker)
        if state is None:
            return False
        self._forget(worker)
        try:
            for part in parts:
                self.index.restore(worker, part)
        except ValueError:
            self.index.clear(worker)
            return False
        self.trust.on_events(worker, now)
        self.doubts.doubt(worker, self.index.confirmed(worker), now)
        state.kv_suspended = True
        return True

    def on_suspended(self, worker: WorkerId, *, suspended: bool) -> None:
        """Whether what events have said of a worker counts for nothing: it may have restarted, empty."""
        state = self._table.get(worker)
        if state is not None:
            state.kv_suspended = suspended

    def audit(self, released: Released) -> None:
        """Hold the prediction against what the engine reports; doubt what it disproves."""
        lease, completion = released.lease, released.completion
        worker, block_size = lease.worker, lease.candidate.block_size
        predicted, actual = released.predicted_cached_tokens, completion.cached_tokens
        state = self._table.get(worker)
        if predicted is None or actual is None or block_size is None or lease.sequences != 1:
            return
        if state is None or completion.served_by not in (None, worker.endpoint):
            return
        now, chosen, request = released.released_at, lease.candidate, lease.decision.request
        chain = lease.reserved[0] if lease.reserved else ()
        self.doubts.audit(
            worker,
            chain,
            claimed=(predicted + chosen.doubtful_tokens) // block_size,
            actual=actual // block_size,
            settled=not state.kv_silent,
            now=now,
        )
        verdict = self.trust.audit(
            worker,
            Audit(
                now,
                predicted,
                actual,
                request.namespace,
                block_size,
                request.prompt_tokens,
                completion.prompt_tokens,
            ),
            computed_blocks=len(chain) - actual // block_size,
            admitted_at=lease.admitted_at,
            complete=state.kv_trusted,
        )
        if verdict is not Verdict.FINE:
            state.kv_silent = verdict is Verdict.SILENT
            self._doubt(worker)
            state.kv_trusted = False
            state.kv_cause = verdict.value

    def _has_published(self, state: WorkerState) -> bool:
        return self.index.block_size(state.id) is not None and not state.kv_silent

    def _pool(self, state: WorkerState) -> PoolFacts:
        return self._pools.get(state.member.pool, NOTHING_CONFIGURED)

    def _forget(self, worker: WorkerId) -> None:
        state = self._table.get(worker)
        if state is not None:
            state.kv_suspended = False  # nothing is left to be suspended
        self.trust.forget(worker)
        self.doubts.clear(worker)
        self.index.clear(worker)

    def _doubt(self, worker: WorkerId) -> None:
        """Whatever events have claimed of `worker` has to be verified: some are missing."""
        heard_at = self.trust.last_event_at(worker)
        if heard_at is not None:
            self.doubts.doubt(worker, self.index.confirmed(worker), heard_at)

    def _apply_in_doubt(self, worker: WorkerId, event: KvEvent) -> None:
        """Apply an event of a worker that is doubted: what it stores again it did not have any more."""
        if isinstance(event, AllBlocksCleared):
            self.doubts.clear(worker)
        if isinstance(event, BlockStored):
            for handle, block in self.index.held(worker, event.block_hashes).items():
                if self.doubts.is_unsure(worker, block):
                    self.index.forget(worker, handle)
        self.index.apply(worker, event)
        if isinstance(event, BlockStored):
            self.doubts.stored(worker, self.index.held(worker, event.block_hashes).values())
