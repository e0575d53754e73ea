"""A small HTTP/1.1 client that tells when each piece of an answer came.

Written for measuring: one request costs little, bodies are ready-made bytes, and the clock is read the
moment a piece arrives. Speaks exactly what the targets speak: keep-alive, `content-length` and `chunked`.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


class HttpError(Exception):
    """The answer broke off, or is not HTTP/1.1 as spoken here."""


@dataclass(slots=True)
class Answer:
    """One answer. Times in seconds of `time.perf_counter`.

    `pieces` are the arrival times of the body's chunks (one, if it came with a `content-length`).
    """

    status: int
    headers: dict[str, str]
    body: bytes
    sent_at: float
    ended_at: float
    pieces: list[float] = field(default_factory=list)

    @property
    def first_at(self) -> float:
        """When the first piece of the body came; of an empty body, when the answer ended."""
        return self.pieces[0] if self.pieces else self.ended_at


def encode(method: str, path: str, host: str, body: bytes = b"", headers: Mapping[str, str] = {}) -> bytes:
    """A complete request."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
    if body:
        lines.append("content-type: application/json")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection:
    """One keep-alive connection to `host:port`; it reconnects when the other side has closed it."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def request(self, data: bytes) -> Answer:
        """Send a request made by `encode` and read the whole answer.

        Raises:
            HttpError: the answer broke off or cannot be parsed.
            OSError: no connection.
        """
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            sent_at = time.perf_counter()
            self._writer.write(data)
            answer = await _read_answer(self._reader, sent_at)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            self.close()
            raise HttpError(f"{self._host}:{self._port}: {error}") from error
        except BaseException:
            self.close()
            raise
        if answer.headers.get("connection", "").lower() == "close":
            self.close()
        return answer


async def _read_answer(reader: asyncio.StreamReader, sent_at: float) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    status, headers = parse_head(head)
    pieces: list[float] = []
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts: list[bytes] = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            part = await reader.readexactly(size + 2)
            pieces.append(time.perf_counter())
            parts.append(part[:-2])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        body = b"".join(parts)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if body:
            pieces.append(time.perf_counter())
    return Answer(status, headers, body, sent_at, time.perf_counter(), pieces)


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case).

    Raises:
        ValueError: not the head of an HTTP/1.x answer.
    """
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not an HTTP/1 answer: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


class Pool:
    """As many connections to one address as are needed at once.

    Args:
        address: `host:port`.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._idle: list[Connection] = []

    async def request(self, data: bytes) -> Answer:
        """As `Connection.request`, on the connection that was used last, or a new one."""
        connection = self._idle.pop() if self._idle else Connection(self.address)
        answer = await connection.request(data)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Drop every idle connection."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def post_json(pool: Pool, path: str, body: bytes) -> Answer:
    """One POST of a JSON body."""
    return await pool.request(encode("POST", path, pool.address, body))
