"""Child processes that cannot outlive us.

A child is started through a small shim that asks the kernel to kill it when our process dies
(`PR_SET_PDEATHSIG`) and then becomes the program. A shim rather than `preexec_fn`: Python code between
fork and exec is unsafe in a process with threads, and gRPC has threads.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from extproc.core.errors import WarmrouteError

_SHIM = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""


class ChildError(WarmrouteError):
    """A child could not be started or did not get ready; the message holds the end of its log."""


def tied(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` tied to this process."""
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]


class ChildProcess:
    """One child with its output in a file. Start and stop it from the main thread's event loop.

    Args:
        command: program and arguments.
        log: file for its standard output and error; appended to.
        env: environment; None means ours.
        cwd: working directory; None means ours.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.command = list(command)
        self.log = log
        self._env = env
        self._cwd = cwd
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id once started."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs or before it started."""
        return None if self._process is None else self._process.returncode

    @property
    def running(self) -> bool:
        """Started and not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it.

        Raises:
            ChildError: it is running already.
        """
        if self.running:
            raise ChildError(f"{self.command[0]} is running already")
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *tied(self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=None if self._env is None else dict(self._env),
                cwd=self._cwd,
                start_new_session=True,  # Ctrl-C reaches us alone; we stop children in order
            )

    async def stop(self, grace: float = 3.0) -> int | None:
        """Ask it to end, then kill it; safe at any time, and more than once. Returns the exit code."""
        process = self._process
        if process is None:
            return None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(grace):
                    await process.wait()
            except TimeoutError:
                await self.kill()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                raise
        return process.returncode

    async def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its output."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
