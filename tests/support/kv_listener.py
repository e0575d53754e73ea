"""What a router would know of engines from their KV events, and something to tell it."""

import time

from extproc.adapters.kv_stream import KvSource
from extproc.adapters.kv_subscriber import KvSubscriber
from extproc.core.types import AllBlocksCleared, BlockStored, KvEvent, WorkerId
from extproc.protocol.kv_sequence_types import (
    SequenceLimits,
)
from tests.support.kv_publisher import VllmPublisher, stored
from tests.support.waiting import until

W = WorkerId("w")
LIMITS = SequenceLimits(reply_timeout_s=0.2, check_interval_s=0.3)


class Listener:
    """What the router would know."""

    def __init__(self, limits: SequenceLimits = LIMITS) -> None:
        self.held: dict[WorkerId, list[int | bytes]] = {}
        self.trust: dict[WorkerId, tuple[bool, str]] = {}
        self.resets: list[WorkerId] = []
        self.heard: list[WorkerId] = []
        self.subscriber = KvSubscriber(
            self.events, self.reset, self.trusted, time.monotonic, limits, on_heard=self.heard.append
        )

    def events(self, worker: WorkerId, events: "tuple[KvEvent, ...]") -> None:
        held = self.held.setdefault(worker, [])
        for event in events:
            if isinstance(event, BlockStored):
                held += event.block_hashes
            elif isinstance(event, AllBlocksCleared):
                held.clear()

    def reset(self, worker: WorkerId) -> None:
        self.held[worker] = []
        self.resets.append(worker)

    def trusted(self, worker: WorkerId, trusted: bool, cause: str) -> None:
        self.trust[worker] = (trusted, cause)

    def follow(self, *publishers: VllmPublisher, replay: bool = True, worker: WorkerId = W) -> None:
        self.subscriber.set_sources(
            [KvSource(worker, each.endpoint, each.replay_endpoint if replay else None) for each in publishers]
        )

    async def holds(self, count: int, worker: WorkerId = W, *, trusted: bool = True) -> None:
        """Exactly blocks 0 to count - 1 of the engine, in order, and the trust that goes with it."""
        await until(
            lambda: self.held.get(worker) == list(range(count)) and self.trust[worker][0] == trusted,
            what=f"{count} blocks, trusted={trusted}",
        )


def publish(publisher: VllmPublisher, count: int = 1, *, lose: bool = False) -> None:
    """Blocks, one after the other, a message each."""
    for _ in range(count):
        at = publisher.next
        publisher.publish(stored(at, at - 1 if at else None, [at, at]), lose=lose)
