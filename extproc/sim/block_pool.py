"""vLLM's V1 block pool: fixed blocks, reference counts, LRU reuse, and the KV events it emits.

Theory of operation. Every block is in one of three states, told apart by its reference count and hash:

    in use   references > 0; a full block also has a hash, so that other sequences can share it
    cached   references == 0 and a hash: free, but a hit can take it back until it is reused
    blank    references == 0 and no hash: free, holds nothing anybody can find

Free blocks (cached and blank) form one queue. Allocation takes from its head, and a cached block that is
taken loses its hash (`BlockRemoved`). A sequence gives its blocks back tail first, so that of one chain the
tail is reused before the head: hashed blocks join the tail of the queue (least recently used first), blank
ones its head. As in the engine, block 0 is a placeholder that never holds anything, and equal blocks are
not merged: the same hash can be stored, and removed, more than once.

Source: `vllm/v1/core/block_pool.py` and `kv_cache_utils.py` (0.32); one full-attention group.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

SPEC_KIND = "full_attention"
"""What the engine calls a KV cache group in which every block attends to every earlier one."""


@lru_cache(maxsize=4)
def _numbers(count: int) -> tuple[int, ...]:
    """0 to count - 1, the same objects for every pool of a fleet."""
    return tuple(range(count))


class BlockPool:
    """A pool of `num_blocks` KV blocks, of which `num_blocks - 1` are usable.

    Blocks are named by their index. Hashes are opaque 64-bit chained integers.
    """

    __slots__ = (
        "_events",
        "_hash",
        "_holders",
        "_next",
        "_prev",
        "_references",
        "block_size",
        "emit_events",
        "free",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, block_size: int, *, emit_events: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; the engine keeps one block back, so use 2 or more")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1 token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.emit_events = emit_events
        self.free = num_blocks - 1
        # The free queue is a doubly linked ring threaded through two arrays; index 0, the placeholder
        # block, is its sentinel: _next[0] is the head of the queue and _prev[0] its tail.
        numbers = _numbers(num_blocks)
        self._next = [*numbers[1:], 0]
        self._prev = [numbers[-1], *numbers[:-1]]
        self._references = [0] * num_blocks
        self._hash: list[int | None] = [None] * num_blocks
        # hash -> the one block that has it, or several in the order they were stored.
        self._holders: dict[int, int | dict[int, None]] = {}
        self._events: list[KvEvent] = []

    # --- reading ---------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the usable blocks that running sequences hold, 0..1. Cached blocks count as free."""
        return 1.0 - self.free / (self.num_blocks - 1)

    @property
    def cached_hashes(self) -> int:
        """Number of different blocks that a request could hit now."""
        return len(self._holders)

    def match(self, block_hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks of the longest cached prefix of `block_hashes`, at most `limit` of them.

        With duplicates, the block that was stored first answers (the engine's rule).
        """
        found: list[int] = []
        holders = self._holders
        for index in range(min(limit, len(block_hashes))):
            holder = holders.get(block_hashes[index])
            if holder is None:
                break
            found.append(holder if isinstance(holder, int) else next(iter(holder)))
        return found

    def holds(self, block_hash: int) -> bool:
        """Whether a request could hit a block of this hash now."""
        return block_hash in self._holders

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are in the free queue, so that using them makes the queue shorter."""
        references = self._references
        return sum(references[block] == 0 for block in blocks)

    def residents(self) -> dict[int, int]:
        """Every hash that can be hit, with the number of blocks that hold it."""
        return {
            block_hash: 1 if isinstance(holder, int) else len(holder)
            for block_hash, holder in self._holders.items()
        }

    def free_queue(self) -> Iterator[int]:
        """The free blocks, next to be reused first."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def references(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._references[block]

    # --- a sequence's life -------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one more reference on blocks that were hit; those in the free queue leave it."""
        references, following, previous = self._references, self._next, self._prev
        for block in blocks:
            if references[block] == 0:
                before, after = previous[block], following[block]
                following[before] = after
                previous[after] = before
                self.free -= 1
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free queue, forgetting what they cached.

        Raises:
            ValueError: fewer than `count` blocks are free; ask `free` first.
        """
        if count > self.free:
            raise ValueError(f"{count} blocks asked for, {self.free} are free")
        taken: list[int] = []
        following, references = self._next, self._references
        block = following[0]
        for _ in range(count):
            taken.append(block)
            references[block] = 1
            if self._hash[block] is not None:
                self._forget(block)
            block = following[block]
        following[0] = block
        self._prev[block] = 0
        self.free -= count
        return taken

    def cache(
        self,
        blocks: Sequence[int],
        block_hashes: Sequence[int],
        start: int,
        stop: int,
        token_ids: "array[int] | None",
        adapter: str | None,
        cache_salt: str | None,
    ) -> None:
        """Make a sequence's blocks `start:stop` reusable; one `BlockStored` tells of all of them.

        `blocks` and `block_hashes` start at the sequence's first block; `token_ids` are its tokens from
        the first on. None: the hashes are the only identity, and the event says so (`BlockStored.chained`).
        """
        for index in range(start, stop):
            block, block_hash = blocks[index], block_hashes[index]
            self._hash[block] = block_hash
            holder = self._holders.get(block_hash)
            if holder is None:
                self._holders[block_hash] = block
            elif isinstance(holder, int):
                self._holders[block_hash] = {holder: None, block: None}
            else:
                holder[block] = None
        if not self.emit_events:
            return
        size = self.block_size
        if token_ids is None:
            self._events.append(
                BlockStored(
                    block_hashes=tuple(block_hashes[start:stop]),
                    parent=block_hashes[start - 1] if start else None,
                    token_ids=(),
                    block_size=size,
                    lora_name=adapter,
                    spec_kind=SPEC_KIND,
                    chained=True,
                )
            )
            return
        every: tuple[object, ...] | None = None if adapter is None else (adapter,)
        extra_keys: list[tuple[object, ...] | None] = [every] * (stop - start)
        if start == 0 and cache_salt:
            extra_keys[0] = (*(every or ()), cache_salt)
        self._events.append(
            BlockStored(
                block_hashes=tuple(block_hashes[start:stop]),
                parent=block_hashes[start - 1] if start else None,
                token_ids=token_ids[start * size : stop * size],
                block_size=size,
                lora_name=adapter,
                extra_keys=tuple(extra_keys),
                spec_kind=SPEC_KIND,
            )
        )

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference on each of a sequence's blocks, given first block first."""
        references, hashes = self._references, self._hash
        following, previous = self._next, self._prev
        blank: list[int] = []
        tail = previous[0]
        for block in reversed(tuple(blocks)):
            references[block] -= 1
            if references[block]:
                continue
            self.free += 1
            if hashes[block] is None:
                blank.append(block)
                continue
            following[tail] = block
            previous[block] = tail
            tail = block
        following[tail] = 0
        previous[0] = tail
        before, after = 0, following[0]
        for block in blank:
            following[before] = block
            previous[block] = before
            before = block
        following[before] = after
        previous[after] = before

    def reset(self) -> bool:
        """Forget every cached block. Refused (False) while a sequence holds blocks, as in the engine."""
        if self.free != self.num_blocks - 1:
            return False
        self._holders.clear()
        self._hash = [None] * self.num_blocks
        if self.emit_events:
            self._events.append(AllBlocksCleared())
        return True

    @property
    def has_events(self) -> bool:
        """Whether there were events since they were taken."""
        return bool(self._events)

    def take_events(self) -> tuple[KvEvent, ...]:
        """Events since the last call, in order."""
        if not self._events:
            return ()
        events = tuple(self._events)
        self._events.clear()
        return events

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None  # noqa: S101 - callers look first
        self._hash[block] = None
        holder = self._holders[block_hash]
        if isinstance(holder, int):
            del self._holders[block_hash]
        else:
            del holder[block]
            if not holder:
                del self._holders[block_hash]
        if self.emit_events:
            self._events.append(BlockRemoved((block_hash,)))
