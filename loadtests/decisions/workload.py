"""What is asked: sessions that grow, or short prompts. Bodies are joined from parts made beforehand."""

import json
from dataclasses import dataclass
from random import Random

from extproc.demo.workload import prose
from loadtests.live.fleet import MODEL

_WORDS = 4096
_TAIL = b'],"max_tokens":16,"stream":true}'


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of load.

    Attributes:
        name: what reports call it.
        sessions: conversations that take turns; 0: every prompt is new.
        size: bytes of a prompt, of a session before its first turn.
        turn: bytes that a session grows by with every request, in two messages.
        rate: requests per second.
        limit_ms: what the 95th percentile should stay below.
    """

    name: str
    sessions: int
    size: int
    turn: int
    rate: float
    limit_ms: float


SHAPES = {
    "sessions": Shape("sessions of 100k tokens, growing", 64, 340_000, 2048, 100.0, 20.0),
    "short": Shape("prompts of 200 tokens, all new", 0, 700, 0, 500.0, 5.0),
}


class Bodies:
    """Request bodies of one shape.

    Args:
        shape: what they are like.
        seed: another seed, other texts.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = Random(seed)
        self._words = prose(self._rng, _WORDS).split()
        self._sessions = [self._begun() for _ in range(shape.sessions)]
        self._turn = 0

    def first(self) -> list[bytes]:
        """The first turn of every session: what has to be known before anything grows."""
        return [bytes(session) + _TAIL for session in self._sessions]

    def next(self) -> bytes:
        """One request more."""
        self._turn += 1
        shape = self._shape
        if not shape.sessions:
            return bytes(self._opened(shape.size)) + _TAIL
        session = self._sessions[self._rng.randrange(shape.sessions)]
        session += b"," + self._message("assistant", shape.turn // 2)
        session += b"," + self._message("user", shape.turn // 2)
        return bytes(session) + _TAIL

    def _begun(self) -> bytearray:
        session = self._opened(self._shape.turn // 2)
        turn = 0
        while len(session) < self._shape.size:
            turn += 1
            session += b"," + self._message(("assistant", "user")[turn % 2], self._shape.turn // 2)
        return session

    def _opened(self, size: int) -> bytearray:
        head = b'{"model":' + json.dumps(MODEL).encode() + b',"messages":['
        return bytearray(head + self._message("user", size))

    def _message(self, role: str, size: int) -> bytes:
        text = " ".join(self._rng.choices(self._words, k=size // 3))[: size - 14]
        return json.dumps({"role": role, "content": f"{self._rng.getrandbits(48):x} {text}"}).encode()
