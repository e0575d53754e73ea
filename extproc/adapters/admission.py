"""Who asks, where they may go, and what has to change in the body: before anything else is computed.

1. The tenant, from what the gateway says. One that may use nothing is refused.
2. The model: aliases are replaced, and its pools found. An unknown model is a 404, if so configured.
3. The first of those pools that the tenant may use; none is a 403, as is a pool with no worker for it.
4. The body, if it must change: `model` where an alias was used, `cache_salt` where the tenant's cache is kept
   apart. Only these values change; every other byte goes on as it came.

Where a cache must be kept apart and the body cannot be changed (compressed, no JSON object, not shown to us)
the request is refused: it would be cached where others can probe for it. An alias that cannot be replaced is
left to the engine, which does not know it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from extproc.adapters.routing import HttpRequest
from extproc.core.model_catalog import ModelCatalog, UnknownModelError
from extproc.core.salting import Salter
from extproc.core.tenancy import EVERYTHING, Isolation, TenantBook, TenantPolicy
from extproc.core.types import WorkerId
from extproc.protocol.json_edit import JsonEditError, JsonKind, JsonValue, apply_edits, parse_document
from extproc.protocol.rejections import Reject, not_isolable, not_permitted, unknown_model
from extproc.protocol.tenant_identity import IdentitySource, identify

_SALT = "cache_salt"


class RefusedError(Exception):
    """A request that may not go on; `reject` is the answer to the client."""

    def __init__(self, reject: Reject) -> None:
        super().__init__(reject.message)
        self.reject = reject


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks, and what they may do."""

    tenant: str
    policy: TenantPolicy


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes: the pool, and the model as the engines know it. `alias`: what it was asked as."""

    pool: str
    model: str
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """The body that goes on; None: as it came. `salt`: what is set in it, or was sent with it."""

    body: bytes | None
    salt: str | None


class Admission:
    """Decides who may go where. Every question may be answered with a `RefusedError`.

    Args:
        catalog: which pool serves which model.
        tenants: who may use what.
        sources: where a tenant's name comes from.
        salter: makes salts; needed if any tenant is salted.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        tenants: TenantBook = EVERYTHING,
        sources: Sequence[IdentitySource] = (),
        salter: Salter | None = None,
    ) -> None:
        if tenants.salted and salter is None:
            raise ValueError("tenants are salted, and there is no key to make salts with")
        self.catalog = catalog
        self.tenants = tenants
        self._sources = tuple(sources)
        self._salter = salter

    def visitor(self, http: HttpRequest) -> Visitor:
        """Who asks."""
        tenant = identify(self._sources, http.headers, http.metadata, http.attributes)
        policy = self.tenants.policy(tenant)
        if policy is None:
            who = "This tenant" if tenant else "A request that names no tenant"
            raise RefusedError(not_permitted(f"{who} may not use this service."))
        return Visitor(tenant, policy)

    def destination(self, visitor: Visitor, model: str | None) -> Destination:
        """Where a visitor's request for a model goes."""
        try:
            resolution = self.catalog.resolve(model)
        except UnknownModelError:
            raise RefusedError(unknown_model(model or "")) from None
        for pool in resolution.pools:
            if visitor.policy.permits_pool(pool):
                return Destination(pool, resolution.model, resolution.alias)
        what = f"the model `{model[:256]}`" if model else "this service"
        raise RefusedError(not_permitted(f"This tenant may not use {what}."))

    def workers(
        self, visitor: Visitor, members: Iterable[WorkerId], subset: frozenset[str] | None
    ) -> frozenset[str] | None:
        """Endpoints the request may go to: those of `subset` that the tenant may use; None: all."""
        if visitor.policy.workers is None:
            return subset
        known = tuple(members)
        permitted = frozenset(worker.endpoint for worker in known if visitor.policy.permits(worker))
        if known and not permitted:
            raise RefusedError(not_permitted("This tenant may not use any of the workers that serve this."))
        return permitted if subset is None else permitted & subset

    def body(
        self, visitor: Visitor, destination: Destination, http: HttpRequest, normalized: bytes | None
    ) -> Body:
        """What goes on in the place of the body; `normalized` is what it was made into before, if it was."""
        salted = visitor.policy.isolation is Isolation.SALTED
        if not salted and destination.alias is None:
            return Body(normalized, None)
        if salted and not http.body_seen:
            raise RefusedError(
                not_isolable("The gateway does not show request bodies, so this cannot be served.", 503)
            )
        body = http.body if normalized is None else normalized
        if not body:
            return Body(None, None)
        try:
            root, values = self._editable(http, body)
        except JsonEditError:
            if salted:
                raise RefusedError(
                    not_isolable("Send one JSON object, in UTF-8 and not compressed.")
                ) from None
            return Body(normalized, None)
        edits = []
        if destination.alias is not None and "model" in values:
            edits.append(values["model"].replaced_by(destination.model))
        salt = None
        if salted and self._salter is not None:
            sent = values.get(_SALT)
            salt = self._salter.salt(visitor.tenant, (sent.text() or None) if sent is not None else None)
            edits.append(root.appended(_SALT, salt) if sent is None else sent.replaced_by(salt))
        return Body(apply_edits(body, edits), salt)

    def _editable(self, http: HttpRequest, body: bytes) -> tuple[JsonValue, dict[str, JsonValue]]:
        if http.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            raise JsonEditError("compressed")
        root = parse_document(body)
        if root.kind is not JsonKind.OBJECT:
            raise JsonEditError("no object")
        return root, root.values()
