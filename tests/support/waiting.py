"""Waiting for a condition, with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Told = TypeVar("Told")


async def until(condition: Callable[[], object], deadline_s: float = 10.0, what: str = "") -> None:
    """Return as soon as `condition()` is true; fail when it is not within the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}")
        await asyncio.sleep(0.005)


async def until_told(
    ask: Callable[[], Awaitable[Told]], wanted: Callable[[Told], object], deadline_s: float = 20.0
) -> Told:
    """Ask again and again; the first answer that is wanted. Fails when none is within the deadline."""
    end = time.monotonic() + deadline_s
    while not wanted(told := await ask()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s; last told: {told}")
        await asyncio.sleep(0.01)
    return told
