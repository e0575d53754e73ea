"""How many workers a tenant's cold requests may be on at once, so that no tenant fills a fleet with prefill.

A *cold* request is one of which no worker holds half (see `extproc.core.engine_shares`); its prefill is what
everyone else on its worker waits for. Of the n workers of a pool that may serve it, the open cold requests of
one tenant may be on

    limit = max(1, ceil(n * min(cold_quota, weight / sum of weights)))

The sum is over tenants that have a weight and open cold requests in the pool now, the asking one included: a
tenant that is alone may use all. A tenant with neither quota nor weight has no limit. Warm requests are never
limited: they cost others little.

A tenant at its limit gets the workers it is on already, in the policy's order; the others follow behind, so
nothing is refused, and a retry still has somewhere to go.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from extproc.core.tenancy import TenantBook
from extproc.core.types import Candidate, Decision, Reason, RoutingRequest, WorkerId


class LeftOut(NamedTuple):
    """Workers that might serve a request and are no candidates: how many, and how many its tenant is on."""

    workers: int
    used: int


NOBODY = LeftOut(0, 0)


class TenantShares:
    """Open cold requests of all tenants that have a limit."""

    def __init__(self, tenants: TenantBook) -> None:
        self._tenants = tenants
        self._open: dict[str, tuple[str, str, WorkerId]] = {}
        self._counts: dict[tuple[str, str], dict[WorkerId, int]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def used(self, request: RoutingRequest) -> Collection[WorkerId]:
        """Workers that open cold requests of its tenant are on, where that has a limit."""
        return self._counts.get((request.pool, request.tenant), {}).keys()

    def bounded(
        self,
        request: RoutingRequest,
        ordered: Sequence[Candidate],
        reason: Reason,
        left_out: LeftOut = NOBODY,
    ) -> tuple[list[Candidate], Reason]:
        """`ordered`, the best first, with workers its tenant may not spread to behind; why the first is.

        `left_out` tells of workers that might serve the request and are no candidates.
        """
        order = list(ordered)
        limit = self.limit(request.pool, request.tenant, len(order) + left_out.workers)
        if limit is None or order[0].shares.warm is not False:
            return order, reason
        used = self._counts.get((request.pool, request.tenant), {})
        mine = [candidate for candidate in order if candidate.worker in used]
        if len(mine) + left_out.used < limit or not mine or order[0].worker in used:
            return order, reason
        return mine + [candidate for candidate in order if candidate.worker not in used], Reason.TENANT_LIMIT

    def limit(self, pool: str, tenant: str, workers: int) -> int | None:
        """Workers a tenant's cold requests may be on, of so many; None: no limit."""
        policy = self._tenants.policy(tenant)
        if policy is None or (policy.cold_quota is None and policy.weight is None):
            return None
        share = 1.0 if policy.cold_quota is None else policy.cold_quota
        if policy.weight is not None:
            active = {name for of, name in self._counts if of == pool} | {tenant}
            weights = (self._weight(name) for name in sorted(active))
            share = min(share, policy.weight / math.fsum(weights))
        return max(1, math.ceil(workers * share - 1e-9))

    def book(self, decision: Decision) -> None:
        """A request was routed."""
        request, chosen = decision.request, decision.chosen
        limited = self.limit(request.pool, request.tenant, 1) is not None
        if not limited or chosen.shares.warm is not False:
            return
        self._open[decision.lease_id] = (request.pool, request.tenant, chosen.worker)
        counts = self._counts.setdefault((request.pool, request.tenant), {})
        counts[chosen.worker] = counts.get(chosen.worker, 0) + 1

    def release(self, lease_id: str) -> None:
        """A request has ended. Unknown ones are ignored."""
        entry = self._open.pop(lease_id, None)
        if entry is None:
            return
        pool, tenant, worker = entry
        counts = self._counts[pool, tenant]
        counts[worker] -= 1
        if not counts[worker]:
            del counts[worker]
        if not counts:
            del self._counts[pool, tenant]

    def _weight(self, tenant: str) -> float:
        policy = self._tenants.policy(tenant)
        return 0.0 if policy is None or policy.weight is None else policy.weight
