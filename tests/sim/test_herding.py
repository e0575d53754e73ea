"""A burst of equal prompts, with what the engines of the fleet really found in their caches."""

from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.hardware import ENGINE_PRESETS
from extproc.sim.hosted_router import OURS
from extproc.sim.sessions import Session, Workload
from tests.support.fleet import BLOCK, turn

REQUESTS, PROMPT, WORKERS = 500, 8000, 3


def burst(policy):
    """500 equal prompts at one moment, over three idle engines."""
    sessions = [
        Session(str(n), (turn(PROMPT, 100, range(PROMPT // BLOCK), n),), arrival_s=1.0)
        for n in range(REQUESTS)
    ]
    engine = ENGINE_PRESETS["medium"].engine(BLOCK)
    settings = FleetSettings(replicas=WORKERS, engine=engine)
    return Fleet(Workload("burst", BLOCK, sessions), OURS[policy], settings).run()


def test_five_hundred_equal_prompts_at_once_spread_and_are_found_cached():
    measures = burst("token-load")
    assert sum(measures.sent) == REQUESTS
    assert max(measures.sent) <= 0.45 * REQUESTS
    (cached,), (prompt,) = measures.cached.values(), measures.prompt.values()
    computed = (prompt - cached) / PROMPT  # in prompts: the first copies, and the last token of each other
    assert computed < 2 * WORKERS
    assert cached / (prompt - WORKERS * PROMPT) > 0.9


def test_whoever_only_follows_the_cache_sends_all_to_one():
    measures = burst("kv-affinity")
    assert max(measures.sent) == REQUESTS
    herd, spread = sorted(measures.e2e), sorted(burst("token-load").e2e)
    assert herd[-1] > 1.5 * spread[-1]
