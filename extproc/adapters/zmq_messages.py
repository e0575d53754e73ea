"""Messages of a ZMQ socket on the event loop, without a future for each of them.

`zmq.asyncio` makes a future, two callbacks and a look at the socket's flags for every message. An engine
sends several for each request, so here what is there is taken at once, and only who finds nothing waits.

A ZMQ socket tells of news by a descriptor that becomes readable once; it calms down when the socket is next
looked at and has nothing more. So all that is there must be taken before anyone waits, and someone has to
look at the socket whenever the descriptor is readable, also when nobody waits for a message.
"""

import asyncio
from collections.abc import Callable

import zmq


class ZmqMessages:
    """What one socket receives. One task at a time asks for it.

    Args:
        socket: open; `close` this before it.
        clock: monotonic seconds.
        slice_s: time to spend on messages that are there already before the loop may serve others.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", clock: Callable[[], float], slice_s: float) -> None:
        self._socket = socket
        self._clock = clock
        self._slice_s = slice_s
        self._began = clock()
        self._waiter: asyncio.Future[list[bytes]] | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._readable)

    async def next(self) -> list[bytes]:
        """The frames of the next message.

        Raises:
            ZMQError: the socket cannot be read.
        """
        frames = self._take()
        if frames is None:
            self._waiter = self._loop.create_future()
            frames = await self._waiter
            self._began = self._clock()
        elif self._clock() - self._began > self._slice_s:
            # A message that is there already is returned without a pause: make one, or requests starve.
            await asyncio.sleep(0)
            self._began = self._clock()
        return frames

    def close(self) -> None:
        """Leave the descriptor alone. The socket stays open."""
        self._loop.remove_reader(self._descriptor)

    def _take(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def _readable(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._socket.getsockopt(zmq.EVENTS)  # or the descriptor stays readable, and the loop spins
            return
        try:
            frames = self._take()
        except zmq.ZMQError as error:
            waiter.set_exception(error)
        else:
            if frames is not None:
                waiter.set_result(frames)
