"""Admission: whether, when and how long requests are held while every worker is full."""

from typing import Annotated

from pydantic import Field

from extproc.adapters.holding import HoldSettings
from extproc.config.base import Seconds, Section
from extproc.core.admission_queue import QueueSettings
from extproc.core.saturation import RoomSettings

_ROOM, _QUEUE, _HOLD = RoomSettings(), QueueSettings(), HoldSettings()


class Admission(Section):
    """Requests are held while every worker that may serve them is full; off by default."""

    enabled: bool = Field(default=False, description="hold requests instead of queueing them at workers")
    max_queue_ms: Annotated[float, Field(ge=0)] | None = Field(
        _ROOM.max_queue_ms, description="full: predicted wait there before prefill begins; null: no matter"
    )
    max_kv_usage: Annotated[float, Field(gt=0, le=1)] | None = Field(
        _ROOM.max_kv_usage, description="full: share of its KV memory that requests hold; null: no matter"
    )
    max_worker_requests: Annotated[int, Field(ge=1)] | None = Field(
        _ROOM.max_requests, description="full, and given no more: requests at a worker; null: no matter"
    )
    max_waiting: Annotated[int, Field(ge=0)] | None = Field(
        _ROOM.max_waiting, description="full: more than so many wait in its engine; null: no matter"
    )
    max_wait_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        _HOLD.max_wait_s, description="longest wait; then a 429 with Retry-After"
    )
    queue_requests: Annotated[int, Field(ge=1)] = Field(
        _QUEUE.max_requests, description="of each pool that wait at once"
    )
    queue_bytes: Annotated[int, Field(gt=0)] = Field(
        _QUEUE.max_bytes, description="of their bodies and prompts, for each pool"
    )
    ageing_s: Seconds = Field(
        _QUEUE.ageing_s, description="a priority that stands by for this long counts one more"
    )
    priority_header: str | None = Field(
        _HOLD.priority_header, description="request header with a whole number, higher first; null: none"
    )
    deadline_headers: list[str] = Field(
        list(_HOLD.deadline_headers),
        description="request headers that say how many ms the client waits; the first one counts",
    )

    def settings(self) -> HoldSettings | None:
        """The adapter's form of it; None: nothing is held."""
        if not self.enabled:
            return None
        return HoldSettings(
            room=RoomSettings(
                max_queue_ms=self.max_queue_ms,
                max_kv_usage=self.max_kv_usage,
                max_requests=self.max_worker_requests,
                max_waiting=self.max_waiting,
            ),
            queue=QueueSettings(self.queue_requests, self.queue_bytes, self.ageing_s),
            max_wait_s=self.max_wait_s,
            priority_header=None if self.priority_header is None else self.priority_header.lower(),
            deadline_headers=tuple(name.lower() for name in self.deadline_headers),
        )
