"""The content of a prompt as chained block hashes, without any tokens.

Content is named, not stored: a `History` grows by stretches of tokens, each with a key that stands for what
those tokens are. The chain key of a stretch is a digest of the key before it, the stretch's own and where it
begins, so it names everything so far. A block is the digest of the chain key of the stretch its last token
lies in, and of its end position. Two histories therefore share exactly the blocks that end within stretches
named alike from the very beginning, at whatever block size.

A trace that already names prefixes (each id stands for all tokens up to its end) needs no chaining:
`prefix_blocks` makes engine blocks of its ids directly.
"""

import struct
from typing import Protocol

import xxhash

_PAIR = struct.Struct("<QQ")
_TRIPLE = struct.Struct("<QQQ")
_digest = xxhash.xxh3_64_intdigest


def key_of(*parts: int | str) -> int:
    """A 64-bit key for these parts; equal parts, equal key."""
    return _digest("\x1f".join(map(str, parts)).encode())


def block_hash(key: int, end: int) -> int:
    """Hash of the block that ends at token `end`, in content that `key` names up to there."""
    return _digest(_PAIR.pack(key, end))


class Keys(Protocol):
    """Keys by index: a sequence of them, or something that makes them when asked."""

    def __getitem__(self, index: int, /) -> int:
        """The key at `index`."""
        ...


class History:
    """A growing sequence of tokens.

    Attributes:
        tokens: its length.
        blocks: hashes of its full blocks. Read only; slices of it are what turns carry.
    """

    __slots__ = ("_block_size", "_key", "blocks", "tokens")

    def __init__(self, block_size: int, key: int) -> None:
        self._block_size = block_size
        self._key = key
        self.tokens = 0
        self.blocks: list[int] = []

    def extend(self, content: int, tokens: int) -> None:
        """Append `tokens` tokens that `content` names.

        Raises:
            ValueError: `tokens` is negative.
        """
        if tokens < 0:
            raise ValueError(f"cannot append {tokens} tokens")
        if tokens == 0:
            return
        self._key = _digest(_TRIPLE.pack(self._key, content, self.tokens))
        self.tokens += tokens
        size, key = self._block_size, self._key
        first = (len(self.blocks) + 1) * size
        self.blocks += [_digest(_PAIR.pack(key, end)) for end in range(first, self.tokens + 1, size)]

    def fork(self) -> "History":
        """Another history with the same beginning."""
        other = History(self._block_size, self._key)
        other.tokens = self.tokens
        other.blocks = self.blocks.copy()
        return other


def prefix_blocks(ids: Keys, id_tokens: int, tokens: int, block_size: int, first: int = 0) -> list[int]:
    """Engine blocks of a prompt whose prefixes a trace has already named.

    Args:
        ids: keys of its leading stretches of `id_tokens` tokens; each names the prompt up to its end.
        id_tokens: tokens per id.
        tokens: how many tokens to cover; no more than the ids stand for.
        block_size: tokens per engine block.
        first: index of the first block wanted; the ones before are known already.
    """
    return [
        _digest(_PAIR.pack(ids[(end - 1) // id_tokens], end))
        for end in range((first + 1) * block_size, tokens + 1, block_size)
    ]
