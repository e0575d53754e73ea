"""Sessions that are made while they are read."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Lazily(Generic[T]):
    """An iterable that begins afresh each time it is iterated, from a function that makes an iterator."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterator[T]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[T]:
        return self._make()
