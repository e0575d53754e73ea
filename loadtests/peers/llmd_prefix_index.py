"""llm-d's approximate prefix index: which worker was recently sent which chunk of a prompt.

Source: llm-d-router v0.9.0 (main at ebab687, August 2026),
`pkg/epp/framework/plugins/requestcontrol/dataproducer/approximateprefix`, with its defaults: auto-tuned.

A prompt is cut into chunks of the engine's block size, but at least 64 tokens; the shorter rest counts as a
chunk too; at most 131,072 tokens are looked at. A worker's match is how many of the chunks it was sent,
counted from the first up to one that no worker was sent. The chunks of a request are recorded for the worker
that it is sent to, in an LRU of that worker's size: its number of GPU blocks if a scrape has told it, else
31,250.

Mapping. A chunk is known by the hash of the engine's block it ends with. The rest is taken to be unlike any
other. Where the engine's block size does not divide 64 the chunk is the smallest multiple of it above 64.
"""

from collections import OrderedDict
from itertools import count

from extproc.sim.routing import SimRequest

MIN_CHUNK_TOKENS = 64
MAX_PREFIX_TOKENS = 131_072
DEFAULT_LRU_CAPACITY = 31_250


class ApproximatePrefixIndex:
    """See the module's docstring.

    Attributes:
        chunk_tokens: tokens per chunk.
    """

    def __init__(self, block_size: int) -> None:
        self._blocks = -(-MIN_CHUNK_TOKENS // block_size)
        self.chunk_tokens = self._blocks * block_size
        self._workers: dict[int, set[int]] = {}  # chunk -> workers that were sent it
        self._recent: dict[int, OrderedDict[int, None]] = {}  # worker -> its chunks, oldest first
        self._capacity: dict[int, int] = {}
        self._rests = count(-1, -1)  # never a hash, those are not negative

    def chunks(self, request: SimRequest) -> list[int]:
        """The chunks of its prompt, the rest included; ask once per request."""
        total = -(-request.prompt_tokens // self.chunk_tokens)
        total = min(total, MAX_PREFIX_TOKENS // self.chunk_tokens)
        chunks = list(request.prefix[self._blocks - 1 :: self._blocks][:total])
        if len(chunks) < total:
            chunks.append(next(self._rests))
        return chunks

    def match(self, chunks: list[int]) -> dict[int, int]:
        """Matched chunks by worker; a worker without any is left out."""
        found: dict[int, int] = {}
        for chunk in chunks:
            workers = self._workers.get(chunk)
            if not workers:
                break
            for worker in workers:
                found[worker] = found.get(worker, 0) + 1
        return found

    def add(self, chunks: list[int], worker: int, gpu_blocks: int | None) -> None:
        """`worker` was sent these. `gpu_blocks` is what its metrics say, if they do."""
        if worker not in self._recent:
            self._recent[worker] = OrderedDict()
            self._capacity[worker] = gpu_blocks or DEFAULT_LRU_CAPACITY
        recent, capacity = self._recent[worker], self._capacity[worker]
        for chunk in chunks:
            recent[chunk] = None
            recent.move_to_end(chunk)
            self._workers.setdefault(chunk, set()).add(worker)
            if len(recent) > capacity:
                oldest, _ = recent.popitem(last=False)
                holders = self._workers[oldest]
                holders.discard(worker)
                if not holders:
                    del self._workers[oldest]

    def uncached_tokens(self, prompt_tokens: int, matched: int, total: int) -> int:
        """llm-d's estimate of what is left to compute: unmatched chunks, and what is beyond the chunks."""
        indexed = total * self.chunk_tokens
        return (total - matched) * self.chunk_tokens + max(0, prompt_tokens - indexed)
