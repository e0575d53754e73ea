"""The Envoy configuration inside the manifests for Istio and Envoy Gateway, in a real Envoy."""

import io
import json
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.core.types import Outcome
from extproc.protocol.ext_proc_messages import PassThrough, Route
from tests.support import istio
from tests.support.grpc_host import RecordingRouting, running
from tests.support.http import Upstream
from tests.support.last_worker import LastWorker
from tests.support.mesh import CHAT
from tests.support.waiting import until

pytestmark = pytest.mark.envoy

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
DESTINATION = "x-gateway-destination-endpoint"
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
ENGINES = "outbound|8000||vllm.llm.svc.cluster.local"
ROUTER = "outbound|50051||warmroute.llm.svc.cluster.local"


def documents(name):
    found = yaml.safe_load_all((FOLDER / name).read_text())
    return {document["kind"]: document for document in found}


def typed(name, **fields):
    return {"@type": f"type.googleapis.com/{name}", **fields}


def endpoints(*addresses):
    entries = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        where = {"socket_address": {"address": host, "port_value": int(port)}}
        entries.append({"endpoint": {"address": where}})
    return [{"lb_endpoints": entries}]


def cluster(name, *addresses, http2=False, **fields):
    options = {HTTP_OPTIONS: typed(HTTP_OPTIONS, explicit_http_config={"http2_protocol_options": {}})}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": endpoints(*addresses)},
        **({"typed_extension_protocol_options": options} if http2 else {}),
        **fields,
    }


def gateway(routes, clusters, *, filters=(), **manager):
    """A gateway as a control plane writes it, before anything of ours is in it."""
    connection_manager = typed(
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="outbound",
        route_config={"virtual_hosts": [{"name": "*", "domains": ["*"], "routes": routes}]},
        http_filters=[
            *filters,
            {
                "name": "envoy.filters.http.router",
                "typed_config": typed("envoy.extensions.filters.http.router.v3.Router"),
            },
        ],
        **manager,
    )
    listener = {
        "name": "http",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": istio.MANAGER, "typed_config": connection_manager}]}],
    }
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    return {
        "node": {"id": "gateway", "cluster": "gateways"},
        "admin": admin,
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def istio_gateway(router, *engines):
    """What Istio makes of the Gateway, the VirtualService and the Services in our manifests."""
    found = documents("istio/routing.yaml")
    (http,) = found["VirtualService"]["spec"]["http"]
    retries = http["retries"]
    inference = {
        "name": http["name"],
        "match": {"prefix": http["match"][0]["uri"]["prefix"]},
        "route": {
            "cluster": ENGINES,
            "timeout": http["timeout"],
            "retry_policy": {
                "retry_on": retries["retryOn"].replace(",503", ",retriable-status-codes"),
                "retriable_status_codes": [503],
                "num_retries": retries["attempts"],
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": typed(
                            "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        ),
                    }
                ],
                "host_selection_retry_max_attempts": "5",
            },
        },
    }
    balancing = found["DestinationRule"]["spec"]["trafficPolicy"]["loadBalancer"]
    by_locality = balancing.get("localityLbSetting", {}).get("enabled", True)  # as the mesh may have it
    others = {"name": "others", "match": {"prefix": "/"}, "route": {"cluster": ENGINES}}
    clusters = [
        cluster(
            ENGINES,
            *engines,
            lb_policy=balancing["simple"],
            common_lb_config={"locality_weighted_lb_config": {}} if by_locality else {},
        ),
        cluster(ROUTER, router, http2=True),
    ]
    return gateway([inference, others], clusters)


async def ask(client, envoy, path=CHAT, **options):
    async with client.post(envoy.url + path, **{"json": {}, **options}) as reply:
        return reply.status, await reply.json() if reply.status == 200 else await reply.text()


async def test_istios_gateway_with_our_envoy_filter(start_envoy):
    ours = documents("istio/envoyfilter.yaml")["EnvoyFilter"]
    routing = RecordingRouting()
    async with (
        Upstream() as one,
        Upstream() as two,
        running(routing) as host,
        aiohttp.ClientSession() as client,
    ):
        routing.answer = Route((two.endpoint, one.endpoint), "lease-1")
        built = istio.apply(ours, istio_gateway(host.server.address, one.endpoint, two.endpoint))
        envoy = await start_envoy(built)
        for number in range(1, 11):
            status, answer = await ask(client, envoy, headers={DESTINATION: one.endpoint})
            assert (status, answer["served_by"]) == (200, two.endpoint)
            assert len(routing.requests) == number
            assert DESTINATION not in routing.requests[-1].headers  # what a client says does not arrive
        await until(lambda: len(routing.completions) == 10, what="access log entries")
        lease, completion = routing.completions[0]
        assert (lease, completion.outcome, completion.served_by) == (
            "lease-1",
            Outcome.FINISHED,
            two.endpoint,
        )
        # Bodies above Envoy's own limit of 1 MiB.
        status, answer = await ask(client, envoy, data=io.BytesIO(b"x" * (3 << 20)), json=None)
        assert (status, answer["size"]) == (200, 3 << 20)
        # Other routes of the gateway: not asked, not logged.
        await until(lambda: len(routing.completions) == len(routing.requests))
        asked, logged = len(routing.requests), len(routing.completions)
        assert (await ask(client, envoy, "/other"))[0] == 200
        assert len(routing.requests) == asked
        assert (await ask(client, envoy))[0] == 200
        await until(lambda: len(routing.completions) > logged)
        assert host.access_log.counters.foreign == 0
        # A worker that is gone: the next of the list. Nothing decided: Istio's own balancing.
        await two.stop()
        status, answer = await ask(client, envoy)
        assert (status, answer["served_by"]) == (200, one.endpoint)
        routing.answer = PassThrough()
        assert (await ask(client, envoy))[0] == 200
    # Warmroute gone: requests go on.
    async with Upstream() as one, aiohttp.ClientSession() as client:
        built = istio.apply(ours, istio_gateway("127.0.0.1:1", one.endpoint))
        assert (await ask(client, await start_envoy(built)))[0] == 200


async def test_without_warmroute_istios_gateway_finds_the_one_engine_that_is_left(start_envoy):
    ours = documents("istio/envoyfilter.yaml")["EnvoyFilter"]
    async with LastWorker() as last:
        envoy = await start_envoy(istio.apply(ours, istio_gateway("127.0.0.1:1", *last.endpoints)))
        assert await last.statuses(envoy.url) == {200: 41}


async def test_istio_lifts_usage_out_of_answers(start_envoy):
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}

    async def respond(request, _received):
        if request.query.get("stream") is None:
            return web.json_response({"usage": usage})
        text = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    ours = documents("istio/envoyfilter.yaml")["EnvoyFilter"]
    routing = RecordingRouting()
    async with Upstream(respond) as one, running(routing) as host, aiohttp.ClientSession() as client:
        routing.answer = Route((one.endpoint,), "lease-1")
        envoy = await start_envoy(istio.apply(ours, istio_gateway(host.server.address, one.endpoint)))
        for number, path in enumerate((CHAT, CHAT + "?stream=1")):
            async with client.post(envoy.url + path, json={}) as reply:
                await reply.read()
            await until(lambda n=number: len(routing.completions) > n, what="an access log entry")
            _, completion = routing.completions[number]
            assert (completion.prompt_tokens, completion.cached_tokens) == (7, 5)


def envoy_gateway(router, *engines):
    """What Envoy Gateway makes of our policies."""
    found = documents("envoy-gateway/policies.yaml")
    (ext_proc,) = found["EnvoyExtensionPolicy"]["spec"]["extProc"]
    traffic = found["BackendTrafficPolicy"]["spec"]
    client = found["ClientTrafficPolicy"]["spec"]
    proxy = documents("envoy-gateway/gateway.yaml")["EnvoyProxy"]["spec"]
    (log,) = proxy["telemetry"]["accessLog"]["settings"][0]["sinks"]
    assert log["als"]["backendRefs"] == [{"name": "warmroute", "namespace": "llm", "port": 50051}]
    assert ext_proc["processingMode"] == {"request": {"body": "Buffered"}}
    service = {"envoy_grpc": {"cluster_name": "warmroute"}}
    processor = typed(
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service=service,
        failure_mode_allow=ext_proc["failOpen"],
        message_timeout=ext_proc["messageTimeout"],
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SKIP",
            "request_trailer_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
        metadata_options={
            "forwarding_namespaces": {"untyped": ext_proc["metadata"]["accessibleNamespaces"]},
            "receiving_namespaces": {"untyped": ext_proc["metadata"]["writableNamespaces"]},
        },
    )
    override = typed(
        "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=traffic["loadBalancer"]["endpointOverride"]["extractFrom"],
        fallback_policy={
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.least_request",
                        "typed_config": typed(
                            "envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest"
                        ),
                    }
                }
            ]
        },
    )
    policy = {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.override_host",
            "typed_config": override,
        }
    }
    retry = traffic["retry"]
    route = {
        "name": "inference",
        "match": {"prefix": "/v1/"},
        "route": {
            "cluster": "vllm",
            "timeout": "0s",
            "retry_policy": {
                "retry_on": ",".join(retry["retryOn"]["triggers"]),
                "retriable_status_codes": retry["retryOn"]["httpStatusCodes"],
                "num_retries": retry["numRetries"],
            },
        },
    }
    mutations = [{"remove": name} for name in client["headers"]["earlyRequestHeaders"]["remove"]]
    built = gateway(
        [route],
        [
            cluster("vllm", *engines, load_balancing_policy={"policies": [policy]}),
            cluster("warmroute", router, http2=True),
        ],
        filters=[{"name": "envoy.filters.http.ext_proc", "typed_config": processor}],
        early_header_mutation_extensions=[
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": typed(
                    "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                    mutations=mutations,
                ),
            }
        ],
        access_log=[
            {
                "name": "envoy.access_loggers.http_grpc",
                "typed_config": typed(
                    "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
                    common_config={
                        "log_name": log["als"]["logName"],
                        "grpc_service": service,
                        "transport_api_version": "V3",
                    },
                ),
            }
        ],
    )
    limit = client["connection"]["bufferLimit"]
    assert limit.endswith("Mi")
    listener = built["static_resources"]["listeners"][0]
    listener["per_connection_buffer_limit_bytes"] = int(limit.removesuffix("Mi")) << 20
    return built


async def test_envoy_gateway_with_our_policies(start_envoy):
    routing = RecordingRouting()
    async with (
        Upstream() as one,
        Upstream() as two,
        Upstream() as stranger,
        running(routing) as host,
        aiohttp.ClientSession() as client,
    ):
        routing.answer = Route((two.endpoint, one.endpoint), "lease-1")
        envoy = await start_envoy(envoy_gateway(host.server.address, one.endpoint, two.endpoint))
        for _ in range(10):
            status, answer = await ask(client, envoy, headers={DESTINATION: one.endpoint})
            assert (status, answer["served_by"]) == (200, two.endpoint)
        await until(lambda: len(routing.completions) == 10, what="access log entries")
        assert routing.completions[0][1].served_by == two.endpoint
        status, answer = await ask(client, envoy, data=io.BytesIO(b"x" * (3 << 20)), json=None)
        assert (status, answer["size"]) == (200, 3 << 20)
        # No decision: what the client names is not followed, least of all to where it should not get.
        routing.answer = RuntimeError("no decision")
        served = set()
        for _ in range(20):
            _, answer = await ask(client, envoy, headers={DESTINATION: stranger.endpoint})
            served.add(answer["served_by"])
        assert served == {one.endpoint, two.endpoint}
        await two.stop()
        routing.answer = Route((two.endpoint, one.endpoint), "lease-2")
        status, answer = await ask(client, envoy)
        assert (status, answer["served_by"]) == (200, one.endpoint)
