"""What makes two KV caches compatible, and what else tells prefixes apart in logs and statistics.

The engine's namespace seeds the hash chain, so it holds only what both a request and a KV event know: model
revision, tokenizer revision, adapter and cache salt. The routing namespace around it adds who asks and how
prompts are rendered: that decides permission and statistics, never cache identity.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import xxhash

LONGEST_SALT = 256
"""Characters of a salt that is kept as it is."""


class Namespace(NamedTuple):
    """Requests share KV blocks only if their namespaces are equal. Salts are `brief_salt`s."""

    model_revision: str
    tokenizer_revision: str
    adapter: str | None = None
    cache_salt: str | None = None

    @property
    def seed(self) -> int:
        """Seed of the hash chain: 64 bits, different for different namespaces."""
        return _seed(self)


def brief_salt(salt: str) -> str:
    """A salt as namespaces have it: a long one is told apart by a digest.

    Clients choose salts, of any length, and namespaces are remembered.
    """
    if len(salt) <= LONGEST_SALT:
        return salt
    return f"\0{len(salt)}:{xxhash.xxh3_128_hexdigest(salt.encode('utf-8', 'surrogatepass'))}"


class RoutingNamespace(NamedTuple):
    """Whose prefixes are told apart: the engine's namespace, and what only the router knows."""

    engine: Namespace
    pool: str
    tenant: str
    template_version: str

    @property
    def key(self) -> str:
        """16 hexadecimal digits, different for different namespaces. Tells nothing of a salt."""
        return f"{_digest((*self.engine, self.pool, self.tenant, self.template_version)):016x}"


@lru_cache(maxsize=65_536)
def _seed(namespace: Namespace) -> int:
    return _digest(namespace)


def _digest(fields: Iterable[str | None]) -> int:
    # Each field is length-prefixed and None is marked, so no two namespaces spell the same bytes.
    digest = xxhash.xxh3_64()
    for value in fields:
        if value is None:
            digest.update(b"-")
        else:
            data = value.encode("utf-8", "surrogatepass")
            digest.update(b"+%d:" % len(data))
            digest.update(data)
    return digest.intdigest()
