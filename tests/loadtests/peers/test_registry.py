import pytest

from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.routing import PolicyUnavailableError
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.documents import documents
from loadtests.peers import PEERS
from tests.loadtests.peers.support import Asking, document, facts
from tests.support.fleet import ENGINE


def made(name, the_facts, seed):
    try:
        return PEERS[name](the_facts, seed)
    except PolicyUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_serves_a_workload_and_says_its_name(name):
    sent = []
    for _ in range(2):
        workload = documents(WorkloadOptions(limit=80), document_tokens=800, documents=5)
        fleet = Fleet(workload, lambda f, s: made(name, f, s), FleetSettings(engine=ENGINE, seed=4))
        measures = fleet.run()
        assert fleet.router.name == name
        assert measures.failed == 0
        assert sum(measures.sent) == 80
        sent.append((measures.sent, list(measures.ttft)))
        if name == "dynamo":
            fleet.router.close()
    if name != "dynamo":  # whose ties cannot be seeded
        assert sent[0] == sent[1]


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_forgets_what_has_ended(name):
    """Load books are empty when nothing is under way, so an idle fleet looks idle."""
    router = made(name, facts(), 0)
    for number in range(5):
        asking = Asking(router)
        asking.count = number
        asking.ask(document(number, 10))
        asking.first(number + 1)
        asking.end(number + 1)
    for counts in (
        getattr(getattr(router, "in_flight", None), "counts", []),
        getattr(router, "tokens", []),
        getattr(router, "prefill_tokens", []),
        [len(active) for active in getattr(router, "active", [])],
        [sum(node.under_way) for node in getattr(getattr(router, "tree", None), "_nodes", [])],
    ):
        assert not any(counts)
    if name == "dynamo":
        router.close()
