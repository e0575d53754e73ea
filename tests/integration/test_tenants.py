"""Tenants through a real Envoy: who gets where, and what becomes of bodies."""

import base64
import contextlib
import hashlib
import hmac
import io
import json
import random

import pytest
from aiohttp import web

from extproc.cli import main
from tests.support.envoy import http_manager
from tests.support.full_stack import FullStack
from tests.support.http import Upstream
from tests.support.waiting import until_told

pytestmark = pytest.mark.envoy

KEY = "an example of a secret key of 32 bytes or more"
JWT_KEY = b"signs the tokens of this test, and nothing else at all"
TENANT = "x-tenant"
MODES = pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
QUIET = {"interval_s": 30, "failure_limit": 1_000_000}  # these upstreams are no engines
ATTACK = "x-attack"  # marks requests of clients


def salt(tenant, sent=None):
    """The definition of the salt, spelled out."""
    text = f"{len(tenant)}:{tenant}-" if sent is None else f"{len(tenant)}:{tenant}+{sent}"
    return hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


def pool(name, *upstreams, models=()):
    return {
        "name": name,
        "model": {"names": list(models)},
        "discovery": {"static": [upstream.endpoint for upstream in upstreams]},
        "kv_events": {"enabled": False},
    }


@contextlib.asynccontextmanager
async def stack_of(tmp_path, pools, tenants, *, mode="BUFFERED", change=lambda config: None, **settings):
    key = tmp_path / "salt.key"
    key.write_text(KEY + "\n")
    given = {
        "pools": pools,
        "scrape": QUIET,
        "envoy": {"body_mode": mode, "message_timeout_s": 10},
        "tenants": {"salt_key": {"file": str(key)}, **tenants},
        **settings,
    }
    async with FullStack(tmp_path, [], settings=given, change_envoy=change) as stack:
        yield stack


def clients_requests(upstream):
    return [one for one in upstream.requests if ATTACK in one.headers]


# --- bodies ------------------------------------------------------------------------------------------


class Bodies:
    """Bodies of all kinds, each with what must become of it, worked out from how it was made."""

    KEYS = ("prompt", "temperature", "metadata", "tools", "é", "n", "\\u006dodel2", "cache", "stop")

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def space(self):
        return "".join(self.rng.choice([" ", "\n", "\t", "\r\n", ""]) for _ in range(self.rng.randint(0, 2)))

    def text(self, content):
        """A JSON string, spelled anyhow."""
        out = ""
        for character in content:
            plain = json.dumps(character, ensure_ascii=False)[1:-1]
            out += self.rng.choice([plain, plain, json.dumps(character)[1:-1]])
        return f'"{out}"'

    def value(self, depth=0):
        kinds = ["text", "number", "word", "deep"] if depth < 3 else ["text", "number", "word"]
        match self.rng.choice(kinds):
            case "text":
                letters = ['"', "\\", "{", "]", "é", "☀️", "\u2028", "a", "東", "𝄞", "model", "cache_salt"]
                return self.text("".join(self.rng.choices(letters, k=self.rng.randint(0, 6))))
            case "number":
                return self.rng.choice(
                    ["12345678901234567890123", "-0", "1.0", "1e2", "1E-7", "0.10", "NaN", "-1.500"]
                )
            case "word":
                return self.rng.choice(["true", "false", "null"])
            case _ if self.rng.random() < 0.5:
                return self.array([self.value(depth + 1) for _ in range(self.rng.randint(0, 3))])
            case _:
                names = ["model", "cache_salt", "b", "a", "Z"]
                members = [
                    (self.text(self.rng.choice(names)), self.value(depth + 1))
                    for _ in range(self.rng.randint(0, 3))
                ]
                return self.object(members)

    def array(self, items):
        return f"[{self.space()}{f'{self.space()},{self.space()}'.join(items)}{self.space()}]"

    def object(self, members):
        spelled = [f"{key}{self.space()}:{self.space()}{value}" for key, value in members]
        return "{" + self.space() + f"{self.space()},{self.space()}".join(spelled) + self.space() + "}"

    def make(self):
        """(sent, expected, the client's salt)."""
        members = [
            (self.text(key), self.value()) for key in self.rng.sample(self.KEYS, self.rng.randint(1, 6))
        ]
        members = [(key, '"hello"' if key == '"prompt"' else value) for key, value in members]
        models = self.rng.randint(1, 2)  # of equal keys the last one counts
        for number in range(models):
            name = "best" if number == models - 1 else "other"
            members.insert(self.rng.randint(0, len(members)) if number == 0 else len(members), ("M", name))
        sent_salt = self.rng.choice([None, "mine", "s" * 40])
        salts = 0 if sent_salt is None else self.rng.randint(1, 2)
        for number in range(salts):
            value = sent_salt if number == salts - 1 else "an earlier one"
            members.append(("S", value))
        last_model = max(at for at, (key, _) in enumerate(members) if key == "M")
        last_salt = max((at for at, (key, _) in enumerate(members) if key == "S"), default=None)
        seed = self.rng.random()

        def spell(*, changed):
            self.rng.seed(seed)  # the same spelling both times
            out = []
            for at, (key, value) in enumerate(members):
                if key == "M":
                    written = self.text(value)
                    out.append((self.text("model"), '"tiny"' if changed and at == last_model else written))
                elif key == "S":
                    written = self.text(value)
                    new = f'"{salt("acme", sent_salt)}"'
                    out.append((self.text("cache_salt"), new if changed and at == last_salt else written))
                else:
                    out.append((key, value))
            whole = self.object(out)
            if changed and last_salt is None:
                end = whole.rindex(out[-1][1]) + len(out[-1][1])
                whole = f'{whole[:end]},"cache_salt":"{salt("acme")}"{whole[end:]}'
            return self.space() + whole + self.space()

        sent = spell(changed=False)
        return sent.encode(), spell(changed=True).encode()


@MODES
async def test_alias_and_salt_change_200_varied_bodies_in_two_values_only(tmp_path, mode):
    async with Upstream() as engine:
        tenants = {
            "identity": [{"header": TENANT}],
            "policies": {"acme": {"isolation": "salted"}},
        }
        pools = [pool("default", engine, models=["tiny"])]
        async with stack_of(tmp_path, pools, tenants, mode=mode, aliases={"best": "tiny"}) as stack:
            bodies = Bodies(7)
            salted_by_client = 0
            for number in range(200):
                sent, expected = bodies.make()
                json.loads(sent)
                headers = {TENANT: "acme", ATTACK: str(number)}
                path = "/v1/completions" if number % 5 else "/v1/embeddings"
                reply = await stack.post(path, sent, headers)
                assert reply.status == 200, (sent, reply.body)
                (arrived,) = [one for one in engine.requests if one.headers.get(ATTACK) == str(number)]
                assert arrived.body == expected, (sent, arrived.body)
                length = arrived.headers.get("content-length")
                assert length in (None, str(len(expected)))
                assert mode != "BUFFERED" or length is not None
                salted_by_client += b"mine" in sent
            assert salted_by_client > 10


@MODES
async def test_a_large_body_is_salted_too(tmp_path, mode):
    async with Upstream() as engine:
        tenants = {"identity": [{"header": TENANT}], "policies": {"acme": {"isolation": "salted"}}}
        pools = [pool("default", engine, models=["tiny"])]
        async with stack_of(tmp_path, pools, tenants, mode=mode) as stack:
            sent = b'{"model":"tiny","prompt":"' + b"x" * 700_000 + b'" }'
            reply = await stack.post("/v1/completions", sent, {TENANT: "acme", ATTACK: "1"})
            assert reply.status == 200
            (arrived,) = clients_requests(engine)
            expected = sent[:-2] + f',"cache_salt":"{salt("acme")}" }}'.encode()
            assert arrived.body == expected


async def test_what_cannot_be_salted_is_refused_in_openais_shape(tmp_path):
    async with Upstream() as engine:
        tenants = {"identity": [{"header": TENANT}], "policies": {"acme": {"isolation": "salted"}}}
        async with stack_of(tmp_path, [pool("default", engine)], tenants) as stack:
            for body, more in ((b"\x1f\x8b", {"content-encoding": "gzip"}), (b"a=b", {})):
                reply = await stack.post("/v1/rerank", body, {TENANT: "acme", ATTACK: "1", **more})
                assert reply.status == 415
                assert json.loads(reply.body)["error"]["code"] == "not_isolable"
            assert clients_requests(engine) == []


# --- who gets where ------------------------------------------------------------------------------------


def token(**claims):
    """A JSON Web Token, signed."""

    def part(value):
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    head = part(b'{"alg":"HS256","typ":"JWT"}') + "." + part(json.dumps({"iss": "t", **claims}).encode())
    return f"{head}.{part(hmac.new(JWT_KEY, head.encode(), hashlib.sha256).digest())}"


def with_jwt(config):
    """Let Envoy's own filter verify tokens, before ours sees a request."""
    encoded = base64.urlsafe_b64encode(JWT_KEY).rstrip(b"=").decode()
    keys = {"keys": [{"kty": "oct", "alg": "HS256", "k": encoded}]}
    provider = {
        "issuer": "t",
        "local_jwks": {"inline_string": json.dumps(keys)},
        "payload_in_metadata": "token",
    }
    http_manager(config)["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.jwt_authn",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication",
                "providers": {"t": provider},
                "rules": [
                    {
                        "match": {"prefix": "/"},
                        "requires": {
                            "requires_any": {"requirements": [{"provider_name": "t"}, {"allow_missing": {}}]}
                        },
                    }
                ],
            },
        },
    )


JWT = {"identity": [{"jwt": {"payload": "token", "claim": ["org", "id"]}}]}


def bearer(tenant):
    return {"authorization": f"Bearer {token(org={'id': tenant})}", ATTACK: tenant}


def attempts(closed, allowed):
    """Everything a client could try: path, body, headers."""
    here, there = closed.endpoint, allowed.endpoint
    bodies = [
        {"model": "secret"},
        {"model": "alias-of-secret"},
        b'{"model":"open","model":"secret"}',
        b'{"model":"secret","model":"open"}',
        b'{"mod\\u0065l":"secret","x":NaN}',
        {
            "model": "open",
            "tenant": "root",
            "user": "root",
            "metadata": {"tenant": "root", "org": {"id": "root"}},
        },
        {"model": "nothing-of-the-kind"},
        {"pool": "closed"},
        b"secret",
        b"",
    ]
    headers = [
        {},
        {"x-warmroute-pool": "closed"},
        {"x-warmroute-pool": "closed", "x-warmroute-workers": "named"},
        {"x-gateway-destination-endpoint": here},
        {"x-gateway-destination-endpoint": f"{there},{here}"},
        {"x-gateway-destination-endpoint-subset": here},
        {"x-session-id": here},
        {"x-session-id": "a session of root"},
        {"x-policy": "round-robin"},
        {"x-policy": "session-affinity", "x-session-id": here},
        {"test-epp-endpoint-selection": here},
        {"x-tenant": "root"},
        {"x-envoy-original-dst-host": here},
        {"x-envoy-max-retries": "20", "x-envoy-retry-on": "5xx,reset"},
        {"host": here},
        {"x-forwarded-for": "127.0.0.1", "x-envoy-internal": "true"},
        {"x-data-parallel-rank": "1"},
    ]
    paths = [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/invocations",
        "/tokenize",
        "/anything",
    ]
    for body in bodies:
        yield "/v1/completions", body, {}
    for more in headers:
        yield "/v1/completions", {"model": "secret"}, more
        yield "/v1/completions", {"model": "open"}, more
    for path in paths:
        yield path, {"model": "secret"}, {"x-warmroute-pool": "closed"}
        yield path, {"model": "open"}, {"x-gateway-destination-endpoint": here}


@MODES
async def test_no_header_body_or_hint_leads_to_a_pool_that_a_tenant_may_not_use(tmp_path, mode):
    async def unwell(request, received):
        return web.json_response({"error": {}}, status=503)

    async with Upstream() as allowed, Upstream() as second, Upstream() as closed:
        tenants = {**JWT, "policies": {"acme": {"pools": ["open"]}, "root": {}}}
        pools = [pool("closed", closed, models=["secret"]), pool("open", allowed, second, models=["open"])]
        settings = {
            "aliases": {"alias-of-secret": "secret"},
            "policy_header": "x-policy",
            "unknown_model": "pass",
        }
        async with stack_of(tmp_path, pools, tenants, mode=mode, change=with_jwt, **settings) as stack:
            # The pool exists and answers those who may use it.
            reply = await stack.post("/v1/completions", {"model": "alias-of-secret"}, bearer("root"))
            assert json.loads(reply.body)["served_by"] == closed.endpoint
            closed.requests.clear()

            async def attack(path, body, more):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {"content-type": "application/json", **bearer("acme"), **more}
                async with stack.session.post(path, data=io.BytesIO(data), headers=headers) as answer:
                    return answer.status, await answer.read()

            statuses = set()
            for path, body, more in attempts(closed, allowed):
                status, answer = await attack(path, body, more)
                statuses.add(status)
                assert clients_requests(closed) == [], (path, body, more)
                if status == 403:
                    assert json.loads(answer)["error"]["code"] == "permission_denied"
            assert statuses >= {200, 403}
            async with stack.session.get("/v1/models", headers=bearer("acme")) as answer:
                assert (await answer.json())["served_by"] in (allowed.endpoint, second.endpoint)

            # Workers that refuse: Envoy tries the others of the pool, and then gives up.
            allowed.respond = second.respond = unwell
            for more in (
                {},
                {"x-warmroute-pool": "closed"},
                {"x-gateway-destination-endpoint": closed.endpoint},
            ):
                assert (await attack("/v1/completions", {"model": "open"}, more))[0] == 503
            await allowed.stop()
            await second.stop()
            for _ in range(3):
                assert (await attack("/v1/completions", {"model": "open"}, {}))[0] == 503
            assert clients_requests(closed) == []

            # No token, a token of nobody, and a forged one.
            for headers in (
                {},
                bearer("nobody"),
                {"authorization": bearer("root")["authorization"][:-3] + "AAA"},
            ):
                reply = await stack.post("/v1/completions", {"model": "secret"}, {ATTACK: "1", **headers})
                assert reply.status in (401, 403)
            assert clients_requests(closed) == []

            # Without us nobody can say who may go where, so nobody goes anywhere.
            await stack.stop_router()
            status, _ = await attack("/v1/completions", {"model": "open"}, {})
            assert status in (500, 503)
            assert clients_requests(closed) == []


async def test_a_tenant_of_some_workers_stays_on_them_when_they_fail(tmp_path):
    async with Upstream() as mine, Upstream() as other:
        tenants = {
            "identity": [{"header": TENANT}],
            "policies": {"pinned": {"workers": [mine.endpoint]}, "free": {}},
        }
        async with stack_of(tmp_path, [pool("default", mine, other)], tenants) as stack:
            for _ in range(8):
                reply = await stack.post("/v1/completions", {"model": "m"}, {TENANT: "pinned", ATTACK: "1"})
                assert json.loads(reply.body)["served_by"] == mine.endpoint
            free = {
                json.loads((await stack.post("/v1/completions", {"model": "m"}, {TENANT: "free"})).body)[
                    "served_by"
                ]
                for _ in range(12)
            }
            assert free == {mine.endpoint, other.endpoint}
            await mine.stop()
            for _ in range(4):
                reply = await stack.post("/v1/completions", {"model": "m"}, {TENANT: "pinned", ATTACK: "1"})
                assert reply.status == 503
            assert clients_requests(other) == []
            reply = await stack.post("/v1/completions", {"model": "m"}, {TENANT: "free"})
            assert json.loads(reply.body)["served_by"] == other.endpoint


async def test_a_tenant_may_be_named_by_an_attribute_of_the_request(tmp_path):
    async with Upstream() as engine:
        tenants = {"identity": [{"attribute": "request.host"}], "policies": {"acme.example": {}}}
        async with stack_of(tmp_path, [pool("default", engine)], tenants) as stack:
            for host, status in (("acme.example", 200), ("other.example", 403)):
                reply = await stack.post("/v1/completions", {"model": "m"}, {"host": host})
                assert reply.status == status
                if status == 200:
                    assert (await stack.decision(reply.request_id))["tenant"] == "acme.example"


# --- pools ---------------------------------------------------------------------------------------------


@MODES
async def test_models_lead_to_their_pools_and_unknown_ones_to_a_404(tmp_path, mode):
    def serving(name):
        async def respond(request, received):
            if received.path == "/v1/models":
                return web.json_response({"data": [{"id": name}, {"id": f"{name}-lora", "parent": name}]})
            return web.json_response({"served_by": name, "body": received.body.decode()})

        return respond

    async with Upstream(serving("one")) as first, Upstream(serving("two")) as second:
        pools = [pool("a", first, models=["one"]), pool("b", second, models=["two"])]
        given = {"pools": pools, "scrape": QUIET, "envoy": {"body_mode": mode, "message_timeout_s": 10}}
        given["aliases"] = {"best": "two"}
        async with FullStack(tmp_path, [], settings=given) as stack:
            # A name that only engines tell is passed on or refused until they have told.
            def ask(model):
                return lambda: stack.post("/v1/completions", {"model": model, "prompt": "x"})

            await until_told(
                ask("two-lora"), lambda r: r.status == 200 and json.loads(r.body)["served_by"] == "two"
            )
            await until_told(ask("three"), lambda reply: reply.status == 404)
            for model, served_by, arrives in (
                ("one", "one", "one"),
                ("two", "two", "two"),
                ("best", "two", "two"),
                ("two-lora", "two", "two-lora"),
            ):
                reply = await stack.post("/v1/completions", {"model": model, "prompt": "x"})
                answer = json.loads(reply.body)
                assert (answer["served_by"], json.loads(answer["body"])["model"]) == (served_by, arrives)
                entry = await stack.decision(reply.request_id)
                assert entry["alias"] == (model if model == "best" else None)
            reply = await stack.post("/v1/completions", {"model": "three", "prompt": "x"})
            assert reply.status == 404
            assert json.loads(reply.body)["error"]["code"] == "model_not_found"
            # One that has just been loaded is found, once the engines have been asked.
            second.respond = serving("three")
            reply = await until_told(ask("three"), lambda reply: reply.status == 200)
            assert json.loads(reply.body)["served_by"] == "three"


# --- rollout -------------------------------------------------------------------------------------------


async def test_observed_requests_are_balanced_by_envoy_and_logged(tmp_path, capsys):
    async with Upstream() as one, Upstream() as two:
        given = {
            "pools": [pool("default", one, two)],
            "scrape": QUIET,
            "rollout": {
                "mode": "observe",
                "classes": [
                    {"name": "canary", "header": "x-class", "values": ["canary"]},
                    {"name": "plain", "header": "x-class", "values": ["plain"], "mode": "shadow"},
                ],
            },
        }
        async with FullStack(tmp_path, [], settings=given) as stack:
            for said, mode, name in (
                (None, "observe", ""),
                ("canary", "enforce", "canary"),
                ("plain", "shadow", "plain"),
            ):
                headers = {ATTACK: mode, **({} if said is None else {"x-class": said})}
                reply = await stack.post("/v1/completions", {"model": "m", "prompt": "x"}, headers)
                assert reply.status == 200
                entry = await stack.decision(reply.request_id)
                assert (entry["mode"], entry["traffic_class"], entry["outcome"]) == (
                    mode,
                    name or None,
                    "finished",
                )
                assert entry["served_by"] == json.loads(reply.body)["served_by"]
                arrived = [r for up in (one, two) for r in up.requests if r.headers.get(ATTACK) == mode]
                told = "x-gateway-destination-endpoint" in arrived[-1].headers
                assert told is (mode != "observe")
                assert entry["policy"] == ("least-load" if mode == "shadow" else "token-load")
                assert ("token-load" in entry["shadow"]) is (mode == "shadow")
        capsys.readouterr()
        assert main(["report", "--json", str(stack.decisions)]) == 0
        modes = json.loads(capsys.readouterr().out)["modes"]
        assert {mode: found["all"]["requests"] for mode, found in modes.items()} == {
            "observe": 1,
            "shadow": 1,
            "enforce": 1,
        }
