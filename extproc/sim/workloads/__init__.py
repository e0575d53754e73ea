"""Workloads by name. Each file defines one, with its parameters, defaults and source.

Everything is generated from a seed, or read from a trace in the format its file describes; without a trace a
workload that has one runs on a short stand-in with similar statistics.
"""

from extproc.sim.sessions import WorkloadMaker
from extproc.sim.workloads.azure_control import azure_control
from extproc.sim.workloads.coding_agent import coding_agent
from extproc.sim.workloads.documents import documents
from extproc.sim.workloads.flood import flood
from extproc.sim.workloads.mooncake import mooncake_conversation, mooncake_synthetic
from extproc.sim.workloads.multi_tenant import multi_tenant
from extproc.sim.workloads.overload import overload
from extproc.sim.workloads.rl_rollouts import rl_rollouts, rl_rollouts_distinct

WORKLOADS: dict[str, WorkloadMaker] = {
    "rl-rollouts": rl_rollouts,
    "rl-rollouts-distinct": rl_rollouts_distinct,
    "coding-agent": coding_agent,
    "mooncake-conversation": mooncake_conversation,
    "mooncake-synthetic": mooncake_synthetic,
    "azure-control": azure_control,
    "documents": documents,
    "flood": flood,
    "multi-tenant": multi_tenant,
    "overload": overload,
}
"""The first line of each maker's docstring says what it is."""
