"""Long prompts encoded in processes beside the router, where nothing that they do holds up its event loop.

A thread that encodes holds Python's lock for most of the time, and the event loop waits for it: with long
prompts always under way, every decision does. So each thread that has a prompt to encode hands it to a child
process, which has encoders of its own, and sleeps until the ids and hashes come back.

Nothing depends on the children. The first long prompt after `begin` starts them. One that is starting, or
busy, or could not make its encoder, is passed over, and the thread encodes by itself. One whose encoder turns
out to be another than the router's (the files have changed) is never asked. A child that ends, or takes too
long, while it has a prompt costs that prompt its ids, as it may be the prompt that ended it; it is started
again, each time later, up to a minute.

Prompts that begin alike go to the same child if it is free: children remember what they have encoded.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from extproc.adapters.prompt_messages import Encoded, Hashed
from extproc.adapters.prompt_process import Elsewhere, PromptProcess, WantedEncoder, sums
from extproc.core.hashing import ChainKey
from extproc.prompt.piece_cache import PieceCacheStats
from extproc.prompt.recipe import EncoderRecipe, Identity
from extproc.protocol.openai import InferenceRequest

PATIENCE_S = 5.0
_ALIKE_BYTES = 4096


class ProcessesState(NamedTuple):
    """How children are doing.

    Attributes:
        running: there now.
        lost: that have ended, or had to be ended, so far.
        hashed: what all of them have hashed.
    """

    running: int
    lost: int
    hashed: Hashed


NO_PROCESSES = ProcessesState(0, 0, Hashed())


class PromptProcesses:
    """A few children, for all encoders of a router. Its methods may be called from any thread.

    Args:
        count: children; 0: every thread encodes by itself.
        patience_s: how long a child may take for a prompt; a second more for each MiB of its body.
        clock: monotonic seconds.
    """

    def __init__(
        self, count: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = count
        self._children = [PromptProcess(number, count, patience_s, clock) for number in range(count)]
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._encoders = 0
        self._open = False

    def begin(self) -> None:
        """From now on long prompts are encoded in children."""
        self._open = True

    def of(self, recipe: EncoderRecipe, identity: Identity) -> "RemoteEncoder":
        """Encodes as an encoder does that was made by `recipe` and is known by `identity`."""
        with self._lock:
            self._encoders += 1
            return RemoteEncoder(self, WantedEncoder(self._encoders, recipe, identity))

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the children that are there now."""
        return tuple(pid for child in self._children if (pid := child.pid) is not None)

    def state(self) -> ProcessesState:
        """How they are doing."""
        children = self._children
        return ProcessesState(
            len(self.pids),
            sum(child.lost for child in children),
            Hashed(*sums([Hashed(), *(child.hashed for child in children)])),
        )

    def close(self) -> None:
        """End them all. A thread that has a prompt there gets an error."""
        with self._lock:
            self._open = False
            idle = [child for child in self._children if child.number not in self._busy]
        for child in self._children:
            child.end()
        for child in idle:
            child.let_go()

    # --- for `RemoteEncoder` ---------------------------------------------------------------------------

    def encode(
        self, encoder: WantedEncoder, request: InferenceRequest, chain: ChainKey | None
    ) -> Elsewhere | None:
        """See `RemoteEncoder.encode`."""
        child = self._take(encoder, crc32(request.plain[:_ALIKE_BYTES])) if request.plain else None
        if child is None:
            return None
        try:
            return child.encode(encoder, request, chain) if child.ready(encoder) else None
        finally:
            with self._lock:
                self._busy.discard(child.number)
                closed = not self._open
            if closed:
                child.end()
                child.let_go()

    def encoded(self, encoder: WantedEncoder) -> Encoded:
        """What all children have encoded with one encoder, those that are gone included."""
        return Encoded(*sums([Encoded(), *(child.encoded(encoder.number) for child in self._children)]))

    def _take(self, encoder: WantedEncoder, key: int) -> "PromptProcess | None":
        """A child that is nobody's, and in `_busy` from now on: one that can begin, if there is one."""
        if not self._children:
            return None
        first = key % self.count
        with self._lock:
            if not self._open:
                return None
            free = [
                child
                for child in (*self._children[first:], *self._children[:first])
                if child.number not in self._busy
            ]
            for one in free:
                one.look()
            child = next((one for one in free if one.has(encoder)), free[0] if free else None)
            if child is not None:
                self._busy.add(child.number)
        return child


class RemoteEncoder:
    """One encoder, in whichever child is free."""

    def __init__(self, processes: PromptProcesses, encoder: WantedEncoder) -> None:
        self._processes = processes
        self._encoder = encoder

    @property
    def count(self) -> int:
        """How many prompts can be encoded at one time."""
        return self._processes.count

    @property
    def stats(self) -> PieceCacheStats:
        """What the children remember."""
        return PieceCacheStats(*self._processes.encoded(self._encoder))

    def encode(self, request: InferenceRequest, chain: ChainKey | None) -> Elsewhere | None:
        """Encode a request in a child, and wait for it; None: there is none for it now.

        Raises:
            Unsupported: as `PromptEncoder.encode`.
            PromptProcessError: no ids; it must not be tried here.
        """
        return self._processes.encode(self._encoder, request, chain)
