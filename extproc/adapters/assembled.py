"""What is put together part by part, and taken apart the other way round."""

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self


class Assembled(ABC):
    """An async context manager. `_start` puts each part that has to be closed on `_cleanup`.

    They are closed in reverse order when it is left; also when `_start` fails half way, or is cancelled.
    """

    def __init__(self) -> None:
        self._cleanup = AsyncExitStack()

    @abstractmethod
    async def _start(self) -> None: ...

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()
