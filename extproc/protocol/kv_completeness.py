"""What is missing of a publisher's messages: whether what was applied is whole, and what may be mended.

It is whole from `since` on; where that is 0, nothing is missing. A clear after a hole makes irrelevant what
was lost about the rank whose cache it emptied, and about no other: several data-parallel ranks may share a
publisher.

Two kinds of loss may end: a hole for which nobody answered when it was found, if somebody answers later, and
a message that could not be read, if it was the wire that had spoiled it. The machine (`kv_sequence`) asks for
them from `mend_from` on.
"""

from collections.abc import Iterable
from typing import NamedTuple

_NONE: frozenset[int] = frozenset()


class Spoiled(NamedTuple):
    """A message that could not be read, with its fingerprint, and where the sequence it broke had begun."""

    since: int
    seq: int
    fingerprint: int


class Completeness:
    """The record of what is missing. All numbers are those of messages.

    Attributes:
        since: everything from here to the latest message was applied; None: the latest are unsure.
        cleared: ranks of which a clear since then makes what was before irrelevant.
        flaw: why it is not whole, while it is not.
        hole: first number of a hole that may perhaps be had later; None: there is none.
        spoiled: what could not be read, and is all that is missing; None: nothing.
    """

    __slots__ = ("cleared", "flaw", "hole", "since", "spoiled")

    def __init__(self, since: int | None = 0, cleared: frozenset[int] = _NONE) -> None:
        self.since = since
        self.cleared = cleared
        self.flaw = "what another router knew of it had a hole"
        self.hole: int | None = None
        self.spoiled: Spoiled | None = None

    def is_whole(self, rank: int) -> bool:
        """Whether nothing is missing that is relevant to a rank."""
        return self.since == 0 or rank in self.cleared

    @property
    def mend_from(self) -> int | None:
        """Where to ask from, to mend what may be mended; None: nothing may."""
        if self.spoiled is None:
            return self.hole
        return self.spoiled.since if self.hole is None else min(self.hole, self.spoiled.since)

    def begin_anew(self) -> None:
        """All is forgotten, and the next message is the first."""
        self.since, self.cleared = 0, _NONE
        self.hole = self.spoiled = None

    def skip_to(self, seq: int, cause: str) -> None:
        """What comes before `seq` and has not come is given up."""
        self.since, self.cleared = seq, _NONE
        self.flaw = cause

    def doubt(self, cause: str) -> None:
        """Something is missing, and no number says where it ends: not whole until a clear."""
        self.since, self.cleared = None, _NONE
        self.flaw = cause

    def lose(self, first: int) -> None:
        """Nobody has answered for a hole that begins at `first`, and perhaps somebody will."""
        self.hole = first if self.hole is None else self.hole

    def spoil(self, seq: int, fingerprint: int | None) -> None:
        """Message `seq` could not be read. `fingerprint`: of its bytes, if others may be had; else None."""
        since = self.since
        if since is not None and seq < since:
            return
        if fingerprint is not None and since is not None and (since == 0 or self.cleared):
            self.spoiled = Spoiled(since, seq, fingerprint)
        self.doubt(f"message {seq} could not be read")

    def clear(self, seq: int, last: int, rank: int, ranks: Iterable[int]) -> None:
        """Message `seq` emptied the cache of `rank`, one of `ranks`; `last` is the latest one applied."""
        if self.since is None:
            self.since = seq
        if self.since <= seq <= last:
            self.cleared |= {rank}
            if self.cleared.issuperset(ranks):  # else there is something to mend yet
                self.hole = self.spoiled = None
