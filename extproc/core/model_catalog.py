"""Which pool serves a model: names from the configuration, and those the engines say they serve.

A name means, in this order: an alias, which is replaced by what it stands for; a base model; an adapter
that some worker has; nothing we know. An unknown name is passed to the default pool, whose engine answers
for itself, unless the policy is to refuse it. Refusing waits until every pool has told what it serves:
before that a name that is missing may still turn up.

One name may be served by several pools. They are given in the order of the configuration, and a tenant gets
the first it may use.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.core.errors import WarmrouteError


class UnknownModelError(WarmrouteError):
    """No pool serves this model."""


class AliasError(WarmrouteError):
    """Aliases that lead nowhere; `alias` is one of them."""

    def __init__(self, alias: str, message: str) -> None:
        super().__init__(message)
        self.alias = alias


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a model name means.

    Attributes:
        model: the name the engines know it by; empty: the request names none.
        pools: names of the pools that serve it, best first; never empty.
        alias: the name in the request, where it was an alias.
    """

    model: str
    pools: tuple[str, ...]
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class _Served:
    pool: str
    base: frozenset[str]
    adapters: frozenset[str]


class _Names(NamedTuple):
    """What the servers of one pool told, together."""

    base: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()


_NOTHING = _Names()


@dataclass(slots=True)
class ModelCatalog:
    """All names of all pools.

    Attributes:
        configured: base model names by pool, in the order of the configuration.
        aliases: what each alias finally stands for; see `resolve_aliases`.
        refuse_unknown: whether unknown names are refused.
    """

    configured: Mapping[str, Sequence[str]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    refuse_unknown: bool = False
    _served: dict[str, _Served] = field(default_factory=dict)  # by endpoint
    _told: dict[str, _Names] = field(default_factory=dict)  # by pool; no entry: nobody has told yet

    def on_models(self, endpoint: str, pool: str, base: Iterable[str], adapters: Iterable[str]) -> None:
        """A worker's server told everything it serves now."""
        served = _Served(pool, frozenset(base), frozenset(adapters))
        if self._served.get(endpoint) != served:
            self._served[endpoint] = served
            self._tell()

    def keep(self, is_member: Callable[[str], bool]) -> None:
        """Forget endpoints that left."""
        left = [endpoint for endpoint in self._served if not is_member(endpoint)]
        for endpoint in left:
            del self._served[endpoint]
        if left:
            self._tell()

    def resolve(self, model: str | None) -> Resolution:
        """What a request's model means; None: it names none.

        Raises:
            UnknownModelError: no pool serves it, and such requests are refused.
        """
        every = tuple(self.configured)
        if not model:
            return Resolution("", every)
        target = self.aliases.get(model, model)
        alias = model if target != model else None
        for serves in (self._serves_base, self._serves_adapter):
            pools = tuple(pool for pool in every if serves(pool, target))
            if pools:
                return Resolution(target, pools, alias)
        if self.refuse_unknown and self._complete():
            raise UnknownModelError(model)
        return Resolution(target, every, alias)

    def adapter(self, pool: str, model: str) -> str | None:
        """The adapter a name stands for in a pool; None for a base model.

        While no base model of the pool is known, every name is taken to be one.
        """
        if not model or self._serves_base(pool, model):
            return None
        known = self.configured.get(pool) or any(
            one.base for one in self._served.values() if one.pool == pool
        )
        return model if known else None

    def is_base(self, model: str) -> bool:
        """Whether any pool serves a base model of this name."""
        return any(self._serves_base(pool, model) for pool in self.configured)

    def names(self, pool: str) -> tuple[str, ...]:
        """Every name a pool is known to serve, base models first, sorted."""
        told = self._told.get(pool, _NOTHING)
        base = {*self.configured.get(pool, ()), *told.base}
        return (*sorted(base), *sorted(told.adapters - base))

    def _serves_base(self, pool: str, model: str) -> bool:
        return model in self.configured.get(pool, ()) or model in self._told.get(pool, _NOTHING).base

    def _serves_adapter(self, pool: str, model: str) -> bool:
        return model in self._told.get(pool, _NOTHING).adapters

    def _complete(self) -> bool:
        return all(pool in self._told for pool in self.configured)

    def _tell(self) -> None:
        self._told = {}
        for one in self._served.values():
            before = self._told.get(one.pool, _NOTHING)
            self._told[one.pool] = _Names(before.base | one.base, before.adapters | one.adapters)


def resolve_aliases(aliases: Mapping[str, str]) -> dict[str, str]:
    """What each alias finally stands for: an alias may stand for another.

    Raises:
        AliasError: they go round in a circle.
    """
    out = {}
    for alias in aliases:
        seen = [alias]
        while (target := aliases.get(seen[-1])) is not None:
            if target in seen:
                circle = " -> ".join([*seen[seen.index(target) :], target])
                raise AliasError(alias, f"aliases go round in a circle: {circle}")
            seen.append(target)
        out[alias] = seen[-1]
    return out
