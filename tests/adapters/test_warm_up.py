import gc
import itertools
import random
import subprocess
import sys
import time

import pytest

from extproc.adapters.prompt_service import PromptService
from extproc.adapters.request_preparation import PoolContext
from extproc.adapters.warm_up import GC_THRESHOLDS, SWITCH_S, warm_up
from extproc.core.candidates import PoolFacts
from extproc.core.hashing import REMEMBERED, token_array
from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from tests.support.core import COSTS


def router():
    ids = itertools.count()
    return Router(
        POLICIES["token-load"](COSTS),
        random.Random(1),
        new_lease_id=lambda: f"lease-{next(ids)}",
        pools={"default": PoolFacts("model", "tokenizer", 16)},
    )


class Encoder:
    def __init__(self, encoder):
        self.encoder = encoder
        self.sizes = []

    def encode(self, request, mark=None):
        self.sizes.append(request.size)
        return self.encoder.encode(request, mark)


@pytest.mark.parametrize("names", [set(), {"tiny"}])
async def test_short_and_long_prompts_go_the_whole_way_and_all_leases_end(names):
    encoder = Encoder(PromptEncoder.load(tiny_model_path()))
    prompts = PromptService(encoder, budget_ms=60_000.0)
    used = router()
    await warm_up(
        used, {"default": PoolContext("default", prompts, "model", "tokenizer", names)}, time.monotonic
    )
    prompts.close()
    assert min(encoder.sizes) < 1000
    assert max(encoder.sizes) > 16 << 10
    assert len(used.ledger) == 0
    assert sum(used.assumed.blocks(state.id) for state in used.table.all()) > 0  # they were sent, and ended


async def test_pools_without_a_model_are_warmed_too():
    used = router()
    await warm_up(used, {"default": PoolContext("default", None, "model", "")}, time.monotonic)
    assert len(used.ledger) == 0


async def test_every_pool_has_somewhere_to_send_them():
    class Noting(Router):
        def release(self, lease_id, completion, now):
            pools.append(self.ledger.get(lease_id).decision.request.pool)
            return super().release(lease_id, completion, now)

    pools, contexts = [], {name: PoolContext(name, None, "model", "") for name in ("a", "b", "c")}
    facts = {name: PoolFacts("model", "", 16) for name in contexts}
    ids = itertools.count()
    used = Noting(
        POLICIES["token-load"](COSTS),
        random.Random(1),
        new_lease_id=lambda: f"lease-{next(ids)}",
        pools=facts,
    )
    await warm_up(used, contexts, time.monotonic)
    assert list(dict.fromkeys(pools)) == ["a", "b", "c"]


class Slow(Encoder):
    """Long prompts take longer than their budget, and are counted when they end."""

    def encode(self, request, mark=None):
        if request.size > 16 << 10:
            time.sleep(0.05)
        return super().encode(request, mark)


@pytest.mark.parametrize("encoding", [Encoder, Slow])
async def test_what_it_encodes_is_not_counted(encoding):
    encoder = PromptEncoder.load(tiny_model_path())
    watched = encoding(encoder)
    prompts = PromptService(watched, budget_ms=10.0 if encoding is Slow else 60_000.0)
    contexts = {"default": PoolContext("default", prompts, "model", "tokenizer")}
    stats = encoder.encoder.stats
    REMEMBERED.prompt_chain(token_array(range(16 * 64 + 1)), 16, 7)
    await warm_up(router(), contexts, time.monotonic, [stats])
    assert len(watched.sizes) > 2
    assert prompts.idle
    prompts.close()
    assert (stats.known, stats.new, stats.evicted) == (0, 0, 0)
    assert stats.size > 0  # it is remembered all the same
    assert (REMEMBERED.hits, REMEMBERED.misses) == (0, 0)


async def test_what_goes_wrong_is_said_and_keeps_nobody_from_starting(caplog):
    class Broken:
        def on_membership(self, members, now):
            raise OSError("no")

    await warm_up(Broken(), {}, time.monotonic)
    assert "the first requests will take longer" in caplog.text


def test_the_collector_forgets_what_exists():
    code = (
        "import gc, sys\nfrom extproc.adapters.warm_up import settle\nkept = [[n] for n in range(10_000)]\n"
        "settle()\nprint(gc.get_freeze_count() > 10_000, gc.get_threshold(), "
        "round(sys.getswitchinterval(), 6))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == f"True {GC_THRESHOLDS} {SWITCH_S}\n"
    assert gc.get_freeze_count() == 0  # in a process of its own: this one is untouched
