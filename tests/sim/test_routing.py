from extproc.sim.fleet_engine import FleetEngine
from extproc.sim.policies import POLICIES
from extproc.sim.routing import FleetFacts, NullRouter, SeesEngines
from tests.support.fleet import ENGINE, documents, simulate


class Zero(NullRouter):
    name = "zero"

    def __init__(self, facts, seed):
        self.made_with = facts

    def route(self, request, now):
        return 0


class Attached(Zero):
    seen = ()

    def attach(self, engines, network_s):
        Attached.seen = (*engines, network_s)


def test_a_router_needs_no_more_than_route():
    assert simulate(documents(20), Zero).sent == [20, 0, 0]


def test_only_bounds_see_the_engines():
    facts = FleetFacts(2, ENGINE)
    seeing = {name for name, make in POLICIES.items() if isinstance(make(facts, 0), SeesEngines)}
    assert seeing == {"oracle"}
    simulate(documents(1), Attached, network_s=0.25)
    *engines, network_s = Attached.seen
    assert [type(engine) for engine in engines] == [FleetEngine] * 3
    assert network_s == 0.25


def test_events_can_be_declined():
    class Deaf(Zero):
        wants_kv_events = False

        def on_kv_events(self, worker, events, now):
            raise AssertionError

    assert simulate(documents(20), Deaf).failed == 0
