"""Chained block hashes: `h(i) = xxh3_64(block i as little-endian u32 tokens, seed = h(i-1))`.

`h(-1)` is the namespace's seed. Requests and KV events are hashed by the same functions, so they meet on
the same chain whatever hash the engine itself uses. A hash is never proof of a hit, only a claim.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence

import xxhash

_WORD = 4
_BIG_ENDIAN = sys.byteorder == "big"


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
    tokens = token_ids if isinstance(token_ids, array) else token_array(token_ids)
    if _BIG_ENDIAN:
        tokens = tokens[:]
        tokens.byteswap()
    count = len(tokens) // block_size
    if max_blocks is not None:
        count = min(count, max_blocks)
    step = block_size * _WORD
    digest = xxhash.xxh3_64_intdigest
    out: list[int] = []
    append = out.append
    with memoryview(tokens).cast("B") as data:
        for start in range(0, count * step, step):
            seed = digest(data[start : start + step], seed)
            append(seed)
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
