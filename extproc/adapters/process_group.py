"""Several processes of one `serve`: started, watched, restarted, stopped in order.

Each child is one full router on the shared port (SO_REUSEPORT) and on a port of its own; they find each other
by sockets in a private folder. A child that dies is started again after a pause, which grows while it keeps
dying young. When we are asked to stop, all are, and those that have not ended by `grace_s` are killed. What
children write to standard output is passed on line by line, so that decisions do not mix.
"""

import asyncio
import contextlib
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from extproc.adapters.child_process import tied
from extproc.adapters.grpc_ports import cannot_listen
from extproc.adapters.line_output import LineOutput
from extproc.protocol.addresses import parse_address

_STDOUT = LineOutput(lambda: sys.stdout)  # one for all children: lines stay whole
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0
_YOUNG_S = 5.0
_MAX_LINE = 16 << 20


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Which of the processes of one `serve` this is.

    Attributes:
        number: from 0.
        count: of all.
        folder: private to them; sockets are there.
    """

    number: int = 0
    count: int = 1
    folder: Path | None = None

    def socket(self, number: int) -> str:
        """Where process `number` is reached by the others."""
        return f"unix:{self.folder}/peer-{number}.sock"

    @property
    def siblings(self) -> tuple[str, ...]:
        """Where the others are reached."""
        return tuple(self.socket(n) for n in range(self.count) if n != self.number)


def port_of(address: str, process: int) -> str:
    """The address of one process, where that of the first is given; port 0 stays, and an empty one too."""
    if not address:
        return address
    host, port = address.rpartition(":")[0], parse_address(address, lowest_port=0).port
    return address if port == 0 else f"{host}:{port + process}"


def reserve(listen: str) -> tuple[socket.socket, str]:
    """Hold the shared port for all processes, and see that nobody else has it.

    The socket does not listen, so no connection goes to it; keep it while processes run.

    Raises:
        WarmrouteError: the address cannot be had.
    """
    address = parse_address(listen, lowest_port=0)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address.host, address.port))
    except OSError as error:
        raise cannot_listen(listen) from error
    return held, f"{listen.rpartition(':')[0]}:{held.getsockname()[1]}"


@dataclass(slots=True)
class _Child:
    number: int
    process: asyncio.subprocess.Process | None = None
    starts: int = 0


class ProcessGroup:
    """Runs `count` children until asked to stop.

    Args:
        command: gives the command line of one child, from its place.
        count: how many.
        report: told, in one line, what an operator should know.
        grace_s: how long children may take to stop.
    """

    def __init__(
        self,
        command: Callable[[ProcessPlace], Sequence[str]],
        count: int,
        report: Callable[[str], None],
        grace_s: float = 30.0,
    ) -> None:
        self._command = command
        self._report = report
        self._grace_s = grace_s
        self._children = [_Child(number) for number in range(count)]
        self._stop = asyncio.Event()
        self._failed = False

    def stop(self) -> None:
        """Ask for the end."""
        self._stop.set()

    async def run(self) -> int:
        """Until `stop` is called. Exit code: 0; 2 if a child said that its configuration cannot be used."""
        folder = Path(tempfile.mkdtemp(prefix="warmroute-"))  # of mode 0700
        try:
            watches = [
                asyncio.create_task(
                    self._keep(child, ProcessPlace(child.number, len(self._children), folder))
                )
                for child in self._children
            ]
            await self._stop.wait()
            for child in self._children:
                self._signal(child, signal.SIGTERM)
            _, late = await asyncio.wait(watches, timeout=self._grace_s)
            for child in self._children:
                self._signal(child, signal.SIGKILL)
            if late:
                self._report(f"{len(late)} processes did not stop in {self._grace_s:g} s and were killed")
            await asyncio.gather(*watches)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return 2 if self._failed else 0

    async def _keep(self, child: _Child, place: ProcessPlace) -> None:
        pause, clock = _FIRST_PAUSE_S, asyncio.get_running_loop().time
        while not self._stop.is_set():
            started = clock()
            try:
                code = await self._one_life(child, place)
            except OSError as error:
                self._report(f"process {child.number} cannot be started: {error.strerror}")
                code = -1
            if self._stop.is_set():
                return
            if code == 2 and child.starts == 1:  # it said why
                self._failed = True
                self.stop()
                return
            pause = min(_MAX_PAUSE_S, 2 * pause) if clock() - started < _YOUNG_S else _FIRST_PAUSE_S
            self._report(f"process {child.number} ended with code {code}; it starts again in {pause:.1f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()

    async def _one_life(self, child: _Child, place: ProcessPlace) -> int:
        child.starts += 1
        child.process = await asyncio.create_subprocess_exec(
            *tied(self._command(place)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
            start_new_session=True,  # Ctrl-C reaches us alone; we stop children in order
        )
        if self._stop.is_set():
            self._signal(child, signal.SIGTERM)
        output = child.process.stdout
        if output is not None:
            await _pass_on(output)
        return await child.process.wait()

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        if child.process is not None and child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)


async def _pass_on(output: asyncio.StreamReader) -> None:
    """Whole lines only, also of what is left when a child dies. Children do not depend on who reads them."""
    while True:
        try:
            line = await output.readline()
        except ValueError:  # longer than any line of ours; what was read is gone
            continue
        if not line:
            return
        with contextlib.suppress(OSError, ValueError):
            _STDOUT.write(line if line.endswith(b"\n") else line + b"\n")
