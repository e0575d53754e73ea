"""What is fuzzed, and what must hold whatever comes in.

Each target is a strategy and a context that gives a check of one value. A check raises where a promise is
broken: an exception that is not documented, a reply Envoy would not accept, a lease that stays. What may be
raised is named in the checks.
"""

import asyncio
import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from random import Random
from typing import Any, NamedTuple

import grpc
import msgspec
import yaml
from google.protobuf import json_format
from hypothesis import strategies as st

from extproc import config as configuration
from extproc.adapters.access_log_server import AccessLogService
from extproc.adapters.ext_proc_codec import event_of
from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.errors import ProtocolError
from extproc.core.policies import TokenLoad
from extproc.core.router import Router
from extproc.core.types import Completion, Member, Outcome
from extproc.pb import access_log_pb2, ext_proc_pb2
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.prompt.normalize import normalize
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.engine_metrics import SAMPLE_NAMES, parse_engine_metrics
from extproc.protocol.ext_proc_messages import PassThrough, Route
from extproc.protocol.kv_events import decode
from extproc.protocol.kv_sequence import KvSequence
from extproc.protocol.kv_sequence_types import (
    Apply,
)
from extproc.protocol.members_file import parse_members
from extproc.protocol.model_cards import parse_model_cards
from extproc.protocol.openai import PATHS, BadRequest, InferenceRequest, LoadOnly, parse_request
from extproc.protocol.rejections import malformed
from extproc.protocol.usage import UsageReader
from tests.fuzz import values
from tests.support.core import BLOCK, NAMESPACE, members, request, worker
from tests.support.grpc_host import RecordingRouting, running
from tests.support.kv_captures import WIRE, wire
from tests.support.waiting import until

Check = Callable[[Any], None]


class Target(NamedTuple):
    """Values and their check."""

    strategy: st.SearchStrategy[Any]
    check: Callable[[], AbstractContextManager[Check]]


def plain(check: Check) -> Callable[[], AbstractContextManager[Check]]:
    """A check that needs nothing set up."""
    return lambda: contextlib.nullcontext(check)


# --- request bodies ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def bodies() -> Iterator[Check]:
    """A body is refused as no JSON, routed by load, or becomes tokens; normalized it is still readable."""
    encoder = PromptEncoder.load(tiny_model_path())
    section = {"mode": "apply", "fragment_tag": "document", "volatile_lines": ["Date:"]}
    rules = configuration.Pool.model_validate(
        WORKING["pools"][0] | {"normalization": section}
    ).normalization.rules()

    def check(case: tuple[str, dict[str, str], bytes]) -> None:
        path, headers, data = case
        refusal = 0, 0
        parsed: InferenceRequest | LoadOnly | None
        try:
            parsed = parse_request("POST", path, headers, data)
        except BadRequest as error:
            refusal = error.status, len(error.body())
            parsed = None
        if parsed is None:
            assert refusal[0] == 400
            assert refusal[1] < 500  # it does not repeat the body
            return
        if isinstance(parsed, LoadOnly):
            assert parsed.reason
            return
        assert 1 <= parsed.sequences <= 16_384
        assert parsed.max_output_tokens is None or abs(parsed.max_output_tokens) < 1 << 31
        for name in (parsed.model, parsed.user, parsed.prompt_cache_key):
            assert name is None or name.encode()  # it can be written down
        with contextlib.suppress(Unsupported):
            encoded = encoder.encode(parsed)
            assert encoded.prompts
            assert all(len(prompt) for prompt in encoded.prompts)
        if not headers:
            result = normalize(parsed.kind, data, rules)
            again = parse_request("POST", path, {}, result.body)
            assert isinstance(again, InferenceRequest)
            assert again.sequences == parsed.sequences

    yield check


json_bodies = st.builds(values.dumped, values.body)
body_cases = st.one_of(
    st.tuples(
        st.sampled_from(sorted(PATHS)), st.just({}), json_bodies | values.damaged(json_bodies) | st.binary()
    ),
    st.tuples(
        st.sampled_from(sorted(PATHS)),
        st.just({"content-encoding": "gzip"}),
        values.damaged(st.builds(gzip.compress, json_bodies)),
    ),
)


# --- ext_proc ----------------------------------------------------------------------------------------------


def _any_message(fields: dict[str, Any]) -> ext_proc_pb2.ProcessingRequest:
    return json_format.ParseDict(fields, ext_proc_pb2.ProcessingRequest())


header_lists = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(
                [":method", ":path", ":status", "content-type", "x-request-id", "content-encoding"]
            )
            | st.text(st.characters(codec="ascii"), max_size=6),
            "value": st.sampled_from(["POST", "/v1/chat/completions", "200", "application/json", "gzip"])
            | st.text(st.characters(codec="utf-8"), max_size=8),
        }
    ),
    max_size=5,
)
metadata = st.dictionaries(
    st.sampled_from(["envoy.lb", "envoy.lb.subset_hint", "warmroute", "other"]),
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=6)
        | st.sampled_from(["ticket", "x-gateway-destination-endpoint-subset"]),
        st.recursive(
            st.none() | st.booleans() | st.text(st.characters(codec="utf-8"), max_size=5) | st.integers(0, 9),
            lambda inner: st.lists(inner, max_size=2),
            max_leaves=4,
        ),
        max_size=2,
    ),
    max_size=2,
)


@st.composite
def ext_proc_messages(draw: st.DrawFn) -> list[ext_proc_pb2.ProcessingRequest]:
    """Parts in nearly the order Envoy sends them in."""
    modes = {
        "requestBodyMode": draw(st.integers(0, 5) | st.just(99)),
        "responseBodyMode": draw(st.integers(0, 5)),
    }
    order = draw(
        st.sampled_from(["hb", "hbb", "hbbt", "hbHB", "hbtHBT", "hHB", "h", "b", "HB", "hbh", ""])
        | st.text("hbtHBTo", max_size=7)
    )
    found = []
    for position, kind in enumerate(order):
        name = "request" if kind in "hbto" else "response"
        if kind in "hH":
            part: dict[str, Any] = {
                f"{name}Headers": {
                    "headers": {"headers": draw(header_lists)},
                    "endOfStream": draw(st.booleans()),
                }
            }
        elif kind in "bB":
            part = {f"{name}Body": {"endOfStream": draw(st.booleans())}}
        elif kind in "tT":
            part = {f"{name}Trailers": {}}
        else:
            part = {}
        if position == 0 or draw(st.integers(0, 9)) == 0:
            part["protocolConfig"] = modes
        if draw(st.integers(0, 4)) == 0:
            part["metadataContext"] = {"filterMetadata": draw(metadata)}
        if draw(st.integers(0, 9)) == 0:
            part["attributes"] = draw(metadata)
        if draw(st.integers(0, 19)) == 0:
            part["observabilityMode"] = True
        message = _any_message(part)
        if kind == "b":
            message.request_body.body = draw(json_bodies | st.binary(max_size=70_000))
        elif kind == "B":
            message.response_body.body = draw(
                st.binary(max_size=100) | st.just(b'{"usage":{"prompt_tokens":1}}')
            )
        found.append(message)
    return found


answers = st.sampled_from(
    [
        Route(("10.0.0.1:8000",), "lease"),
        Route(None, "lease", {"x-pool": "a"}),
        Route(("10.0.0.1:8000",), "lease", {}, b"replaced"),
        Route((), "lease"),
        Route(("not an endpoint\n",), "lease", {"bad header\n": "x"}),
        PassThrough(),
        malformed("no"),
        RuntimeError("a bug"),
    ]
)


@contextlib.contextmanager
def ext_proc() -> Iterator[Check]:
    """A stream ends without an error, each part is answered at most once, and each lease is reported once."""
    with asyncio.Runner() as runner:
        routing = RecordingRouting()
        host_context = running(routing)
        host = runner.run(host_context.__aenter__())

        async def exchange(messages: list[ext_proc_pb2.ProcessingRequest]) -> list[Any]:
            call = host.stream()
            let_go = False  # before the end: then gRPC's client makes a status of its own
            try:
                for message in messages:
                    await call.write(message)
                await call.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                let_go = True
            replies = []
            with contextlib.suppress(*((grpc.aio.AioRpcError,) if let_go else ())):
                replies = [reply async for reply in call]
                assert (await call.code()).name == "OK"
            await until(lambda: not host.ext_proc.counters.active)
            return replies

        def check(case: tuple[list[ext_proc_pb2.ProcessingRequest], Any]) -> None:
            messages, routing.answer = case
            routing.signals.clear()
            routing.requests.clear()
            routing.completions.clear()
            counters = host.ext_proc.counters
            failed_before = counters.routing_errors
            routed_before = counters.routed
            replies = runner.run(exchange(messages))
            assert all(reply.WhichOneof("response") for reply in replies)
            assert len(routing.requests) <= 1
            if not isinstance(routing.answer, RuntimeError):
                assert counters.routing_errors == failed_before
            refusals = [reply for reply in replies if reply.HasField("immediate_response")]
            assert len(refusals) <= 1
            assert not refusals or replies[-1] is refusals[0]
            sent = [message.WhichOneof("request") for message in messages]
            for kind in ("request_headers", "response_headers", "request_trailers", "response_trailers"):
                assert sum(reply.HasField(kind) for reply in replies) <= sent.count(kind)
            ended = [signal for signal in routing.signals if signal[0] == "stream_ended"]
            assert len(ended) == counters.routed - routed_before

        try:
            yield check
        finally:
            runner.run(host_context.__aexit__(None, None, None))


# --- what engines say --------------------------------------------------------------------------------------


def a_router() -> Router:
    """With three workers."""
    costs = CostSettings()
    numbers = iter(range(10**9))
    facts = PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, BLOCK)
    router = Router(
        TokenLoad(costs),
        Random(1),
        new_lease_id=lambda: f"lease-{next(numbers)}",
        pools={"default": facts},
        costs=costs,
    )
    router.on_membership(members(3), 0.0)
    return router


def _still_decides(router: Router) -> None:
    decision = router.schedule(request(range(1, 100)), 1.0)
    assert decision.chosen.worker in {worker(number) for number in range(3)}
    assert router.release(decision.lease_id, Completion(Outcome.FINISHED), 1.0) is not None
    assert len(router.ledger) == 0


handles = st.integers(0, 3) | st.integers(0, (1 << 64) - 1) | st.binary(max_size=32)
kv_events = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]),
            "block_hashes": st.lists(handles, max_size=4),
        },
        optional={
            "parent_block_hash": st.none() | handles,
            "token_ids": st.lists(st.integers(-1, 1 << 33), max_size=40)
            | st.lists(st.integers(0, 9), min_size=16, max_size=16),
            "block_size": st.integers(-1, 64) | st.just(16),
            "medium": st.none() | values.text,
            "lora_name": st.none() | values.text,
            "lora_id": st.none() | st.integers(),
            "extra_keys": st.none() | st.lists(st.none() | st.lists(values.scalar, max_size=2), max_size=2),
            "group_idx": st.none() | st.integers(-1, 5),
        },
    ),
    st.lists(values.scalar | st.lists(handles, max_size=3), max_size=8),
)


def _packed(batch: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(batch)
    except (OverflowError, UnicodeEncodeError):
        return b""


captured = st.sampled_from([wire(version, item) for version in WIRE for item in WIRE[version]])
payloads = st.one_of(
    st.builds(
        lambda ts, events, rank: _packed([ts, events, rank]),
        st.floats() | st.integers(-5, 5),
        st.lists(kv_events, max_size=4),
        st.none() | st.integers(-1, 3),
    ),
    values.damaged(captured),
    captured,
    st.binary(max_size=60),
)
stream_steps = st.lists(
    st.tuples(
        st.sampled_from(["live", "live", "live", "replayed", "end", "connected", "disconnected", "tick"]),
        st.integers(0, 12) | st.integers(0, (1 << 64) - 1),
        payloads,
    ),
    max_size=12,
)


def check_kv_stream(steps: list[tuple[str, int, bytes]]) -> None:
    """Any order of messages, any bytes in them: applied or not read, and the router still decides."""
    machine, router, now = KvSequence(replay=True), a_router(), 0.0
    for kind, number, payload in steps:
        now += 1.0
        actions = _stepped(machine, kind, number, payload, now)
        budget = 10_000
        while actions:
            budget -= 1
            assert budget > 0
            action = actions.pop(0)
            if not isinstance(action, Apply):
                continue
            try:
                batch = decode(action.payload)
            except ProtocolError:
                actions += machine.unreadable(action.seq)
                continue
            router.on_kv_events(worker(0), batch.events, now)
        deadline = machine.next_deadline()
        assert deadline is None or deadline >= 0
    _still_decides(router)


def _stepped(machine: KvSequence, kind: str, number: int, payload: bytes, now: float) -> list[Any]:
    match kind:
        case "live":
            return machine.live(number, payload, now)
        case "replayed":
            return machine.replayed(number, payload, now)
        case "end":
            return machine.replay_end(now)
        case "connected":
            return machine.connected(now)
        case "disconnected":
            return machine.disconnected(now)
        case _:
            return machine.tick(now)


labels = st.dictionaries(
    st.sampled_from(["engine", "model_name", "le", "max_lora", "block_size", "num_gpu_blocks"])
    | values.odd_text,
    st.sampled_from(["0", "1", "-1", "99999999999999999999", "16", "x"]) | values.odd_text,
    max_size=3,
)
sample_lines = st.builds(
    lambda name, marks, value, tail: (
        f"{name}"
        + ("{" + ",".join(f'{key}="{mark}"' for key, mark in marks.items()) + "}" if marks else "")
        + f" {value}{tail}"
    ),
    st.sampled_from(SAMPLE_NAMES) | values.odd_text,
    labels,
    st.sampled_from(["1", "0.5", "NaN", "+Inf", "-Inf", "-3", "1e400", "", "1 1", "0x10"]) | values.odd_text,
    st.sampled_from(["", "", " 1700000000", " # {} 1"]),
)
pages = st.builds(
    lambda lines, end: ("\n".join(lines) + end).encode("utf-8", "surrogatepass"),
    st.lists(sample_lines | st.just("# HELP x y") | values.odd_text, max_size=8),
    st.sampled_from(["\n", "\n", "", "\r\n"]),
)


def check_metrics(page: bytes) -> None:
    """A page gives figures or a `ProtocolError`; figures do not stop the router."""
    router = a_router()
    try:
        by_rank = parse_engine_metrics(page)
    except ProtocolError:
        return
    router.on_metrics(worker(0).endpoint, by_rank, 1.0)
    _still_decides(router)


def check_model_cards(data: bytes) -> None:
    """A list of models, or a `ProtocolError`."""
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(card.id, str) for card in parse_model_cards(data))


@st.composite
def answer_pieces(draw: st.DrawFn) -> tuple[str | None, list[bytes]]:
    """An answer, cut anywhere."""
    usage = st.fixed_dictionaries({"usage": values.tree | st.dictionaries(values.text, values.scalar)})
    events = draw(st.lists(usage | values.tree, max_size=4))
    if draw(st.booleans()):
        whole = b"".join(b"data: " + values.dumped(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    else:
        whole = values.dumped(events[0] if events else {})
    whole = draw(values.damaged(st.just(whole)))
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    kinds = st.sampled_from([None, "application/json", "text/event-stream; charset=utf-8"]) | values.odd_text
    return draw(kinds), [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def check_usage(case: tuple[str | None, list[bytes]]) -> None:
    """Usage is counts or nothing, and does not depend on where an answer was cut."""
    kind, pieces = case
    found = []
    for parts in (pieces, [b"".join(pieces)]):
        reader = UsageReader(kind)
        for piece in parts:
            reader.feed(piece)
        usage = reader.finish()
        found.append(usage)
        if usage is not None:
            for count in (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens):
                assert count is None or (isinstance(count, int) and 0 <= count < 1 << 54)
    assert found[0] == found[1]


# --- what Envoy and operators say --------------------------------------------------------------------------


@st.composite
def log_entries(draw: st.DrawFn) -> access_log_pb2.HTTPAccessLogEntry:
    """One entry of an access log."""
    entry = access_log_pb2.HTTPAccessLogEntry()
    common, response = entry.common_properties, entry.response
    figures = st.sampled_from(["-", "", "12", "9" * 5000, "-1", "1.5", "²", "٣"]) | values.odd_text.filter(
        lambda text: text.isascii()
    )
    for tag in draw(st.lists(st.sampled_from(["ticket", "first_body_us", "prefill_us", "x"]), max_size=4)):
        common.custom_tags[tag] = draw(figures)
    common.access_log_type = draw(st.integers(0, 12))
    common.intermediate_log_entry = draw(st.booleans())
    common.upstream_request_attempt_count = draw(st.integers(0, 9))
    if draw(st.booleans()):
        common.duration.seconds = draw(st.integers(-(1 << 40), 1 << 40))
    address = common.upstream_remote_address.socket_address
    address.address = draw(st.sampled_from(["", "10.0.0.1", "::1", "nonsense"]))
    address.port_value = draw(st.integers(0, 70_000))
    response.response_code.value = draw(st.integers(0, 1 << 31))
    response.response_body_bytes = draw(st.integers(0, 1 << 63))
    response.response_code_details = draw(st.text(st.characters(codec="utf-8"), max_size=9))
    for name, fields in draw(
        st.dictionaries(
            st.sampled_from(["llm.usage", "envoy.lb", "warmroute"]),
            st.dictionaries(
                st.sampled_from(["prompt_tokens", "completion_tokens", "cached_tokens", "ticket"]),
                st.none() | st.booleans() | st.floats() | st.text(st.characters(codec="utf-8"), max_size=4),
            ),
            max_size=2,
        )
    ).items():
        for key, value in fields.items():
            if value is None:
                common.metadata.filter_metadata[name].fields[key].null_value = 0
            else:
                common.metadata.filter_metadata[name].update({key: value})
    return entry


def check_access_log(entries: list[access_log_pb2.HTTPAccessLogEntry]) -> None:
    """Every entry is taken, or counted as not ours."""
    service = AccessLogService(RecordingRouting())
    for entry in entries:
        service._take(entry)
    assert service.counters.errors == 0
    assert service.counters.entries == len(entries)


WORKING = yaml.safe_load(
    """
    listen: 127.0.0.1:50051
    policy: token-load
    limits: {body_bytes: 1000}
    cost: {cold_share: 0.5}
    tenants: {identity: [{header: x-tenant}], policies: {acme: {pools: [a], weight: 2}}}
    rollout: {mode: shadow, classes: [{name: c, pools: [a], mode: enforce}]}
    aliases: {gpt: tiny}
    admin: {listen: ''}
    envoy: {eds: auto}
    pools:
      - {name: a, model: {names: [tiny]}, block_size: 16, discovery: {static: [10.0.0.1:8000]}}
      - {name: b, model: {names: [other]}, discovery: {dns: {name: engines.test, port: 8000}}}
    """
)


@st.composite
def configurations(draw: st.DrawFn) -> str:
    """A working configuration with something else in one or two places, as YAML; or damaged as text."""
    data = json.loads(json.dumps(WORKING))
    for _ in range(draw(st.integers(1, 2))):
        inner: Any = data
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = draw(st.sampled_from(keys))
            if not isinstance(inner[key], dict | list) or not inner[key] or draw(st.integers(0, 2)) == 0:
                break
            inner = inner[key]
        inner[key] = draw(values.tree)
    text = yaml.safe_dump(data, allow_unicode=True)
    if draw(st.integers(0, 3)) == 0:
        text = draw(values.damaged(st.just(text.encode("utf-8", "surrogatepass")))).decode("utf-8", "replace")
    return text


def check_configuration(text: str) -> None:
    """A configuration is read, or a `ConfigError` says what is wrong."""
    with contextlib.suppress(configuration.ConfigError):
        configuration.parse(text, secrets=False)


member_entry = st.fixed_dictionaries(
    {"endpoint": st.sampled_from(["10.0.0.1:8000", "[::1]:80", "x", "a:1"]) | values.tree},
    optional={
        "dp_size": values.scalar,
        "dp_start_rank": values.scalar,
        "kv_events": values.scalar,
        "cold": values.scalar,
        "zone": values.tree,
    },
)
member_files = st.builds(
    lambda value: yaml.safe_dump(value, allow_unicode=True),
    st.lists(member_entry | values.tree, max_size=3)
    | st.fixed_dictionaries({"workers": st.lists(member_entry, max_size=3) | values.tree})
    | st.fixed_dictionaries({"resources": st.lists(values.tree, max_size=3)})
    | values.tree,
)


def check_members(text: str) -> None:
    """A file lists workers, or a `ProtocolError` says why not."""
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(member, Member) for member in parse_members(text, Member("", "default")))


def check_events(messages: list[ext_proc_pb2.ProcessingRequest]) -> None:
    """Any message is an event, none, or a `ProtocolError`."""
    for message in messages:
        with contextlib.suppress(ProtocolError):
            event_of(message)


TARGETS: dict[str, Target] = {
    "bodies": Target(body_cases, bodies),
    "ext-proc": Target(st.tuples(ext_proc_messages(), answers), ext_proc),
    "ext-proc-events": Target(ext_proc_messages(), plain(check_events)),
    "kv-stream": Target(stream_steps, plain(check_kv_stream)),
    "metrics": Target(pages | values.damaged(pages), plain(check_metrics)),
    "model-cards": Target(
        json_bodies
        | values.damaged(st.builds(values.dumped, st.fixed_dictionaries({"data": st.lists(values.tree)}))),
        plain(check_model_cards),
    ),
    "usage": Target(answer_pieces(), plain(check_usage)),
    "access-log": Target(st.lists(log_entries(), max_size=4), plain(check_access_log)),
    "configuration": Target(configurations(), plain(check_configuration)),
    "members": Target(member_files, plain(check_members)),
}
