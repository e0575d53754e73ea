import asyncio

import pytest

from extproc.adapters.assembled import Assembled


class Things(Assembled):
    def __init__(self, fails=None):
        super().__init__()
        self.open = []
        self.closed = []
        self._fails = fails

    async def _start(self):
        for name in ("first", "second"):
            self.open.append(name)
            self._cleanup.callback(self._close, name)
        if self._fails is not None:
            raise self._fails

    def _close(self, name):
        self.open.remove(name)
        self.closed.append(name)


async def test_parts_are_closed_the_other_way_round():
    async with Things() as things:
        assert things.open == ["first", "second"]
    assert (things.open, things.closed) == ([], ["second", "first"])


@pytest.mark.parametrize("fails", [OSError("no port"), asyncio.CancelledError()])
async def test_what_has_been_started_is_closed_when_the_rest_fails(fails):
    things = Things(fails)
    with pytest.raises(type(fails)):
        await things.__aenter__()
    assert (things.open, things.closed) == ([], ["second", "first"])
