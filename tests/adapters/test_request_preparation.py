import json
import random
import time

import pytest

from extproc.adapters.admission import Admission, RefusedError
from extproc.adapters.request_preparation import (
    EXPECTED_OUTPUT_HEADER,
    PREFIX_CLASS_HEADER,
    PoolContext,
    RequestPreparation,
)
from extproc.adapters.routing import HttpRequest
from extproc.adapters.telemetry.stages import Stages
from extproc.core.candidates import PoolFacts
from extproc.core.model_catalog import ModelCatalog
from extproc.core.namespace import LONGEST_SALT
from extproc.core.policies import POLICIES
from extproc.core.rollout import Mode, Rollout
from extproc.core.router import Router
from extproc.core.types import Member
from extproc.protocol.body_limits import DEFAULT_LIMITS, BodyLimits
from extproc.protocol.openai import BadRequest, LoadOnly
from tests.support.core import COSTS, worker


class Requests:
    """Prepares for pools without tokenizers; nothing is encoded."""

    def __init__(self, *, refuse_unknown=False, aliases=None, **settings):
        router = Router(
            POLICIES["token-load"](COSTS),
            random.Random(3),
            new_lease_id=lambda: "lease",
            pools={name: PoolFacts("v1", "t1", 16) for name in ("a", "b")},
            costs=COSTS,
        )
        router.on_membership(
            [Member(worker(0).endpoint, pool="a"), Member(worker(1).endpoint, pool="b")], 1.0
        )
        pools = {name: PoolContext(name, None, "v1", "t1", template_version="x") for name in ("a", "b")}
        self.pools = pools
        catalog = ModelCatalog({"a": ("base",), "b": ("other",)}, aliases or {}, refuse_unknown)
        for number, (pool, base) in enumerate((("a", "base"), ("b", "other"))):
            catalog.on_models(worker(number).endpoint, pool, [base], [])
        self.unknown = 0
        given = {
            "rollout": Rollout(),
            "baseline": None,
            "session_header": "X-Session",
            "policy_header": "X-Policy",
            "body_limits": DEFAULT_LIMITS,
            "on_unknown_model": self.look,
            "on_normalized": lambda _normal: None,
            **settings,
        }
        self.preparation = RequestPreparation(router.table, pools, Admission(catalog), **given)

    def look(self):
        self.unknown += 1

    async def of(self, body=None, headers=None, raw=None, **fields):
        if raw is None:
            raw = json.dumps({"model": "base", "prompt": "q", **(body or {})}).encode()
        given = {"subset": None, "trace_parent": None, "body": raw, **fields}
        http = HttpRequest(
            method="POST", path="/v1/completions", headers=headers or {}, request_id="r", **given
        )
        return await self.preparation.prepare(http, Stages(time.monotonic))

    async def ask(self, *args, **fields):
        return (await self.of(*args, **fields)).ask


async def test_what_a_request_says_is_what_is_asked():
    ask = await Requests().ask({"max_tokens": 7, "n": 2, "stream": True, "cache_salt": "s"})
    assert (ask.request_id, ask.model, ask.pool, ask.namespace.cache_salt) == ("r", "base", "a", "s")
    assert (ask.max_output_tokens, ask.sequences, ask.stream) == (7, 2, True)
    assert (ask.namespace.model_revision, ask.namespace.tokenizer_revision) == ("v1", "t1")
    assert (ask.load_only, ask.prompts, ask.template_version) == ("no-tokenizer", (), "x")


async def test_a_body_that_is_too_long_to_be_read_is_mostly_no_text():
    body = {"prompt": "q" * (1 << 20)}
    assert (await Requests().ask(body)).prompt_tokens > 200_000
    ask = await Requests(body_limits=BodyLimits(read_bytes=1 << 20)).ask(body)
    assert (ask.load_only, ask.prompt_tokens) == ("body-too-long", 1024)


async def test_who_tokenizes_is_told_the_model_and_not_its_alias():
    """A worker that is asked for token ids does not know what else its model is called here."""
    requests, asked = Requests(aliases={"nick": "base"}), []

    class Asked:
        async def encode(self, request, *_rest):
            asked.append(request)
            return LoadOnly("unsupported:x")

    requests.pools["a"].prompts = Asked()
    for name in ("nick", "base"):
        await requests.ask({"model": name, "prompt": "q", "x": 1})
    assert [one.model for one in asked] == ["base", "base"]
    assert [one.body for one in asked] == [{"model": "base", "prompt": "q", "x": 1}] * 2


async def test_a_long_salt_is_not_kept():
    """Namespaces are remembered, and clients choose salts."""
    one, other = [(await Requests().ask({"cache_salt": end.rjust(1 << 20, "s")})).namespace for end in "ab"]
    assert one.cache_salt != other.cache_salt
    assert len(one.cache_salt) <= LONGEST_SALT


async def test_the_model_chooses_the_pool_and_what_no_pool_serves_is_looked_for():
    requests = Requests(refuse_unknown=True)
    assert (await requests.ask({"model": "other"})).pool == "b"
    with pytest.raises(RefusedError):
        await requests.of({"model": "nobody-s"})
    assert requests.unknown == 1


async def test_a_session_is_named_by_header_before_body():
    requests = Requests()
    assert (await requests.ask({"user": "u"})).session_key == "u"
    assert (await requests.ask({"user": "u"}, {"x-session": "h"})).session_key == "h"
    assert (await requests.ask()).session_key is None


@pytest.mark.parametrize(
    ("said", "meant"), [("7", 7), ("0", None), ("-3", None), ("many", None), ("9" * 30, None)]
)
async def test_a_hint_is_taken_where_it_makes_sense_and_never_refused(said, meant):
    assert (await Requests().ask(headers={EXPECTED_OUTPUT_HEADER: said})).expected_output_tokens == meant
    assert (await Requests().ask({"expected_output_tokens": said})).expected_output_tokens == meant


async def test_classes_and_policies_are_named_in_headers():
    ask = await Requests().ask(headers={PREFIX_CLASS_HEADER: " Session ", "x-policy": "round-robin"})
    assert (ask.prompt_class, ask.policy) == ("session", "round-robin")
    assert (await Requests().ask(headers={PREFIX_CLASS_HEADER: "mine"})).prompt_class == ""
    silent = Requests(policy_header=None)
    assert (await silent.ask(headers={"x-policy": "round-robin"})).policy is None


async def test_what_is_not_shown_is_routed_by_load_and_what_is_malformed_is_refused():
    assert (await Requests().ask(body_seen=False)).load_only == "body-not-shown"
    with pytest.raises(BadRequest):
        await Requests().of(raw=b"{")


async def test_where_it_may_go_is_what_the_gateway_or_a_test_says():
    requests = Requests()
    here, there = worker(0).endpoint, worker(1).endpoint
    assert (await requests.ask()).subset is None
    assert (await requests.ask(subset=frozenset({here}))).subset == {here}
    assert (await requests.ask(override=f"nowhere:1, {there},{here}")).subset == {there}
    assert requests.preparation.overridden(f"nowhere:1, {there},{here}") == (there, here)
    assert list(requests.preparation.members("b")) == [worker(1)]


async def test_in_mode_shadow_the_baseline_decides():
    shadow = Requests(rollout=Rollout(Mode.SHADOW), baseline="round-robin")
    ask = await shadow.ask(headers={"x-policy": "kv-affinity"})
    assert (ask.mode, ask.policy) == (Mode.SHADOW, "round-robin")
