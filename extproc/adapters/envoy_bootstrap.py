"""Envoy configuration for Warmroute: settings in, a complete bootstrap out. Deterministic.

`EnvoySettings` holds what differs between installations; everything else follows from the design:

- the destination comes from dynamic metadata only (`override_host`), so no client can choose an address;
- the ordered fallback list is consumed by the route's retry policy;
- a processor that is down, slow or wrong never fails a request (in BUFFERED mode): the cluster's own
  least-request balancing takes over; except where tenants were promised what Envoy alone cannot keep
  (`fail_open`);
- each of several pools has a cluster of its own, so that no retry can leave the pool the router chose;
- usage is lifted from responses by native filters and comes to us in the gRPC access log.

Keys of the `llm.usage` metadata, kept apart per API because their meanings differ:

- OpenAI completions and chat: `prompt_tokens`, `completion_tokens`, `cached_tokens` (part of the prompt);
- OpenAI responses: `input_tokens`, `output_tokens`, `input_cached_tokens` (part of the input);
- Anthropic messages: `input_tokens`, `output_tokens`, `cache_read_input_tokens` and
  `cache_creation_input_tokens` (*not* parts of the input).
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from extproc.adapters import envoy_comments
from extproc.core.errors import WarmrouteError
from extproc.protocol.addresses import Address, parse_address
from extproc.protocol.endpoint_discovery import ALL_WORKERS
from extproc.protocol.endpoint_picker import DESTINATION, POOL_HEADER, WORKERS_HEADER

EnvoyVersion = tuple[int, int]

SUPPORTED_VERSIONS: tuple[EnvoyVersion, ...] = ((1, 36), (1, 37), (1, 38), (1, 39), (1, 40))
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.\d+)?")


class EnvoyConfigError(WarmrouteError):
    """These settings cannot become an Envoy configuration; the message says what to change."""


class BodyMode(StrEnum):
    """How Envoy hands request bodies to the router.

    With FULL_DUPLEX_STREAMED neither `failure_mode_allow` nor the message timeout works in Envoy: a router
    that is down fails requests. With retries, Envoy (1.35 to 1.40 at least) also sends the body of a request
    that ends in trailers twice, https://github.com/envoyproxy/envoy/issues/45470. It exists for gateways that
    insist on it.
    """

    BUFFERED = "BUFFERED"
    FULL_DUPLEX_STREAMED = "FULL_DUPLEX_STREAMED"


@dataclass(frozen=True, slots=True)
class StaticWorkers:
    """Workers named in the configuration, as `host:port`. Names are resolved by Envoy."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EdsFileWorkers:
    """Workers in a file Envoy watches (`workers_file` makes its content). Replace it by rename only.

    `assignment` is the `cluster_name` of the load assignment in it.
    """

    path: str
    assignment: str = "workers"


@dataclass(frozen=True, slots=True)
class DnsWorkers:
    """Every address of a DNS name, re-resolved by Envoy every `refresh_s` seconds."""

    name: str
    port: int
    refresh_s: float = 5.0


@dataclass(frozen=True, slots=True)
class EdsServiceWorkers:
    """Workers told by the routers themselves, over gRPC on their own port (EDS).

    `assignment` is `workers` for those of all pools, or `workers/POOL`. A list stays in force while no router
    can be reached; an Envoy that starts without one waits up to 15 s, then has no workers until one comes.
    """

    assignment: str = ALL_WORKERS


DEFAULT_PREFIXES = ("/v1/", "/inference/v1/")
"""Paths with inference behind them."""

_OURS = (DESTINATION, POOL_HEADER, WORKERS_HEADER)

Workers = StaticWorkers | EdsFileWorkers | DnsWorkers | EdsServiceWorkers


@dataclass(frozen=True, slots=True)
class PoolWorkers:
    """The workers of one pool, which has a cluster of its own: chosen by the header the router sets."""

    name: str
    workers: Workers


@dataclass(frozen=True, slots=True)
class RouterTls:
    """TLS from Envoy to the routers: paths of PEM files, as Envoy sees them.

    `name` is a DNS name the routers' certificate must have; None takes any of the authority `ca`.
    `certificate` and `key` are Envoy's own, for routers that ask for one.
    """

    ca: str
    name: str | None = None
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """What an installation may choose. Durations in seconds, sizes in bytes.

    Attributes:
        workers: where the engines are, all of them.
        pools: those of each pool, where there are several.
        named_only: there are requests that only workers named by the router may serve, whatever happens.
        fail_open: a request goes on where the router fails, balanced by Envoy; else it is answered 503.
        forwarded_namespaces: metadata of other filters that the router is shown.
        request_attributes: attributes of requests and connections that the router is shown.
        routers: `host:port` of the Warmroute replicas (ext_proc and access log on one port).
        router_tls: how to speak TLS to them; None: plain text.
        listen_address: address of the listener clients use.
        listen_port: its port; 0 lets the system choose (ask the admin interface for it).
        admin_address: address of Envoy's admin interface.
        admin_port: its port; 0 lets the system choose (`--admin-address-path` tells).
        envoy_version: (major, minor) of the Envoy that will read this, 1.36 to 1.40. Below 1.38 usage of
            streamed answers cannot be lifted; below 1.37 there are no first-body times.
        body_mode: see `BodyMode`.
        body_limit: largest request body; above it, and above `response_limit`, Envoy answers 413 in plain
            text. Keep it 1 MiB above the router's own limit, which is exact and answers in JSON.
        response_limit: largest JSON response; above it Envoy answers 500, because it buffers to read usage.
        message_timeout: longest wait for one answer of the router, then the request goes on without it.
        max_message_timeout: longest wait the router may ask for when it queues a request.
        first_token_observer: tell the router of a first token while it happens, not when the answer ends.
        stream_usage: lift usage out of streamed answers too. Envoy's filter for it (1.38 to 1.40 at least)
            crashes Envoy on an event whose data is a bare JSON scalar, such as `data: null`. vLLM sends
            none; turn this off for upstreams that might.
        retries: other endpoints tried when one refuses; 0 for none.
        retry_resets: try another, too, when one that accepted a request dies before its answer began. The
            work is done again; and a request that kills engines meets up to 1 + `retries` of them.
        connect_timeout: longest wait for a connection to an engine.
        upstream_idle_timeout: idle connections to engines are closed after this; keep it below the
            engine's keep-alive (uvicorn: 5 s), or requests meet connections that are just closing.
        stream_idle_timeout: longest silence on a request, which must allow for the longest prefill.
        log_flush_interval: delay of access log entries.
        log_progress_interval: interval of intermediate entries for answers that run long; None for none.
        routed_prefixes: paths that go through the router; all others are balanced by Envoy alone.
        usage_free_paths: routed paths without usage lifting, because their JSON answers are large.
        internal_headers: request headers only the router may set; removed when a client sends them.
        trace_collector: `host:port` of an OpenTelemetry collector (OTLP over gRPC) that Envoy sends spans to;
            None: it makes none. With it, requests, the router's decisions and traced engines share a trace.
        trace_percent: how many requests in a hundred are traced when their client has not decided that.
        node_id: name of this Envoy.
        node_cluster: name of the group it belongs to.
    """

    workers: Workers
    pools: tuple[PoolWorkers, ...] = ()
    named_only: bool = False
    fail_open: bool = True
    forwarded_namespaces: tuple[str, ...] = ()
    request_attributes: tuple[str, ...] = ()
    routers: tuple[str, ...] = ("127.0.0.1:50051",)
    router_tls: RouterTls | None = None
    listen_address: str = "0.0.0.0"
    listen_port: int = 10_000
    admin_address: str = "127.0.0.1"
    admin_port: int = 9901
    envoy_version: EnvoyVersion = (1, 40)
    body_mode: BodyMode = BodyMode.BUFFERED
    body_limit: int = 65 << 20
    response_limit: int = 16 << 20
    message_timeout: float = 1.0
    max_message_timeout: float = 60.0
    first_token_observer: bool = False
    stream_usage: bool = True
    retries: int = 2
    retry_resets: bool = True
    connect_timeout: float = 1.0
    upstream_idle_timeout: float = 4.0
    stream_idle_timeout: float = 1800.0
    log_flush_interval: float = 0.02
    log_progress_interval: float | None = 10.0
    routed_prefixes: tuple[str, ...] = DEFAULT_PREFIXES
    usage_free_paths: tuple[str, ...] = ("/v1/embeddings", "/v1/rerank", "/v1/score")
    internal_headers: tuple[str, ...] = (
        DESTINATION,
        "x-warmroute-ticket",
        POOL_HEADER,
        WORKERS_HEADER,
    )
    trace_collector: str | None = None
    trace_percent: float = 100.0
    node_id: str = "warmroute-envoy"
    node_cluster: str = "warmroute"

    def __post_init__(self) -> None:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS)
        version = ".".join(map(str, self.envoy_version))
        no_workers = isinstance(self.workers, StaticWorkers) and not self.workers.endpoints
        ports = (self.listen_port, self.admin_port)
        limits = (self.body_limit, self.response_limit)
        demands = {
            f"Envoy {version} is not supported: choose one of {known}": (
                self.envoy_version in SUPPORTED_VERSIONS
            ),
            "no router address: name at least one host:port where warmroute serves": bool(self.routers),
            "no worker endpoint: name at least one host:port, an EDS file, a DNS name or EDS": not no_workers,
            "no routed path prefix: nothing would ever reach the router": bool(self.routed_prefixes),
            f"ports {ports} must be in 0 to 65535": all(0 <= port < 65_536 for port in ports),
            "body_limit and response_limit must be at least 1 byte and less than 4 GiB": (
                all(0 < limit < 1 << 32 for limit in limits)
            ),
            "retries must not be negative; 0 is for none": self.retries >= 0,
            f"trace_percent {self.trace_percent:g} must be in 0 to 100": 0.0 <= self.trace_percent <= 100.0,
            # Whatever else is configured, no client may choose the destination.
            f"internal_headers must contain {', '.join(_OURS)}": set(_OURS) <= set(self.internal_headers),
        }
        for demand, met in demands.items():
            if not met:
                raise EnvoyConfigError(demand)

    @property
    def router_addresses(self) -> tuple[Address, ...]:
        """Parsed `routers`."""
        return tuple(parse_address(text) for text in self.routers)


def parse_version(text: str) -> EnvoyVersion:
    """`1.40`, `v1.40.0` → (1, 40).

    Raises:
        EnvoyConfigError: not a version, or one that is not supported.
    """
    match = _VERSION.fullmatch(text.strip())
    version = (int(match[1]), int(match[2])) if match else None
    if version not in SUPPORTED_VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS)
        raise EnvoyConfigError(f"Envoy version {text!r} is not supported: choose one of {known}")
    return version


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """The complete bootstrap as plain data, in protobuf's JSON form with snake_case names.

    Raises:
        EnvoyConfigError: envoy-data-plane is not installed.
        AddressError: an address in the settings is not `host:port`.
    """
    return _plain(_messages().bootstrap(settings))


def workers_file(endpoints: Sequence[str]) -> dict[str, Any]:
    """Content of the file an `EdsFileWorkers` setting names: a DiscoveryResponse with one assignment.

    Raises:
        EnvoyConfigError: envoy-data-plane is not installed.
        AddressError: an endpoint is not `host:port`.
    """
    addresses = [parse_address(text) for text in endpoints]
    return {
        "resources": [
            {
                "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
                **_plain(_messages().workers_assignment(addresses)),
            }
        ]
    }


def write_workers_file(path: str | Path, endpoints: Sequence[str]) -> None:
    """Write a workers file and put it in place by rename, the only change Envoy notices."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.new")
    temporary.write_text(to_yaml(workers_file(endpoints), comments=False), encoding="utf-8")
    temporary.replace(target)


def to_json(config: Mapping[str, Any]) -> str:
    """Configuration as JSON text."""
    return json.dumps(config, indent=2) + "\n"


def to_yaml(config: Mapping[str, Any], *, comments: bool = True) -> str:
    """Configuration as YAML text, with a comment wherever a value has a reason."""
    text = yaml.safe_dump(dict(config), sort_keys=False, default_flow_style=False, width=1_000_000)
    return envoy_comments.annotate(text) if comments else text


def _plain(message: Any) -> dict[str, Any]:
    # Fields have their names in the protocol already; `Casing.SNAKE` would make `5_xx` of `5xx`.
    data: dict[str, Any] = message.to_dict(casing=str)
    return data


def _messages() -> Any:
    try:
        with warnings.catch_warnings():
            # The generated types use a spelling newer pydantic versions warn of; users cannot change it.
            warnings.simplefilter("ignore", DeprecationWarning)
            from extproc.adapters import envoy_messages
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"betterproto2", "envoy_data_plane"}:
            raise
        raise EnvoyConfigError(
            "building an Envoy configuration needs envoy-data-plane: pip install 'warmroute[envoy]'"
        ) from error
    return envoy_messages
