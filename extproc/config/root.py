"""The whole file."""

from typing import Annotated, Literal

from pydantic import Field

from extproc.config.addresses import ListenAddress
from extproc.config.admission import Admission
from extproc.config.base import PolicyName, Section
from extproc.config.cost import Cost
from extproc.config.operations import Admin, Journal
from extproc.config.peers import Peers
from extproc.config.pools import Pool
from extproc.config.rollout import Rollout
from extproc.config.service import DecisionLog, Envoy, Limits, Scrape, Tls
from extproc.config.tenants import Tenants
from extproc.core.router import RouterSettings


class Config(Section):
    """Everything `warmroute serve` needs."""

    listen: ListenAddress = Field(
        "127.0.0.1:50051", description="gRPC address for Envoy: ext_proc, access log, health"
    )
    processes: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="routers in this `serve`, on one port and each on one of its own: the next ones"
    )
    prompt_processes: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None,
        description="processes of each router that encode bodies of over 256 KiB beside it, started by the "
        "first such prompt; 0: threads do; null: 2, with `processes` at most one a core, on one core 0",
    )
    tls: Tls | None = None
    pools: Annotated[list[Pool], Field(min_length=1)]
    aliases: dict[str, str] = Field(
        default_factory=dict, description="model names that stand for others; the body is rewritten"
    )
    unknown_model: Literal["auto", "refuse", "pass"] = Field(
        "auto",
        description="refuse: 404; pass: the first pool's engine answers; auto: refuse with several pools",
    )
    tenants: Tenants | None = None
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
    rollout: Rollout = Field(default_factory=Rollout)
    admission: Admission = Field(default_factory=Admission)
    fallbacks: Annotated[int, Field(ge=1)] = Field(3, description="endpoints named per request, in order")
    seed: int | None = Field(None, description="seed of the tie-breaks; null: random")
    test_mode: bool = Field(default=False, description="honour conformance test headers; never in production")
    cost: Cost = Field(default_factory=Cost)
    scrape: Scrape = Field(default_factory=Scrape)
    limits: Limits = Field(default_factory=Limits)
    decision_log: DecisionLog = Field(default_factory=DecisionLog)
    peers: Peers = Field(default_factory=Peers)
    admin: Admin = Field(default_factory=Admin)
    journal: Journal = Field(default_factory=Journal)
    envoy: Envoy = Field(default_factory=Envoy)

    @property
    def fail_closed(self) -> bool:
        """Whether a request must fail where we do: Envoy alone cannot keep what tenants were promised."""
        return self.tenants is not None and self.tenants.book().restricted

    def router_settings(self) -> RouterSettings:
        """The core's form of the settings."""
        return RouterSettings(
            stale_after_s=self.scrape.stale_after_s,
            failure_limit=self.scrape.failure_limit,
            lease_expiry_s=self.limits.lease_expiry_s,
            peer_fade_after_s=self.peers.fade_after_s,
            peer_gone_after_s=self.peers.gone_after_s,
            max_index_blocks=self.limits.index_blocks,
        )
