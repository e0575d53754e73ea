"""What replicas tell each other, between the core's values and the wire (`proto/peer_exchange.proto`).

A peer is trusted to be one of ours, not to be free of faults: whatever is not a plausible value is refused,
so that no number from outside can make a load negative, endless or huge. A message about loads is refused
whole: the next one says it anew. Of a delivery of signals each is refused alone: none comes again.
"""

import math
from dataclasses import replace
from typing import TypeVar

import msgspec

from extproc.core.errors import ProtocolError
from extproc.core.peer_loads import PeerNews, SentPrefix, ToldLoad
from extproc.core.types import Completion, WorkerId
from extproc.pb import peer_exchange_pb2 as pb

MAX_NAME = 256
MAX_WORKERS = 10_000
MAX_HASHES = 65_536
MAX_SIGNALS = 1_000
_MAX_COUNT = 1 << 40  # tokens or milliseconds on one worker
_MAX_DETAILS = 1_024
_MAX_COMPLETION = 8 << 10  # bytes, packed

_Figure = TypeVar("_Figure", int, float)


def encode_news(news: PeerNews, owner: str, *, access_log_open: bool) -> pb.Update:
    """One message as it travels."""
    update = pb.Update(
        replica=news.replica,
        epoch=news.epoch,
        number=news.number,
        whole=news.whole,
        owner=owner,
        access_log_open=access_log_open,
    )
    for worker, load in news.loads:
        update.loads.add(endpoint=worker.endpoint, dp_rank=worker.dp_rank, **load._asdict())
    for one in news.sent:
        update.sent.add(
            endpoint=one.worker.endpoint,
            dp_rank=one.worker.dp_rank,
            hashes=one.hashes,
            lifetime_s=one.lifetime_s,
        )
    return update


def decode_news(update: pb.Update) -> PeerNews:
    """What a message says.

    Raises:
        ProtocolError: it is not plausible.
    """
    if not 0 < len(update.replica) <= MAX_NAME or len(update.owner) > MAX_NAME:
        raise ProtocolError("a peer has no name, or one that is too long")
    if len(update.loads) > MAX_WORKERS:
        raise ProtocolError(f"a peer tells of {len(update.loads)} workers; at most {MAX_WORKERS} are taken")
    if sum(len(one.hashes) for one in update.sent) > MAX_HASHES:
        raise ProtocolError(f"a peer tells of more than {MAX_HASHES} blocks at once")
    return PeerNews(
        replica=update.replica,
        epoch=update.epoch,
        number=update.number,
        whole=update.whole,
        loads=tuple((WorkerId(one.endpoint, one.dp_rank), _load(one)) for one in update.loads),
        sent=tuple(
            SentPrefix(WorkerId(one.endpoint, one.dp_rank), tuple(one.hashes), _number(one.lifetime_s))
            for one in update.sent
        ),
    )


def _load(one: pb.WorkerLoad) -> ToldLoad:
    if max(one.context_tokens, one.private_tokens) > _MAX_COUNT:
        raise ProtocolError(f"a peer tells of {one.context_tokens} tokens on {one.endpoint}")
    return ToldLoad(
        sequences=one.sequences,
        prefilling=min(one.prefilling, one.sequences),
        context_tokens=one.context_tokens,
        private_tokens=one.private_tokens,
        queued_prefill_ms=_number(one.queued_prefill_ms),
        queued_prefill_tokens=_number(one.queued_prefill_tokens),
        remaining_tokens=_number(one.remaining_tokens),
    )


def _number(value: float) -> float:
    if not math.isfinite(value) or not 0.0 <= value <= _MAX_COUNT:
        raise ProtocolError(f"a peer tells of {value}, which is no size or time")
    return value


# --- signals ---------------------------------------------------------------------------------------------


class FirstBody(msgspec.Struct, frozen=True):
    """The response body of a request has begun."""

    ticket: str


class Served(msgspec.Struct, frozen=True):
    """Which endpoint serves a request."""

    ticket: str
    endpoint: str


class Completed(msgspec.Struct, frozen=True):
    """How a request ended."""

    ticket: str
    completion: Completion


class LeftEarly(msgspec.Struct, frozen=True):
    """How a request ended that has no ticket."""

    request_id: str
    completion: Completion


Signal = FirstBody | Served | Completed | LeftEarly
"""News about a request, for the replica that has routed it."""


def encode_signal(signal: Signal) -> pb.Signal:
    """A signal as it travels.

    Raises:
        ProtocolError: it holds something that cannot travel.
    """
    try:
        match signal:
            case FirstBody(ticket):
                return pb.Signal(ticket=ticket, kind=pb.Signal.KIND_FIRST_BODY)
            case Served(ticket, endpoint):
                return pb.Signal(ticket=ticket, kind=pb.Signal.KIND_SERVED, endpoint=endpoint)
            case Completed(ticket, completion):
                kind, packed = pb.Signal.KIND_COMPLETED, _packed(completion)
            case LeftEarly(ticket, completion):
                kind, packed = pb.Signal.KIND_LEFT_EARLY, _packed(completion)
        return pb.Signal(ticket=ticket, kind=kind, completion=packed)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"news of a request cannot be told: {error}") from error


def decode_signals(delivery: pb.Delivery) -> tuple[list[Signal], int]:
    """What was delivered, and how many signals are left out because they are not plausible.

    Kinds we do not know are passed over.

    Raises:
        ProtocolError: it is more than `MAX_SIGNALS`.
    """
    if len(delivery.signals) > MAX_SIGNALS:
        raise ProtocolError(f"a peer delivers {len(delivery.signals)} signals at once; at most {MAX_SIGNALS}")
    signals, refused = [], 0
    for one in delivery.signals:
        try:
            signal = _signal(one)
        except ProtocolError:
            refused += 1
        else:
            if signal is not None:
                signals.append(signal)
    return signals, refused


def _signal(signal: pb.Signal) -> Signal | None:
    if not 0 < len(signal.ticket) <= MAX_NAME or len(signal.endpoint) > MAX_NAME:
        raise ProtocolError("a peer delivers a signal without a ticket, or with one that is too long")
    if signal.kind == pb.Signal.KIND_COMPLETED:
        return Completed(signal.ticket, _completion(signal.completion))
    if signal.kind == pb.Signal.KIND_LEFT_EARLY:
        return LeftEarly(signal.ticket, _completion(signal.completion))
    if signal.kind == pb.Signal.KIND_FIRST_BODY:
        return FirstBody(signal.ticket)
    if signal.kind == pb.Signal.KIND_SERVED:
        return Served(signal.ticket, signal.endpoint)
    return None


def _packed(completion: Completion) -> bytes:
    """Details may be of any length, and are for people: cut, so that the end of the request is told."""
    details = completion.details
    if details is not None and len(details) > _MAX_DETAILS:
        completion = replace(completion, details=details[:_MAX_DETAILS])
    return msgspec.msgpack.encode(completion)


def _completion(packed: bytes) -> Completion:
    """A figure that is not plausible is left out, as if it had not been reported: the request has ended."""
    if len(packed) > _MAX_COMPLETION:
        raise ProtocolError(f"a peer delivers a completion of {len(packed)} bytes; at most {_MAX_COMPLETION}")
    try:
        completion = msgspec.msgpack.decode(packed, type=Completion)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a peer delivers a completion that cannot be read: {error}") from error
    return replace(
        completion,
        first_body_ms=_plausible(completion.first_body_ms),
        upstream_first_body_ms=_plausible(completion.upstream_first_body_ms),
        duration_ms=_plausible(completion.duration_ms),
        prompt_tokens=_plausible(completion.prompt_tokens),
        cached_tokens=_plausible(completion.cached_tokens),
        output_tokens=_plausible(completion.output_tokens),
    )


def _plausible(figure: _Figure | None) -> _Figure | None:
    return figure if figure is not None and 0 <= figure <= _MAX_COUNT else None
