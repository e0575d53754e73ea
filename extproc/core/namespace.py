"""What makes two KV caches compatible.

The namespace seeds the hash chain, so it holds only what both a request and a KV event know: model
revision, tokenizer revision, adapter and cache salt. Who may use which pool, and the template version,
live outside of it: they decide permission and statistics, never cache identity.
"""

from functools import lru_cache
from typing import NamedTuple

import xxhash


class Namespace(NamedTuple):
    """Requests share KV blocks only if their namespaces are equal."""

    model_revision: str
    tokenizer_revision: str
    adapter: str | None = None
    cache_salt: str | None = None

    @property
    def seed(self) -> int:
        """Seed of the hash chain: 64 bits, different for different namespaces."""
        return _seed(self)


@lru_cache(maxsize=65_536)
def _seed(namespace: Namespace) -> int:
    # Each field is length-prefixed and None is marked, so no two namespaces spell the same bytes.
    digest = xxhash.xxh3_64()
    for value in namespace:
        if value is None:
            digest.update(b"-")
        else:
            data = value.encode("utf-8", "surrogatepass")
            digest.update(b"+%d:" % len(data))
            digest.update(data)
    return digest.intdigest()
