"""vLLM's KV event payloads: msgpack bytes to `core.types` events.

A payload is the array `[ts, [event, ...], data_parallel_rank]`. Up to vLLM 0.23 an event is an array whose
first element is its name; from 0.24 on it is a map with the name under `type`. Trailing or optional fields
are absent when they equal their default, and newer versions add fields at the end: both forms are read by
one set of field names, and whatever is not known here is skipped.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from extproc.core.errors import ProtocolError
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier

Handle = int | bytes

MAX_PAYLOAD_BYTES = 4 << 20
"""A longer message is not read. A step of 64,000 new tokens makes less than one MiB."""
_MOST_EVENTS = 1 << 16
# msgpack's numbers by their first byte: how long they are.
_NUMBER_BYTES = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """What one message says.

    Attributes:
        timestamp: the engine's wall clock when it made the batch, in seconds.
        events: in the order they happened.
        dp_rank: the engine's data-parallel rank; None if the message does not say.
        skipped: events with a name that is not known here.
    """

    timestamp: float
    events: tuple[KvEvent, ...]
    dp_rank: int | None
    skipped: int = 0


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: tuple[Handle, ...]
    parent_block_hash: Handle | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: tuple[Handle, ...]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_Wire = _Stored | _Removed | _Cleared

_MAPS = msgspec.msgpack.Decoder(_MapBatch)
_ARRAYS = msgspec.msgpack.Decoder(_ArrayBatch)
_RAW = msgspec.msgpack.Decoder(_RawBatch)
_MAP_TYPES: dict[object, type[_Wire]] = {
    "BlockStored": _Stored,
    "BlockRemoved": _Removed,
    "AllBlocksCleared": _Cleared,
}
_ARRAY_TYPES: dict[object, type[_Wire]] = {
    "BlockStored": _StoredArray,
    "BlockRemoved": _RemovedArray,
    "AllBlocksCleared": _ClearedArray,
}
_CLEARED = AllBlocksCleared()
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)


def decode(payload: bytes) -> KvEventBatch:
    """The events of one message.

    Raises:
        ProtocolError: the bytes are not a KV event batch of any known version, or more than one step makes.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a KV event message of {len(payload)} bytes is longer than any engine's")
    announced = _announced(payload)
    if announced > _MOST_EVENTS:
        raise ProtocolError(f"a KV event message with {announced} events has more than any engine's")
    try:
        return _batch(_MAPS.decode(payload))
    except _UNREADABLE:
        pass
    try:
        return _batch(_ARRAYS.decode(payload))
    except _UNREADABLE:
        pass
    # Only batches with an event of an unknown name, or of both forms, come this far.
    try:
        raw = _RAW.decode(payload)
        events = [event for event in map(_known, raw.events) if event is not None]
    except _UNREADABLE as error:
        raise ProtocolError(
            f"KV event payload of {len(payload)} bytes cannot be read ({error}): "
            "does another kind of publisher use this endpoint?"
        ) from error
    return KvEventBatch(
        raw.ts, tuple(map(_event, events)), raw.data_parallel_rank, skipped=len(raw.events) - len(events)
    )


def tier_of(medium: str | None) -> Tier:
    """The tier an engine's `medium` names; engines that do not say mean the GPU."""
    if medium is None or medium == "GPU":
        return Tier.GPU
    name = medium.upper()
    if name == "GPU":
        return Tier.GPU
    return Tier.CPU if name.startswith("CPU") else Tier.DISK


def _batch(batch: _MapBatch | _ArrayBatch) -> KvEventBatch:
    return KvEventBatch(batch.ts, tuple(map(_event, batch.events)), batch.data_parallel_rank)


def _announced(payload: bytes) -> int:
    """How many events the list after the time stamp says it has, before any is decoded."""
    at = 1 + _NUMBER_BYTES.get(payload[1], 1) if len(payload) > 1 else 0
    head = payload[at : at + 1]
    length = 4 if head == b"\xdd" else 2 if head == b"\xdc" else 0
    return int.from_bytes(payload[at + 1 : at + 1 + length], "big")


def _known(raw: object) -> _Wire | None:
    """One event of either form, or None when its name is not known."""
    if isinstance(raw, dict):
        kind = _MAP_TYPES.get(_name(raw.get("type")))
    elif isinstance(raw, list) and raw:
        kind = _ARRAY_TYPES.get(_name(raw[0]))
    else:
        raise msgspec.ValidationError("an event is neither an array nor a map")
    return None if kind is None else msgspec.convert(raw, kind)


def _name(value: object) -> str:
    if isinstance(value, str):
        return value
    raise msgspec.ValidationError("an event has no name")


def _adapter(wire: _Stored) -> str | None:
    if wire.lora_name is None and wire.lora_id is not None:
        # Before vLLM 0.14 only the engine's own number is known. Requests cannot name it, so such blocks
        # get a name no adapter can have: they are tracked, and never taken for the base model's.
        return f"\0lora_id={wire.lora_id}"
    return wire.lora_name


def _event(wire: _Wire) -> KvEvent:
    if isinstance(wire, _Stored):
        return BlockStored(
            wire.block_hashes,
            wire.parent_block_hash,
            wire.token_ids,
            wire.block_size,
            _adapter(wire),
            wire.extra_keys,
            tier_of(wire.medium),
            wire.group_idx or 0,
            wire.kv_cache_spec_kind,
        )
    if isinstance(wire, _Removed):
        return BlockRemoved(wire.block_hashes, tier_of(wire.medium), wire.group_idx or 0)
    return _CLEARED
