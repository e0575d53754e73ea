"""Chained block hashes: `h(i) = xxh3_64(block i as little-endian u32 tokens, seed = h(i-1))`.

`h(-1)` is the namespace's seed. Requests and KV events are hashed by the same functions, so they meet on
the same chain whatever hash the engine itself uses. A hash is never proof of a hit, only a claim.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import xxhash

_WORD = 4
_BIG_ENDIAN = sys.byteorder == "big"
_STRETCH = 64  # blocks cut out of the tokens, or remembered, in one go

REMEMBERED_BLOCKS = 1_000_000
"""How many blocks a `ChainMemo` remembers by default, at some 60 bytes each."""


class ChainKey(NamedTuple):
    """What the hashes of a prompt depend on besides its tokens.

    Attributes:
        block_size: tokens per block.
        seed: of the namespace.
    """

    block_size: int
    seed: int


def token_array(token_ids: Iterable[int]) -> "array[int]":
    """Token ids as 4-byte unsigned integers.

    Raises:
        OverflowError: a token id is negative or does not fit 32 bits.
    """
    return array("I", token_ids)


def chain(
    token_ids: "array[int] | Sequence[int]", block_size: int, seed: int, max_blocks: int | None = None
) -> list[int]:
    """Hashes of the full blocks of `token_ids`, in order; at most `max_blocks` of them."""
    tokens = _little_endian(token_ids)
    count = len(tokens) // block_size
    if max_blocks is not None:
        count = min(count, max_blocks)
    out: list[int] = []
    _extend(out, memoryview(tokens).cast("B"), 0, count, block_size, seed)
    return out


def prompt_chain(token_ids: "array[int]", block_size: int, seed: int) -> list[int]:
    """Hashes of the blocks a prompt can hit.

    An engine always computes at least the last token, so a prompt of n tokens can hit at most
    `(n - 1) // block_size` blocks (vLLM's rule).
    """
    return chain(token_ids, block_size, seed, max_blocks=max(0, len(token_ids) - 1) // block_size)


def mix(seed: int, extra: bytes) -> int:
    """A chain seed that also depends on `extra` (multimodal inputs and other engine-side keys)."""
    return xxhash.xxh3_64_intdigest(extra, seed)


class ChainMemo:
    """`prompt_chain` that remembers: the beginnings of prompts mostly have been there before.

    Stretches of 64 blocks are remembered under a hash of their tokens, seeded by the link before them: 64
    bits that are trusted as much as the chain itself. To find one costs a small part of hashing it.

    Args:
        max_blocks: how many blocks to remember, at some 60 bytes each; the least recently used go first, in
            two halves: what was not used while one half filled up goes with the other. 0: none.

    Attributes:
        hits: stretches found.
        misses: stretches hashed.
    """

    def __init__(self, max_blocks: int = REMEMBERED_BLOCKS) -> None:
        self._half = max_blocks // _STRETCH // 2
        self._young: dict[tuple[int, int], tuple[int, ...]] = {}
        self._old: dict[tuple[int, int], tuple[int, ...]] = {}
        self.hits = 0
        self.misses = 0

    @property
    def blocks(self) -> int:
        """How many are remembered; some may be counted twice."""
        return _STRETCH * (len(self._young) + len(self._old))

    def prompt_chain(self, token_ids: "array[int]", block_size: int, seed: int) -> tuple[int, ...]:
        """What the function of this name says."""
        count = max(0, len(token_ids) - 1) // block_size
        out: list[int] = []
        data = memoryview(_little_endian(token_ids)).cast("B")
        whole = count // _STRETCH if self._half else 0
        known = self._recall(out, data, whole, block_size, seed) if whole else 0
        if len(out) < count:
            start = len(out) * block_size * _WORD
            _extend(out, data, start, count - len(out), block_size, out[-1] if out else seed)
        if known < whole:
            # Keys are seeded by the stretch before, so behind an unknown stretch none is known.
            self._remember(out, data, range(known, whole), block_size, seed)
        self.misses += whole - known
        self.hits += known
        if len(self._young) > self._half:
            self._young, self._old = {}, self._young
        return tuple(out)

    def _recall(self, out: list[int], data: memoryview, whole: int, block_size: int, seed: int) -> int:
        """Put the links of the first stretches into `out`, up to one that is not known; how many are."""
        size = _STRETCH * block_size * _WORD
        digest, young, old = xxhash.xxh3_64_intdigest, self._young, self._old
        for at in range(whole):
            key = (block_size, digest(data[at * size : (at + 1) * size], seed))
            found = young.get(key)
            if found is None:
                found = old.get(key)
                if found is None:
                    return at
                young[key] = found
            out += found
            seed = found[-1]
        return whole

    def _remember(
        self, out: list[int], data: memoryview, stretches: range, block_size: int, seed: int
    ) -> None:
        """Keep the links of these stretches, which are in `out`."""
        size = _STRETCH * block_size * _WORD
        digest, young = xxhash.xxh3_64_intdigest, self._young
        for at in stretches:
            first = at * _STRETCH
            before = out[first - 1] if first else seed
            key = (block_size, digest(data[at * size : (at + 1) * size], before))
            young[key] = tuple(out[first : first + _STRETCH])


REMEMBERED = ChainMemo()
"""The memo of this process: what is in it changes no answer, only what an answer costs."""


def _little_endian(token_ids: "array[int] | Sequence[int]") -> "array[int]":
    tokens = token_ids if isinstance(token_ids, array) else token_array(token_ids)
    if _BIG_ENDIAN:
        tokens = tokens[:]
        tokens.byteswap()
    return tokens


def _extend(out: list[int], data: memoryview, start: int, blocks: int, block_size: int, seed: int) -> None:
    """Hash so many blocks of `data` from byte `start` on."""
    digest = xxhash.xxh3_64_intdigest
    size = block_size * _WORD
    links = [seed]
    befores = iter(links)  # each link as soon as it is there: an iterator of a list sees what is appended
    while blocks > 0:
        count = min(blocks, _STRETCH)
        links.extend(map(digest, _cutter(count, size).unpack_from(data, start), befores))
        start += count * size
        blocks -= count
    out += links[1:]


@lru_cache(maxsize=1024)
def _cutter(count: int, size: int) -> Struct:
    """Cuts `count` pieces of `size` bytes."""
    return Struct(f"{size}s" * count)
