from importlib.metadata import EntryPoint

import pytest

from extproc.adapters import policy_plugins
from extproc.config import ConfigError, parse
from extproc.core.errors import WarmrouteError
from extproc.core.policies import POLICIES, RoundRobin

FILE = "pools: [{discovery: {static: ['127.0.0.1:1']}}]\n"


class Mine(RoundRobin):
    """A policy from elsewhere."""

    name = "mine"


@pytest.fixture
def offered(monkeypatch):
    points = []
    policy_plugins.available_policies.cache_clear()
    monkeypatch.setattr(
        policy_plugins, "entry_points", lambda group: points if group == "warmroute.policies" else []
    )
    yield points
    policy_plugins.available_policies.cache_clear()


def point(name, value):
    return EntryPoint(name, value, "warmroute.policies")


def test_ours_are_always_there(offered):
    assert policy_plugins.available_policies() == POLICIES


def test_a_package_can_offer_a_policy(offered):
    offered.append(point("mine", f"{__name__}:Mine"))
    assert policy_plugins.available_policies()["mine"] is Mine
    assert parse(FILE + "policy: mine").policy == "mine"


def test_an_unknown_policy_is_refused_with_the_known_ones(offered):
    with pytest.raises(ConfigError, match=r"line 2: policy: .*'fastest'.*token-load"):
        parse(FILE + "policy: fastest")
    with pytest.raises(ConfigError, match="line 2: shadow"):
        parse(FILE + "shadow: [token-load, fastest]")


@pytest.mark.parametrize("value", ["no_such_module:X", f"{__name__}:FILE"])
def test_a_broken_offer_is_named(offered, value):
    offered.append(point("broken", value))
    with pytest.raises(WarmrouteError, match="'broken'"):
        policy_plugins.available_policies()
