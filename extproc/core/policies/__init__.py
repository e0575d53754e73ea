"""Routing policies: candidates in, ordered candidates out. One file each."""

from extproc.core.policies.base import Needs, Policy
from extproc.core.policies.kv_affinity import KvAffinity
from extproc.core.policies.least_load import LeastLoad
from extproc.core.policies.prefix_affinity import PrefixAffinity
from extproc.core.policies.round_robin import RoundRobin
from extproc.core.policies.session_affinity import SessionAffinity
from extproc.core.policies.token_load import TokenLoad

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (TokenLoad, PrefixAffinity, SessionAffinity, LeastLoad, KvAffinity, RoundRobin)
}

__all__ = [
    "POLICIES",
    "KvAffinity",
    "LeastLoad",
    "Needs",
    "Policy",
    "PrefixAffinity",
    "RoundRobin",
    "SessionAffinity",
    "TokenLoad",
]
