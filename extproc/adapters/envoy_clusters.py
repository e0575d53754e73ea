"""The clusters of the bootstrap, and the values all parts of it are made of."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

from envoy_data_plane.envoy.config.cluster import v3 as cluster_v3
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint_v3
from envoy_data_plane.envoy.extensions.clusters.common.dns import v3 as common_dns
from envoy_data_plane.envoy.extensions.clusters.dns import v3 as dns_cluster
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
from envoy_data_plane.envoy.extensions.load_balancing_policies.subset import v3 as subset
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls_v3
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstreams
from envoy_data_plane.envoy.type.matcher import v3 as matcher_v3
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.google.protobuf import Any

from extproc.adapters.envoy_bootstrap import (
    DnsWorkers,
    EdsFileWorkers,
    EdsServiceWorkers,
    EnvoySettings,
    RouterTls,
    Workers,
)
from extproc.protocol.addresses import Address, parse_address
from extproc.protocol.endpoint_picker import (
    DESTINATION,
    LB_NAMESPACE,
    POOL_HEADER,
    SERVED_KEY,
    WORKERS_HEADER,
)

WORKERS = "workers"
ROUTER = "warmroute"
COLLECTOR = "opentelemetry_collector"
_ROUTER_CHECK_S = 0.5
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def address(host: str, port: int) -> core.Address:
    """A socket address; the host may be a name where Envoy resolves."""
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def seconds(value: float) -> timedelta:
    """A duration."""
    return timedelta(seconds=value)


def metadata_key(namespace: str, key: str) -> metadata.MetadataKey:
    """One key of dynamic metadata."""
    return metadata.MetadataKey(key=namespace, path=[metadata.MetadataKeyPathSegment(key=key)])


class WorkerCluster(NamedTuple):
    """A cluster of engines, and the headers of the requests that go there.

    Attributes:
        name: of the cluster.
        workers: who is in it.
        headers: name and value of each header a request must have; empty: it takes the rest.
        named_only: no worker that the router does not name is ever chosen.
    """

    name: str
    workers: Workers
    headers: tuple[tuple[str, str], ...] = ()
    named_only: bool = False


def worker_clusters(settings: EnvoySettings) -> list[WorkerCluster]:
    """All clusters of engines, in the order in which requests try them."""
    found = [
        WorkerCluster(f"{WORKERS}/{pool.name}", pool.workers, ((POOL_HEADER, pool.name),))
        for pool in settings.pools
    ]
    found.append(WorkerCluster(WORKERS, settings.workers))
    if not settings.named_only:
        return found
    named = [
        one._replace(
            name=f"{one.name}#named", headers=(*one.headers, (WORKERS_HEADER, "named")), named_only=True
        )
        for one in found
    ]
    return [*named, *found]


def workers_cluster(settings: EnvoySettings, one: WorkerCluster) -> cluster_v3.Cluster:
    """Engines, chosen by metadata, else by least requests; or else by nobody."""
    workers = one.workers
    cluster = cluster_v3.Cluster(
        name=one.name,
        connect_timeout=seconds(settings.connect_timeout),
        circuit_breakers=_open_breakers(),
        # Nobody but the router chooses among named workers.
        outlier_detection=None if one.named_only else _refusing(),
        load_balancing_policy=worker_balancing(settings, named_only=one.named_only),
        typed_extension_protocol_options={
            HTTP_OPTIONS: Any.pack(
                upstreams.HttpProtocolOptions(
                    common_http_protocol_options=core.HttpProtocolOptions(
                        idle_timeout=seconds(settings.upstream_idle_timeout)
                    ),
                    explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
                        http_protocol_options=core.Http1ProtocolOptions()
                    ),
                )
            )
        },
    )
    if isinstance(workers, EdsFileWorkers):
        # Envoy refuses to watch a path without a folder in it.
        path = workers.path if "/" in workers.path else f"./{workers.path}"
        cluster.type = cluster_v3.ClusterDiscoveryType.EDS
        cluster.eds_cluster_config = cluster_v3.ClusterEdsClusterConfig(
            eds_config=core.ConfigSource(
                path_config_source=core.PathConfigSource(path=path),
                resource_api_version=core.ApiVersion.V3,
            ),
            service_name=workers.assignment if workers.assignment != one.name else "",
        )
        return cluster
    if isinstance(workers, EdsServiceWorkers):
        cluster.type = cluster_v3.ClusterDiscoveryType.EDS
        cluster.eds_cluster_config = cluster_v3.ClusterEdsClusterConfig(
            eds_config=core.ConfigSource(
                api_config_source=core.ApiConfigSource(
                    api_type=core.ApiConfigSourceApiType.GRPC,
                    transport_api_version=core.ApiVersion.V3,
                    set_node_on_first_message_only=True,
                    grpc_services=[
                        core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=ROUTER))
                    ],
                ),
                resource_api_version=core.ApiVersion.V3,
            ),
            service_name=workers.assignment,
        )
        return cluster
    if isinstance(workers, DnsWorkers):
        _set_addresses(cluster, [parse_address(f"{workers.name}:{workers.port}")], workers.refresh_s)
    else:
        _set_addresses(cluster, [parse_address(text) for text in workers.endpoints])
    return cluster


def worker_balancing(settings: EnvoySettings, *, named_only: bool = False) -> cluster_v3.LoadBalancingPolicy:
    """`override_host` by metadata only: a header could be sent by anyone.

    With `named_only` the fallback is a subset that nobody is in: a list that is used up ends in a 503.
    """
    least = _policy("envoy.load_balancing_policies.least_request", Any.pack(least_request.LeastRequest()))
    nobody = subset.Subset(
        fallback_policy=subset.SubsetLbSubsetFallbackPolicy.NO_FALLBACK,
        subset_selectors=[subset.SubsetLbSubsetSelector(keys=["nobody"])],
        subset_lb_policy=least,
    )
    override = override_host.OverrideHost(
        override_host_sources=[
            override_host.OverrideHostOverrideHostSource(metadata=metadata_key(LB_NAMESPACE, DESTINATION))
        ],
        selected_host_key=(
            metadata_key(LB_NAMESPACE, SERVED_KEY) if settings.envoy_version >= (1, 38) else None
        ),
        fallback_policy=(
            _policy("envoy.load_balancing_policies.subset", Any.pack(nobody)) if named_only else least
        ),
    )
    return _policy("envoy.load_balancing_policies.override_host", Any.pack(override))


def router_cluster(settings: EnvoySettings) -> cluster_v3.Cluster:
    """The Warmroute replicas: ext_proc and, if there is only one, the access log."""
    return _router_cluster(ROUTER, settings.router_addresses, settings.router_tls)


def log_clusters(settings: EnvoySettings) -> list[str]:
    """Clusters the access log goes to: one for each router.

    Envoy keeps a log on one connection, but who placed a request must hear of its end. So all hear of all,
    and each takes what is its own.
    """
    count = len(settings.routers)
    return [ROUTER] if count == 1 else [f"{ROUTER}-log-{number}" for number in range(1, count + 1)]


def router_log_cluster(name: str, where: Address, tls: RouterTls | None) -> cluster_v3.Cluster:
    """One of several Warmroute replicas: its access log."""
    return _router_cluster(name, [where], tls)


def _router_transport(tls: RouterTls) -> core.TransportSocket:
    names = []
    if tls.name is not None:
        names = [
            tls_v3.SubjectAltNameMatcher(
                san_type=tls_v3.SubjectAltNameMatcherSanType.DNS,
                matcher=matcher_v3.StringMatcher(exact=tls.name),
            )
        ]
    own = []
    if tls.certificate is not None and tls.key is not None:
        own = [
            tls_v3.TlsCertificate(
                certificate_chain=core.DataSource(filename=tls.certificate),
                private_key=core.DataSource(filename=tls.key),
            )
        ]
    context = tls_v3.UpstreamTlsContext(
        sni=tls.name or "",
        common_tls_context=tls_v3.CommonTlsContext(
            alpn_protocols=["h2"],
            tls_certificates=own,
            validation_context=tls_v3.CertificateValidationContext(
                trusted_ca=core.DataSource(filename=tls.ca), match_typed_subject_alt_names=names
            ),
        ),
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def _router_cluster(name: str, addresses: Iterable[Address], tls: RouterTls | None) -> cluster_v3.Cluster:
    cluster = cluster_v3.Cluster(
        name=name,
        connect_timeout=seconds(0.25),
        circuit_breakers=_open_breakers(),
        typed_extension_protocol_options={
            HTTP_OPTIONS: Any.pack(
                upstreams.HttpProtocolOptions(
                    explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
                        http2_protocol_options=core.Http2ProtocolOptions(
                            connection_keepalive=core.KeepaliveSettings(
                                interval=seconds(30), timeout=seconds(5)
                            )
                        )
                    )
                )
            )
        },
    )
    if tls is not None:
        cluster.transport_socket = _router_transport(tls)
    addresses = tuple(addresses)
    if len(addresses) > 1 or not all(where.is_resolved for where in addresses):
        cluster.health_checks = [_router_check()]
    _set_addresses(cluster, addresses)
    return cluster


def _router_check() -> core.HealthCheck:
    """One of several routers that is gone, or going, gets no request; the last one standing gets all."""
    return core.HealthCheck(
        timeout=seconds(1),
        interval=seconds(_ROUTER_CHECK_S),
        no_traffic_interval=seconds(_ROUTER_CHECK_S),
        unhealthy_threshold=1,
        healthy_threshold=1,
        grpc_health_check=core.HealthCheckGrpcHealthCheck(),
    )


def collector_cluster(collector: str) -> cluster_v3.Cluster:
    """Where spans go, `host:port`: OTLP over gRPC."""
    cluster = cluster_v3.Cluster(
        name=COLLECTOR,
        connect_timeout=seconds(1),
        typed_extension_protocol_options={
            HTTP_OPTIONS: Any.pack(
                upstreams.HttpProtocolOptions(
                    explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
                        http2_protocol_options=core.Http2ProtocolOptions()
                    )
                )
            )
        },
    )
    _set_addresses(cluster, [parse_address(collector)])
    return cluster


def load_assignment(cluster: str, addresses: Sequence[Address]) -> endpoint_v3.ClusterLoadAssignment:
    """Endpoints of one cluster, all in one locality."""
    return endpoint_v3.ClusterLoadAssignment(
        cluster_name=cluster,
        endpoints=[
            endpoint_v3.LocalityLbEndpoints(
                lb_endpoints=[
                    endpoint_v3.LbEndpoint(endpoint=endpoint_v3.Endpoint(address=address(*one)))
                    for one in addresses
                ]
            )
        ],
    )


def _set_addresses(
    cluster: cluster_v3.Cluster, addresses: Iterable[Address], refresh_s: float | None = None
) -> None:
    known = list(addresses)
    cluster.load_assignment = load_assignment(cluster.name, known)
    if all(one.is_resolved for one in known):
        cluster.type = cluster_v3.ClusterDiscoveryType.STATIC
        return
    cluster.cluster_type = cluster_v3.ClusterCustomClusterType(
        name="envoy.clusters.dns",
        typed_config=Any.pack(
            dns_cluster.DnsCluster(
                dns_refresh_rate=None if refresh_s is None else seconds(refresh_s),
                # The router resolves names by the same rule, so both know the same endpoints.
                dns_lookup_family=common_dns.DnsLookupFamily.V4_PREFERRED,
            )
        ),
    )


def _open_breakers() -> cluster_v3.CircuitBreakers:
    # Envoy's default of 1,024 counts streams that are merely open; the router bounds the load itself.
    return cluster_v3.CircuitBreakers(
        thresholds=[
            cluster_v3.CircuitBreakersThresholds(
                max_connections=100_000, max_pending_requests=100_000, max_requests=100_000, max_retries=1_000
            )
        ]
    )


def _refusing() -> cluster_v3.OutlierDetection:
    # For the fallback policy, which would prefer those that refuse, for they have the fewest requests:
    # `override_host` takes no notice. Answers never count. With more than half out, Envoy balances among all.
    return cluster_v3.OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=2,
        enforcing_local_origin_success_rate=0,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        interval=seconds(1),
        base_ejection_time=seconds(10),
        max_ejection_time=seconds(30),
        max_ejection_percent=50,
    )


def _policy(name: str, config: Any) -> cluster_v3.LoadBalancingPolicy:
    return cluster_v3.LoadBalancingPolicy(
        policies=[
            cluster_v3.LoadBalancingPolicyPolicy(
                typed_extension_config=core.TypedExtensionConfig(name=name, typed_config=config)
            )
        ]
    )
