"""What parts of the file say about each other: names that must exist, be unique, or lead somewhere."""

from collections.abc import Iterator
from typing import TypeAlias

from extproc.adapters.engine_key import EngineKeyError, read_key
from extproc.config.pools import Pool
from extproc.config.root import Config
from extproc.config.tenants import Tenant, Tenants
from extproc.core.model_catalog import AliasError, resolve_aliases
from extproc.protocol.addresses import parse_address
from extproc.protocol.kv_endpoints import resolve_kv_endpoint

_LAST_PORT = 65_535

Where: TypeAlias = tuple[int | str, ...]
Problem: TypeAlias = tuple[Where, str]
"""Where in the file, and what to do about it."""


def problems_of(config: Config, *, secrets: bool = True) -> Iterator[Problem]:
    """Contradictions of a configuration whose sections are each valid; with `secrets`, keys are read too."""
    yield from _ports(config)
    yield from _pools(config)
    if secrets:
        yield from _engine_keys(config)
    yield from _aliases(config)
    if config.tenants is not None:
        yield from _tenants(config, config.tenants)
        if secrets:
            yield from _salt_key(config.tenants)
    yield from _rollout(config)


def _ports(config: Config) -> Iterator[Problem]:
    """Where processes have successive ports, all of them must exist."""
    several = config.processes > 1
    for where, listen, more in (
        (("listen",), config.listen, config.processes if several else 0),
        (("admin", "listen"), config.admin.listen, config.processes - 1),
        (("peers", "listen"), config.peers.listen, config.processes - 1),
    ):
        port = parse_address(listen, lowest_port=0).port if listen else 0
        if port and port + more > _LAST_PORT:
            yield (
                where,
                (
                    f"with {config.processes} processes, ports up to {port + more} are needed: "
                    f"choose {_LAST_PORT - more} or less"
                ),
            )


def _kv_events(pool: Pool) -> Iterator[Problem]:
    """Where ranks have successive addresses, all of them must exist."""
    if not pool.kv_events.enabled:
        return

    def last_rank(start: int | None, size: int | None) -> int:
        """Of a worker; None: as the pool says."""
        first = (pool.dp_start_rank if start is None else start) or 0
        return first + (size or pool.dp_size) - 1

    given: list[tuple[Where, str | None, int]] = [
        (("kv_events", "endpoint"), pool.kv_events.endpoint, last_rank(None, None)),
        (("kv_events", "replay"), pool.kv_events.replay, last_rank(None, None)),
    ]
    for at, worker in enumerate(pool.discovery.static):
        where: Where = ("discovery", "static", at)
        last = last_rank(worker.dp_start_rank, worker.dp_size)
        given.append(((*where, "kv_events"), worker.kv_events, last))
        given.append(((*where, "kv_replay"), worker.kv_replay, last))
    for inner, endpoint, last in given:
        if endpoint is not None:
            try:
                resolve_kv_endpoint(endpoint, "*", last)
            except ValueError as error:
                yield inner, str(error)


def _pools(config: Config) -> Iterator[Problem]:
    names = [pool.name for pool in config.pools]
    owners: dict[str, str] = {}
    for position, pool in enumerate(config.pools):
        if pool.name in names[:position]:
            yield ("pools", position, "name"), f"pool names must differ, got {', '.join(names)}"
        for at, model in enumerate(pool.model.names):
            if owners.setdefault(model, pool.name) != pool.name and config.tenants is None:
                where = ("pools", position, "model", "names", at)
                yield (
                    where,
                    (
                        f"model {model!r} is in two pools: {owners[model]} and {pool.name}; "
                        "only where `tenants` say who may use which can that be meant"
                    ),
                )
        for inner, what in _kv_events(pool):
            yield ("pools", position, *inner), what
        revisions = [pool.model.revision]
        for at, other in enumerate(pool.model.revisions):
            if other.revision in revisions:
                yield (
                    ("pools", position, "model", "revisions", at, "revision"),
                    f"revision {other.revision!r} is described already: name each once",
                )
            revisions.append(other.revision)


def _engine_keys(config: Config) -> Iterator[Problem]:
    for position, pool in enumerate(config.pools):
        if pool.api_key_file is not None:
            try:
                read_key(pool.api_key_file)
            except EngineKeyError as error:
                yield ("pools", position, "api_key_file"), str(error)


def _aliases(config: Config) -> Iterator[Problem]:
    owners = {model: pool.name for pool in config.pools for model in pool.model.names}
    for alias in config.aliases:
        if alias in owners:
            yield (
                ("aliases", alias),
                f"pool {owners[alias]} serves a model of this name: an alias would hide it; remove one",
            )
    try:
        resolve_aliases(config.aliases)
    except AliasError as error:
        yield ("aliases", error.alias), f"{error}; let one of them name a model"


def _tenants(config: Config, tenants: Tenants) -> Iterator[Problem]:
    pools = [pool.name for pool in config.pools]
    described: list[tuple[Where, Tenant]] = [
        (("tenants", "policies", name), tenant) for name, tenant in tenants.policies.items()
    ]
    if tenants.unknown is not None:
        described.append((("tenants", "unknown"), tenants.unknown))
    for where, tenant in described:
        for at, pool in enumerate(tenant.pools or ()):
            if pool not in pools:
                yield (*where, "pools", at), f"there is no pool {pool!r}; choose from {', '.join(pools)}"
        if tenant.isolation == "salted" and tenants.salt_key is None:
            yield (
                (*where, "isolation"),
                "salts need a secret key: name a file or an environment variable in `tenants.salt_key`",
            )
        if tenant.workers is not None and _observed(config):
            yield (
                (*where, "workers"),
                "in mode observe Envoy chooses the worker, so this cannot be kept: use shadow or enforce",
            )


def _observed(config: Config) -> bool:
    rollout = config.rollout
    return "observe" in (rollout.mode, *(one.mode for one in rollout.classes))


def _salt_key(tenants: Tenants) -> Iterator[Problem]:
    if tenants.salt_key is not None:
        try:
            tenants.salt_key.salter()
        except ValueError as error:
            yield ("tenants", "salt_key"), str(error)


def _rollout(config: Config) -> Iterator[Problem]:
    pools = [pool.name for pool in config.pools]
    for position, one in enumerate(config.rollout.classes):
        where = ("rollout", "classes", position)
        if one.name in (other.name for other in config.rollout.classes[:position]):
            yield (*where, "name"), f"there are two traffic classes {one.name!r}: name each once"
        for at, pool in enumerate(one.pools or ()):
            if pool not in pools:
                yield (*where, "pools", at), f"there is no pool {pool!r}; choose from {', '.join(pools)}"
        if one.tenants is not None and config.tenants is None:
            yield (*where, "tenants"), "no tenants are configured: describe them in `tenants`, or drop this"
