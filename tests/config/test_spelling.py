import pytest

from extproc.config import ConfigError, parse

POOLS = "pools:\n  - discovery: {static: [h:1]}\n"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("polcy: token-load\n", "line 3: polcy: no such setting; did you mean `policy`?"),
        ("    kv_event: {}\n", "line 3: pools.0.kv_event: no such setting; did you mean `kv_events`?"),
        ("    max_queue_ms: 5\n", "no such setting; did you mean `admission.max_queue_ms`?"),
        ("block_size: 16\n", "block_size: no such setting; did you mean `pools.block_size`?"),
        (
            "tenants: {identity: [{header: x}], policies: {acme: {wieght: 1}}}\n",
            "tenants.policies.acme.wieght: no such setting; did you mean `weight`?",
        ),
        ("name: x\n", "name: no such setting; all settings: deploy/configuration.md"),  # there are several
        ("colour: red\n", "colour: no such setting; all settings: deploy/configuration.md"),
    ],
)
def test_a_setting_that_does_not_exist_is_answered_with_what_was_meant(text, hint):
    with pytest.raises(ConfigError) as caught:
        parse(POOLS + text)
    assert hint in str(caught.value)
