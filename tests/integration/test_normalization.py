"""Normalized requests through real Envoy: what reaches the engine, and what a real vLLM makes of it."""

import gzip
import hashlib
import json
import random

import pytest
from aiohttp import web

from extproc.core.salting import Salter
from extproc.demo.workload import prose
from extproc.prompt.normalize import NormalizationRules, normalize
from extproc.prompt.normalize_text import TextRules
from extproc.prompt.normalize_volatile import STABLE_END
from extproc.protocol.openai import PATHS
from tests.support.full_stack import FullStack, Worker
from tests.support.http import Upstream
from tests.support.vllm import ReplicaSpec

pytestmark = [pytest.mark.envoy]

SETTINGS = {"fragment_tag": "doc", "volatile_lines": ["Date:"], "max_body_bytes": 400_000}
RULES = NormalizationRules(TextRules(fragment_tag="doc", volatile_lines=("Date:",)))
MODES = ("BUFFERED", "FULL_DUPLEX_STREAMED")


# --- bytes -----------------------------------------------------------------------------------------------


class Awkward:
    """Bodies whose spelling a re-encoder would change: escapes, spaces, numbers, equal keys."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def text(self):
        rng = self.rng
        pieces = [
            "Date: 1",
            "caf\\u0065\\u0301",
            "plain",
            '\\"quoted\\"',
            "<doc>2</doc><doc>1</doc>",
            "\\ud83d\\ude00",
        ]
        ends = ["\\r\\n", " \\n", "\\n", "\\u000d"]
        return '"' + "".join(rng.choice(pieces) + rng.choice(ends) for _ in range(rng.randint(1, 40))) + '"'

    def body(self, path):
        rng = self.rng
        parameters = [
            '"z" : 1.50',
            '"a":12345678901234567890123',
            '"description":"x \\r\\n"',
            '"\\u007a":1e2',
        ]
        tool = (
            '{"type":"function","function":{"name":"f", "parameters":{'
            + ", ".join(rng.sample(parameters, 4))
            + "}}}"
        )
        said = f'[{{"role":"user","content":{self.text()}}} , {{"content":"kept \\r\\n","role":"assistant"}}]'
        members = {
            "/v1/chat/completions": ['"messages": ' + said, f'"tools" :[{tool}]'],
            "/v1/completions": [f'"prompt":[{self.text()},{self.text()}]'],
            "/v1/responses": [f'"input":{said}', f'"instructions" : {self.text()}'],
            "/v1/messages": [f'"messages":{said}', f'"system":[{{"type":"text","text":{self.text()}}}]'],
        }[path]
        members += [
            '"model" :"tiny"',
            '"max_tokens": 1.0e1',
            '"seed":123456789012345678901',
            '"x":"\\/\\u00e9 "',
        ]
        return ("{ " + ", ".join(rng.sample(members, len(members))) + " }\n").encode()


def arrived(upstream, body, *, length=None):
    """Whether the last request is `body` to the byte, and says its length rightly if it says one."""
    received = [one for one in upstream.requests if one.method == "POST"][-1]
    length = str(len(body) if length is None else length)
    assert received.headers.get("content-length", length) == length
    return received.sha256 == hashlib.sha256(body).hexdigest()


async def answer(request, received):
    return web.Response(text="") if received.path == "/metrics" else web.json_response({"usage": {}})


def stack_of(directory, upstream, body_mode, mode):
    return FullStack(
        directory,
        [Worker(upstream.endpoint, None, None)],
        settings={"envoy": {"body_mode": body_mode, "message_timeout_s": 10}},
        pool={
            "model": {"names": ["tiny"]},
            "kv_events": {"enabled": False},
            "normalization": {"mode": mode, **SETTINGS},
        },
    )


@pytest.mark.parametrize("body_mode", MODES)
async def test_what_reaches_the_engine_is_normalized_and_nothing_else_is_touched(tmp_path, body_mode):
    async with (
        Upstream(respond=answer) as upstream,
        stack_of(tmp_path, upstream, body_mode, "apply") as stack,
    ):
        make = Awkward(seed=3)
        changed = 0
        for number in range(60):
            path = sorted(PATHS)[number % len(PATHS)]
            body = make.body(path)
            expected = normalize(PATHS[path], body, RULES)
            assert (await stack.post(path, body)).status == 200
            assert arrived(upstream, expected.body)
            assert json.loads(expected.body)["seed"] == 123456789012345678901
            changed += expected.body != body
        assert changed > 50

        body = make.body("/v1/completions")
        packed = gzip.compress(body)
        reply = await stack.post("/v1/completions", packed, {"content-encoding": "gzip"})
        assert arrived(upstream, body, length=len(packed))  # the server unpacks it
        assert (await stack.decision(reply.request_id))["normalization"][
            "outcome"
        ] == "skipped:content-encoding"
        long = json.dumps({"prompt": "word \r\n" * 100_000}).encode()
        reply = await stack.post("/v1/completions", long)
        assert arrived(upstream, long)
        assert (await stack.decision(reply.request_id))["normalization"]["outcome"] == "skipped:too-large"
        reply = await stack.post("/v1/embeddings", body)
        assert arrived(upstream, body)
        assert (await stack.decision(reply.request_id))["normalization"] is None


@pytest.mark.parametrize("body_mode", MODES)
async def test_a_long_body_is_normalized_too(tmp_path, body_mode):
    async with (
        Upstream(respond=answer) as upstream,
        stack_of(tmp_path, upstream, body_mode, "apply") as stack,
    ):
        body = json.dumps({"model": "tiny", "prompt": "word \r\n" * 40_000}).encode()
        reply = await stack.post("/v1/completions", body)
        assert arrived(upstream, json.dumps({"model": "tiny", "prompt": "word\n" * 40_000}).encode())
        assert (await stack.decision(reply.request_id))["normalization"] == {
            "outcome": "applied",
            "changes": {"line-ends": 40_000, "trailing-spaces": 40_000},
        }


async def test_a_dry_run_says_what_it_would_change_and_changes_nothing(tmp_path):
    async with (
        Upstream(respond=answer) as upstream,
        stack_of(tmp_path, upstream, "BUFFERED", "dry-run") as stack,
    ):
        body = json.dumps({"model": "tiny", "prompt": "a \r\nb"}).encode()
        reply = await stack.post("/v1/completions", body)
        assert arrived(upstream, body)
        assert (await stack.decision(reply.request_id))["normalization"] == {
            "outcome": "dry-run",
            "changes": {"line-ends": 1, "trailing-spaces": 1},
        }


async def test_a_tenant_has_it_its_own_way_and_its_salt_and_the_alias_come_on_top(tmp_path, monkeypatch):
    monkeypatch.setenv("WARMROUTE_TEST_SALT_KEY", "k" * 64)
    async with Upstream(respond=answer) as upstream:
        stack = stack_of(tmp_path, upstream, "BUFFERED", "disabled")
        stack.settings |= {
            "aliases": {"short": "tiny"},
            "tenants": {
                "identity": [{"header": "x-tenant"}],
                "policies": {"a": {"normalization": "apply", "isolation": "salted"}, "b": {}},
                "salt_key": {"env": "WARMROUTE_TEST_SALT_KEY"},
            },
        }
        body = json.dumps({"model": "short", "prompt": "a \r\nb"}).encode()
        salt = Salter(b"k" * 64).salt("a", None)
        async with stack:
            await stack.post("/v1/completions", body, {"x-tenant": "a"})
            expected = {"model": "tiny", "prompt": "a\nb", "cache_salt": salt}
            assert arrived(
                upstream, json.dumps(expected).encode().replace(b', "cache_salt": ', b',"cache_salt":')
            )
            await stack.post("/v1/completions", body, {"x-tenant": "b"})
            assert arrived(upstream, body.replace(b"short", b"tiny"))


# --- tokens ----------------------------------------------------------------------------------------------


class Twins:
    """One document, tools and fragments, written as carelessly as clients do."""

    def __init__(self):
        rng = random.Random(11)
        self.paragraphs = [prose(rng, 60) + " Café." for _ in range(8)]
        self.fragments = [f'<doc id="{n}">{prose(rng, 40)}</doc>' for n in range(4)]
        self.properties = {name: {"type": "string", "description": f"The {name}."} for name in "abcdef"}

    def request(self, rng, question, *, newline, accent):
        def shuffled(value):
            return dict(rng.sample(list(value.items()), len(value)))

        blanks = [" " * rng.randint(0, 2) for _ in self.paragraphs]
        document = "".join(p + b + newline * 2 for p, b in zip(self.paragraphs, blanks, strict=True))
        content = (
            f"Date: {rng.random()}{newline}Answer from these documents.{newline * 2}"
            + document.replace("é", accent)
            + newline.join(rng.sample(self.fragments, 4))
            + f"{newline}{STABLE_END}{newline}{question}"
        )
        properties = shuffled({name: shuffled(inner) for name, inner in self.properties.items()})
        parameters = shuffled({"type": "object", "properties": properties, "required": ["a"]})
        function = shuffled({"name": "find", "description": "Finds things.", "parameters": parameters})
        return {
            "tools": [shuffled({"type": "function", "function": function})],
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}],
        }


async def asked(stack, body):
    """(decision, prompt tokens, cached tokens as the engine says)."""
    reply = await stack.chat(body["messages"], tools=body["tools"], tool_choice="none")
    assert reply.status == 200, reply.body
    cached = (reply.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return await stack.decision(reply.request_id), reply.usage["prompt_tokens"], cached


def as_other_kinds(body):
    """The same as requests of the other kinds, by path."""
    (tool,), (system, user) = body["tools"], body["messages"]
    function = tool["function"]
    named = {key: function[key] for key in function if key != "parameters"}
    return {
        "/v1/completions": {"prompt": user["content"] + "\nAnswer: ", "max_tokens": 4},
        "/v1/responses": {
            "instructions": system["content"],
            "input": user["content"],
            "tools": [{"type": "function", **function}],
            "tool_choice": "none",
            "max_output_tokens": 4,
        },
        "/v1/messages": {
            "system": system["content"],
            "messages": [{"role": "user", "content": [{"type": "text", "text": user["content"]}]}],
            "tools": [{**named, "input_schema": function["parameters"]}],
            "tool_choice": {"type": "none"},
            "max_tokens": 4,
        },
    }


async def twins_of_other_kinds_hit(stack, one, other):
    """Each kind of request: the second of two twins is predicted, and found by the engine, to be warm."""
    first, second = as_other_kinds(one), as_other_kinds(other)
    for path in first:
        for body in (first[path], second[path]):
            reply = await stack.post(path, {"model": "tiny", "temperature": 0, **body})
            assert reply.status == 200, (path, reply.body)
            decision = await stack.decision(reply.request_id)
            assert decision["normalization"]["outcome"] == "applied"
            assert decision["predicted_cached_tokens"] == decision["actual_cached_tokens"], path
        assert decision["actual_cached_tokens"] > 0.9 * decision["prompt_tokens"], path


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("body_mode", MODES)
async def test_a_twin_hits_the_cache_of_its_twin_on_real_vllm(vllm_pool, tmp_path, body_mode):
    replicas = dict(zip(("dry-run", "apply"), vllm_pool.start(*[ReplicaSpec()] * 2), strict=True))
    rng, twins = random.Random(5), Twins()
    one = twins.request(rng, "First question?", newline="\r\n", accent="e\u0301")
    other = twins.request(rng, "Another one!", newline="\n", accent="é")
    envoy = {"envoy": {"body_mode": body_mode, "message_timeout_s": 10}}
    hits = {}
    for mode, replica in replicas.items():
        workers = [Worker(replica.endpoint, replica.kv_events, replica.kv_replay)]
        directory = tmp_path / mode
        directory.mkdir()
        pool = {"normalization": {"mode": mode, **SETTINGS}}
        async with FullStack(directory, workers, settings=envoy, pool=pool) as stack:
            await stack.until_subscribed(1)
            for body in (one, other):
                decision, prompt, cached = await asked(stack, body)
                assert decision["prompt_tokens"] == prompt
                assert decision["predicted_cached_tokens"] == decision["actual_cached_tokens"] == cached
                hits[mode] = cached / prompt
            changes = decision["normalization"]["changes"]
            assert decision["normalization"]["outcome"] == ("applied" if mode == "apply" else mode)
            assert {"key-order", "fragment-order", "volatile-lines"} <= set(changes)
            if mode == "apply":
                await twins_of_other_kinds_hit(stack, one, other)
    # The tools come before the document in this model's prompts: their keys are the first difference.
    assert hits["dry-run"] < 0.1
    assert hits["apply"] > 0.9

    for replica in replicas.values():
        replica.kill()
