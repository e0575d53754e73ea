"""Requests and fleets for peers."""

from extproc.core.types import BlockRemoved, BlockStored, EngineMetrics
from extproc.sim.engine_types import EngineConfig
from extproc.sim.routing import FleetFacts, SimRequest
from extproc.sim.sessions import Turn

BLOCK = 16


def facts(replicas=3, **engine):
    return FleetFacts(replicas, EngineConfig(block_size=BLOCK, **engine))


def document(name, blocks):
    """Chained hashes of a document's blocks: unlike any other document's."""
    return tuple(((name + 1) << 32) + at for at in range(blocks))


class Asking:
    """Sends requests to a router, one after the other."""

    def __init__(self, router):
        self.router = router
        self.count = 0
        self.now = 0.0

    def request(self, prefix=(), extra=8, **fields):
        """A prompt of these blocks and `extra` tokens more (1 to a block)."""
        self.count += 1
        tokens = len(prefix) * BLOCK + extra
        values = {
            "request_id": f"r{self.count}",
            "session_id": f"s{self.count}",
            "group": "",
            "tenant": "",
            "turn": 0,
            "prompt_tokens": tokens,
            "block_size": BLOCK,
            "prefix": tuple(prefix),
            "max_output_tokens": None,
            "truth": Turn(tokens, 1, ()),
        }
        return SimRequest(**{**values, **fields})

    def ask(self, prefix=(), extra=8, **fields):
        """Where the router sends it."""
        return self.router.route(self.request(prefix, extra, **fields), self.now)

    def first(self, number):
        self.router.on_first_token(f"r{number}", self.now)

    def end(self, number):
        self.router.on_finished(f"r{number}", 0, 1, self.now)


def stored(blocks, parent=None):
    return BlockStored(tuple(blocks), parent, (), BLOCK)


def removed(blocks):
    return BlockRemoved(tuple(blocks))


def scraped(waiting=0, kv_usage=0.0, blocks=None):
    return EngineMetrics(running=0, waiting=waiting, kv_usage=kv_usage, num_gpu_blocks=blocks)
