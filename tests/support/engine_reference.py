"""An engine's prefix cache, written as plainly as possible: lists and tuples of tokens, no hashes.

It serves one request at a time and is slow on purpose; the tests compare the fast one with it.
"""

from collections import Counter

from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

Prefix = tuple[object, ...]


class ReferenceCache:
    """Serves requests one after another and says how much of each prompt was cached."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.free: list[int] = list(range(1, num_blocks))  # next to be reused first
        self.content: dict[int, Prefix] = {}  # block -> namespace and all tokens up to its end, if cached
        self.order: list[int] = []  # cached blocks in the order they were stored

    def serve(self, namespace: object, prompt: list[int], output: list[int], budget: int) -> int:
        """Cached tokens of this prompt."""
        tokens = prompt + output
        held: list[int] = []
        for end in range(self.size, len(prompt), self.size):
            prefix = (namespace, *tokens[:end])
            block = next((block for block in self.order if self.content[block] == prefix), None)
            if block is None:
                break
            held.append(block)
        cached = len(held) * self.size
        for block in held:
            self.free.remove(block)
        computed = cached
        # The last token is sampled but never computed.
        while computed < len(tokens) - 1:
            step = min(budget, len(prompt) - computed) if computed < len(prompt) else 1
            computed += step
            while len(held) * self.size < computed:
                block = self.free.pop(0)
                if block in self.content:
                    del self.content[block]
                    self.order.remove(block)
                held.append(block)
            for index in range(computed // self.size):
                if held[index] not in self.content:
                    self.content[held[index]] = (namespace, *tokens[: (index + 1) * self.size])
                    self.order.append(held[index])
        blank = [block for block in reversed(held) if block not in self.content]
        self.free = blank + self.free + [block for block in reversed(held) if block in self.content]
        return cached


def residents_from(events: list[KvEvent]) -> dict[int | bytes, int]:
    """The resident set that a listener with reference counts arrives at."""
    counts: Counter[int | bytes] = Counter()
    for event in events:
        match event:
            case BlockStored():
                assert event.parent is None or isinstance(event.parent, int)
                counts.update(event.block_hashes)
            case BlockRemoved():
                counts.subtract(event.block_hashes)
                assert min(counts.values()) >= 0
            case AllBlocksCleared():
                counts.clear()
    return {block_hash: count for block_hash, count in counts.items() if count}
