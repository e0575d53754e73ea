import pytest

from extproc.config import Config, ConfigError, parse
from extproc.core.saturation import RoomSettings

POOLS = "pools: [{discovery: {static: ['10.0.0.1:8000']}}]\n"


def test_nothing_is_held_by_default():
    assert parse(POOLS).admission.settings() is None


def test_bounds_reach_the_adapter():
    text = """
admission:
  enabled: true
  max_queue_ms: null
  max_worker_requests: 8
  max_waiting: 2
  max_wait_s: 30
  queue_requests: 5
  queue_bytes: 1000
  ageing_s: 2
  priority_header: X-Prio
  deadline_headers: [X-Timeout]
"""
    settings = parse(POOLS + text).admission.settings()
    assert settings.room == RoomSettings(None, 0.95, 8, 2)
    assert (settings.queue.max_requests, settings.queue.max_bytes, settings.queue.ageing_s) == (5, 1000, 2)
    assert (settings.max_wait_s, settings.priority_header, settings.deadline_headers) == (
        30,
        "x-prio",
        ("x-timeout",),
    )


@pytest.mark.parametrize(
    "wrong", ["max_wait_s: 0", "max_kv_usage: 1.5", "queue_requests: 0", "max_worker_requests: 0", "on: true"]
)
def test_a_bound_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="admission"):
        parse(f"{POOLS}admission: {{enabled: true, {wrong}}}")


def test_a_tenant_has_a_priority():
    config: Config = parse(
        POOLS
        + """
tenants:
  identity: [{header: x-tenant}]
  policies: {acme: {priority: 3, weight: 2}}
  unknown: {}
"""
    )
    book = config.tenants.book()
    assert (book.policy("acme").priority, book.policy("acme").weight) == (3, 2)
    assert book.policy("other").priority == 0
