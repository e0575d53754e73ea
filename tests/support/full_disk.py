"""A disk that is full: files take no more than so many bytes, and of a write what they have room for."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
