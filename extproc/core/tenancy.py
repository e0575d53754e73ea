"""Tenants: what each may use, and how far its KV cache is kept apart from others'.

Who a tenant is comes from the gateway, never from a request's body (`extproc.protocol.tenant_identity`).
Permission is asked first, before anything about a request is computed, and it is asked of the pool and of
every worker that could be named to the gateway, fallbacks included.

A tenant without a policy of its own is *unknown*: the policy for unknown tenants is used, and where there is
none, nothing is permitted. A request that names no tenant is of the unknown tenant "".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.core.types import WorkerId


class Isolation(StrEnum):
    """What a tenant's prompts share with others'."""

    SHARED = "shared"  # prefixes are cached once for all: another tenant's prompt may be a hit
    SALTED = "salted"  # the engine caches under a salt of the tenant's own


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What one tenant, or every unknown one, may do.

    Attributes:
        pools: names of pools it may use; None: all.
        workers: endpoints (`ip:port`, or `ip` for every port) it may use inside them; None: all.
        isolation: see `Isolation`.
        weight: its share of the workers for cold requests beside other tenants that have some; None: it does
            not take part. See `extproc.core.tenant_shares`, also for the next.
        cold_quota: share (0 to 1) of a pool's workers that its cold requests may be on; None: all.
        priority: the highest it may ask for where requests are held, and what it has when it asks for none;
            None: whatever it asks for, else 0. There its weight, else 1, is its share of what goes (see
            `extproc.core.admission_queue`).
    """

    pools: frozenset[str] | None = None
    workers: frozenset[str] | None = None
    isolation: Isolation = Isolation.SHARED
    weight: float | None = None
    cold_quota: float | None = None
    priority: int | None = None

    def permits_pool(self, pool: str) -> bool:
        """Whether it may use a pool."""
        return self.pools is None or pool in self.pools

    def permits(self, worker: WorkerId) -> bool:
        """Whether it may use a worker of a pool it may use."""
        if self.workers is None:
            return True
        endpoint = worker.endpoint
        return endpoint in self.workers or endpoint.rpartition(":")[0].strip("[]") in self.workers


@dataclass(frozen=True, slots=True)
class TenantBook:
    """All policies.

    Attributes:
        policies: by tenant.
        unknown: for every other tenant; None: they may use nothing.
    """

    policies: Mapping[str, TenantPolicy] = field(default_factory=dict)
    unknown: TenantPolicy | None = None

    def policy(self, tenant: str) -> TenantPolicy | None:
        """The policy of a tenant; None: it may use nothing."""
        return self.policies.get(tenant, self.unknown)

    @property
    def salted(self) -> bool:
        """Whether any tenant is kept apart by a salt."""
        return any(policy.isolation is Isolation.SALTED for policy in self._all())

    @property
    def restricted(self) -> bool:
        """Whether any tenant may not use everything, or is kept apart: failing open would break a promise."""
        return self.unknown is None or any(
            policy.pools is not None or policy.workers is not None or policy.isolation is Isolation.SALTED
            for policy in self._all()
        )

    def _all(self) -> Iterable[TenantPolicy]:
        unknown = () if self.unknown is None else (self.unknown,)
        return (*self.policies.values(), *unknown)


EVERYTHING = TenantBook(unknown=TenantPolicy())
"""Where no tenants are configured."""
