"""Tenants: who asks, what each may use, and whose caches are kept apart."""

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.base import Section
from extproc.core.salting import Salter
from extproc.core.tenancy import EVERYTHING, Isolation, TenantBook, TenantPolicy
from extproc.prompt.normalize import NormalizationMode
from extproc.protocol.addresses import AddressError, parse_address
from extproc.protocol.tenant_identity import (
    JWT_NAMESPACE,
    FromAttribute,
    FromHeader,
    FromMetadata,
    IdentitySource,
)

Name = Annotated[str, Field(min_length=1)]
Path_ = Annotated[list[Name], Field(min_length=1)]


class MetadataKey(Section):
    """Dynamic metadata of one of Envoy's filters."""

    namespace: Name = Field(description="the filter's metadata namespace")
    path: Path_ = Field(description="keys that lead to the name")


class JwtClaim(Section):
    """A claim of a token that Envoy's jwt_authn filter has verified."""

    payload: Name = Field(description="the provider's `payload_in_metadata`")
    claim: Path_ = Field(description="keys that lead to the claim")


class Identity(Section):
    """Where a tenant's name comes from: exactly one of these."""

    header: Name | None = Field(None, description="request header; only if clients cannot set it themselves")
    metadata: MetadataKey | None = None
    jwt: JwtClaim | None = None
    attribute: Name | None = Field(
        None, description="attribute Envoy sends, such as `connection.uri_san_peer_certificate`"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.header, self.metadata, self.jwt, self.attribute)) != 1:
            raise ValueError("name exactly one of `header`, `metadata`, `jwt` and `attribute`")
        return self

    def source(self) -> IdentitySource:
        """The protocol's form of it."""
        if self.header is not None:
            return FromHeader(self.header)
        if self.metadata is not None:
            return FromMetadata(self.metadata.namespace, tuple(self.metadata.path))
        if self.jwt is not None:
            return FromMetadata(JWT_NAMESPACE, (self.jwt.payload, *self.jwt.claim))
        return FromAttribute(self.attribute or "")


class Tenant(Section):
    """What a tenant may do."""

    pools: list[Name] | None = Field(None, description="pools it may use; null: all")
    workers: list[Name] | None = Field(
        None, description="workers it may use in them, as `ip:port` or `ip`; null: all"
    )
    isolation: Literal["shared", "salted"] = Field(
        "shared", description="salted: its KV cache is kept apart in the engine, by a `cache_salt`"
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="its share of the workers for cold requests, and of what goes where requests are held",
    )
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        0, description="the highest it may ask for where requests are held, and what it has otherwise"
    )
    cold_quota: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="share of a pool's workers that its cold requests may be on at once; null: all"
    )
    normalization: NormalizationMode | None = Field(
        None, description="its prompts: disabled, dry-run or apply; null: as the pool says"
    )

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        for worker in self.workers or ():
            _address(worker)
        return self

    def policy(self) -> TenantPolicy:
        """The core's form of it."""
        return TenantPolicy(
            pools=None if self.pools is None else frozenset(self.pools),
            workers=None if self.workers is None else frozenset(map(_address, self.workers)),
            isolation=Isolation(self.isolation),
            weight=self.weight,
            cold_quota=self.cold_quota,
            priority=self.priority,
        )


class SaltKey(Section):
    """Where the secret key of the salts is: exactly one of these. At least 32 bytes."""

    file: Path | None = Field(None, description="file that holds it; white space around it is no part of it")
    env: Name | None = Field(None, description="environment variable that holds it")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise ValueError("name exactly one of `file` and `env`")
        return self

    def salter(self) -> Salter:
        """Read the key.

        Raises:
            ValueError: there is none, or it is too short; the message says what to do and never shows it.
        """
        advice = "make one with: openssl rand -hex 32"
        if self.file is not None:
            try:
                key = self.file.read_bytes().strip()
            except OSError as error:
                raise ValueError(
                    f"cannot read the key from {self.file}: {error.strerror}; {advice}"
                ) from None
        else:
            key = os.environ.get(self.env or "", "").strip().encode("utf-8", "surrogateescape")
            if not key:
                raise ValueError(f"the environment variable {self.env} is not set; {advice}")
        try:
            return Salter(key)
        except ValueError as error:
            raise ValueError(f"{error}; {advice}") from None


class Tenants(Section):
    """Who may use what. Without it, everyone may use everything."""

    identity: Annotated[list[Identity], Field(min_length=1)] = Field(
        description="tried in order; the first that names a tenant wins"
    )
    policies: dict[Name, Tenant] = Field(default_factory=dict, description="by tenant")
    unknown: Tenant | None = Field(None, description="for every other tenant, and requests that name none")
    salt_key: SaltKey | None = None

    def book(self) -> TenantBook:
        """The core's form of the policies."""
        return TenantBook(
            {name: tenant.policy() for name, tenant in self.policies.items()},
            None if self.unknown is None else self.unknown.policy(),
        )

    def sources(self) -> tuple[IdentitySource, ...]:
        """The protocol's form of the identity."""
        return tuple(identity.source() for identity in self.identity)


def book_of(tenants: Tenants | None) -> TenantBook:
    """The policies; everything to everyone where none are configured."""
    return EVERYTHING if tenants is None else tenants.book()


def _address(text: str) -> str:
    """`ip:port` or `ip`, spelled as workers are."""
    try:
        address = parse_address(text)
    except AddressError:
        address = None
    if address is not None and address.is_resolved:
        return str(address)
    try:
        return str(ip_address(text.strip("[]")))
    except ValueError:
        raise ValueError(f"{text!r} is not a worker: write `ip:port` or `ip`") from None
