"""Waiting for a condition, with a deadline."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], deadline_s: float = 10.0, what: str = "") -> None:
    """Return as soon as `condition()` is true; fail when it is not within the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}")
        await asyncio.sleep(0.005)
