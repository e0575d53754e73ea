"""Stacks that scenarios share, one plain and one with wires to tamper with; rebuilt after one that failed."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.chaos.odd_stack import OddStack
from tests.chaos.pair_stack import PairStack
from tests.chaos.stack import ChaosStack

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


class Shared:
    """One stack, as long as it is whole."""

    def __init__(
        self, make_directory: pytest.TempPathFactory, make_stack: Callable[[Path], ChaosStack]
    ) -> None:
        self._make_directory = make_directory
        self._make_stack = make_stack
        self._opened: AsyncExitStack | None = None
        self._stack: ChaosStack

    async def whole(self) -> ChaosStack:
        """The stack, healthy and with nothing going on."""
        if self._opened is None:
            self._opened = AsyncExitStack()
            stack = self._make_stack(self._make_directory.mktemp("chaos"))
            self._stack = await self._opened.enter_async_context(stack)
        await self._stack.begin()
        return self._stack

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.aclose()


async def _lent(shared: Shared, request: pytest.FixtureRequest) -> AsyncIterator[ChaosStack]:
    try:
        yield await shared.whole()
    except BaseException:
        await shared.close()
        raise
    if request.node.stash.get(_FAILED, False):
        await shared.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def _plain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    shared = Shared(tmp_path_factory, ChaosStack)
    yield shared
    await shared.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def _wired(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    shared = Shared(tmp_path_factory, partial(ChaosStack, wires=True, fronts=True, log_wire=True))
    yield shared
    await shared.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def _odd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    shared = Shared(tmp_path_factory, OddStack)
    yield shared
    await shared.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def _pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    shared = Shared(tmp_path_factory, PairStack)
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="package")
async def stack(_plain: Shared, request: pytest.FixtureRequest) -> AsyncIterator[ChaosStack]:
    """Engines, router and Envoy."""
    async for one in _lent(_plain, request):
        yield one


@pytest_asyncio.fixture(loop_scope="package")
async def wired(_wired: Shared, request: pytest.FixtureRequest) -> AsyncIterator[ChaosStack]:
    """The same with wires in between: `wires` of KV events, `fronts` of metrics, `log_wire`."""
    async for one in _lent(_wired, request):
        yield one


@pytest_asyncio.fixture(loop_scope="package")
async def odd(_odd: Shared, request: pytest.FixtureRequest) -> AsyncIterator[ChaosStack]:
    """One whose router's clocks and names are told by a `world`."""
    async for one in _lent(_odd, request):
        yield one


@pytest_asyncio.fixture(loop_scope="package")
async def pair(_pair: Shared, request: pytest.FixtureRequest) -> AsyncIterator[ChaosStack]:
    """One with two routers that are peers."""
    async for one in _lent(_pair, request):
        yield one
