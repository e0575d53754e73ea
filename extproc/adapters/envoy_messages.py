"""The bootstrap of `envoy_bootstrap`, built from envoy-data-plane's typed messages.

Imported only when a configuration is built: the package is an optional extra.
"""

import dataclasses
from collections.abc import Sequence

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.cluster import v3 as cluster_v3
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint_v3
from envoy_data_plane.envoy.config.listener import v3 as listener_v3
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.config.trace import v3 as trace_v3
from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_log
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router_v3
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.type import v3 as percent_v3
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.envoy.type.tracing import v3 as tracing
from envoy_data_plane.google.protobuf import Any

from extproc.adapters import envoy_usage
from extproc.adapters.envoy_bootstrap import BodyMode, EnvoySettings
from extproc.adapters.envoy_clusters import (
    COLLECTOR,
    ROUTER,
    WORKERS,
    WorkerCluster,
    address,
    collector_cluster,
    load_assignment,
    log_clusters,
    metadata_key,
    router_cluster,
    router_log_cluster,
    seconds,
    worker_clusters,
    workers_cluster,
)
from extproc.protocol.addresses import Address
from extproc.protocol.endpoint_picker import (
    LB_NAMESPACE,
    SUBSET_NAMESPACE,
    TICKET_KEY,
    TICKET_NAMESPACE,
)

EXT_PROC = "envoy.filters.http.ext_proc"
_UNAVAILABLE = percent_v3.StatusCode(503)
# Envoy draws at random, and takes one it has tried before when it runs out of draws. Of N workers of which
# all but one refuse, at worst one draw in N² finds that one. A draw takes half a microsecond.
_HOST_DRAWS = 1000
OBSERVER = "envoy.filters.http.ext_proc.first_token"


def bootstrap(settings: EnvoySettings) -> bootstrap_v3.Bootstrap:
    """Everything one Envoy needs."""
    return bootstrap_v3.Bootstrap(
        node=core.Node(id=settings.node_id, cluster=settings.node_cluster),
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[listener(settings)],
            clusters=clusters(settings),
        ),
        admin=bootstrap_v3.Admin(address=address(settings.admin_address, settings.admin_port)),
    )


def clusters(settings: EnvoySettings) -> list[cluster_v3.Cluster]:
    """Engines, router, and the collector of spans where there is one."""
    found = [workers_cluster(settings, one) for one in worker_clusters(settings)]
    found.append(router_cluster(settings))
    if len(settings.routers) > 1:
        found += [
            router_log_cluster(name, where, settings.router_tls)
            for name, where in zip(log_clusters(settings), settings.router_addresses, strict=True)
        ]
    if settings.trace_collector is not None:
        found.append(collector_cluster(settings.trace_collector))
    return found


def workers_assignment(addresses: Sequence[Address]) -> endpoint_v3.ClusterLoadAssignment:
    """The resource in a workers file."""
    return load_assignment(WORKERS, addresses)


def listener(settings: EnvoySettings) -> listener_v3.Listener:
    """The port clients talk to."""
    return listener_v3.Listener(
        name="ingress",
        address=address(settings.listen_address, settings.listen_port),
        per_connection_buffer_limit_bytes=settings.response_limit,
        filter_chains=[
            listener_v3.FilterChain(
                filters=[
                    listener_v3.Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=Any.pack(connection_manager(settings)),
                    )
                ]
            )
        ],
    )


def connection_manager(settings: EnvoySettings) -> hcm.HttpConnectionManager:
    """HTTP handling: header hygiene, routes, filters, access log."""
    progress = settings.log_progress_interval
    return hcm.HttpConnectionManager(
        codec_type=hcm.HttpConnectionManagerCodecType.AUTO,
        stat_prefix="ingress",
        tracing=tracing_of(settings),
        stream_idle_timeout=seconds(settings.stream_idle_timeout),
        request_timeout=seconds(120),
        delayed_close_timeout=seconds(0.1),
        early_header_mutation_extensions=[early_header_mutation(settings)],
        access_log=[access_log(settings, cluster) for cluster in log_clusters(settings)],
        access_log_options=(
            hcm.HttpConnectionManagerHcmAccessLogOptions(access_log_flush_interval=seconds(progress))
            if progress is not None
            else None
        ),
        route_config=routes(settings),
        http_filters=http_filters(settings),
    )


def tracing_of(settings: EnvoySettings) -> hcm.HttpConnectionManagerTracing | None:
    """Envoy's own spans: the request, the call to the router, and each attempt at an engine."""
    if settings.trace_collector is None:
        return None
    return hcm.HttpConnectionManagerTracing(
        random_sampling=percent_v3.Percent(value=settings.trace_percent),
        spawn_upstream_span=True,
        provider=trace_v3.TracingHttp(
            name="envoy.tracers.opentelemetry",
            typed_config=Any.pack(
                trace_v3.OpenTelemetryConfig(
                    grpc_service=core.GrpcService(
                        envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=COLLECTOR)
                    ),
                    service_name=settings.node_id,
                )
            ),
        ),
    )


def early_header_mutation(settings: EnvoySettings) -> core.TypedExtensionConfig:
    """Removes what only the router may say, before any filter or route reads it."""
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(
            early.HeaderMutation(
                mutations=[mutation_rules.HeaderMutation(remove=name) for name in settings.internal_headers]
            )
        ),
    )


def access_log(settings: EnvoySettings, cluster: str) -> accesslog.AccessLog:
    """Completions, flags, times and usage, to a router's own port."""
    tags = [
        tracing.CustomTag(
            tag=TICKET_KEY,
            metadata=tracing.CustomTagMetadata(
                kind=metadata.MetadataKind(request=metadata.MetadataKindRequest()),
                metadata_key=metadata_key(TICKET_NAMESPACE, TICKET_KEY),
            ),
        )
    ]
    if settings.envoy_version >= (1, 37):
        tags += [
            tracing.CustomTag(tag="first_body_us", value="%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"),
            tracing.CustomTag(tag="prefill_us", value="%COMMON_DURATION(US_TX_END:US_RX_BODY_BEG:us)%"),
        ]
    return accesslog.AccessLog(
        name="envoy.access_loggers.http_grpc",
        typed_config=Any.pack(
            grpc_log.HttpGrpcAccessLogConfig(
                common_config=grpc_log.CommonGrpcAccessLogConfig(
                    log_name="warmroute",
                    grpc_service=core.GrpcService(
                        envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=cluster), timeout=seconds(0)
                    ),
                    transport_api_version=core.ApiVersion.V3,
                    buffer_flush_interval=seconds(settings.log_flush_interval),
                    buffer_size_bytes=16_384,
                    custom_tags=tags,
                )
            )
        ),
    )


def routes(settings: EnvoySettings) -> route_v3.RouteConfiguration:
    """Routed prefixes through the router; everything else by Envoy's own balancing."""
    without_usage = {
        name: Any.pack(route_v3.FilterConfig(disabled=True))
        for name in envoy_usage.filter_names(settings.envoy_version, streamed=settings.stream_usage)
    }
    without_router = {EXT_PROC: Any.pack(ext_proc.ExtProcPerRoute(disabled=True))}
    if settings.first_token_observer:
        without_router[OBSERVER] = Any.pack(ext_proc.ExtProcPerRoute(disabled=True))
    matched = []
    for number, path in enumerate(settings.usage_free_paths):
        matched += _routes(settings, f"no-usage-{number}", route_v3.RouteMatch(path=path), without_usage)
    for number, prefix in enumerate(settings.routed_prefixes):
        matched += _routes(settings, f"routed-{number}", route_v3.RouteMatch(prefix=prefix))
    if "/" not in settings.routed_prefixes:
        other = WorkerCluster(WORKERS, settings.workers)
        matched.append(
            _route("other", route_v3.RouteMatch(prefix="/"), other, {**without_router, **without_usage})
        )
    return route_v3.RouteConfiguration(
        name="warmroute",
        virtual_hosts=[
            route_v3.VirtualHost(
                name="all",
                domains=["*"],
                routes=matched,
                retry_policy=worker_retry_policy(settings) if settings.retries else None,
                request_body_buffer_limit=settings.body_limit,
            )
        ],
    )


def _routes(
    settings: EnvoySettings, name: str, path: route_v3.RouteMatch, per_filter: dict[str, Any] | None = None
) -> list[route_v3.Route]:
    """A route to each cluster of engines, by the headers the router sets; the last one takes the rest."""
    return [_route(name, path, one, per_filter) for one in worker_clusters(settings)]


def _route(
    name: str, path: route_v3.RouteMatch, cluster: WorkerCluster, per_filter: dict[str, Any] | None = None
) -> route_v3.Route:
    headers = [
        route_v3.HeaderMatcher(name=header, string_match=matcher.StringMatcher(exact=value))
        for header, value in cluster.headers
    ]
    suffix = cluster.name.removeprefix(WORKERS)
    return route_v3.Route(
        name=f"{name}{suffix}",
        match=dataclasses.replace(path, headers=headers),
        route=route_v3.RouteAction(cluster=cluster.name, timeout=seconds(0)),
        typed_per_filter_config=per_filter or {},
    )


def worker_retry_policy(settings: EnvoySettings) -> route_v3.RetryPolicy:
    """Each attempt takes the next endpoint of the router's list, then the fallback policy."""
    died = "reset" if settings.retry_resets else "reset-before-request"
    return route_v3.RetryPolicy(
        retry_on=f"connect-failure,refused-stream,{died},retriable-status-codes",
        retriable_status_codes=[503],
        num_retries=settings.retries,
        retry_back_off=route_v3.RetryPolicyRetryBackOff(
            base_interval=seconds(0.005), max_interval=seconds(0.05)
        ),
        retry_host_predicate=[
            route_v3.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=_previous_hosts()
            )
        ],
        host_selection_retry_max_attempts=_HOST_DRAWS,
    )


def http_filters(settings: EnvoySettings) -> list[hcm.HttpFilter]:
    """In order: router, first-token observer, usage, Envoy's router filter."""
    filters = [hcm.HttpFilter(name=EXT_PROC, typed_config=Any.pack(ext_proc_filter(settings)))]
    if settings.first_token_observer:
        filters.append(hcm.HttpFilter(name=OBSERVER, typed_config=Any.pack(observer_filter())))
    filters += [
        hcm.HttpFilter(name=name, typed_config=Any.pack(message))
        for name, message in envoy_usage.filters(settings.envoy_version, streamed=settings.stream_usage)
    ]
    filters.append(
        hcm.HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(router_v3.Router()))
    )
    return filters


def ext_proc_filter(settings: EnvoySettings) -> ext_proc.ExternalProcessor:
    """Asks the router where the request goes; takes no part in the response."""
    duplex = settings.body_mode is BodyMode.FULL_DUPLEX_STREAMED
    send, skip = ext_proc.ProcessingModeHeaderSendMode.SEND, ext_proc.ProcessingModeHeaderSendMode.SKIP
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=ROUTER),
            timeout=seconds(0),
            retry_policy=core.RetryPolicy(
                retry_on="connect-failure,refused-stream,unavailable,reset",
                num_retries=2,
                retry_back_off=core.BackoffStrategy(base_interval=seconds(0.01), max_interval=seconds(0.05)),
                retry_host_predicate=[
                    core.RetryPolicyRetryHostPredicate(
                        name="envoy.retry_host_predicates.previous_hosts", typed_config=_previous_hosts()
                    )
                ],
                host_selection_retry_max_attempts=3,
            ),
        ),
        failure_mode_allow=settings.fail_open and not duplex,
        status_on_error=(None if settings.fail_open else percent_v3.HttpStatus(code=_UNAVAILABLE)),
        request_attributes=list(settings.request_attributes),
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=send,
            response_header_mode=skip,
            request_body_mode=ext_proc.ProcessingModeBodySendMode[settings.body_mode.value],
            response_body_mode=ext_proc.ProcessingModeBodySendMode.NONE,
            request_trailer_mode=send if duplex else skip,
            response_trailer_mode=skip,
        ),
        message_timeout=seconds(settings.message_timeout),
        max_message_timeout=seconds(settings.max_message_timeout),
        metadata_options=ext_proc.MetadataOptions(
            # Subset hints of Endpoint Picker gateways, and the name of who served on a retry.
            forwarding_namespaces=_namespaces(SUBSET_NAMESPACE, LB_NAMESPACE, *settings.forwarded_namespaces),
            receiving_namespaces=_namespaces(LB_NAMESPACE, TICKET_NAMESPACE),
        ),
    )


def observer_filter() -> ext_proc.ExternalProcessor:
    """Shows the router the first piece of a response without ever delaying it."""
    skip = ext_proc.ProcessingModeHeaderSendMode.SKIP
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=ROUTER), timeout=seconds(0)
        ),
        failure_mode_allow=True,
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=skip,
            response_header_mode=skip,
            request_body_mode=ext_proc.ProcessingModeBodySendMode.NONE,
            response_body_mode=ext_proc.ProcessingModeBodySendMode.STREAMED,
            request_trailer_mode=skip,
            response_trailer_mode=skip,
        ),
        stat_prefix="first_token",
        metadata_options=ext_proc.MetadataOptions(forwarding_namespaces=_namespaces(TICKET_NAMESPACE)),
        observability_mode=True,
    )


def _namespaces(*names: str) -> ext_proc.MetadataOptionsMetadataNamespaces:
    return ext_proc.MetadataOptionsMetadataNamespaces(untyped=list(names))


def _previous_hosts() -> Any:
    return Any.pack(previous_hosts.PreviousHostsPredicate())
