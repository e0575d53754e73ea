"""A router that starts begins with what is known: by a peer, else by itself when it was stopped.

Nothing of this can keep it from starting: peers of whom nothing is heard cost `PEERS_S`, those that do not
answer `FETCH_S` together, a snapshot that cannot be used one line. While it runs, the snapshot is written
again and again, and once more when it stops.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from extproc.adapters import index_file
from extproc.adapters.index_file import IndexFileError
from extproc.adapters.index_memory import IndexMemory
from extproc.adapters.peer_exchange import PeerExchange
from extproc.adapters.peer_link import fetch_index
from extproc.core.errors import WarmrouteError
from extproc.core.types import WorkerId
from extproc.protocol.index_snapshot import SnapshotReader, WorkerMemory, read

_log = logging.getLogger("warmroute.snapshot")

PEERS_S = 2.0  # for a first peer to be heard
FETCH_S = 20.0  # for all who are asked
_POLL_S = 0.02

Report = Callable[[str], None]


async def from_peers(exchange: PeerExchange, memory: IndexMemory, report: Report) -> bool:
    """Ask the peers that are heard, one after the other, until one knows something."""
    asked: set[str] = set()
    give_up, ends = time.monotonic() + PEERS_S, time.monotonic() + FETCH_S
    while True:
        left_s = ends - time.monotonic()
        link = next((one for one in exchange.links if one.connected and one.address not in asked), None)
        if left_s <= 0.0:
            return False
        if link is None:
            if asked or time.monotonic() >= give_up:
                return False
            await asyncio.sleep(_POLL_S)
            continue
        asked.add(link.address)
        reader = SnapshotReader()
        settings = exchange.settings
        try:
            async for piece in fetch_index(link.address, settings.name, settings.security, left_s):
                reader.take(piece)
        except WarmrouteError as error:
            report(f"peer {link.replica} tells nothing of the engines' caches: {error}")
            continue
        if reader.workers:
            report(f"peer {link.replica} tells of {_what(reader.workers)}")
            memory.give(reader.workers)
            return True


async def from_disk(path: Path, max_age_s: float, memory: IndexMemory, report: Report) -> bool:
    """Read the snapshot of an earlier start."""
    try:
        workers = await asyncio.to_thread(lambda: read(index_file.read(path, max_age_s)))
    except FileNotFoundError:
        return False
    except (IndexFileError, WarmrouteError) as error:
        report(f"the snapshot is not used, and we start cold: {error}")
        return False
    report(f"the snapshot tells of {_what(workers)}")
    memory.give(workers)
    return True


class SnapshotWriter:
    """Writes the snapshot. `run` it as a task, `write` once more at the end.

    Args:
        path: the file.
        interval_s: how often.
        pieces: what is known now.
        report: told when writing begins to fail, and when it works again.
    """

    def __init__(
        self, path: Path, interval_s: float, pieces: Callable[[], AsyncIterator[bytes]], report: Report
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._pieces = pieces
        self._report = report
        self._failed = False
        self._writing: asyncio.Task[int] | None = None

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.write()

    async def write(self) -> None:
        """Write it now. What another call has begun to write ends first, also if that call was cancelled."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])
        try:
            known = [piece async for piece in self._pieces()]
            writing = self._writing = asyncio.create_task(
                asyncio.to_thread(index_file.write, self._path, known, time.time())
            )
            await asyncio.shield(writing)
        except Exception as error:
            if not self._failed:
                why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
                self._report(f"the snapshot cannot be written to {self._path}: {why}")
                _log.debug("the snapshot", exc_info=True)
            self._failed = True
            return
        if self._failed:
            self._report(f"the snapshot is written to {self._path} again")
        self._failed = False


def _what(workers: dict[WorkerId, WorkerMemory]) -> str:
    return f"{sum(one.blocks for one in workers.values())} blocks on {len(workers)} workers"
