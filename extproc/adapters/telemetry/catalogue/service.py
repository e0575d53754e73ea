"""How the router itself is doing: streams, peers, held requests, the index, memories of prompts."""

from collections.abc import Sequence

from extproc.adapters.telemetry.metric import (
    BLOCK,
    BYTE,
    ONE,
    REQUEST,
    SECOND,
    Metric,
    counter,
    gauge,
)

BUILD = gauge(
    "warmroute_build_info", ONE, "Always 1; the version that runs, and the policy.", ("version", "policy")
)
HELD = gauge("warmroute_held_requests", REQUEST, "Requests held until a worker has room.", ("pool",))
HELD_BYTES = gauge("warmroute_held_bytes", BYTE, "Of their bodies and prompts.", ("pool",))
HELD_FAULTS = counter(
    "warmroute_admission_faults",
    ONE,
    "Times that holding failed: requests went on as if nothing were held.",
    (),
)
LEASES = gauge("warmroute_leases", REQUEST, "Requests routed and not known to have ended.")
OLDEST_LEASE = gauge("warmroute_oldest_lease_seconds", SECOND, "Age of the oldest of them; 0 without any.")
ACCESS_LOG_STREAMS = gauge(
    "warmroute_access_log_streams",
    "{stream}",
    "Open streams of Envoy's access log, and peers with some, who hand on; at 0, ends of requests are lost.",
)
ACCESS_LOG_ENTRIES = counter(
    "warmroute_access_log_entries", "{entry}", "Entries received, and foreign ones.", ("kind",)
)
PEER_CONNECTED = gauge(
    "warmroute_peer_connected", ONE, "1 while another replica is heard, 0 while it is not.", ("peer",)
)
PEER_SILENT = gauge(
    "warmroute_peer_silent_seconds",
    SECOND,
    "Since its last message; absent once it counts for nothing.",
    ("peer",),
)
PEER_SEQUENCES = gauge(
    "warmroute_peer_sequences", "{sequence}", "Running sequences that it has told of.", ("peer",)
)
PEER_SIGNALS = counter(
    "warmroute_peer_signals",
    "{signal}",
    "News about requests: forwarded to the replica that routed them, taken from others, unknown (of nobody "
    "we know), dropped (not delivered).",
    ("kind",),
)
PEER_CONNECTS = counter(
    "warmroute_peer_connects",
    "{connection}",
    "Times that it began to be heard: many, and it comes and goes.",
    ("peer",),
)
PEER_LISTENERS = gauge("warmroute_peer_listeners", "{replica}", "Other replicas that hear us.")
PEER_REFUSED = counter(
    "warmroute_peer_refused",
    ONE,
    "What was refused of other replicas: call (to us: another token, too many, or of no form), update (about "
    "load, not plausible), signal (about a request, not plausible), replica (updates of one too many), block "
    "(of prompts on their way, beyond what is kept).",
    ("kind",),
)
PEER_INDEXES = counter(
    "warmroute_peer_indexes", ONE, "Times that a starting replica was told what we know of caches.", ()
)
STREAMS = gauge("warmroute_ext_proc_streams", "{stream}", "Open ext_proc streams.")
PASSED = counter(
    "warmroute_ext_proc_passed_through", REQUEST, "Requests left to the gateway's own balancing.", ()
)
ERRORS = counter(
    "warmroute_ext_proc_errors",
    REQUEST,
    "Requests left to the gateway's own balancing by a fault: routing, answer (not sendable), protocol.",
    ("kind",),
)
INDEX_BLOCKS = gauge("warmroute_index_blocks", BLOCK, "Distinct KV blocks known on any worker.")
INDEX_ENTRIES = gauge(
    "warmroute_index_entries",
    BLOCK,
    "KV blocks kept, each counted for every worker that holds it: what `limits.index_blocks` bounds.",
)
INDEX_GIVEN_UP = counter(
    "warmroute_index_given_up", BLOCK, "KV blocks forgotten because of that bound, though they are held.", ()
)
INDEX_RECALLED = counter(
    "warmroute_index_recalled_workers",
    "{worker}",
    "Workers of whose cache a peer or the snapshot knew when we started, and was believed.",
    (),
)
INDEX_BYTES = gauge("warmroute_index_memory_bytes", BYTE, "Memory of the index of KV blocks, estimated.")
ADMIN_CUT = counter(
    "warmroute_admin_connections_cut",
    "{connection}",
    "Connections to the admin server that were cut: silent or slow for too long, or too many at once.",
    (),
)
HASH_STRETCHES = counter(
    "warmroute_prompt_hash_stretches",
    "{stretch}",
    "Stretches of 64 blocks of prompts: `known` had been hashed before, `new` had to be.",
    ("state",),
)
HASH_BLOCKS = gauge("warmroute_prompt_hash_blocks", BLOCK, "KV blocks whose hashes are remembered.")
PROMPT_CHARACTERS = counter(
    "warmroute_prompt_characters",
    "{character}",
    "Characters of prompts: `known` were encoded before, `new` had to be.",
    ("pool", "state"),
)
PROMPT_CACHE_BYTES = gauge(
    "warmroute_prompt_cache_bytes",
    BYTE,
    "Memory of texts encoded before and their ids, estimated.",
    ("pool",),
)
PROMPT_CACHE_EVICTED = counter(
    "warmroute_prompt_cache_evictions",
    "{text}",
    "Pieces of text dropped from that memory to make room: many, and it is too small.",
    ("pool",),
)

PROMPT_PROCESSES = gauge(
    "warmroute_prompt_processes",
    "{process}",
    "Processes that encode long prompts; the first such prompt starts them.",
)
PROMPT_PROCESSES_LOST = counter(
    "warmroute_prompt_processes_lost",
    "{process}",
    "Of these, those that have ended or were stuck; the prompts they had were routed by load.",
    (),
)

SERVICE_METRICS: Sequence[Metric] = (
    BUILD, LEASES, OLDEST_LEASE, ACCESS_LOG_STREAMS, ACCESS_LOG_ENTRIES, STREAMS, PASSED, ERRORS,
    INDEX_BLOCKS, INDEX_ENTRIES, INDEX_GIVEN_UP, INDEX_RECALLED, INDEX_BYTES, HASH_STRETCHES, HASH_BLOCKS,
    PROMPT_CHARACTERS, PROMPT_CACHE_BYTES, PROMPT_CACHE_EVICTED, PROMPT_PROCESSES,
    PROMPT_PROCESSES_LOST, HELD, HELD_BYTES, HELD_FAULTS,
    PEER_CONNECTED, PEER_CONNECTS, PEER_SILENT, PEER_SEQUENCES, PEER_SIGNALS, PEER_LISTENERS,
    PEER_REFUSED, PEER_INDEXES, ADMIN_CUT,
)  # fmt: skip
"""Read when somebody asks."""
