"""Asks a running Warmroute through its admin server."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec

from extproc.adapters.http_errors import in_words
from extproc.core.errors import WarmrouteError

DEFAULT_URL = "http://127.0.0.1:9902"
TOKEN_VARIABLE = "WARMROUTE_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
_MAX_BYTES = 64 << 20


class AdminClientError(WarmrouteError):
    """Warmroute did not answer as it should; the message says what to do."""


def token_from(file: Path | None) -> str | None:
    """The token in `file`, else in the environment; None: there is none.

    Raises:
        AdminClientError: the file cannot be read.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AdminClientError(f"cannot read the token file {file}: {error}") from error


class AdminClient:
    """A connection; an async context manager.

    Args:
        url: where the admin server is; a path in it is kept.
        token: for servers that ask for one.
        timeout_s: longest an answer may take.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 5.0) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def state(self) -> dict[str, Any]:
        """See `extproc.adapters.status`.

        Raises:
            AdminClientError: there is no usable answer.
        """
        found = await self._get("state")
        if found is None or "workers" not in found:
            raise AdminClientError(f"what answers at {self._url} is not a Warmroute, or one too old for this")
        return found

    async def explained(self, request_id: str) -> dict[str, Any] | None:
        """The explained line about a request; None when it is not known there (any more).

        Raises:
            AdminClientError: there is no usable answer.
        """
        return await self._get(f"explain/{quote(request_id, safe='')}")

    async def _get(self, path: str) -> dict[str, Any] | None:
        if self._session is None:
            raise RuntimeError("not entered")
        try:
            async with self._session.get(
                f"{self._url}/{path}", headers={"Accept": "application/json"}, allow_redirects=False
            ) as reply:
                body = await reply.content.read(_MAX_BYTES)
                status = reply.status
        except TimeoutError as error:
            raise AdminClientError(f"{self._url} does not answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AdminClientError(
                f"cannot reach {self._url} ({in_words(error)}); is `warmroute serve` running, "
                "and is this its `admin.listen`?"
            ) from error
        if status == 401:
            raise AdminClientError(
                f"{self._url} asks for a token: give --token-file, or set {TOKEN_VARIABLE}"
            )
        if status == 404:
            return None
        if status != 200:
            raise AdminClientError(
                f"{self._url}/{path} answered {status}: {body[:200].decode(errors='replace')}"
            )
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise AdminClientError(f"{self._url}/{path} is no answer of Warmroute: {error}") from error
