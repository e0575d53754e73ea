from datetime import UTC, datetime

import pytest
import yaml

from extproc import config as configuration
from extproc.adapters.admission import RefusedError
from extproc.adapters.discovery import DnsDiscovery, FileDiscovery, StaticDiscovery
from extproc.adapters.kubernetes_discovery import KubernetesDiscovery
from extproc.adapters.process_group import ProcessPlace
from extproc.assembly import (
    admission_of,
    for_process,
    kv_sources,
    load_encoder,
    load_normalizer,
    load_revisions,
    peer_settings,
    peer_sources,
    prompt_processes,
    router_header,
    sources_of,
)
from extproc.config import ConfigError
from extproc.core.candidates import PoolFacts
from extproc.core.types import Member, WorkerId
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import parse_request
from tests.support.requests import http


def pool_of(**fields):
    given = {"discovery": {"static": ["10.0.0.1:8000"]}, **fields}
    return configuration.parse(yaml.safe_dump({"pools": [given]})).pools[0]


def test_a_model_folder_that_is_none_is_an_error_that_says_what_it_must_hold():
    assert load_encoder(pool_of()) is None
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_encoder(pool_of(model={"path": "/no/such/model"}))


@pytest.mark.parametrize(
    ("pool", "unknown", "found"),
    [
        ("disabled", None, {"own": "applied", "as-pool": None, "other": None}),
        ("dry-run", None, {"own": "applied", "as-pool": "dry-run", "other": "dry-run"}),
        ("apply", "disabled", {"own": "applied", "as-pool": "applied", "other": None, "": None}),
    ],
)
async def test_tenants_may_have_normalization_their_own_way(pool, unknown, found):
    tenants = {
        "identity": [{"header": "x-tenant"}],
        "policies": {"own": {"normalization": "apply"}, "as-pool": {}},
        "unknown": {} if unknown is None else {"normalization": unknown},
    }
    config = configuration.parse(
        yaml.safe_dump(
            {
                "pools": [{"discovery": {"static": ["10.0.0.1:8000"]}, "normalization": {"mode": pool}}],
                "tenants": tenants,
            }
        )
    )
    normalizer = load_normalizer(config, config.pools[0])
    body = b'{"prompt": "a \\n"}'
    request = parse_request("POST", "/v1/completions", {}, body)
    for tenant, outcome in found.items():
        result = await normalizer.normalize(
            request, body=body, path="/v1/completions", headers={}, tenant=tenant
        )
        assert (None if result.report is None else result.report.outcome) == outcome
    normalizer.close()


def test_nothing_normalizes_where_nobody_wants_it():
    config = configuration.parse('pools: [{discovery: {static: ["10.0.0.1:8000"]}}]')
    assert load_normalizer(config, config.pools[0]) is None


async def test_every_source_of_workers_is_used(tmp_path):
    pool = pool_of(
        dp_size=2,
        discovery={
            "static": [{"endpoint": "10.0.0.1:8000", "dp_size": 4, "kv_events": "tcp://*:7"}],
            "file": str(tmp_path / "w.yaml"),
            "dns": {"name": "engines", "port": 8000},
            "kubernetes": {"service": "vllm", "port": "http"},
        },
    )
    static, *others = sources_of(pool)
    assert [type(source) for source in others] == [FileDiscovery, DnsDiscovery, KubernetesDiscovery]
    assert isinstance(static, StaticDiscovery)
    published = []
    await static.start(lambda members: published.append(tuple(members)), print)
    await static.close()
    assert published[-1] == (
        Member("10.0.0.1:8000", dp_size=4, kv_events="tcp://10.0.0.1:7", kv_replay="tcp://10.0.0.1:5558"),
    )
    off = pool_of(kv_events={"enabled": False})
    published.clear()
    (static,) = sources_of(off)
    await static.start(lambda members: published.append(tuple(members)), print)
    await static.close()
    assert published[-1][0].kv_events is None


async def test_a_worker_may_be_of_the_cold_pool():
    pool = pool_of(discovery={"static": ["10.0.0.1:8000", {"endpoint": "10.0.0.2:8000", "cold": True}]})
    published = []
    (static,) = sources_of(pool)
    await static.start(lambda members: published.append(tuple(members)), print)
    await static.close()
    assert [member.cold for member in published[0]] == [False, True]


def test_the_events_of_every_rank():
    member = Member("10.0.0.1:8000", dp_size=2, kv_events="tcp://*:5557", kv_replay="tcp://*:5558")
    first, second = kv_sources(member, "kv")
    assert (first.endpoint, second.endpoint) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    assert second.replay_endpoint == "tcp://10.0.0.1:5559"
    assert (second.worker, second.topic, second.bind) == (WorkerId("10.0.0.1:8000", 1), "kv", False)
    bound = Member("10.0.0.1:8000", kv_events="tcp://*:5557", kv_bind=True)
    (source,) = kv_sources(bound, "")
    assert (source.endpoint, source.bind, source.replay_endpoint) == ("tcp://*:5557", True, None)
    assert kv_sources(Member("10.0.0.1:8000"), "") == []
    with pytest.raises(ValueError, match="port 0"):
        kv_sources(Member("10.0.0.1:8000", kv_events="tcp://*:0"), "")


def test_the_events_of_ranks_that_do_not_begin_at_0():
    events = {"kv_events": "tcp://*:5557", "kv_replay": "tcp://*:5558"}
    hybrid = kv_sources(Member("10.0.0.1:8000", dp_size=2, dp_start_rank=2, **events), "", told_rank=7)
    assert [(one.worker.dp_rank, one.endpoint, one.replay_endpoint) for one in hybrid] == [
        (2, "tcp://10.0.0.1:5559", "tcp://10.0.0.1:5560"),
        (3, "tcp://10.0.0.1:5560", "tcp://10.0.0.1:5561"),
    ]
    assert [one.alone for one in hybrid] == [False, False]


def test_the_events_of_an_only_rank_are_at_the_port_of_the_number_it_is_told_to_have():
    events = {"kv_events": "tcp://*:5557", "kv_replay": "tcp://*:5558"}
    (told,) = kv_sources(Member("10.0.0.1:8000", **events), "", told_rank=3)
    assert (told.worker, told.alone) == (WorkerId("10.0.0.1:8000"), True)
    assert (told.endpoint, told.replay_endpoint) == ("tcp://10.0.0.1:5560", "tcp://10.0.0.1:5561")
    (described,) = kv_sources(Member("10.0.0.1:8000", dp_start_rank=2, **events), "", told_rank=3)
    assert (described.worker.dp_rank, described.endpoint) == (2, "tcp://10.0.0.1:5559")


async def test_the_first_rank_of_a_worker_and_of_its_pool():
    pool = pool_of(
        dp_start_rank=2,
        discovery={"static": ["10.0.0.1:8000", {"endpoint": "10.0.0.2:8000", "dp_start_rank": 0}]},
    )
    published = []
    (static,) = sources_of(pool)
    await static.start(lambda members: published.append(tuple(members)), print)
    await static.close()
    assert [member.dp_start_rank for member in published[0]] == [2, 0]


def test_revisions_that_differ_in_more_than_weights_have_encoders_of_their_own(tmp_path):
    template = tmp_path / "new.jinja"
    template.write_text("{{ messages[0].content }}")
    revisions = [{"revision": "v2", "chat_template": str(template)}, {"revision": "v3"}]
    model = {"path": str(tiny_model_path()), "revision": "v1", "revisions": revisions}
    loaded = load_revisions(pool_of(model=model))
    ours = load_encoder(pool_of(model=model))
    assert list(loaded) == ["v2"]
    assert loaded["v2"].template_version != ours.template_version
    assert loaded["v2"].tokenizer_revision != ours.tokenizer_revision


def config_of(text):
    pools = "pools: [{name: a, model: {names: [m]}, discovery: {static: ['h:1']}}, "
    return configuration.parse(
        pools + "{name: b, model: {names: [n]}, discovery: {static: ['h:2']}}]\n" + text
    )


def test_who_may_go_where_is_what_the_file_says():
    admission = admission_of(
        config_of(
            "aliases: {best: n}\n"
            "tenants: {identity: [{header: X-Tenant}], policies: {acme: {pools: [b]}}, unknown: {pools: [a]}}"
        )
    )
    acme, other = (admission.visitor(http(headers={"x-tenant": name})) for name in ("acme", "other"))
    assert admission.destination(acme, "best").pool == "b"
    assert admission.destination(other, "m").pool == "a"
    with pytest.raises(RefusedError, match="may not use"):
        admission.destination(other, "best")


@pytest.mark.parametrize(
    ("text", "refused"),
    [("", True), ("unknown_model: pass", False), ("unknown_model: refuse", True)],
)
def test_unknown_models_are_refused_or_passed(text, refused):
    admission = admission_of(config_of(text))
    admission.catalog.on_models("h:1", "a", ["m"], [])
    admission.catalog.on_models("h:2", "b", ["n"], [])
    visitor = admission.visitor(http())
    if not refused:
        assert admission.destination(visitor, "x").pool == "a"
        return
    with pytest.raises(RefusedError) as caught:
        admission.destination(visitor, "x")
    assert caught.value.reject.status == 404


def of_fleet(**fields):
    return configuration.parse(
        yaml.safe_dump({"pools": [{"discovery": {"static": ["10.0.0.1:8000"]}}], **fields})
    )


def test_what_processes_cannot_share_gets_their_number():
    config = of_fleet(
        processes=3,
        decision_log={"path": "/log/decisions.jsonl"},
        journal={"path": "/log/journal"},
        peers={"listen": "0.0.0.0:50060", "snapshot": {"path": "/var/index.bin"}},
    )
    first, third = (for_process(config, ProcessPlace(n, 3, "/run/x")) for n in (0, 2))
    assert (first.decision_log, first.journal) == (config.decision_log, config.journal)
    assert third.decision_log.path == "/log/decisions-2.jsonl"
    assert str(third.journal.path) == "/log/journal-2"
    assert str(third.peers.snapshot.path) == "/var/index-2.bin"
    assert (first.peers.listen, third.peers.listen) == ("0.0.0.0:50060", "0.0.0.0:50062")
    assert for_process(config, ProcessPlace()) is config
    assert for_process(of_fleet(), ProcessPlace(1, 2)).decision_log.path == "-"


def test_engines_that_connect_to_us_cannot_have_several_processes():
    pool = {"discovery": {"static": ["10.0.0.1:8000"]}, "kv_events": {"bind": True}}
    config = configuration.parse(yaml.safe_dump({"pools": [pool]}))
    with pytest.raises(ConfigError, match="processes: 1"):
        for_process(config, ProcessPlace(0, 2))


def test_processes_and_replicas_find_each_other():
    assert peer_settings(of_fleet(), ProcessPlace(), "o", 1) is None
    siblings = peer_settings(of_fleet(), ProcessPlace(1, 2, "/run/x"), "o", 7)
    assert (siblings.listen, siblings.fixed) == (("unix:/run/x/peer-1.sock",), ("unix:/run/x/peer-0.sock",))
    assert (siblings.owner, siblings.epoch) == ("o", 7)
    peers = {"listen": "0.0.0.0:50060", "static": ["a:1"], "name": "x", "dns": {"name": "b", "port": 9}}
    config = of_fleet(peers=peers, processes=2)
    both = peer_settings(config, ProcessPlace(0, 2, "/run/x"), "o", 1)
    assert both.listen == ("0.0.0.0:50060", "unix:/run/x/peer-0.sock")
    assert both.fixed == ("unix:/run/x/peer-1.sock", "a:1")
    assert both.name == "x/0"
    assert len(peer_sources(config)) == 2
    assert peer_sources(of_fleet()) == []


def header_of(text):
    config = configuration.parse("pools: [{name: a, discovery: {static: ['h:1']}}]\n" + text)
    return router_header(
        config,
        {"a": PoolFacts("r", "t", 16)},
        ("token-load", "round-robin", "least-load"),
        seed=7,
        started=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        clock=9.0,
    )


def test_a_router_is_made_from_what_the_file_says_and_what_was_found():
    header = header_of("policy: least-load\nshadow: [round-robin]\nscrape: {stale_after_s: 9}\n")
    assert (header.policy, header.shadow, header.others) == ("least-load", ("round-robin",), ())
    assert (header.seed, header.clock, header.started) == (7, 9.0, "2026-01-02T03:04:05.000+00:00")
    assert (header.pools["a"].tokenizer_revision, header.settings.stale_after_s) == ("t", 9)


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("policy_header: x-policy", ("token-load", "round-robin", "least-load")),
        ("rollout: {mode: shadow, baseline: round-robin}", ("round-robin",)),
    ],
)
def test_a_router_knows_every_policy_that_may_have_to_decide(text, others):
    assert header_of(text).others == others


@pytest.mark.parametrize(
    ("text", "cores", "found"),
    [
        ("", 1, 0),
        ("", 2, 2),
        ("", 64, 2),
        ("processes: 2", 2, 1),
        ("processes: 4", 2, 1),
        ("processes: 4", 8, 2),
        ("prompt_processes: 0", 64, 0),
        ("prompt_processes: 5", 1, 5),
    ],
)
def test_long_prompts_get_processes_where_there_are_cores(text, cores, found):
    pool = {"pools": [{"discovery": {"static": ["10.0.0.1:8000"]}}]}
    assert prompt_processes(configuration.parse(f"{text}\n{yaml.safe_dump(pool)}"), cores) == found
