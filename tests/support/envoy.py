"""A real Envoy for tests."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extproc.adapters.envoy_bootstrap import EnvoySettings, bootstrap
from extproc.adapters.envoy_process import EnvoyNotFoundError, EnvoyProcess, find_envoy


def require_envoy() -> Path:
    """The binary, or skip with the reason."""
    try:
        return find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))


OLDER_VERSIONS = ("1.36", "1.37", "1.38", "1.39")


def older_envoy(version: str) -> Path:
    """The binary of an older Envoy (`X.Y`), or skip with the reason."""
    folder = os.environ.get("WARMROUTE_ENVOYS_DIR")
    if not folder:
        pytest.skip("WARMROUTE_ENVOYS_DIR is not set: run `.ci/install-envoys.sh DIR` and set it to DIR")
    binary = Path(folder) / version / "envoy"
    if not os.access(binary, os.X_OK):
        pytest.skip(f"there is no Envoy {version} in WARMROUTE_ENVOYS_DIR={folder}")
    return binary


def on_loopback(settings: EnvoySettings) -> EnvoySettings:
    """The same settings on ports the system chooses, reachable from this machine only."""
    return replace(
        settings, listen_address="127.0.0.1", listen_port=0, admin_address="127.0.0.1", admin_port=0
    )


def http_manager(config: Mapping[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager inside a bootstrap."""
    listener = config["static_resources"]["listeners"][0]
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


class EnvoyFactory:
    """Starts Envoys and stops all of them at the end of the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[EnvoyProcess] = []

    async def __call__(
        self, what: EnvoySettings | Mapping[str, Any], *, binary: Path | None = None
    ) -> EnvoyProcess:
        """A ready Envoy with these settings (moved to free loopback ports) or this bootstrap."""
        binary = binary or require_envoy()
        config = bootstrap(on_loopback(what)) if isinstance(what, EnvoySettings) else what
        directory = self._directory / f"envoy-{len(self._started)}"
        directory.mkdir()
        envoy = EnvoyProcess(config, directory, binary=binary)
        self._started.append(envoy)
        await envoy.start()
        return envoy

    async def stop(self) -> None:
        for envoy in reversed(self._started):
            await envoy.stop()
