"""Comments for generated Envoy YAML: the reason of a value, above the value.

`NOTES` maps the end of a key path to a comment. Keys of lists count, their indices do not; `name=x` stands
for the entry whose name is `x`. Every comment appears once, at the first place that matches.
"""

import re

_DRAWS = (
    "A retry for which the router names nobody draws so often for a worker not tried before. Those that\n"
    "refuse connections have the fewest requests and are drawn most: with the usual 5 they are met again."
)

NOTES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("node",), "Names of this Envoy. Obligatory as soon as endpoints come from a file or a server."),
    (
        ("typed_config", "tracing"),
        "The router's spans are children of these, and so are an engine's: traceparent goes along to both.",
    ),
    (("tracing", "random_sampling"), "Share of requests traced where the client has not decided."),
    (("tracing", "spawn_upstream_span"), "One span for each attempt, so that retries are seen."),
    (
        ("typed_config", "stream_idle_timeout"),
        "The longest silence on a request. Envoy's default of 5 minutes would cut very long prefills.",
    ),
    (("typed_config", "request_timeout"), "The longest time a client may take to send its request."),
    (
        ("typed_config", "delayed_close_timeout"),
        "The default of 1 s delays a client's view of an answer that broke off.",
    ),
    (
        ("typed_config", "early_header_mutation_extensions"),
        (
            "Clients must not say what only the router may say. This happens before routes and filters read\n"
            "the headers; a header mutation *filter* would come too late."
        ),
    ),
    (
        ("name=envoy.access_loggers.http_grpc",),
        "Completions, failures, first-body times and usage go to the router: same address as ext_proc.",
    ),
    (
        ("common_config", "buffer_flush_interval"),
        "Envoy's default of 1 s would keep load counted that is gone.",
    ),
    (
        ("access_log_options", "access_log_flush_interval"),
        "Intermediate entries: the router sees that a long answer is still alive.",
    ),
    (
        ("routes", "name=no-usage-0"),
        "Large JSON answers without useful usage: Envoy does not buffer them to read it.",
    ),
    (("routes", "name=routed-0"), "Inference: through the router."),
    (
        ("routes", "name=other"),
        "Health, metrics and the rest: balanced by Envoy alone, the router is not asked.",
    ),
    (
        ("route", "timeout"),
        "An answer may take as long as it takes; silence is bounded by stream_idle_timeout.",
    ),
    (
        ("virtual_hosts", "retry_policy"),
        (
            "Consumes the router's ordered list: each attempt takes the next endpoint. `reset` is for\n"
            "workers that accept a request and die before they answer; the work is done again. Where one\n"
            "request might kill engine after engine, make it `reset-before-request`."
        ),
    ),
    (("virtual_hosts", "retry_policy", "host_selection_retry_max_attempts"), _DRAWS),
    (("route", "retry_policy", "host_selection_retry_max_attempts"), _DRAWS),
    (
        ("virtual_hosts", "request_body_buffer_limit"),
        (
            "The largest request body, for HTTP/1 and HTTP/2; above it the client gets 413. It only raises\n"
            "the listener's per_connection_buffer_limit_bytes; Envoy's default for both is 1 MiB."
        ),
    ),
    (
        ("http_filters", "name=envoy.filters.http.ext_proc"),
        "Asks the router where the request goes. It takes no part in the response.",
    ),
    (("typed_config", "grpc_service", "timeout"), "The stream lives as long as the request."),
    (("grpc_service", "retry_policy"), "With several router replicas, another is tried when one refuses."),
    (
        ("typed_config", "failure_mode_allow"),
        "Router down, slow or wrong: the request goes on, balanced by Envoy.",
    ),
    (("processing_mode", "request_body_mode"), "The router decides from the request body."),
    (("typed_config", "message_timeout"), "The longest wait for the router. Envoy's default is 0.2 s."),
    (
        ("typed_config", "max_message_timeout"),
        "Allows the router to hold a request in its queue, up to this long.",
    ),
    (
        ("metadata_options", "receiving_namespaces"),
        "Metadata of other namespaces would be dropped without a word.",
    ),
    (
        ("http_filters", "name=envoy.filters.http.ext_proc.first_token"),
        "Shows the router the first piece of each answer, and never delays one.",
    ),
    (
        ("http_filters", "name=envoy.filters.http.sse_to_metadata"),
        (
            "Lifts usage out of streamed answers, without changing a byte. Remove it if upstreams might\n"
            "send events whose data is a bare JSON scalar (`data: null`): they crash this filter."
        ),
    ),
    (
        ("http_filters", "name=envoy.filters.http.json_to_metadata"),
        "The same for JSON answers. It buffers them: see per_connection_buffer_limit_bytes.",
    ),
    (
        ("listeners", "per_connection_buffer_limit_bytes"),
        "A JSON answer above this limit would become a 500.",
    ),
    (
        ("common_http_protocol_options", "idle_timeout"),
        "Below the engine's keep-alive (uvicorn: 5 s), or requests meet connections just being closed.",
    ),
    (
        ("eds_config", "api_config_source"),
        "The workers come from Warmroute, and stay as they are while it cannot be reached.",
    ),
    (
        ("clusters", "original_dst_lb_config"),
        (
            "One destination, from metadata that no client can set. No fallback, and no balancing without\n"
            "the router: set `fallbacks: 1` in warmroute.yaml, and prefer standalone.yaml where Envoy can\n"
            "know the workers."
        ),
    ),
    (("circuit_breakers",), "Envoy's default is 1,024, and merely open streams count."),
    (
        ("outlier_detection",),
        (
            "Engines that refuse connections, or break them off, twice in a row are left out for seconds\n"
            "where Envoy balances alone. Those that the router names are taken all the same."
        ),
    ),
    (
        ("typed_config", "override_host_sources"),
        "Metadata only. A `header` source could be sent by any client.",
    ),
    (("typed_config", "selected_host_key"), "Tells who really served, after retries."),
    (("typed_config", "fallback_policy"), "When the router has not answered or its list is used up."),
    (
        ("http2_protocol_options", "connection_keepalive"),
        "Finds a router that vanished without closing its connections.",
    ),
    (("admin",), "Envoy's admin interface: keep it local."),
)

_LINE = re.compile(r"(?P<indent> *)(?P<dashes>(?:- )*)(?P<key>[^\s:'][^:]*):(?: (?P<value>.*))?")


def annotate(text: str) -> str:
    """`text` (block-style YAML as PyYAML writes it) with a comment line above each noted value."""
    open_notes = list(NOTES)
    stack: list[tuple[int, str]] = []
    out: list[str] = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None:
            start = len(match["indent"])
            depth = start + len(match["dashes"])
            # A dash starts a new entry: the keys of the entry before it are closed.
            while stack and stack[-1][0] >= (depth if not match["dashes"] else start + 1):
                stack.pop()
            stack.append((depth, match["key"]))
            for note in _matching(open_notes, [key for _, key in stack], match["value"]):
                open_notes.remove(note)
                out += [" " * start + "# " + part for part in note[1].splitlines()]
        out.append(line)
    return "\n".join(out) + "\n"


def _matching(
    notes: list[tuple[tuple[str, ...], str]], path: list[str], value: str | None
) -> list[tuple[tuple[str, ...], str]]:
    named = [*path[:-1], f"name={value}"] if path[-1] == "name" else path
    return [note for note in notes if tuple(named[-len(note[0]) :]) == note[0]]
