"""What became of a request: the value the audit, the learning and the decision log are made from."""

from dataclasses import dataclass

from extproc.core.leases import Lease
from extproc.core.rollout import Mode
from extproc.core.types import Completion, Outcome

_BAD_STATUS = 400

STOPPED = Completion(Outcome.LOST, details="the router stopped")
"""How requests end that are open when the router stops: it will not hear of it."""


@dataclass(frozen=True, slots=True)
class Released:
    """A lease that has ended, and how: what the decision log and the audit are made from.

    `evicted_blocks`: KV blocks that left the GPU of its worker in the meantime; None: not known.
    """

    lease: Lease
    completion: Completion
    released_at: float
    evicted_blocks: int | None = None

    @property
    def predicted_cached_tokens(self) -> int | None:
        """The prediction for the worker that served it; None when there was none to make.

        Engines count blocks loaded back from a slower tier as cached, so both are in it.
        """
        decision = self.lease.decision
        if not decision.request.keyed_prompts:
            return None
        served = self.completion.served_by
        hits = (
            candidate.cached_tokens + candidate.offloaded_tokens
            for candidate in decision.candidates
            if served in (None, candidate.worker.endpoint)
        )
        return next(hits, None)

    @property
    def prediction_was_exact(self) -> bool | None:
        """Whether the engine cached exactly what was predicted; None when it cannot be compared."""
        predicted, actual = self.predicted_cached_tokens, self.completion.cached_tokens
        if predicted is None or actual is None or self.lease.sequences != 1:
            return None
        return predicted == actual


def is_leak(completion: Completion) -> bool:
    """Whether load was written off because somebody who should have told of its end did not."""
    return completion.outcome is Outcome.LOST and completion.details != STOPPED.details


def suspects(lease: Lease, completion: Completion) -> tuple[str, ...]:
    """Endpoints that could not be reached for this request, or died under it.

    One that ran into a time limit did neither: it is slow, and with it, perhaps, all the others.
    """
    chosen, served = lease.decision.chosen.worker.endpoint, completion.served_by
    if completion.outcome is Outcome.FAILED:
        if "time_limit" in completion.labels:
            return ()
        return (served or chosen,)
    if completion.outcome is Outcome.REJECTED:
        tried = completion.labels.get("tried")
        return () if tried is None else (chosen, tried)
    # A retry took the request elsewhere: the first choice refused it or died under it.
    retried = (completion.attempts or 1) > 1
    return (chosen,) if retried and served is not None and served != chosen else ()


def answered(completion: Completion) -> bool:
    """Whether a worker has given a whole answer that is no error, as far as that was told.

    What an engine refuses (a prompt that is too long) it refuses at once: its times say nothing.
    """
    return completion.outcome is Outcome.FINISHED and (completion.status or 0) < _BAD_STATUS


def served_at(lease: Lease, completion: Completion) -> str | None:
    """The endpoint that has given this request a whole and good answer; None: none has, or it is not known.

    First tokens do not tell: whether an answer is a good one is not said with them.
    """
    if completion.status is None or not answered(completion):
        return None
    if completion.served_by is None and lease.decision.request.mode is Mode.OBSERVE:
        return None  # the gateway sent it where it liked
    return completion.served_by or lease.decision.chosen.worker.endpoint
