"""Long prompts encoded in processes beside the router, where nothing that they do holds up its event loop.

A thread that encodes holds Python's lock for most of the time, and the event loop waits for it: with long
prompts always under way, every decision does. So each thread that has a prompt to encode hands it to a child
process, which has encoders of its own, and sleeps until the ids and hashes come back.

Nothing depends on the children. The first long prompt after `begin` starts them. One that is starting, or
busy, or could not make its encoder, is passed over, and the thread encodes by itself. One whose encoder turns
out to be another than the router's (the files have changed) is never asked. A child that ends or makes no
progress for `patience_s` while it has a prompt costs that prompt its ids, as it may be the prompt that ended
it; it is started again, each time later, up to `RESTART_MOST_S`.

Prompts that begin alike go to the same child if it is free: children remember what they have encoded.
"""

import contextlib
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

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
from extproc.core.hashing import ChainKey
from extproc.prompt.encoder import EncodedPrompt
from extproc.prompt.errors import Unsupported
from extproc.prompt.piece_cache import PieceCacheStats
from extproc.prompt.recipe import EncoderRecipe, Identity
from extproc.protocol.openai import InferenceRequest

_log = logging.getLogger("warmroute.prompt_processes")

PATIENCE_S = 5.0
RESTART_S = 0.5
RESTART_MOST_S = 60.0
_ALIKE_BYTES = 4096
_CHILD = "extproc.adapters.prompt_child"

Link: TypeAlias = "Connection[Any, Any]"


class PromptProcessError(WarmrouteError):
    """A prompt got no ids, for a reason that lies in the process that had it."""


class Elsewhere(NamedTuple):
    """What came back.

    Attributes:
        prompt: the ids, and the hashes where they were asked for.
        encoded_s: seconds since the text was rendered; None: nothing was.
    """

    prompt: EncodedPrompt
    encoded_s: float | None


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


class _Encoder(NamedTuple):
    """One that children are to have: its number, how it is made, and what must come of that."""

    number: int
    recipe: EncoderRecipe
    identity: Identity


class _State(Enum):
    LOADING = "loading"
    READY = "ready"
    USELESS = "useless"


class PromptProcesses:
    """A few children, for all encoders of a router. Its methods may be called from any thread.

    Args:
        count: children; 0: every thread encodes by itself.
        patience_s: how long a child may make no progress with a prompt.
        clock: monotonic seconds.
    """

    def __init__(
        self, count: int, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = count
        self._children = [_Child(number, count, patience_s, clock) for number in range(count)]
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
            return RemoteEncoder(self, _Encoder(self._encoders, recipe, identity))

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
            Hashed(*_sums([Hashed(), *(child.hashed for child in children)])),
        )

    def close(self) -> None:
        """End them all. A thread that has a prompt there gets an error."""
        self._open = False
        for child in self._children:
            child.end()

    # --- for `RemoteEncoder` ---------------------------------------------------------------------------

    def encode(
        self, encoder: _Encoder, request: InferenceRequest, chain: ChainKey | None
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
            if not self._open:
                child.end()

    def encoded(self, encoder: _Encoder) -> Encoded:
        """What all children have encoded with one encoder, those that are gone included."""
        return Encoded(*_sums([Encoded(), *(child.encoded(encoder.number) for child in self._children)]))

    def _take(self, encoder: _Encoder, key: int) -> "_Child | None":
        """A child that is nobody's, for whoever asked, and best one that can begin; it is in `_busy` then."""
        if not self._open or not self._children:
            return None
        first = key % self.count
        with self._lock:
            free = [
                child
                for child in (*self._children[first:], *self._children[:first])
                if child.number not in self._busy
            ]
            child = next((one for one in free if one.has(encoder)), free[0] if free else None)
            if child is not None:
                self._busy.add(child.number)
        return child


class RemoteEncoder:
    """One encoder, in whichever child is free."""

    def __init__(self, processes: PromptProcesses, encoder: _Encoder) -> None:
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


class _Child:
    """One process, or none yet. Used by one thread at a time, but for what only tells, and `end`."""

    def __init__(self, number: int, of: int, patience_s: float, clock: Callable[[], float]) -> None:
        self.number = number
        self.lost = 0
        self._of = of
        self._patience_s = patience_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._encoders: dict[int, _State] = {}
        self._wanted: dict[int, _Encoder] = {}
        self._encoded: dict[int, Encoded] = {}
        self._encoded_before: dict[int, Encoded] = {}
        self._hashed = self._hashed_before = Hashed()
        self._start_at = -1.0
        self._pause_s = RESTART_S

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    @property
    def hashed(self) -> Hashed:
        return Hashed(*_sums([self._hashed_before, self._hashed]))

    def encoded(self, number: int) -> Encoded:
        before, now = self._encoded_before.get(number, Encoded()), self._encoded.get(number, Encoded())
        return Encoded(*_sums([before, now]))

    def has(self, encoder: _Encoder) -> bool:
        """Whether it has made this one, when it was last asked."""
        return self._encoders.get(encoder.number) is _State.READY

    def ready(self, encoder: _Encoder) -> bool:
        """Whether it can encode with this one at once; if not, it will be as soon as it can."""
        if self._process is not None and self._process.poll() is not None:
            self._gone(f"has ended with {self._process.returncode}")
        if self._link is None and not self._start():
            return False
        try:
            state = self._encoders.get(encoder.number)
            if state is None and _State.LOADING not in self._encoders.values():
                self._encoders[encoder.number] = _State.LOADING
                self._wanted[encoder.number] = encoder
                self._sent(Load(encoder.number, encoder.recipe))
            if _State.LOADING in self._encoders.values() and self._link is not None and self._link.poll(0):
                self._note(self._link.recv())
        except (OSError, EOFError) as error:
            self._gone(f"cannot be reached ({type(error).__name__})")
            return False
        return self.has(encoder)

    def encode(self, encoder: _Encoder, request: InferenceRequest, chain: ChainKey | None) -> Elsewhere:
        """Raises `Unsupported` and `PromptProcessError`."""
        try:
            link = self._sent(Job(encoder.number, request.kind, chain))
            link.send_bytes(request.plain)
            answer = link.recv()
            if isinstance(answer, Done):
                prompts = tuple(_words("I", link.recv_bytes()) for _ in range(answer.prompts))
                chains: tuple[tuple[int, ...], ...] = ()
                if chain is not None:
                    chains = tuple(tuple(_words("Q", link.recv_bytes())) for _ in prompts)
        except BlockingIOError:
            self._gone(f"made no progress with a prompt for {self._patience_s:g} s")
            raise PromptProcessError("encoding took too long") from None
        except (OSError, EOFError):
            self._gone("has ended while it had a prompt")
            raise PromptProcessError("the process that had the prompt has ended") from None
        except Exception:  # what it says next belongs to this prompt
            self._gone("said what cannot be understood")
            raise
        self._pause_s = RESTART_S
        if isinstance(answer, NotHere):
            raise Unsupported(answer.reason, answer.detail)
        if not isinstance(answer, Done):
            why = answer.error if isinstance(answer, Broken) else type(answer).__name__
            raise PromptProcessError(f"encoding failed: {why}")
        self._encoded[encoder.number], self._hashed = answer.encoded, answer.hashed
        found = {} if chain is None else {chain.block_size: chains}
        return Elsewhere(EncodedPrompt(prompts, found), answer.encoded_s)

    def end(self) -> None:
        """For good. Whoever waits for it learns that it has ended."""
        self._start_at = float("inf")
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    # --- inside ------------------------------------------------------------------------------------

    def _start(self) -> bool:
        if self._clock() < self._start_at:
            return False
        ours, theirs = socket.socketpair()
        with theirs:
            for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, side, _timeval(self._patience_s))
            command = [
                sys.executable,
                "-m",
                "extproc.adapters.prompt_child",
                str(theirs.fileno()),
                str(self._of),
            ]
            try:
                self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the router, which ends us
                )
            except OSError as error:
                ours.close()
                self._gone(f"cannot be started ({error.strerror})")
                return False
        self._link = Connection(ours.detach())
        return True

    def _sent(self, message: Load | Job) -> Link:
        if self._link is None:
            raise EOFError
        self._link.send(message)
        return self._link

    def _note(self, answer: object) -> None:
        """It has made an encoder, or cannot."""
        if isinstance(answer, Refused):
            self._encoders[answer.encoder] = _State.USELESS
            _log.warning("a process cannot encode long prompts, so threads do: %s", answer.why)
        elif isinstance(answer, Loaded):
            wanted = self._wanted[answer.encoder]
            same = answer.identity == wanted.identity
            self._encoders[answer.encoder] = _State.READY if same else _State.USELESS
            if not same:
                _log.warning(
                    "the files in %s have changed since the start: its long prompts are encoded in threads",
                    wanted.recipe.model_dir,
                )

    def _gone(self, why: str) -> None:
        """It has ended, or is ended now."""
        self.lost += 1
        self._start_at = max(self._start_at, self._clock() + self._pause_s)
        _log.warning("process %d for long prompts %s; it is started again", self.number, why)
        self._pause_s = min(2 * self._pause_s, RESTART_MOST_S)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.close()
            self._link = None
        for number in self._encoded:
            self._encoded_before[number] = self.encoded(number)._replace(pieces=0, size=0)
        self._hashed_before = self.hashed._replace(blocks=0)
        self._encoded, self._hashed, self._encoders = {}, Hashed(), {}


def _words(kind: str, data: bytes) -> "array[int]":
    words = array(kind)
    words.frombytes(data)
    return words


def _timeval(seconds: float) -> bytes:
    """`struct timeval`."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _sums(rows: Iterable[tuple[int, ...]]) -> list[int]:
    """Column by column."""
    return [sum(column) for column in zip(*rows, strict=True)]
