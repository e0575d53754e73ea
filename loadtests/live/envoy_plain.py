"""Envoy configurations that are not Warmroute's: an upstream that costs almost nothing, and plain proxies.

All as plain data in protobuf's JSON form, pure. What the compared proxies have in common (buffers, timeouts,
retries, circuit breakers) has the values of `warmroute envoy-config`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_TYPE = "type.googleapis.com/"
_BODY_LIMIT = 65 << 20
_MANY = 1_000_000


def trivial_engine(answers: Mapping[str, str]) -> dict[str, Any]:
    """An upstream that reads the whole request and answers at once, the same text whatever was asked.

    Args:
        answers: JSON or plain text by path; anything else gets the one of `""`.
    """
    routes = [
        {"match": {"path": path} if path else {"prefix": "/"}, "direct_response": _answer(text)}
        for path, text in sorted(answers.items(), reverse=True)
    ]
    buffer = {
        "name": "envoy.filters.http.buffer",
        "typed_config": {
            "@type": f"{_TYPE}envoy.extensions.filters.http.buffer.v3.Buffer",
            "max_request_bytes": _BODY_LIMIT,
        },
    }
    json_headers = [
        {
            "header": {"key": "content-type", "value": "application/json"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ]
    return _bootstrap(
        _listener([buffer], [{**route, "response_headers_to_add": json_headers} for route in routes]), []
    )


def proxy(
    upstreams: Sequence[str], *, lb_policy: str = "ROUND_ROBIN", processor: str | None = None
) -> dict[str, Any]:
    """Envoy in front of engines.

    Args:
        upstreams: `ip:port` of each engine.
        lb_policy: Envoy's, in capitals.
        processor: `ip:port` of an external processor that is shown headers and the buffered body.
    """
    filters: list[dict[str, Any]] = []
    clusters = [_cluster("engines", upstreams, lb_policy)]
    if processor is not None:
        filters.append(
            {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": f"{_TYPE}envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}, "timeout": "30s"},
                    "failure_mode_allow": False,  # a processor that is not asked must not look fast
                    "message_timeout": "10s",
                    "processing_mode": {
                        "request_header_mode": "SEND",
                        "request_body_mode": "BUFFERED",
                        "response_header_mode": "SKIP",
                    },
                },
            }
        )
        clusters.append(_cluster("processor", [processor], "ROUND_ROBIN", http2=True))
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    return _bootstrap(_listener(filters, [route]), clusters)


def _answer(text: str) -> dict[str, Any]:
    return {"status": 200, "body": {"inline_string": text}}


def _bootstrap(listener: dict[str, Any], clusters: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "admin": {"address": _socket("127.0.0.1", 0)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _listener(filters: list[dict[str, Any]], routes: list[dict[str, Any]]) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPE}envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "generate_request_id": True,
        "stream_idle_timeout": "1800s",
        "http_filters": [
            *filters,
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}envoy.extensions.filters.http.router.v3.Router"},
            },
        ],
        "route_config": {
            "name": "all",
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": routes,
                    "request_body_buffer_limit": _BODY_LIMIT,
                }
            ],
        },
    }
    return {
        "name": "clients",
        "address": _socket("127.0.0.1", 0),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _cluster(name: str, endpoints: Sequence[str], lb_policy: str, *, http2: bool = False) -> dict[str, Any]:
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    cluster: dict[str, Any] = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "lb_policy": lb_policy,
        "circuit_breakers": {"thresholds": [dict.fromkeys(limits, _MANY)]},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": _socket(*_split(endpoint))}} for endpoint in endpoints
                    ]
                }
            ],
        },
    }
    if http2:
        cluster["typed_extension_protocol_options"] = {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        }
    return cluster


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
