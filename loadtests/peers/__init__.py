"""The best other routers, to be compared with in the simulator. Each file has formula, defaults and source.

Each keeps its own view of the fleet, with its own limits and its own ignorance: what it was told by KV events
or metrics, or guesses from what it sent. `dynamo` is NVIDIA's own code; the others are written after their
sources. Characters, where a peer works on them, are 4 to a token.
"""

from extproc.sim.routing import RouterMaker
from loadtests.peers.aibrix_prefix_cache import AibrixPrefixCache
from loadtests.peers.dynamo import Dynamo
from loadtests.peers.dynamo_formula import DynamoFormula
from loadtests.peers.llmd_default import LlmdDefault
from loadtests.peers.llmd_token_load import LlmdTokenLoad
from loadtests.peers.preble import Preble
from loadtests.peers.ray_consistent_hash import RayConsistentHash
from loadtests.peers.ray_prefix_affinity import RayPrefixAffinity
from loadtests.peers.sglang_cache_aware import SglangCacheAware
from loadtests.peers.smg import SmgCacheAware, SmgEvents

PEERS: dict[str, RouterMaker] = {
    "llmd-default": LlmdDefault,
    "llmd-token-load": LlmdTokenLoad,
    "dynamo": Dynamo,
    "dynamo-formula": DynamoFormula,
    "sglang-cache-aware": SglangCacheAware,
    "smg-cache-aware": SmgCacheAware,
    "smg-events": SmgEvents,
    "aibrix-prefix-cache": AibrixPrefixCache,
    "ray-consistent-hash": RayConsistentHash,
    "ray-prefix-affinity": RayPrefixAffinity,
    "preble": Preble,
}
"""Makers by the name that `warmroute simulate --policies` takes."""
