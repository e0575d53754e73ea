from extproc.adapters.telemetry.recorder import Telemetry
from extproc.core.rollout import Mode
from extproc.core.types import BlockRemoved
from extproc.protocol.rejections import Reject
from tests.adapters.telemetry.values import Clock, decision, http, released
from tests.support.core import stored, worker


class Broken:
    """Spans that always fail."""

    def decided(self, *_):
        raise RuntimeError("broken")

    rejected = finished = decided


def test_a_fault_in_here_reaches_no_request_and_is_said_once(caplog):
    telemetry = Telemetry(Clock(), spans=Broken())
    for _ in range(3):
        stages = telemetry.begin()
        assert telemetry.decided(http(), decision(), stages) == {}
        telemetry.rejected(http(), Reject(503, "no", "why"), stages)
        telemetry.finished(released())
    assert telemetry.faults == 9
    assert len([record for record in caplog.records if "not affected" in record.message]) == 1


def test_refusals_are_counted():
    telemetry = Telemetry(Clock())
    telemetry.rejected(http(), Reject(503, "no", "nothing_ready"), telemetry.begin())
    assert telemetry.registry.get_sample_value("warmroute_rejections_total", {"why": "nothing_ready"}) == 1


def test_evictions_have_ages_until_what_was_stored_is_forgotten():
    clock = Clock(10.0)
    telemetry = Telemetry(clock)
    # Every sixteenth handle is sampled, and handles here are small integers.
    telemetry.kv_events(worker(), "default", [stored(range(64 * 16))])
    clock.now = 25.0
    telemetry.kv_events(worker(), "default", [BlockRemoved((16, 17))])
    value = telemetry.registry.get_sample_value
    assert value("warmroute_kv_evictions_total", {"pool": "default"}) == 2
    assert value("warmroute_kv_evicted_age_seconds_sum", {"pool": "default"}) == 15.0
    telemetry.kv_forgotten(worker())
    telemetry.kv_events(worker(), "default", [BlockRemoved((32,))])
    assert value("warmroute_kv_evictions_total", {"pool": "default"}) == 3
    assert value("warmroute_kv_evicted_age_seconds_count", {"pool": "default"}) == 1


def test_an_observed_request_was_sent_by_nobody_here(monkeypatch):
    telemetry = Telemetry(Clock())
    sent = []
    telemetry._state = type("State", (), {"count_routed": sent.append})
    for mode in Mode:
        telemetry.decided(http(), decision(mode=mode), telemetry.begin())
    assert len(sent) == 2
    assert telemetry.faults == 0
