"""`python -m extproc.adapters.prompt_child`: encodes prompts for the router that has started it.

It reads jobs from a socket that it was given, and ends when nobody has the other end any more.
"""

import contextlib
import gc
import sys
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from extproc.adapters.freed_memory import give_back
from extproc.adapters.prompt_messages import (
    Broken,
    Done,
    Encoded,
    Hashed,
    Job,
    Load,
    Loaded,
    NotHere,
    Refused,
)
from extproc.core.errors import WarmrouteError
from extproc.core.hashing import REMEMBERED_BLOCKS, ChainMemo
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.prompt.recipe import identity_of
from extproc.protocol.openai import parse_plain

_HUGE_BYTES = 4 << 20  # a body that takes more memory to encode than all that is remembered


class PromptChild:
    """Answers one message after the other.

    Args:
        connection: where they come from.
        of: processes that do the work together; each remembers its part.
        settle: called when an encoder has been made, which lives as long as the process.
    """

    def __init__(
        self, connection: "Connection[Any, Any]", of: int, settle: Callable[[], None] = lambda: None
    ) -> None:
        self._connection = connection
        self._of = of
        self._settle = settle
        self._encoders: dict[int, PromptEncoder] = {}
        self._memo = ChainMemo(REMEMBERED_BLOCKS // of)

    def serve(self) -> None:
        """Until the other end is closed."""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Load):
                    self._load(message)
                elif isinstance(message, Job):
                    self._encode(message, self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            return

    def _load(self, load: Load) -> None:
        try:
            encoder = self._encoders[load.encoder] = load.recipe.load(of=self._of)
        except WarmrouteError as error:
            self._connection.send(Refused(load.encoder, str(error)))
            return
        except Exception as error:  # other models can be made
            self._connection.send(Refused(load.encoder, f"{type(error).__name__}: {error}"))
            return
        self._settle()
        self._connection.send(Loaded(load.encoder, identity_of(encoder)))

    def _encode(self, job: Job, body: bytes) -> None:
        rendered: list[float] = []
        try:
            encoder = self._encoders[job.encoder]
            request = parse_plain(job.kind, body)
            encoded = encoder.encode(request, lambda _: rendered.append(time.monotonic()))
            chains = self._chains(encoded.prompts, job)
        except Unsupported as problem:
            self._connection.send(NotHere(job.number, problem.reason, problem.detail))
            return
        except Exception as error:  # whatever it is, the next job must find us here
            self._connection.send(Broken(job.number, type(error).__name__))
            return
        encoded_s = time.monotonic() - rendered[-1] if rendered else None
        stats, memo = encoder.encoder.stats, self._memo
        counted = Encoded(stats.known, stats.new, stats.pieces, stats.size, stats.evicted)
        hashed = Hashed(memo.hits, memo.misses, memo.blocks)
        self._connection.send(Done(job.number, len(encoded.prompts), encoded_s, counted, hashed))
        for ids in encoded.prompts:
            self._connection.send_bytes(ids.tobytes())
        for chain in chains:
            self._connection.send_bytes(array("Q", chain).tobytes())
        if len(body) > _HUGE_BYTES:
            del request, encoded, body
            give_back()

    def _chains(self, prompts: "tuple[array[int], ...]", job: Job) -> list[tuple[int, ...]]:
        if job.chain is None:
            return []
        return [self._memo.prompt_chain(ids, job.chain.block_size, job.chain.seed) for ids in prompts]


def _settle() -> None:
    give_back()
    gc.freeze()


def main() -> int:
    """Serve the socket whose number is the first argument, as one of so many as the second says."""
    with contextlib.suppress(OSError):  # where memory runs out, the router can do without us
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    PromptChild(Connection(int(sys.argv[1])), int(sys.argv[2]), _settle).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
