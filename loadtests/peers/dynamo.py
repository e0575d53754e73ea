"""`dynamo`: NVIDIA Dynamo's own selection service, in this process.

Real: everything that decides. `dynamo._core.SelectionService` of ai-dynamo-runtime (the optional extra
`peers`; 1.6.1 was used) with its defaults: its KV indexer fed through its ZMQ listener in vLLM's wire format,
its book of active requests, its cost formula, its choice. `prefill_complete` follows a first token, and
`free_reservation` an end; output blocks are not reported (off by default).

Ours: the clock and the tokens. The simulator's time stands still while the service answers: before a
selection, every event published since the last one is followed by a marker block, which is polled for until
the indexer knows it, so the service sees exactly the events that had arrived by then. Each block's tokens are
made from its hash (two tokens of 32 bits, then zeros), so that the service hashes equal blocks alike.
Nothing in the service's defaults depends on time. When events are lost it is told nothing, as in production.

Ties are broken by the service's own random numbers, which cannot be seeded: of all policies this one alone
may differ from run to run.

Raises `PolicyUnavailableError` when the package is not installed.
"""

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from time import monotonic
from typing import Any

import zmq
from xxhash import xxh32_intdigest

from extproc.adapters.kv_publisher import encode_batch
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from extproc.sim.routing import FleetFacts, NullRouter, PolicyUnavailableError, SimRequest

_SEQUENCE = struct.Struct(">q")
_DEADLINE_S = 30.0
_MARKER = 0xFFFFFFFF  # first token of blocks that are no block of a workload; `_tokens` never makes it


class Dynamo(NullRouter):
    """See the module's docstring."""

    name = "dynamo"
    wants_kv_events = True

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        del seed  # the service has its own random numbers
        # It reports every selection on stderr otherwise.
        os.environ.setdefault("DYN_LOG", "error")
        try:
            core = import_module("dynamo._core")
        except ImportError as error:
            raise PolicyUnavailableError(
                "dynamo needs NVIDIA's package: pip install 'warmroute[peers]' (about 250 MB); "
                "dynamo-formula needs nothing"
            ) from error
        if facts.engine.block_size < 3:
            raise PolicyUnavailableError(
                "dynamo needs blocks of 3 tokens or more here: a hash must fit in one"
            )
        self._size = facts.engine.block_size
        self._model = facts.model
        self._context = zmq.Context()
        self._sockets: list[zmq.SyncSocket] = []
        self._sequences = [0] * facts.replicas
        self._marks = [0] * facts.replicas
        self._dirty: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._service: Any = core.SelectionService(indexer_threads=1)
        for worker in range(facts.replicas):
            self._add_worker(worker, facts)

    def _add_worker(self, worker: int, facts: FleetFacts) -> None:
        socket = self._context.socket(zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._sockets.append(socket)
        self._run(
            self._service.upsert_worker,
            {
                "worker_id": worker,
                "model_name": self._model,
                "endpoint": f"http://worker-{worker}",
                "block_size": self._size,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
                "total_kv_blocks": facts.engine.num_gpu_blocks,
                "max_num_batched_tokens": facts.engine.max_num_batched_tokens,
            },
        )
        # The listener subscribes before anything can be published, so nothing is missed.
        if not socket.poll(int(_DEADLINE_S * 1000)):
            raise PolicyUnavailableError("dynamo's KV event listener did not subscribe")
        socket.recv()

    def _run(self, call: Callable[[Any], Awaitable[Any]], argument: Any) -> Any:
        # The service's calls must be made while the loop runs.
        async def awaited() -> Any:
            return await call(argument)

        return self._loop.run_until_complete(awaited())

    # --- what the fleet tells ----------------------------------------------------------------------------

    def on_kv_events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """See `FleetRouter`."""
        del now
        self._publish(worker, [self._wire(event) for event in events])
        self._dirty.add(worker)

    def on_first_token(self, request_id: str, now: float) -> None:
        """See `FleetRouter`."""
        del now
        self._run(self._service.prefill_complete, request_id)

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens, output_tokens, now
        self._run(self._service.free_reservation, request_id)

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        del now
        self._settle()
        chosen = self._run(
            self._service.select_and_reserve,
            {
                "selection_id": request.request_id,
                "model_name": self._model,
                "token_ids": self._prompt(request),
            },
        )
        return int(chosen["worker_id"])

    def close(self) -> None:
        """Stop the service and its sockets."""
        self._service.shutdown()
        for socket in self._sockets:
            socket.close()
        self._context.term()
        self._loop.close()

    # --- the service's view ------------------------------------------------------------------------------

    def overlap(self, request: SimRequest) -> list[int]:
        """Blocks of the prompt that the service believes each worker has."""
        self._settle()
        return self._device_blocks(self._prompt(request))

    def _device_blocks(self, tokens: list[int]) -> list[int]:
        scores = self._run(self._service.overlap_scores, {"model_name": self._model, "token_ids": tokens})
        by_worker = {row["worker_id"]: int(row["device_blocks"]) for row in scores["workers"]}
        return [by_worker[worker] for worker in range(len(self._sockets))]

    def _settle(self) -> None:
        """Wait until the indexer has every event that was published."""
        for worker in sorted(self._dirty):
            self._marks[worker] += 1
            mark = self._marks[worker]
            tokens = [_MARKER, worker, mark, *[0] * (self._size - 3)]
            # One marker at a time: the one before is taken back, so the index does not grow by them.
            events: list[KvEvent] = [self._stored((_marker(worker, mark),), None, tokens)]
            if mark > 1:
                events.append(BlockRemoved((_marker(worker, mark - 1),)))
            self._publish(worker, events)
            deadline = monotonic() + _DEADLINE_S
            while not self._device_blocks(tokens)[worker]:
                if monotonic() > deadline:
                    raise RuntimeError(f"dynamo's indexer did not apply worker {worker}'s events")
        self._dirty.clear()

    def _publish(self, worker: int, events: Sequence[KvEvent]) -> None:
        sequence = _SEQUENCE.pack(self._sequences[worker])
        self._sequences[worker] += 1
        self._sockets[worker].send_multipart([b"", sequence, encode_batch(events, 0.0)])

    # --- blocks as the service wants them ----------------------------------------------------------------

    def _wire(self, event: KvEvent) -> KvEvent:
        match event:
            case BlockStored():
                tokens: list[int] = []
                for block in event.block_hashes:
                    tokens += self._tokens(int(block))
                hashes = tuple(_signed(int(block)) for block in event.block_hashes)
                parent = None if event.parent is None else _signed(int(event.parent))
                return self._stored(hashes, parent, tokens)
            case BlockRemoved():
                return BlockRemoved(tuple(_signed(int(block)) for block in event.block_hashes), event.tier)
            case AllBlocksCleared():
                return event

    def _stored(self, hashes: tuple[int, ...], parent: int | None, tokens: list[int]) -> BlockStored:
        return BlockStored(hashes, parent, tokens, self._size)

    def _tokens(self, block: int) -> list[int]:
        return [(block & 0xFFFFFFFF) % _MARKER, block >> 32, *[0] * (self._size - 2)]

    def _prompt(self, request: SimRequest) -> list[int]:
        tokens: list[int] = []
        for block in request.prefix:
            tokens += self._tokens(block)
        rest = request.prompt_tokens - len(tokens)
        # The rest is the request's own: nothing can hit it.
        own = xxh32_intdigest(request.request_id.encode())
        return tokens + [_MARKER, own, *[0] * rest][:rest]


def _signed(block: int) -> int:
    """The same 64 bits as a signed number, which is all that the service takes."""
    return block - (1 << 64) if block >= 1 << 63 else block


def _marker(worker: int, mark: int) -> int:
    return -((worker << 40) + mark)
