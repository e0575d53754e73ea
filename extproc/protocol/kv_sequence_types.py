"""What goes into the machine of a publisher's message sequence, and what it asks its host to do."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Apply:
    """Decode this payload and apply it to the index."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask for messages from `from_seq` on. Answers to earlier requests must not be passed on any more."""

    from_seq: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget what this publisher's events have said."""


@dataclass(frozen=True, slots=True)
class TrustChanged:
    """What `KvSequence.trust` says has changed for some rank: ask it when this is carried out, not before."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Do not predict from what this publisher has said: it may be gone. Keep it."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What this publisher has said counts again, as far as it was not reset."""


Action = Apply | RequestReplay | Reset | TrustChanged | Suspend | Resume


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """How long to wait, and how much to keep.

    Attributes:
        reply_timeout_s: without a replayed message for so long, an answer counts as over, and incomplete.
        attempts: how many answers in a row may bring nothing before a hole is given up.
        check_interval_s: how often the end of the sequence is asked for.
        overlap: how many known messages a question asks for again, to compare.
        max_waiting: live messages kept while a replay runs.
        max_waiting_bytes: their total size.
    """

    reply_timeout_s: float = 5.0
    attempts: int = 3
    check_interval_s: float = 30.0
    overlap: int = 16
    max_waiting: int = 50_000
    max_waiting_bytes: int = 64 << 20


class Trust(NamedTuple):
    """Whether what has been applied is the whole truth about a rank, and why."""

    trusted: bool
    cause: str


class SequenceMemory(NamedTuple):
    """Where a machine stands: what another needs to go on.

    Attributes:
        last: number of the latest message applied.
        prints: number and fingerprint of the latest messages applied, in order.
        whole_since: everything from here to `last` was applied; None: that is not sure.
        cleared: a clear since then makes what was before irrelevant.
        kept_replays: the publisher has answered with messages before.
    """

    last: int
    prints: tuple[tuple[int, int], ...]
    whole_since: int | None
    cleared: bool
    kept_replays: bool
