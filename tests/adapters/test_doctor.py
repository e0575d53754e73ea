import itertools
import json
import random
import shutil
import time

import pytest
from aiohttp import web

from extproc.adapters import doctor_probe
from extproc.adapters.doctor import Doctor, Expectation
from extproc.adapters.doctor_findings import Status
from extproc.adapters.doctor_names import check_isolation, served_by
from extproc.adapters.engine_key import EngineKey
from extproc.adapters.kv_stream import KvSource
from extproc.adapters.routing_service import DP_RANK_HEADER
from extproc.core.types import Member, WorkerId
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from tests.support.http import Upstream
from tests.support.ports import free_port
from tests.support.sim_engine import SimEngine

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
SEEDS = itertools.count()
ALL = ("reachable", "models", "metrics", "token ids", "cached tokens", "KV events", "replay")


@pytest.fixture(scope="module")
def encoder():
    return PromptEncoder.load(tiny_model_path())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(doctor_probe, "_EVENT_WAIT_S", 1.0)
    monkeypatch.setattr(doctor_probe, "_TRUST_WAIT_S", 0.5)


def source_of(engine, **changed):
    fields = {"endpoint": engine.kv_events, "replay_endpoint": engine.kv_replay, **changed}
    return KvSource(WorkerId(engine.endpoint), **fields)


async def examine(endpoint, sources, encoder=None, **expected):
    expectation = Expectation(
        names=expected.pop("names", ("tiny",)), block_size=expected.pop("block_size", None), encoder=encoder
    )
    member = Member(endpoint, **expected)
    doctor = Doctor(random.Random(next(SEEDS)), time.monotonic)  # no prompt is asked twice
    findings = [finding async for finding in doctor.examine(member, sources, expectation)]
    assert all(finding.advice for finding in findings if finding.status is not OK)
    assert len({finding.check for finding in findings}) == len(findings)
    return {finding.check: finding for finding in findings}


def statuses(findings):
    return {check: finding.status for check, finding in findings.items()}


async def test_a_healthy_engine_passes_every_check(encoder):
    async with SimEngine(block_size=32) as engine:
        findings = await examine(engine.endpoint, [source_of(engine)], encoder, block_size=32)
        assert statuses(findings) == dict.fromkeys(ALL, OK)
        assert "96" in findings["cached tokens"].detail
        # Again, with everything in its cache, and no encoder to compare with.
        findings = await examine(engine.endpoint, [source_of(engine)])
        assert statuses(findings) == {check: OK for check in ALL if check != "token ids"}


async def test_an_engine_that_is_down_is_not_reachable():
    endpoint = f"127.0.0.1:{free_port()}"
    findings = await examine(endpoint, [])
    assert statuses(findings) == {"reachable": FAIL}
    assert findings["reachable"].detail == "cannot connect: Connection refused"


async def test_an_unhealthy_engine_is_not_reachable():
    async with SimEngine() as engine:
        engine.faults.health_status = 503
        findings = await examine(engine.endpoint, [source_of(engine)])
    assert statuses(findings) == {"reachable": FAIL}
    assert "503" in findings["reachable"].detail


def variant(tmp_path, change_config=lambda config: None, change_tokenizer=lambda tokenizer: None):
    target = tmp_path / "other"
    shutil.copytree(tiny_model_path(), target)
    for name, change in (("tokenizer_config.json", change_config), ("tokenizer.json", change_tokenizer)):
        document = json.loads((target / name).read_text())
        change(document)
        (target / name).write_text(json.dumps(document))
    return PromptEncoder.load(target)


async def test_another_chat_template_fails_and_says_where(tmp_path):
    def prefix(config):
        config["chat_template"] = "Be kind. " + config["chat_template"]

    other = variant(tmp_path, prefix)
    async with SimEngine() as engine:
        found = (await examine(engine.endpoint, [source_of(engine)], other))["token ids"]
    assert found.status is FAIL
    assert "chat: differs from the engine's at position" in found.detail
    assert "chat_template" in found.advice


async def test_other_merges_fail(tmp_path):
    def fewer_merges(tokenizer):
        del tokenizer["model"]["merges"][100:]

    other = variant(tmp_path, change_tokenizer=fewer_merges)
    async with SimEngine() as engine:
        found = (await examine(engine.endpoint, [source_of(engine)], other))["token ids"]
    assert found.status is FAIL
    assert "model.path" in found.advice


async def test_what_is_not_rendered_here_is_a_warning(tmp_path):
    def no_template(config):
        del config["chat_template"]

    other = variant(tmp_path, no_template)
    async with SimEngine() as engine:
        examined = Doctor(random.Random(1)).examine(
            Member(engine.endpoint), [source_of(engine)], Expectation(("tiny",), None, other)
        )
        tokens = [finding async for finding in examined if finding.check == "token ids"]
    assert [finding.status for finding in tokens] == [WARN, WARN, OK]  # two chats, and one text that is equal
    assert "chat_template.jinja" in tokens[0].advice


async def test_events_switched_off_at_the_engine(encoder):
    async with SimEngine(kv_events=False) as engine:
        source = KvSource(WorkerId(engine.endpoint), f"tcp://127.0.0.1:{free_port()}")
        findings = await examine(engine.endpoint, [source], encoder)
    assert findings["KV events"].status is FAIL
    assert "none arrived" in findings["KV events"].detail
    assert "--kv-events-config" in findings["KV events"].advice
    assert findings["cached tokens"].status is OK
    assert "replay" not in findings


async def test_events_of_another_engine():
    async with SimEngine() as engine, SimEngine() as other:
        sources = [source_of(engine, endpoint=other.kv_events, replay_endpoint=other.kv_replay)]
        findings = await examine(engine.endpoint, sources)
        assert "none arrived" in findings["KV events"].detail
        await examine(other.endpoint, [source_of(other)])
        findings = await examine(engine.endpoint, sources)
        assert findings["KV events"].status is FAIL
        assert "another engine" in findings["KV events"].advice


async def test_pitfall_39_block_sizes_that_differ():
    async with SimEngine(block_size=16) as engine, SimEngine(block_size=32) as other:
        findings = await examine(engine.endpoint, [source_of(engine)], block_size=64)
        assert findings["metrics"].status is WARN
        assert findings["KV events"].status is OK  # the engine's own value is used
        await examine(other.endpoint, [source_of(other)])
        sources = [source_of(engine, endpoint=other.kv_events, replay_endpoint=other.kv_replay)]
        findings = await examine(engine.endpoint, sources)
        assert findings["KV events"].status is FAIL
        assert "32 tokens in events" in findings["KV events"].detail


async def test_without_metrics_the_block_size_is_learned_from_events():
    async with SimEngine(block_size=32) as engine:
        engine.faults.metrics_status = 500
        findings = await examine(engine.endpoint, [source_of(engine)])
    assert findings["metrics"].status is WARN
    assert "500" in findings["metrics"].detail
    assert findings["KV events"].status is OK


async def test_without_a_replay_endpoint_it_is_a_warning():
    async with SimEngine() as engine:
        await examine(engine.endpoint, [source_of(engine)])  # its first events are history now
        findings = await examine(engine.endpoint, [source_of(engine, replay_endpoint=None)])
    assert findings["KV events"].status is OK
    assert findings["replay"].status is WARN


async def test_events_switched_off_in_the_configuration():
    async with SimEngine() as engine:
        findings = await examine(engine.endpoint, [])
        assert findings["KV events"].status is WARN
        assert "KV events" not in await examine(engine.endpoint, None)


async def test_an_address_that_cannot_be_listened_on():
    async with SimEngine() as engine:
        sources = [source_of(engine, endpoint=engine.kv_events, bind=True)]
        findings = await examine(engine.endpoint, sources)
    assert findings["KV events"].status is FAIL
    assert "in use" in findings["KV events"].detail.lower()


async def test_another_served_model_name():
    async with SimEngine() as engine:
        findings = await examine(engine.endpoint, [source_of(engine)], names=("llama",))
    assert findings["models"].status is FAIL
    assert "serves tiny; the configuration names llama" in findings["models"].detail
    assert "--served-model-name" in findings["models"].advice


class Odd:
    """An engine whose answers a test can bend."""

    def __init__(self, usage=None, status=200, cards=True):
        self.usage, self.status, self.cards = usage, status, cards
        self.headers = []

    async def respond(self, request, received):
        if request.path == "/health":
            return web.Response()
        if request.path == "/v1/models" and self.cards:
            return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        if request.path == "/metrics":
            return web.Response(text="nothing 1\n")
        if request.path == "/v1/completions":
            self.headers.append(received.headers)
            return web.json_response({"usage": self.usage}, status=self.status)
        return web.Response(status=404, text="no such page")


@pytest.mark.parametrize(
    ("odd", "status", "words"),
    [
        (Odd(usage={"prompt_tokens": 49, "prompt_tokens_details": None}), WARN, "does not report"),
        (Odd(usage={"prompt_tokens": 49}), WARN, "does not report"),
        (Odd(usage={"prompt_tokens_details": {"cached_tokens": 0}}), FAIL, "computed again"),
        (Odd(usage={}, status=500), FAIL, "answers 500"),
        (Odd(usage=None), WARN, "does not report"),
    ],
)
async def test_cached_tokens(odd, status, words):
    async with Upstream(odd.respond) as engine:
        findings = await examine(engine.endpoint, [])
    assert findings["cached tokens"].status is status
    assert words in findings["cached tokens"].detail


async def test_pages_that_are_missing(encoder):
    async with Upstream(Odd(usage={}).respond) as engine:
        findings = await examine(engine.endpoint, [], encoder)
        assert findings["metrics"].status is WARN
        assert "cache_config_info" in findings["metrics"].detail
        assert findings["token ids"].status is WARN
        assert "/tokenize does not answer" in findings["token ids"].detail
    async with Upstream(Odd(cards=False).respond) as engine:
        findings = await examine(engine.endpoint, [], encoder)
        assert statuses(findings) == {"reachable": OK, "models": FAIL, "metrics": WARN}


async def test_one_rank_is_asked_twice_when_there_are_several():
    odd = Odd(usage={})
    async with Upstream(odd.respond) as engine:
        await examine(engine.endpoint, [], dp_size=2)
        await examine(engine.endpoint, [])
    assert [headers.get(DP_RANK_HEADER) for headers in odd.headers] == ["0", "0", None, None]


async def test_ranks_that_are_not_those_configured():
    async with SimEngine(dp_rank=3) as engine:
        alone = await examine(engine.endpoint, [])
        several = await examine(engine.endpoint, [], dp_size=2)
    assert (alone["ranks"].status, alone["ranks"].detail) == (OK, "data-parallel rank 3")
    assert several["ranks"].status is FAIL
    assert "`dp_size: 1` and `dp_start_rank: 3`" in several["ranks"].advice


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
async def test_a_key_does_not_go_where_a_redirect_leads(tmp_path, path):
    (tmp_path / "key").write_text("a-secret")
    key = EngineKey(tmp_path / "key")

    async def respond(request, received):
        if request.path == path:
            return web.Response(status=307, headers={"Location": f"http://{other.endpoint}{path}"})
        return web.json_response({"data": [{"id": "tiny"}]})

    async with Upstream(respond) as engine, Upstream() as other:
        expected = Expectation((), None, None, key=key)
        doctor = Doctor(random.Random(1), time.monotonic)
        async for _ in doctor.examine(Member(engine.endpoint), (), expected):
            pass
        member = Member(engine.endpoint)
        await served_by(member, key)
        await check_isolation(member, "tiny", random.Random(1), key)
        assert not other.requests
        sent = {(one.path, one.headers.get("authorization")) for one in engine.requests}
    assert {("/health", None), ("/metrics", None), (path, "Bearer a-secret")} <= sent
