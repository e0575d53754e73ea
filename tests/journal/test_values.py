import dataclasses
from array import array

import msgspec
import pytest

from extproc.core.namespace import Namespace
from extproc.core.router import Router
from extproc.core.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Completion,
    HistogramTotals,
    KvEvent,
    Member,
    Outcome,
    Rendition,
    RoutingRequest,
    Tier,
    WorkerId,
)
from extproc.journal import values
from extproc.journal.symbols import SymbolReader, SymbolWriter
from extproc.journal.tap import INPUTS
from extproc.journal.values import (
    hashed,
    pack_event_hashes,
    pack_events,
    pack_prompt_hashes,
    pack_request,
    parameters,
    plain,
    restored,
    unpack_event_hashes,
    unpack_events,
    unpack_prompt_hashes,
    unpack_request,
)
from tests.support.core import NAMESPACE, metrics


def through(packed):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(packed))


VALUES = {
    ("release", "completion"): Completion(Outcome.FAILED, status=503, first_body_ms=1.5, labels={"a": "b"}),
    ("on_metrics", "by_rank"): {0: metrics(kv_usage=0.25, ttft=HistogramTotals(1.5, 3.0)), 1: metrics()},
    ("on_membership", "members"): (Member("a:1", "p", 2, "tcp://*:1"), Member("b:1")),
    ("on_kv_trust", "worker"): WorkerId("a:1", 3),
    ("on_kv_trust", "trusted"): True,
    ("tick", "now"): 0.1 + 0.2,
}


@pytest.mark.parametrize(("where", "value"), VALUES.items(), ids=str)
def test_arguments_survive_by_their_methods_types(where, value):
    method, name = where
    hint = parameters(getattr(Router, method))[name]
    assert restored(through(plain(value)), hint) == value


def test_every_field_of_a_request_has_a_form():
    """A field that is added must be one that can be written, or get a form of its own."""
    for field in dataclasses.fields(RoutingRequest):
        hint = values._REQUEST_FIELDS.get(field.name)
        if hint is None:
            assert field.name in values._OMITTED
        else:
            msgspec.json.schema_components([hint])  # refuses types it cannot read


def test_every_parameter_of_every_input_has_a_form():
    for method in INPUTS:
        for name, hint in parameters(getattr(Router, method)).items():
            if name not in ("request", "events"):
                msgspec.json.schema_components([hint])  # refuses types it cannot read


FULL = RoutingRequest(
    request_id="r",
    model="m",
    pool="p",
    namespace=Namespace("a", "b", "lora", "salt"),
    prompts=(array("I", range(40)), array("I", range(5))),
    prompt_tokens=45,
    max_output_tokens=9,
    sequences=2,
    stream=True,
    subset=frozenset({"a:1", "b:2"}),
    session_key="who",
    policy="round-robin",
    expected_output_tokens=3,
    tenant="t",
    prompt_class="chat",
    renditions={"next": Rendition("t2", (array("I", range(7)),))},
)


def test_a_request_survives_but_for_its_prompts_and_secrets():
    again = unpack_request(through(pack_request(FULL, 99)))
    assert [len(prompt) for prompt in again.prompts] == [40, 5]
    assert not any(any(prompt) for prompt in again.prompts)
    assert again.session_hash == 99
    assert again.session_key == hashed("who") != "who"
    assert again.namespace == Namespace("a", "b", "lora", hashed("salt"))
    (rendition,) = again.renditions.values()
    assert (rendition.tokenizer_revision, len(rendition.prompts[0]), any(rendition.prompts[0])) == (
        "t2",
        7,
        False,
    )
    for name in RoutingRequest.__slots__:
        if name not in ("prompts", "renditions", "chains", "session_key", "session_hash", "namespace"):
            assert getattr(again, name) == getattr(FULL, name), name


def test_a_request_whose_hashes_were_known_beforehand_has_as_many_prompts():
    ask = RoutingRequest("r", "m", "p", NAMESPACE, chains={16: ((1,), (2,))})
    assert unpack_request(through(pack_request(ask, 1))).keyed_prompts == 2


def test_a_request_by_load_only_has_none():
    ask = RoutingRequest("r", "m", "p", NAMESPACE, load_only="too-long")
    again = unpack_request(through(pack_request(ask, 1)))
    assert (again.keyed_prompts, again.load_only) == (0, "too-long")


def test_hashes_survive():
    prompts = {("a", 16): ((1, 2**64 - 1), ()), ("b", 32): ((7,), ())}
    packed = through(pack_prompt_hashes(prompts, SymbolWriter()))
    assert unpack_prompt_hashes(packed, SymbolReader()) == prompts
    events = [((1, b"x" * 32), [11, 12]), ((5,), None), ((7, 8), [7, 8])]
    packed = through(pack_event_hashes(events, SymbolWriter()))
    assert unpack_event_hashes(packed, SymbolReader()) == events


EVENTS: list[KvEvent] = [
    BlockStored(
        (1, b"x" * 32), None, range(100, 132), 16, "lora", (("lora", "salt"), ("lora",)), Tier.CPU, 2
    ),
    BlockStored((5,), 1, array("I", range(16)), 16, spec_kind="full_attention"),
    BlockStored((5,), b"x" * 32, (), 16),
    BlockStored((7, 8), None, (), 16, chained=True),
    BlockRemoved((1, b"y"), Tier.DISK, 3),
    AllBlocksCleared(),
]


def test_events_survive_but_for_their_tokens():
    again = unpack_events(through(pack_events(EVENTS, SymbolWriter())), SymbolReader())
    for before, after in zip(EVENTS, again, strict=True):
        assert type(after) is type(before)
        if not isinstance(before, BlockStored):
            assert after == before
            continue
        assert len(after.token_ids) == len(before.token_ids)
        assert after.extra_keys is None
        for name in BlockStored.__slots__:
            if name not in ("token_ids", "extra_keys"):
                assert getattr(after, name) == getattr(before, name), name
