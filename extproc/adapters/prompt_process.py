"""One process that encodes prompts for this router, seen from here: started, asked, ended, started again.

It is used by one thread at a time, but for what only tells, and `end`.
"""

import contextlib
import logging
import math
import os
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
from extproc.prompt.recipe import EncoderRecipe, Identity
from extproc.protocol.openai import InferenceRequest

_log = logging.getLogger("warmroute.prompt_processes")

RESTART_S = 0.5
RESTART_MOST_S = 60.0
LOAD_S = 60.0
_PATIENCE_S_PER_BYTE = 1.0 / (1 << 20)
_KILLED_S = 1.0
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


class WantedEncoder(NamedTuple):
    """One that children are to have: its number, how it is made, and what must come of that."""

    number: int
    recipe: EncoderRecipe
    identity: Identity


class _State(Enum):
    LOADING = "loading"
    READY = "ready"
    USELESS = "useless"


class PromptProcess:
    """One of `of` processes, or none yet.

    Attributes:
        number: which one.
        lost: times that it has ended, or had to be ended.
    """

    def __init__(self, number: int, of: int, patience_s: float, clock: Callable[[], float]) -> None:
        self.number = number
        self.lost = 0
        self._of = of
        self._patience_s = patience_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._encoders: dict[int, _State] = {}
        self._wanted: dict[int, WantedEncoder] = {}
        self._encoded: dict[int, Encoded] = {}
        self._encoded_before: dict[int, Encoded] = {}
        self._hashed = self._hashed_before = Hashed()
        self._socket: socket.socket | None = None  # what the link is made of
        self._jobs = 0
        self._load_by = 0.0
        self._start_at = -1.0
        self._pause_s = RESTART_S

    @property
    def pid(self) -> int | None:
        """Of the process; None: there is none now."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    @property
    def hashed(self) -> Hashed:
        """What it has hashed, and those before it."""
        return Hashed(*sums([self._hashed_before, self._hashed]))

    def encoded(self, number: int) -> Encoded:
        """What it has encoded with one encoder, and those before it."""
        before, now = self._encoded_before.get(number, Encoded()), self._encoded.get(number, Encoded())
        return Encoded(*sums([before, now]))

    def has(self, encoder: WantedEncoder) -> bool:
        """Whether it has made this one, when it was last asked, and is not making another."""
        return self._encoders.get(encoder.number) is _State.READY and not self._loading

    @property
    def _loading(self) -> bool:
        """It will say so when it is done, and answers nothing else before."""
        return _State.LOADING in self._encoders.values()

    def look(self) -> None:
        """Whether it has ended, and what it says of the encoder that it is making."""
        if self._process is not None and self._process.poll() is not None:
            self._gone(f"has ended with {self._process.returncode}")
        if self._link is None or not self._loading:
            return
        try:
            if self._link.poll(0):
                self._note(self._link.recv())
            elif self._clock() > self._load_by:
                self._gone(f"has not read a tokenizer in {LOAD_S:g} s")
        except Exception as error:  # whatever it is, what it says next would be misunderstood
            self._gone(f"cannot be reached ({type(error).__name__})")

    def ready(self, encoder: WantedEncoder) -> bool:
        """Whether it can encode with this one at once; if not, it will be as soon as it can."""
        self.look()
        if self._link is None and not self._start():
            return False
        if encoder.number not in self._encoders and not self._loading:
            self._encoders[encoder.number] = _State.LOADING
            self._wanted[encoder.number] = encoder
            self._load_by = self._clock() + LOAD_S
            try:
                self._sent(Load(encoder.number, encoder.recipe))
            except OSError as error:
                self._gone(f"cannot be reached ({type(error).__name__})")
        return self.has(encoder)

    def encode(self, encoder: WantedEncoder, request: InferenceRequest, chain: ChainKey | None) -> Elsewhere:
        """Encode a request; only where it is `ready`.

        Raises:
            Unsupported: as `PromptEncoder.encode`.
            PromptProcessError: no ids.
        """
        self._jobs += 1
        chains: tuple[tuple[int, ...], ...] = ()
        try:
            self._set_patience(self._patience_s + len(request.plain) * _PATIENCE_S_PER_BYTE)
            link = self._sent(Job(self._jobs, encoder.number, request.kind, chain))
            link.send_bytes(request.plain)
            answer = link.recv()
            if not isinstance(answer, Done | NotHere | Broken) or answer.number != self._jobs:
                raise EOFError  # noqa: TRY301  # it answers something else
            if isinstance(answer, Done):
                prompts = tuple(_words("I", link.recv_bytes()) for _ in range(answer.prompts))
                if chain is not None:
                    chains = tuple(tuple(_words("Q", link.recv_bytes())) for _ in prompts)
        except BlockingIOError:
            self._gone("took too long for a prompt")
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
        if isinstance(answer, Broken):
            raise PromptProcessError(f"encoding failed: {answer.error}")
        self._encoded[encoder.number], self._hashed = answer.encoded, answer.hashed
        found = {} if chain is None else {chain.block_size: chains}
        return Elsewhere(EncodedPrompt(prompts, found), answer.encoded_s)

    def end(self) -> None:
        """For good. Whoever waits for it learns that it has ended."""
        self._start_at = math.inf
        if self._process is not None:
            _kill(self._process)

    def let_go(self) -> None:
        """Close what leads to it: nobody uses it any more."""
        for end in (self._link, self._socket):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.close()
        self._link = self._socket = None

    # --- inside ------------------------------------------------------------------------------------

    def _start(self) -> bool:
        if self._clock() < self._start_at:
            return False
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._socket, self._link = ours, Connection(os.dup(ours.fileno()))
                self._set_patience(self._patience_s)
                self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                    [*_python(), "-m", _CHILD, str(theirs.fileno()), str(self._of)],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the router, which ends us
                )
        except OSError as error:
            self._gone(f"cannot be started ({error.strerror})")
            return False
        return True

    def _set_patience(self, seconds: float) -> None:
        """How long one read or write of what is said may take."""
        if self._socket is not None:
            for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, side, _timeval(seconds))

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
        self.lost += self._process is not None
        self._start_at = max(self._start_at, self._clock() + self._pause_s)
        if self._start_at < math.inf:
            _log.warning("process %d for long prompts %s; it is started again", self.number, why)
        self._pause_s = min(2 * self._pause_s, RESTART_MOST_S)
        if self._process is not None:
            _kill(self._process)
            self._process = None
        self.let_go()
        encoded, hashed = self._encoded, self._hashed
        self._encoded, self._hashed, self._encoders = {}, Hashed(), {}  # nothing is ever counted twice
        for number, counts in encoded.items():
            before = self._encoded_before.get(number, Encoded())
            self._encoded_before[number] = Encoded(*sums([before, counts]))._replace(pieces=0, size=0)
        self._hashed_before = Hashed(*sums([self._hashed_before, hashed]))._replace(blocks=0)


def _python() -> list[str]:
    """Our interpreter, which looks for modules where we do: in the working directory only if we do."""
    here = {"", str(Path.cwd())} & set(sys.path)
    return [sys.executable, *([] if here else ["-P"])]


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """At once; one that the kernel does not let go is left to it."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _words(kind: str, data: bytes) -> "array[int]":
    words = array(kind)
    words.frombytes(data)
    return words


def _timeval(seconds: float) -> bytes:
    """`struct timeval`."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def sums(rows: Iterable[tuple[int, ...]]) -> list[int]:
    """Column by column."""
    return [sum(column) for column in zip(*rows, strict=True)]
