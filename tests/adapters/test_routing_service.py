import asyncio
import gzip
import json
import random
from dataclasses import replace

import pytest

from extproc.adapters.admission import Admission
from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.held_requests import HeldRequests
from extproc.adapters.holding import HoldSettings
from extproc.adapters.prompt_service import PromptService
from extproc.adapters.request_preparation import PoolContext
from extproc.adapters.routing import HttpRequest
from extproc.adapters.routing_service import DP_RANK_HEADER, WarmRoutingService
from extproc.core.candidates import PoolFacts
from extproc.core.hashing import ChainMemo
from extproc.core.model_catalog import ModelCatalog
from extproc.core.policies import POLICIES
from extproc.core.rollout import Mode, Rollout
from extproc.core.router import Router
from extproc.core.salting import Salter
from extproc.core.saturation import RoomSettings
from extproc.core.tenancy import Isolation, TenantBook, TenantPolicy
from extproc.core.types import Completion, Member, Outcome
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.ext_proc_messages import Route
from extproc.protocol.rejections import Reject
from extproc.protocol.tenant_identity import FromHeader
from tests.support.core import COSTS, metrics, worker
from tests.support.waiting import until

TEXT = "The quick brown fox jumps over the lazy dog, again and again. " * 8


class Service:
    """The service around a real router and a real tokenizer, on a clock of the test's."""

    def __init__(
        self,
        tmp_path,
        encoder,
        members=3,
        *,
        dp_size=1,
        pools=("default",),
        names=(),
        tokenizer=True,
        **settings,
    ):
        self.now = 100.0
        self.file = tmp_path / "decisions.jsonl"
        facts = {name: PoolFacts("model", "tokenizer", 16) for name in pools}
        numbers = iter(range(10**9))
        self.router = Router(
            POLICIES["token-load"](COSTS),
            random.Random(3),
            new_lease_id=lambda: f"lease-{next(numbers)}",
            pools=facts,
            costs=COSTS,
        )
        self.prompts = PromptService(encoder, budget_ms=60_000.0) if tokenizer else None
        served = {"default": set(names), "second": {"other"}}
        contexts = {
            name: PoolContext(name, self.prompts, "model", "tokenizer", set(served[name])) for name in pools
        }
        self.decisions = DecisionLog(str(self.file), print)
        self.service = WarmRoutingService(
            self.router, contexts, self.decisions, lambda: self.now, fallback_count=2, **settings
        )
        self.members = [
            Member(worker(n).endpoint, pool=pools[n % len(pools)], dp_size=dp_size) for n in range(members)
        ]
        self.join(self.members)

    def join(self, members):
        _, released = self.router.on_membership(members, self.now)
        self.service.finish(*released)

    def log(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    async def ask(self, path="/v1/completions", body=None, **fields):
        if body is None:
            body = {"model": "tiny", "prompt": TEXT, "max_tokens": 4}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"method": "POST", "headers": {}, "subset": None, "trace_parent": None, **fields}
        return await self.service.route(HttpRequest(path=path, body=raw, request_id="r", **given))

    async def routed(self, *args, **fields):
        """The lease of a request that was routed."""
        route = await self.ask(*args, **fields)
        assert isinstance(route, Route), route
        lease = self.router.ledger.get(route.lease_id)
        assert lease.worker.endpoint == route.endpoints[0]
        return lease

    def finish(self, lease, **fields):
        self.service.completed(lease.id, Completion(Outcome.FINISHED, status=200, **fields))


@pytest.fixture(scope="module")
def encoder():
    return PromptEncoder.load(tiny_model_path())


@pytest.fixture
def make(tmp_path, encoder):
    made = []

    def build(*args, **kwargs):
        made.append(Service(tmp_path, encoder, *args, **kwargs))
        return made[-1]

    yield build
    for service in made:
        service.decisions.close()
        if service.prompts is not None:
            service.prompts.close()


@pytest.mark.parametrize("overtakes", [False, True])
async def test_a_client_that_left_before_the_ticket_is_logged_as_cancelled(make, overtakes):
    service = make()
    lease = await service.routed()
    left = Completion(Outcome.CANCELLED, duration_ms=5.0)
    if not overtakes:
        service.service.stream_ended(lease.id, cancelled=True)
    assert service.service.left_early("r", left) is not overtakes
    if overtakes:
        service.service.stream_ended(lease.id, cancelled=True)
    service.decisions.close()
    assert [line["outcome"] for line in service.log()] == ["cancelled"]
    assert service.service.counters.lost == 0


async def test_requests_are_watched_from_arrival_to_end(make):
    service = make()
    value = service.service._telemetry.registry.get_sample_value
    lease = await service.routed("/v1/chat/completions", chat_body())
    seconds = "warmroute_decision_duration_seconds_count"
    for stage in ("parse", "render", "tokenize", "match", "decide", "total"):
        assert value(seconds, {"stage": stage}) == 1, stage
    labels = {"pool": "default", "policy": "token-load", "reason": lease.decision.reason.value}
    assert value("warmroute_decisions_total", {**labels, "mode": "enforce"}) == 1
    service.finish(lease, prompt_tokens=100, cached_tokens=48)
    done = {"model": "tiny", "pool": "default", "prompt_class": lease.decision.request.prompt_class}
    assert value("warmroute_requests_total", {**done, "outcome": "finished"}) == 1
    assert value("warmroute_input_tokens_total", {**done, "cache": "cached"}) == 48
    refused = await service.ask(body=b"{not json")
    assert value("warmroute_rejections_total", {"why": refused.why}) == 1


def chat_body():
    return {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}


async def test_a_request_is_tokenized_scheduled_and_logged_once(make):
    service = make()
    route = await service.ask()
    assert len(route.endpoints) == len(set(route.endpoints)) == 2
    assert route.set_headers == {}
    lease = service.router.ledger.get(route.lease_id)
    ask = lease.decision.request
    assert (ask.prompt_tokens, ask.max_output_tokens, ask.load_only) == (len(ask.prompts[0]), 4, None)
    assert service.log() == []
    service.finish(lease, cached_tokens=0, prompt_tokens=ask.prompt_tokens)
    (entry,) = service.log()
    assert (entry["outcome"], entry["predicted_cached_tokens"], entry["request_id"]) == ("finished", 0, "r")
    counters = service.service.counters
    assert (counters.routed, counters.exact, counters.mispredicted, counters.lost) == (1, 1, 0, 0)
    assert len(service.router.ledger) == 0


async def test_signals_that_come_twice_late_or_for_nobody_change_nothing(make):
    service = make()
    lease = await service.routed()
    for _ in range(2):
        service.service.first_body(lease.id)
    service.service.served(lease.id, worker(2).endpoint)
    service.finish(lease)
    service.finish(lease)
    service.service.completed(lease.id, Completion(Outcome.CANCELLED))
    service.service.first_body(lease.id)
    service.service.served(lease.id, worker(1).endpoint)
    service.service.stream_ended(lease.id, cancelled=True)
    service.service.first_body("nobody")
    service.service.completed("nobody", Completion(Outcome.FINISHED))
    (entry,) = service.log()
    assert (entry["outcome"], entry["served_by"]) == ("finished", worker(2).endpoint)


async def test_a_prediction_that_fails_is_counted(make):
    service = make()
    service.finish(await service.routed(), cached_tokens=16)
    assert (service.service.counters.exact, service.service.counters.mispredicted) == (0, 1)


async def test_engines_that_compute_a_cached_prompt_for_its_logprobs_are_not_distrusted(make):
    """vLLM reads no cache for such requests; what other clients are told must not come to depend on them."""
    service = make(members=1)
    plain = {"model": "tiny", "prompt": TEXT, "max_tokens": 4}
    first = await service.routed(body=plain)
    hit = (await service.routed(body=plain)).decision.chosen.cached_tokens
    assert hit > 0
    service.finish(first, cached_tokens=0)
    for _ in range(6):
        lease = await service.routed(body={**plain, "echo": True, "logprobs": 1})
        request = lease.decision.request
        assert (request.load_only, request.prompt_tokens) == (
            "prompt-logprobs",
            first.decision.request.prompt_tokens,
        )
        assert lease.decision.chosen.uncovered_tokens == request.prompt_tokens
        service.finish(lease, prompt_tokens=request.prompt_tokens, cached_tokens=0)
    assert service.service.counters.mispredicted == 0
    chosen = (await service.routed(body=plain)).decision.chosen
    assert (chosen.cached_tokens, chosen.confidence) == (hit, 1.0)


async def test_an_image_does_not_count_as_minutes_of_work(make):
    service = make(members=1)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    lease = await service.routed(
        path="/v1/chat/completions",
        body={"model": "tiny", "messages": [{"role": "user", "content": [image]}]},
    )
    assert lease.decision.request.load_only == "unsupported:multimodal"
    assert 500 < lease.decision.request.prompt_tokens < 2000


async def test_pitfall_52_the_second_of_two_equal_requests_goes_where_the_first_went(make):
    service = make()
    first, second = await service.routed(), await service.routed()
    assert first.worker == second.worker
    assert second.decision.chosen.cached_tokens > 0


@pytest.mark.parametrize("cancelled", [True, False])
async def test_pitfall_58_a_stream_that_ends_gives_its_lease_a_little_time(make, cancelled):
    service = make()
    service.service.access_log_streams(0)
    lease = await service.routed()
    service.service.stream_ended(lease.id, cancelled=cancelled)
    assert service.router.ledger.get(lease.id) is not None
    service.now += service.router.settings.stream_grace_s + 0.1
    service.service.finish(*service.router.tick(service.now))
    assert [entry["outcome"] for entry in service.log()] == ["lost"]
    assert service.service.counters.lost == 1
    assert len(service.router.ledger) == 0


async def test_what_is_open_when_the_router_stops_has_its_line_and_no_second_one(make):
    service = make(members=2)
    finished, left, stays = [await service.routed() for _ in range(3)]
    service.finish(finished)
    service.join([member for member in service.members if member.endpoint != left.worker.endpoint])
    service.service.stopped()
    entries = service.log()
    assert [entry["outcome"] for entry in entries] == ["finished", "lost", "lost"]
    assert [entry["details"] for entry in entries[1:]] == ["the router stopped"] * 2
    assert sorted(entry["selected_worker"] for entry in entries[1:]) == sorted(
        str(lease.worker) for lease in (left, stays)
    )
    service.finish(stays)
    service.service.stopped()
    assert len(service.log()) == 3


async def test_what_the_gateway_has_placed_and_is_open_when_the_router_stops_has_its_line(make):
    service = make(rollout=Rollout(mode=Mode.OBSERVE))
    assert isinstance(await service.ask(), Route)
    service.service.stopped()
    assert [(entry["mode"], entry["outcome"]) for entry in service.log()] == [("observe", "lost")]


async def test_while_an_access_log_is_open_a_stream_that_ends_waits_for_its_entry(make):
    service = make()
    service.service.access_log_streams(1)
    lease = await service.routed()
    service.service.stream_ended(lease.id, cancelled=False)
    service.now += 100.0
    assert service.router.tick(service.now) == []
    service.finish(lease)
    assert [entry["outcome"] for entry in service.log()] == ["finished"]


async def test_pitfall_21_every_prompt_of_a_batch_is_counted(make):
    service = make()
    lease = await service.routed(body={"model": "tiny", "prompt": [[1] * 40, [2] * 40], "n": 2})
    ask = lease.decision.request
    assert ([len(p) for p in ask.prompts], ask.prompt_tokens, ask.sequences) == ([40, 40], 80, 4)
    assert [len(chain) for chain in lease.reserved] == [2, 2]


async def test_names_that_are_not_served_base_models_are_adapters(make):
    service = make(names=("tiny",))
    base = await service.routed()
    lora = await service.routed(body={"model": "sql-lora", "prompt": TEXT})
    assert base.decision.request.namespace.adapter is None
    assert lora.decision.request.namespace.adapter == "sql-lora"
    assert lora.decision.chosen.cached_tokens == 0  # not the base model's blocks, wherever it went
    again = await service.routed(body={"model": "sql-lora", "prompt": TEXT})
    assert again.worker == lora.worker


async def test_base_models_are_learned_from_engines(make):
    service = make()
    assert (await service.routed()).decision.request.namespace.adapter is None  # nothing is known yet
    service.service.models_learned("e:1", "default", ["big"], [])
    assert (await service.routed()).decision.request.namespace.adapter == "tiny"
    service.service.models_learned("e:1", "default", ["tiny"], [])
    assert (await service.routed()).decision.request.namespace.adapter is None
    service.service.models_learned("e:2", "a pool that left", ["x"], [])


async def test_pitfall_37_the_salt_is_part_of_the_namespace(make):
    service = make()
    keys = set()
    for salt in ("a", "b", None):
        body = {"model": "tiny", "prompt": TEXT} | ({} if salt is None else {"cache_salt": salt})
        lease = await service.routed(body=body)
        keys.add(tuple(lease.reserved[0]))
        assert lease.decision.chosen.cached_tokens == 0
    assert len(keys) == 3


async def test_the_rank_is_a_header_where_there_are_several(make):
    service = make(members=1, dp_size=4)
    ranks = set()
    for number in range(8):
        route = await service.ask(body={"model": "tiny", "prompt": f"{number} {TEXT}"})
        ranks.add(route.set_headers[DP_RANK_HEADER])
        assert route.endpoints == (worker(0).endpoint,)
    assert ranks == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"method": "GET", "path": "/v1/models", "body": b""}, "method"),
        ({"path": "/v1/embeddings"}, "path"),
        ({"body": b""}, "no-body"),
        ({"body_seen": False, "body": b""}, "body-not-shown"),
        ({"body": b"?", "headers": {"content-encoding": "zstd"}}, "content-encoding"),
    ],
)
async def test_what_is_not_understood_goes_by_load_with_its_reason(make, fields, reason):
    service = make()
    leases = [await service.routed(**fields) for _ in range(6)]
    assert {lease.decision.request.load_only for lease in leases} == {reason}
    assert service.service.counters.load_only == {reason: 6}
    assert len({lease.worker for lease in leases}) == 3  # pitfall 59: they count as load, too
    service.finish(leases[0])
    assert (service.log()[0]["load_only"], service.log()[0]["predicted_cached_tokens"]) == (reason, None)


async def test_pitfall_59_load_is_counted_on_all_paths(make):
    service = make(members=8)
    leases = [await service.routed("/inference/v1/generate", body={"x": n}) for n in range(80)]
    counts = [sum(lease.worker == worker(n) for lease in leases) for n in range(8)]
    assert counts == [10] * 8


async def test_without_a_tokenizer_everything_goes_by_load(make):
    service = make(tokenizer=False)
    assert (await service.routed()).decision.request.load_only == "no-tokenizer"


async def test_the_size_of_what_is_not_tokenized_is_estimated(make):
    service = make()
    lease = await service.routed("/v1/embeddings", body=b"x" * 4000)
    assert lease.decision.request.prompt_tokens == 1000


@pytest.mark.parametrize("body", [b'{"model":', b"[]", gzip.compress(b"{", mtime=0)])
async def test_pitfall_24_malformed_bodies_are_refused_before_any_load_is_counted(make, body):
    service = make()
    headers = {"content-encoding": "gzip"} if body[:1] == b"\x1f" else {}
    reject = await service.ask(body=body, headers=headers)
    assert isinstance(reject, Reject)
    assert (reject.status, reject.why) == (400, "malformed")
    assert service.service.counters.rejected == {"malformed": 1}
    assert len(service.router.ledger) == 0  # pitfall 57
    assert service.log() == []


async def test_nothing_ready_is_a_503(make):
    service = make(members=0)
    reject = await service.ask()
    assert (reject.status, reject.why) == (503, "no_ready_endpoint")
    assert "discovery" in json.loads(reject.body)["error"]["message"]
    service.join(service.members or [Member(worker(0).endpoint)])
    await service.routed()


async def test_the_gateways_subset_is_obeyed(make):
    service = make()
    for _ in range(4):
        lease = await service.routed(subset=frozenset({worker(1).endpoint}))
        assert lease.worker == worker(1)
        assert len(lease.decision.candidates) == 1
    for nothing in (frozenset(), frozenset({"10.9.9.9:1"})):
        assert (await service.ask(subset=nothing)).status == 503


async def test_a_test_may_choose_the_endpoints_if_they_are_members(make):
    service = make()
    one, two = worker(1).endpoint, worker(2).endpoint
    route = await service.ask(override=f" {two}, 10.9.9.9:1 ,{one}")
    assert route.endpoints == (two, one)
    assert service.router.ledger.get(route.lease_id).worker == worker(2)
    assert (await service.ask(override="10.9.9.9:1")).status == 503


async def test_the_model_chooses_the_pool(make):
    service = make(members=4, pools=("default", "second"), names=("tiny",))
    for _ in range(3):
        assert (await service.routed()).worker in (worker(0), worker(2))
        assert (await service.routed(body={"model": "other", "prompt": "x"})).worker in (worker(1), worker(3))
        assert (await service.routed(body={"model": "who?", "prompt": "x"})).worker in (worker(0), worker(2))
        embedding = await service.routed("/v1/embeddings", body={"model": "other", "input": "x"})
        assert embedding.worker in (worker(1), worker(3))


async def test_a_worker_that_leaves_answers_what_it_has_and_takes_no_more(make):
    service = make()
    leases = [await service.routed(body={"model": "tiny", "prompt": f"{n} {TEXT}"}) for n in range(9)]
    service.join(service.members[1:])
    gone = [lease for lease in leases if lease.worker == worker(0)]
    assert gone
    assert [lease.id in service.router.ledger for lease in gone] == [False] * len(gone)
    for _ in range(2):  # the worker answers what it has, and each answer counts once
        for lease in gone:
            service.finish(lease)
    assert [entry["outcome"] for entry in service.log()] == ["finished"] * len(gone)
    assert (await service.ask()).endpoints[0] != worker(0).endpoint


async def test_pitfall_53_a_thousand_requests_at_once_while_workers_come_and_go(make):
    service = make(members=6)
    rng = random.Random(4)
    outcomes = []

    async def one(number):
        answer = await service.ask(body={"model": "tiny", "prompt": f"{number % 50} {TEXT}"})
        if isinstance(answer, Reject):
            outcomes.append("rejected")
            return
        outcomes.append("routed")
        await asyncio.sleep(0)
        service.service.first_body(answer.lease_id)
        await asyncio.sleep(0)
        service.service.completed(answer.lease_id, Completion(Outcome.FINISHED))

    async def churn():
        while len(outcomes) < 1000:
            service.join(rng.sample(service.members, rng.randint(0, 6)))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(churn())
        for number in range(1000):
            group.create_task(one(number))
    assert len(service.router.ledger) == 0
    assert len(service.log()) == outcomes.count("routed")
    service.join([])
    assert service.router.index.stats().blocks == 0


# --- tenants, modes ------------------------------------------------------------------------------------

POOLS = ("default", "second")
BOOK = TenantBook(
    {
        "one": TenantPolicy(pools=frozenset({"default"})),
        "pinned": TenantPolicy(workers=frozenset({worker(0).endpoint})),
        "apart": TenantPolicy(isolation=Isolation.SALTED),
    }
)
SALTER = Salter(b"k" * 32)


def guarded(make, **settings):
    """Four workers, by turns in two pools."""
    catalog = ModelCatalog({"default": ["tiny"], "second": ["other"]})
    admission = Admission(catalog, BOOK, [FromHeader("x-tenant")], SALTER)
    return make(members=4, pools=POOLS, names=("tiny",), admission=admission, **settings)


def as_tenant(name, **headers):
    return {"headers": {"x-tenant": name, **headers}}


async def test_a_test_may_not_choose_what_its_tenant_may_not_use(make):
    service = guarded(make)
    ours, theirs, ours_too = (worker(n).endpoint for n in (0, 1, 2))
    route = await service.ask(override=f"{ours},{theirs},{ours_too}", **as_tenant("one"))
    assert route.endpoints == (ours, ours_too)
    assert (await service.ask(override=theirs, **as_tenant("one"))).status == 503
    route = await service.ask(override=f"{ours},{ours_too}", **as_tenant("pinned"))
    assert route.endpoints == (ours,)


async def test_hints_sessions_and_policies_choose_among_permitted_workers_only(make):
    service = guarded(make, policy_header="x-policy")
    hint = frozenset({worker(0).endpoint, worker(1).endpoint, worker(2).endpoint})
    for headers in ({}, {"x-session-id": "s"}, {"x-policy": "round-robin"}):
        for subset in (None, hint):
            lease = await service.routed(subset=subset, **as_tenant("pinned", **headers))
            assert lease.worker == worker(0)
            assert len(lease.decision.candidates) == 1
    outside = frozenset({worker(2).endpoint})
    assert (await service.ask(subset=outside, **as_tenant("pinned"))).status == 503
    body = {"model": "other", "prompt": TEXT}
    assert (await service.ask(body=body, **as_tenant("one"))).status == 403
    assert (await service.ask(body=b"not json", **as_tenant("nobody"))).status == 403  # before it is read
    assert service.service.counters.rejected["not_permitted"] == 2


async def test_the_pool_and_strictness_are_told_to_the_gateway(make):
    service = guarded(make)
    route = await service.ask(**as_tenant("one"))
    assert route.set_headers == {"x-warmroute-pool": "default"}
    route = await service.ask(**as_tenant("pinned"))
    assert route.set_headers == {"x-warmroute-pool": "default", "x-warmroute-workers": "named"}


async def test_the_salt_in_the_body_is_the_salt_of_the_namespace(make):
    service = guarded(make)
    for sent in (None, "mine"):
        body = {"model": "tiny", "prompt": TEXT} | ({} if sent is None else {"cache_salt": sent})
        route = await service.ask(body=body, **as_tenant("apart"))
        lease = service.router.ledger.get(route.lease_id)
        salt = SALTER.salt("apart", sent)
        assert lease.decision.request.namespace.cache_salt == salt
        assert json.loads(route.body)["cache_salt"] == salt
        service.finish(lease)
    assert not any(SALTER.salt("apart") in line for line in service.file.read_text().splitlines())


async def test_in_mode_observe_the_gateway_chooses(make):
    service = make(rollout=Rollout(Mode.OBSERVE), dp_size=2)
    route = await service.ask()
    assert (route.endpoints, route.set_headers, route.body) == (None, {}, None)
    assert len(service.router.ledger) == 0
    done = Completion(Outcome.FINISHED, served_by=worker(2).endpoint, cached_tokens=0)
    service.service.completed(route.lease_id, done)
    (entry,) = service.log()
    assert (entry["mode"], entry["served_by"]) == ("observe", worker(2).endpoint)


async def test_prompts_are_encoded_for_each_revision_that_a_worker_serves(make, encoder):
    service = make()
    other = PromptService(encoder, budget_ms=60_000.0)
    service.service._pools["default"].revisions = {"v2": ("tokenizer-2", other), "v3": ("tokenizer-3", other)}
    service.join([replace(service.members[0], revision="v2"), *service.members[1:]])
    ask = (await service.routed()).decision.request
    assert set(ask.renditions) == {"v2"} or ask.namespace.model_revision == "v2"
    other.close()


async def test_long_prompts_are_hashed_before_they_come_to_the_router(make, monkeypatch):
    memo, routers = ChainMemo(), ChainMemo()
    monkeypatch.setattr("extproc.adapters.prompt_service.REMEMBERED", memo)
    monkeypatch.setattr("extproc.core.candidates.REMEMBERED", routers)
    service = make()
    for state in service.router.table.all():
        service.router.on_metrics(state.id.endpoint, {0: metrics()}, service.now)
    long = {"model": "tiny", "prompt": TEXT * 60, "max_tokens": 4}
    await service.routed(body=long)
    assert memo.blocks == 0  # it is not known yet how long blocks are
    asked = routers.hits + routers.misses
    assert asked > 0
    lease = await service.routed(body=long)
    size, (chain,) = lease.candidate.block_size, lease.reserved
    request = lease.decision.request
    hits = memo.hits
    assert memo.prompt_chain(request.prompts[0], size, request.namespace.seed) == chain
    assert memo.hits > hits
    assert routers.hits + routers.misses == asked
    await service.routed(body={"model": "tiny", "prompt": TEXT, "max_tokens": 4})
    assert memo.misses < 100  # short ones are none of its business


async def test_requests_are_held_by_what_holds_them_and_go_when_another_ends(make, monkeypatch):
    made, waits = make(1), []
    room = RoomSettings(max_queue_ms=None, max_kv_usage=None, max_requests=1)
    held = HeldRequests(made.router, HoldSettings(room=room), lambda: made.now, on_wait=waits.append)
    monkeypatch.setattr(made.service, "_held", held)
    asked = []

    async def more_time(seconds):
        asked.append(seconds)

    first = await made.routed()
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 4, "priority": -3}
    second = asyncio.create_task(made.ask(body=body, more_time=more_time))
    await until(lambda: len(held) == 1)
    made.finish(await made.routed(path="/v1/models", body=b"", method="GET"))  # no inference
    made.now += 0.5
    made.finish(first)
    route = await second
    lease = made.router.ledger.get(route.lease_id)
    assert lease.decision.request.admission == (500.0, 3)
    assert [round(seconds, 3) for seconds in asked] == [11.0]
    made.finish(lease)
    assert made.log()[-1]["admission"] == {"held_ms": 500.0, "priority": 3}
    assert [wait.ending.value for wait in waits] == ["passed", "admitted"]


async def test_who_waits_too_long_is_refused_and_counted(make, monkeypatch):
    made = make(1)
    room = RoomSettings(max_queue_ms=None, max_kv_usage=None, max_requests=1)
    held = HeldRequests(made.router, HoldSettings(room=room, max_wait_s=3.0), lambda: made.now)
    monkeypatch.setattr(made.service, "_held", held)
    await made.routed()
    second = asyncio.create_task(made.ask())
    await until(lambda: len(held) == 1)
    made.now += 3.0
    reject = await second
    assert (reject.status, reject.headers["retry-after"]) == (429, "3")
    assert made.service.counters.rejected == {"held_too_long": 1}
    third = asyncio.create_task(made.ask())
    await until(lambda: len(held) == 1)
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    assert len(held) == 0
