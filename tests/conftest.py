from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.envoy import EnvoyFactory


@pytest.fixture
async def start_envoy(tmp_path: Path) -> AsyncIterator[EnvoyFactory]:
    """`await start_envoy(settings)` gives a ready Envoy; all of them end with the test."""
    factory = EnvoyFactory(tmp_path)
    yield factory
    await factory.stop()
