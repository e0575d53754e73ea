import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.errors import ProtocolError
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from extproc.protocol.kv_events import decode, tier_of
from tests.support.kv_captures import RECORDINGS, WIRE, payloads, recorded, wire

VERSIONS = sorted(WIRE, key=lambda version: [int(part) for part in version.split(".")])
H0, H1 = 0x1111111111111111, 0xF222222222222222


def since(version: str, first: str) -> bool:
    return VERSIONS.index(version) >= VERSIONS.index(first)


@pytest.mark.parametrize("version", VERSIONS)
class TestEveryVersion:
    def test_envelope(self, version: str) -> None:
        for item in WIRE[version]:
            batch = decode(wire(version, item))
            assert (batch.timestamp, batch.dp_rank, batch.skipped) == (1.5, 0, 0)
            assert batch.events

    def test_stored(self, version: str) -> None:
        (root,) = decode(wire(version, "stored_root")).events
        (child,) = decode(wire(version, "stored_child")).events
        assert isinstance(root, BlockStored)
        assert isinstance(child, BlockStored)
        assert root.block_hashes == (H0, H1)
        assert (root.parent, child.parent) == (None, H1)
        assert list(root.token_ids) == list(range(100, 164))
        assert (root.block_size, root.tier, root.group, root.lora_name) == (32, Tier.GPU, 0, None)
        assert root.extra_keys == ((None, None) if since(version, "0.18.0") else None)
        assert root.spec_kind == ("full_attention" if since(version, "0.22.0") else None)

    def test_adapter_and_salt(self, version: str) -> None:
        (event,) = decode(wire(version, "stored_lora_salt")).events
        assert isinstance(event, BlockStored)
        assert event.lora_name == ("lA" if since(version, "0.14.0") else "\0lora_id=3")
        assert event.extra_keys == ((("lA", "SALT"),) if since(version, "0.18.0") else None)

    def test_image(self, version: str) -> None:
        (event,) = decode(wire(version, "stored_mm")).events
        assert isinstance(event, BlockStored)
        assert event.extra_keys == (((["img-hash", 5],),) if since(version, "0.18.0") else None)

    def test_removed_cleared_mixed(self, version: str) -> None:
        assert decode(wire(version, "removed")).events == (BlockRemoved((H0, H1)),)
        assert decode(wire(version, "cleared")).events == (AllBlocksCleared(),)
        cleared, stored, removed = decode(wire(version, "mixed")).events
        assert cleared == AllBlocksCleared()
        assert isinstance(stored, BlockStored)
        assert removed == BlockRemoved((H0,))

    def test_offload_without_tokens(self, version: str) -> None:
        (event,) = decode(wire(version, "cpu_placeholder")).events
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.block_size, list(event.token_ids)) == ((11,), 0, [])
        assert event.tier is (Tier.CPU if since(version, "0.10.2") else Tier.GPU)

    def test_hash_of_bytes(self, version: str) -> None:
        if "stored_bytes_hash" in WIRE[version]:
            (event,) = decode(wire(version, "stored_bytes_hash")).events
            assert isinstance(event, BlockStored)
            assert event.block_hashes == (bytes(range(32)),)


def test_versions_are_all_there() -> None:
    assert len(VERSIONS) == 20
    assert {"0.10.0", "0.23.0", "0.24.0", "0.33.0"} <= set(VERSIONS)


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_recorded_message_decodes(name: str) -> None:
    batches = [decode(payload) for payload in payloads(name)]
    assert batches
    assert all(batch.events and not batch.skipped for batch in batches)
    rank = 1 if name.endswith("rank1") else 0
    assert {batch.dp_rank for batch in batches} == {rank}


def test_live_and_replayed_messages_are_the_same() -> None:
    live = list(recorded("basic_live"))
    replayed = list(recorded("basic_replay"))
    assert replayed == [*live, (-1, b"")]


def encode(*events: object, tail: tuple[object, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), *tail])


def test_unknown_events_and_fields_are_skipped() -> None:
    batch = decode(
        encode(
            {"type": "BlockMoved", "x": 1},
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "colour": [1, {"a": 2}]},
            {"type": "AllBlocksCleared", "why": None},
        )
    )
    assert batch.events == (BlockRemoved((1,)), AllBlocksCleared())
    assert batch.skipped == 1
    batch = decode(
        encode(["BlockMoved", 1], ["BlockRemoved", [1], "GPU", 0, "x", "y", "z"], ["AllBlocksCleared"])
    )
    assert batch.events == (BlockRemoved((1,)), AllBlocksCleared())
    assert batch.skipped == 1


def test_both_forms_in_one_message() -> None:
    batch = decode(encode({"type": "BlockRemoved", "block_hashes": [1]}, ["BlockRemoved", [2]]))
    assert batch.events == (BlockRemoved((1,)), BlockRemoved((2,)))


def test_rank_may_be_missing_and_the_envelope_may_grow() -> None:
    assert decode(encode(tail=())).dp_rank is None
    assert decode(encode(tail=(None,))).dp_rank is None
    assert decode(encode(tail=(3, "new", {}))).dp_rank == 3


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("gpu", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu", Tier.CPU),
        ("CPU_TIER1", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("whatever", Tier.DISK),
    ],
)
def test_medium_names_the_tier(medium: str | None, tier: Tier) -> None:
    assert tier_of(medium) is tier


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"hello",
        encode({"block_hashes": [1]}),
        encode({"type": "BlockRemoved", "block_hashes": "x"}),
        encode({"type": "BlockStored"}),
        encode(["BlockStored"]),
        encode([1, 2]),
        encode([]),
        encode("BlockStored"),
        msgspec.msgpack.encode({"ts": 1.5}),
        wire("0.32.0", "mixed")[:-3],
        encode({"type": "BlockRemoved", "block_hashes": [1]}).replace(
            b"BlockRemoved", b"BlockRem\xff\xfe\xfd\xfc"
        ),
        b"\x91" * 5000,
        b"\x92\xcb?\xf8\0\0\0\0\0\0\x91" + b"\x91" * 5000,
        b"\x92\xcb?\xf8\0\0\0\0\0\0\x91\x81\x91\x01\x01",
    ],
)
def test_what_is_not_a_batch_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(payload)


@pytest.mark.parametrize("stamp", [1.5, 0, 7, 200, -1, -200, 1 << 20, 1 << 40, -(1 << 40)])
def test_more_events_than_a_step_makes_are_not_even_decoded(stamp: float) -> None:
    for event in (["AllBlocksCleared"], {"type": "AllBlocksCleared"}, ["Unknown"], []):
        flood = msgspec.msgpack.encode([stamp, [event] * 70_000])
        with pytest.raises(ProtocolError, match="70000 events"):
            decode(flood)
    assert len(decode(msgspec.msgpack.encode([stamp, [["AllBlocksCleared"]] * 1000])).events) == 1000


def test_a_message_longer_than_any_step_is_not_read() -> None:
    tokens = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1] * (5 << 20), 16]]])
    with pytest.raises(ProtocolError, match="longer than any engine's"):
        decode(tokens)


@given(st.binary(max_size=200), st.sampled_from(VERSIONS), st.integers(0, 180))
def test_corrupt_bytes_never_raise_anything_else(noise: bytes, version: str, at: int) -> None:
    whole = wire(version, "mixed")
    for payload in (noise, whole[:at], whole[:at] + noise[:1] + whole[at + 1 :]):
        with contextlib.suppress(ProtocolError):
            decode(payload)
