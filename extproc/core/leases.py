"""One request on one worker, and what all of them together are for it."""

from dataclasses import dataclass
from typing import NamedTuple

from extproc.core.decode_clock import Run
from extproc.core.types import Candidate, Decision, WorkerId


@dataclass(slots=True)
class Lease:
    """One unfinished request on one worker. Mutable; owned by the ledger (`extproc.core.load_ledger`)."""

    decision: Decision
    candidate: Candidate  # its worker, as it looked when the decision was made
    worker: WorkerId
    generation: int
    uncovered_tokens: int
    sequences: int
    reserved: tuple[tuple[int, ...], ...]  # block hashes counted as on their way to the worker
    admitted_at: float
    prefill_start: float
    prefill_end: float
    expires_at: float
    booked_before_ms: float  # prefill ever booked on its worker, own included
    run: Run
    reported_tokens: int = 0  # generated, as signals said, all sequences
    first_token_at: float | None = None
    stream_ended_at: float | None = None
    served_by: str | None = None  # endpoint, where the gateway tells before the end

    @property
    def id(self) -> str:
        """The ticket that travels with the request."""
        return self.decision.lease_id

    @property
    def private_prompt_tokens(self) -> int:
        """Of its prompt, what does not fill a block that others could share."""
        size = self.candidate.block_size or 0
        return max(0, self.decision.request.prompt_tokens - size * sum(map(len, self.reserved)))

    def unfinished_prefill_s(self, now: float) -> float:
        """Seconds of this lease's own prefill interval that lie after `now`."""
        if self.first_token_at is not None:
            return 0.0
        return max(0.0, self.prefill_end - max(now, self.prefill_start))


class WorkerLoad(NamedTuple):
    """What we have put on one worker, seen at one moment.

    `context_tokens` counts shared prefixes as often as they are read; `private_tokens` is the part of it that
    lies outside of full prompt blocks.
    """

    active: int = 0
    sequences: int = 0
    context_tokens: int = 0
    queued_prefill_ms: float = 0.0
    queued_prefill_tokens: float = 0.0
    private_tokens: int = 0
    prefilling: int = 0  # of `sequences`, those expected to wait for their first token


IDLE = WorkerLoad()
