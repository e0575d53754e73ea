"""A policy is documented where it is defined: what it computes, from what, and with which defaults."""

import re

import pytest

from extproc.core.cost import CostSettings
from extproc.core.policies import POLICIES, prefix_affinity, session_affinity

DEFAULTS = {
    "token-load": {
        f"`{name}` {getattr(CostSettings(), name):,g}"
        for name in ("tie_ms", "max_extra_ttft_ms", "max_warm_wait_ms")
    },
    "prefix-affinity": {f"bound {prefix_affinity.LOAD_BOUND:g}"},
    "session-affinity": {
        f"{session_affinity.VIRTUAL_NODES} points",
        f"bound {session_affinity.LOAD_BOUND:g}",
    },
    "least-load": {"none"},
    "kv-affinity": {"none"},
    "round-robin": {"none"},
}


@pytest.mark.parametrize("name", POLICIES)
def test_formula_inputs_and_defaults_are_stated(name):
    text = re.sub(r"\s+", " ", POLICIES[name].__doc__)
    parts = dict(re.findall(r"(Formula|Inputs|Defaults): (.*?)(?= Formula:| Inputs:| Defaults:|$)", text))
    assert set(parts) == {"Formula", "Inputs", "Defaults"}
    assert all(len(part) > 3 for part in parts.values())
    for default in DEFAULTS[name]:
        assert default in parts["Defaults"]


def test_every_policy_is_documented():
    assert set(DEFAULTS) == set(POLICIES)
