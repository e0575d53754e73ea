"""The key that a pool's engines ask for (`vllm serve --api-key`), for what we ask them ourselves.

vLLM answers 401 to requests under some paths that come without `Authorization: Bearer KEY`; `/metrics`,
`/health` and `/tokenize` need none. Clients send the key with their requests; we send it to the workers of
its pool, under these paths only, and never where a redirect leads. It is not in logs, states or errors.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from extproc.core.errors import WarmrouteError

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Beginnings of the paths under which vLLM asks for its key."""
REFUSALS = frozenset({401, 403})
"""Statuses that mean that a key is missing or wrong."""


class EngineKeyError(WarmrouteError):
    """A key cannot be used; the message names the file, and not the key."""


def read_key(path: Path) -> str:
    """The key in a file, without the white space around it.

    Raises:
        EngineKeyError: the file cannot be read, or holds no key.
    """
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise EngineKeyError(f"cannot read {path}: {reason}") from None
    if not key:
        raise EngineKeyError(f"{path} is empty; put the engines' --api-key there")
    if not (key.isascii() and key.isprintable()):
        raise EngineKeyError(f"{path} holds no key: it must be one line of printable ASCII characters")
    return key


class EngineKey:
    """A pool's key, read from its file at once, and again when an engine refuses it: keys are changed.

    Args:
        path: the file.
        pause_s: least seconds between two readings.
        clock: seconds, monotonic.

    Attributes:
        path: the file.
        problem: why it could not be read the last time, or ""; then the key before is used.

    Raises:
        EngineKeyError: the file cannot be read, or holds no key.
    """

    def __init__(
        self, path: Path, *, pause_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self.problem = ""
        self._pause_s = pause_s
        self._clock = clock
        self._headers = _headers(read_key(path))
        self._read_at = clock()
        self._reading = asyncio.Lock()

    def headers(self, path: str) -> dict[str, str]:
        """What is sent with a request for a path: nothing, where no key is asked for."""
        return dict(self._headers) if path.startswith(GUARDED) else {}

    async def renewed(self, sent: Mapping[str, str]) -> bool:
        """Whether there is another key than was sent with a request that was refused."""
        if not sent:
            return False
        async with self._reading:
            # Many workers of a pool refuse an old key at once: the first has it read for all.
            if sent == self._headers and self._clock() - self._read_at >= self._pause_s:
                self._read_at = self._clock()
                try:
                    self._headers = _headers(await asyncio.to_thread(read_key, self.path))
                    self.problem = ""
                except EngineKeyError as error:
                    self.problem = str(error)
            return sent != self._headers


def headers_for(key: EngineKey | None, path: str) -> dict[str, str]:
    """What is sent with a request for a path to a worker whose pool has this key, or none."""
    return {} if key is None else key.headers(path)


@dataclass(frozen=True, slots=True)
class Refusal:
    """That a worker does not let us see its models: what is seen, and what to do about it."""

    text: str
    advice: str


def refusal(status: int, key: EngineKey | None) -> Refusal:
    """What is to be said of a worker whose `/v1/models` was refused with a status of `REFUSALS`."""
    if key is None:
        text = f"/v1/models answers {status}: the engine asks for a key (vLLM's --api-key), and we have none"
        advice = "put the key into a file and name that in the pool's `api_key_file`"
    else:
        text = f"/v1/models answers {status}: the engine does not take the key in `api_key_file`"
        advice = f"write the engine's --api-key into {key.path}; it is read again without a restart"
        if key.problem:
            advice = f"{key.problem}; {advice}"
    return Refusal(text, f"{advice}. Until then its model names, adapters and revision are not known")


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
