"""Sequences of block hashes and handles, written small.

The same prefixes come again and again, and a stored block has the hash that a request had before it. So every
value gets a number when it is first seen, in order; a stretch of values whose numbers follow each other is
written as (first number, length), a value that is new as itself. Both sides forget all numbers at the same
point, when there are `LIMIT` of them.
"""

from collections.abc import Iterable, Sequence

Symbol = int | bytes
Packed = list[Symbol | list[int]]

LIMIT = 200_000


class SymbolWriter:
    """Writes sequences."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._numbers: dict[Symbol, int] = {}
        self._limit = limit

    def pack(self, symbols: Iterable[Symbol]) -> Packed:
        """One sequence."""
        if len(self._numbers) >= self._limit:
            self._numbers.clear()
        packed: Packed = []
        run: list[int] | None = None
        for symbol in symbols:
            number = self._numbers.get(symbol)
            if number is None:
                self._numbers[symbol] = len(self._numbers)
                packed.append(symbol)
                run = None
            elif run is not None and number == run[0] + run[1]:
                run[1] += 1
            else:
                run = [number, 1]
                packed.append(run)
        return packed


class SymbolReader:
    """Reads, in the order of writing, what a `SymbolWriter` of the same limit has written."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._symbols: list[Symbol] = []
        self._limit = limit

    def unpack(self, packed: Sequence[Symbol | Sequence[int]]) -> tuple[Symbol, ...]:
        """One sequence.

        Raises:
            ValueError: it refers to values that never came.
        """
        if len(self._symbols) >= self._limit:
            self._symbols.clear()
        symbols: list[Symbol] = []
        for part in packed:
            if isinstance(part, int | bytes):
                self._symbols.append(part)
                symbols.append(part)
                continue
            start, length = part
            if not 0 <= start <= start + length <= len(self._symbols):
                raise ValueError("refers to blocks that were never named")
            symbols += self._symbols[start : start + length]
        return tuple(symbols)
