"""Between the values that a router's methods take and what MessagePack can hold, by the methods' own types.

Whatever is made of dataclasses, named tuples, enums and plain values needs no code here. What holds prompts
or secrets, or would be large, has its own form:

* A request is written without its token ids; beside it stands what its blocks hashed to. Session key and
  cache salt are replaced by hashes of them, which tell requests apart and nothing else.
* KV events are written without token ids; beside them stands what their blocks hashed to.
"""

import inspect
import typing
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from types import GenericAlias
from typing import Any

import msgspec
import xxhash

from extproc.core.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    Rendition,
    RoutingRequest,
    Tier,
    TokenIds,
)
from extproc.journal.symbols import Packed, Symbol, SymbolReader, SymbolWriter

EventHashes = list[tuple[tuple[Symbol, ...], list[int] | None]]
"""What blocks hashed to: (handles, hashes; None where that could not be told), in the order of hashing."""

PromptHashes = dict[tuple[str, int], tuple[tuple[int, ...], ...]]
"""What the blocks of a request hashed to: by model revision and block size, one chain per prompt."""

_OMITTED = frozenset({"prompts", "renditions", "chains", "session_key", "session_hash"})


def parameters(method: Callable[..., Any]) -> dict[str, Any]:
    """Names and types of a method's parameters, in order; without `self` and callbacks."""
    hints = typing.get_type_hints(method, localns={"array": list})
    names = [name for name in inspect.signature(method).parameters if name != "self"]
    return {name: _concrete(hints[name]) for name in names if not _is_callback(hints[name])}


def _concrete(hint: Any) -> Any:
    """Any iterable is written, and read again, as a tuple."""
    if typing.get_origin(hint) is Iterable:
        return GenericAlias(tuple, (typing.get_args(hint)[0], ...))
    return hint


def _is_callback(hint: Any) -> bool:
    """Whether a parameter only lets others watch: what is decided cannot depend on it."""
    return any(typing.get_origin(one) is Callable for one in (hint, *typing.get_args(hint)))


def plain(value: Any) -> Any:
    """`value` as MessagePack can hold it; None and defaults of dataclasses are kept."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        value = tuple(value)
    return msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=False)


def restored(value: Any, hint: Any) -> Any:
    """What `plain` has written.

    Raises:
        msgspec.ValidationError: it is not of this type.
    """
    return msgspec.convert(value, hint)


def hashed(text: str | None) -> str | None:
    """A name for `text` that does not tell it."""
    return None if text is None else f"{xxhash.xxh3_64_intdigest(text.encode('utf-8', 'surrogatepass')):016x}"


# --- requests ----------------------------------------------------------------------------------------


def _request_fields() -> dict[str, Any]:
    hints = typing.get_type_hints(RoutingRequest, localns={"array": list})
    return {name: hint for name, hint in hints.items() if name not in _OMITTED}


_REQUEST_FIELDS = _request_fields()
_DEFAULTS = {f.name: f.default for f in fields(RoutingRequest) if f.default is not MISSING}


def pack_request(request: RoutingRequest, session_hash: int) -> dict[str, Any]:
    """`request` as it is kept; `session_hash` stands for its session."""
    packed = {
        name: plain(value)
        for name in _REQUEST_FIELDS
        if (value := getattr(request, name)) != _DEFAULTS.get(name, MISSING)
    }
    packed["namespace"] = list(request.namespace._replace(cache_salt=hashed(request.namespace.cache_salt)))
    packed["session_key"] = hashed(request.session_key)
    packed["session_hash"] = session_hash
    packed["prompts"] = _lengths(request.prompts)
    packed["renditions"] = {
        revision: [rendition.tokenizer_revision, _lengths(rendition.prompts)]
        for revision, rendition in request.renditions.items()
    }
    if not request.prompts and request.chains:
        packed["prompts"] = [0] * request.keyed_prompts
    return packed


def unpack_request(packed: Mapping[str, Any]) -> RoutingRequest:
    """What `pack_request` has written. Prompts are stand-ins of the same lengths.

    Raises:
        KeyError, ValueError: it is not such a request.
    """
    given = {name: restored(packed[name], hint) for name, hint in _REQUEST_FIELDS.items() if name in packed}
    return RoutingRequest(
        **given,
        prompts=_stand_ins(packed["prompts"]),
        renditions={
            revision: Rendition(tokenizer, _stand_ins(lengths))
            for revision, (tokenizer, lengths) in packed["renditions"].items()
        },
        session_key=packed["session_key"],
        session_hash=packed["session_hash"],
    )


def _lengths(prompts: Iterable[TokenIds]) -> list[int]:
    return [len(prompt) for prompt in prompts]


def _stand_ins(lengths: Iterable[int]) -> tuple[TokenIds, ...]:
    return tuple(array("I", bytes(array("I").itemsize * length)) for length in lengths)


def pack_prompt_hashes(hashes: PromptHashes, symbols: SymbolWriter) -> list[Any]:
    """Block hashes of one request."""
    return [
        [revision, size, [symbols.pack(chain) for chain in chains]]
        for (revision, size), chains in hashes.items()
    ]


def unpack_prompt_hashes(packed: Iterable[Any], symbols: SymbolReader) -> PromptHashes:
    """What `pack_prompt_hashes` has written.

    Raises:
        ValueError: these are not such hashes.
    """
    return {
        (revision, size): tuple(_integers(symbols.unpack(chain)) for chain in chains)
        for revision, size, chains in packed
    }


def _integers(symbols: Iterable[Symbol]) -> tuple[int, ...]:
    return tuple(symbol for symbol in symbols if isinstance(symbol, int))


# --- KV events -----------------------------------------------------------------------------------------


def pack_events(events: Iterable[KvEvent], symbols: SymbolWriter) -> list[Any]:
    """`events` as they are kept."""
    return [_pack_event(event, symbols) for event in events]


def unpack_events(packed: Iterable[Any], symbols: SymbolReader) -> list[KvEvent]:
    """What `pack_events` has written. Token ids are stand-ins, as many as there were.

    Raises:
        KeyError, ValueError: these are not such events.
    """
    return [_unpack_event(event, symbols) for event in packed]


def pack_event_hashes(hashes: EventHashes, symbols: SymbolWriter) -> list[Any]:
    """What was hashed while events were taken in."""
    return [
        [symbols.pack(handles), None if found is None else symbols.pack(found)] for handles, found in hashes
    ]


def unpack_event_hashes(packed: Iterable[Any], symbols: SymbolReader) -> EventHashes:
    """What `pack_event_hashes` has written.

    Raises:
        ValueError: these are not such hashes.
    """
    return [
        (symbols.unpack(handles), None if found is None else list(_integers(symbols.unpack(found))))
        for handles, found in packed
    ]


_EVENT_FIELDS = tuple(
    f.name
    for f in fields(BlockStored)
    if f.name not in ("block_hashes", "parent", "token_ids", "extra_keys", "tier")
)


def _pack_event(event: KvEvent, symbols: SymbolWriter) -> dict[str, Any]:
    match event:
        case BlockStored():
            packed = {name: value for name in _EVENT_FIELDS if (value := getattr(event, name)) is not None}
            packed["tier"] = int(event.tier)
            packed["stored"] = symbols.pack(event.block_hashes)
            packed["parent"] = None if event.parent is None else symbols.pack((event.parent,))
            packed["tokens"] = len(event.token_ids)
            return packed
        case BlockRemoved():
            return {
                "removed": symbols.pack(event.block_hashes),
                "tier": int(event.tier),
                "group": event.group,
            }
        case AllBlocksCleared():
            return {}


def _unpack_event(packed: Mapping[str, Any], symbols: SymbolReader) -> KvEvent:
    if "stored" in packed:
        handles = symbols.unpack(packed["stored"])
        parent: Packed | None = packed["parent"]
        known = {name: packed[name] for name in _EVENT_FIELDS if name in packed}
        return BlockStored(
            block_hashes=handles,
            parent=None if parent is None else symbols.unpack(parent)[0],
            token_ids=range(packed["tokens"]),
            tier=Tier(packed["tier"]),
            **known,
        )
    if "removed" in packed:
        return BlockRemoved(symbols.unpack(packed["removed"]), Tier(packed["tier"]), packed["group"])
    return AllBlocksCleared()
