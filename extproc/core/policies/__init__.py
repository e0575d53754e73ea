"""Routing policies: candidates in, ordered candidates out. One file each."""

from extproc.core.policies.base import Policy
from extproc.core.policies.least_load import LeastLoad
from extproc.core.policies.round_robin import RoundRobin
from extproc.core.policies.token_load import TokenLoad

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (TokenLoad, LeastLoad, RoundRobin)}

__all__ = ["POLICIES", "LeastLoad", "Policy", "RoundRobin", "TokenLoad"]
