"""What the first requests would pay for otherwise, done before there are any.

Requests that nobody sent go the whole way of one, through each pool's own encoders, to a router that nobody
asks afterwards: what is compiled, imported or cached at first use is then there, and neither the real router
nor metrics, spans, logs or journal have seen anything. What encoders and hashes count begins anew afterwards.

`settle` keeps Python's garbage collector from looking at all that again and again: what exists by then lives
as long as the process, and is never looked at any more; younger objects are looked at less often than by
default. A collection stops every request that is being decided, and the work of a full one grows with what is
known of the fleet's caches; reference counts free nearly everything without it. It also lets the event loop
have its turn sooner where a thread that encodes a long prompt runs Python: by default it would wait 5 ms. And
what reading tokenizers has left behind is given back to the machine.
"""

import asyncio
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping

from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.freed_memory import give_back
from extproc.adapters.request_preparation import PoolContext
from extproc.adapters.routing import HttpRequest
from extproc.adapters.routing_service import WarmRoutingService
from extproc.core.hashing import REMEMBERED
from extproc.core.router import Router
from extproc.core.types import Completion, Member, Outcome
from extproc.prompt.piece_cache import PieceCacheStats
from extproc.protocol.ext_proc_messages import Route

_log = logging.getLogger("warmroute.warm_up")

GC_THRESHOLDS = (20_000, 20, 100)
"""New containers per look at the youngest, such looks per look at older ones, those per full look."""

SWITCH_S = 0.0002
"""How long one thread may run Python while another waits for its turn."""

_TURNS = 5
_WORDS = (20, 5000)  # short prompts are encoded on the event loop, long ones in threads
_MEMBERS = 4
_GIVEN_UP_S = 5.0  # for encodings that took longer than their budget
_POLL_S = 0.005


async def warm_up(
    router: Router,
    pools: Mapping[str, PoolContext],
    clock: Callable[[], float],
    counts: Iterable[PieceCacheStats] = (),
) -> None:
    """Route requests that nobody sent.

    Args:
        router: made like the real one, and thrown away afterwards.
        pools: what the real service knows of its pools.
        clock: monotonic seconds.
        counts: what the pools' encoders count.
    """
    try:
        await _route(router, pools, clock)
        give_up = clock() + _GIVEN_UP_S
        while clock() < give_up:
            if all(pool.prompts is None or pool.prompts.idle for pool in pools.values()):
                break
            await asyncio.sleep(_POLL_S)
    except Exception:
        _log.exception("warming up failed; the first requests will take longer")
    for one in counts:
        one.begin()
    REMEMBERED.hits = REMEMBERED.misses = 0


async def _route(router: Router, pools: Mapping[str, PoolContext], clock: Callable[[], float]) -> None:
    names = [pool for pool in pools for _ in range(_MEMBERS)]
    members = [Member(f"192.0.2.1:{8000 + number}", pool=pool) for number, pool in enumerate(names)]
    router.on_membership(members, clock())
    for name, pool in pools.items():
        service = WarmRoutingService(router, {name: pool}, DecisionLog("", _log.debug), clock, 2)
        for turn in range(_TURNS):
            for words in _WORDS:
                await _one(service, pool, turn, words)


async def _one(service: WarmRoutingService, pool: PoolContext, turn: int, words: int) -> None:
    model = min(pool.base_models, default="warm-up")
    messages = [
        {"role": "system", "content": "warm up " * words},
        {"role": "user", "content": f"question {turn}"},
    ]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 1}).encode()
    answer = await service.route(
        HttpRequest("POST", "/v1/chat/completions", {}, body, None, None, f"warm-up-{turn}")
    )
    if isinstance(answer, Route):
        service.completed(answer.lease_id, Completion(Outcome.FINISHED, status=200, output_tokens=1))


def settle() -> None:
    """Have the garbage collector forget what exists and look less often, and threads take turns sooner.

    Of the whole process: for commands that serve, not for libraries.
    """
    give_back()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)
