"""Configuration: one YAML (or JSON) file, read once, validated with errors that name line and fix."""

from extproc.config.admission import Admission
from extproc.config.base import ConfigError
from extproc.config.cost import Cost
from extproc.config.loading import load, parse
from extproc.config.operations import Admin, Journal
from extproc.config.peers import IndexSnapshot, Peers, PeersDns, PeersTls
from extproc.config.pools import Discovery, Dns, Kubernetes, KvEvents, Model, Pool, Revision, StaticWorker
from extproc.config.rollout import Rollout, TrafficClass
from extproc.config.root import Config
from extproc.config.service import DecisionLog, Envoy, Limits, RouterTls, Scrape, Tls
from extproc.config.tenants import Identity, JwtClaim, MetadataKey, SaltKey, Tenant, Tenants, book_of

__all__ = [
    "Admin",
    "Admission",
    "Config",
    "ConfigError",
    "Cost",
    "DecisionLog",
    "Discovery",
    "Dns",
    "Envoy",
    "Identity",
    "IndexSnapshot",
    "Journal",
    "JwtClaim",
    "Kubernetes",
    "KvEvents",
    "Limits",
    "MetadataKey",
    "Model",
    "Peers",
    "PeersDns",
    "PeersTls",
    "Pool",
    "Revision",
    "Rollout",
    "RouterTls",
    "SaltKey",
    "Scrape",
    "StaticWorker",
    "Tenant",
    "Tenants",
    "Tls",
    "TrafficClass",
    "book_of",
    "load",
    "parse",
]
