"""The whole file."""

from typing import Annotated

from pydantic import AfterValidator, Field

from extproc.adapters.policy_plugins import available_policies
from extproc.config.base import Section
from extproc.config.cost import Cost
from extproc.config.pools import Pool
from extproc.config.service import DecisionLog, Envoy, Limits, Scrape
from extproc.core.router import RouterSettings


def _known_policy(name: str) -> str:
    known = available_policies()
    if name not in known:
        raise ValueError(f"there is no policy {name!r}; choose from {', '.join(known)}")
    return name


PolicyName = Annotated[str, AfterValidator(_known_policy)]


class Config(Section):
    """Everything `warmroute serve` needs."""

    listen: str = Field("127.0.0.1:50051", description="gRPC address for Envoy: ext_proc, access log, health")
    pools: Annotated[list[Pool], Field(min_length=1)]
    policy: PolicyName = Field("token-load", description="see policies above; packages can add some")
    shadow: list[PolicyName] = Field(
        default_factory=list, description="policies whose choice is logged beside, and never acted on"
    )
    policy_header: str | None = Field(
        None, description="request header that may choose the policy; null: none may"
    )
    session_header: str = Field(
        "x-session-id", description="request header that names the session, for session-affinity"
    )
    fallbacks: Annotated[int, Field(ge=1)] = Field(3, description="endpoints named per request, in order")
    seed: int | None = Field(None, description="seed of the tie-breaks; null: random")
    test_mode: bool = Field(default=False, description="honour conformance test headers; never in production")
    cost: Cost = Field(default_factory=Cost)
    scrape: Scrape = Field(default_factory=Scrape)
    limits: Limits = Field(default_factory=Limits)
    decision_log: DecisionLog = Field(default_factory=DecisionLog)
    envoy: Envoy = Field(default_factory=Envoy)

    def router_settings(self) -> RouterSettings:
        """The core's form of the settings."""
        return RouterSettings(
            stale_after_s=self.scrape.stale_after_s,
            failure_limit=self.scrape.failure_limit,
            lease_expiry_s=self.limits.lease_expiry_s,
        )
