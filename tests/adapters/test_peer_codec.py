import msgspec
import pytest

from extproc.adapters.peer_codec import (
    MAX_HASHES,
    MAX_SIGNALS,
    MAX_WORKERS,
    Completed,
    FirstBody,
    LeftEarly,
    Served,
    decode_news,
    decode_signals,
    encode_news,
    encode_signal,
)
from extproc.core.errors import ProtocolError
from extproc.core.peer_loads import PeerNews, SentPrefix, ToldLoad
from extproc.core.types import Completion, Outcome, WorkerId
from extproc.pb import peer_exchange_pb2 as pb

LOAD = ToldLoad(4, 2, 8000, 100, 400.0, 3000.0, 600.0)
NEWS = PeerNews(
    "a",
    3,
    9,
    whole=True,
    loads=((WorkerId("1.2.3.4:80", 1), LOAD),),
    sent=(SentPrefix(WorkerId("1.2.3.4:80"), (1, (1 << 64) - 1), 1.5),),
)


def test_news_survive_the_wire():
    update = encode_news(NEWS, "owner", access_log_open=True)
    again = pb.Update.FromString(update.SerializeToString())
    assert decode_news(again) == NEWS
    assert (again.owner, again.access_log_open) == ("owner", True)


@pytest.mark.parametrize(
    "change",
    [
        {"replica": ""},
        {"replica": "x" * 300},
        {"owner": "x" * 300},
        {"loads": [pb.WorkerLoad(endpoint="a:1", queued_prefill_ms=float("nan"))]},
        {"loads": [pb.WorkerLoad(endpoint="a:1", queued_prefill_ms=float("inf"))]},
        {"loads": [pb.WorkerLoad(endpoint="a:1", remaining_tokens=-1.0)]},
        {"loads": [pb.WorkerLoad(endpoint="a:1", context_tokens=1 << 50)]},
        {"loads": [pb.WorkerLoad(endpoint="a:1")] * (MAX_WORKERS + 1)},
        {"sent": [pb.SentPrefix(endpoint="a:1", hashes=[0] * (MAX_HASHES + 1))]},
        {"sent": [pb.SentPrefix(endpoint="a:1", lifetime_s=float("nan"))]},
    ],
)
def test_what_is_not_plausible_is_refused(change):
    with pytest.raises(ProtocolError):
        decode_news(pb.Update(**{"replica": "a", "epoch": 1, "number": 1, **change}))


SIGNALS = [
    FirstBody("o.1"),
    Served("o.1", "1.2.3.4:80"),
    Completed(
        "o.1",
        Completion(Outcome.FINISHED, "1.2.3.4:80", 200, 1, 3.5, 2.5, 9.0, 10, 8, 4, None, {"tried": "x"}),
    ),
    Completed("o.2", Completion(Outcome.CANCELLED)),
    LeftEarly("request-1", Completion(Outcome.CANCELLED, duration_ms=1.5)),
]


def test_signals_survive_the_wire():
    delivery = pb.Delivery(signals=map(encode_signal, SIGNALS))
    assert decode_signals(pb.Delivery.FromString(delivery.SerializeToString())) == (SIGNALS, 0)


def completed(**fields):
    packed = msgspec.msgpack.encode({"outcome": "finished", **fields})
    return pb.Signal(ticket="o.1", kind=pb.Signal.KIND_COMPLETED, completion=packed)


@pytest.mark.parametrize(
    "bad",
    [
        pb.Signal(ticket="", kind=pb.Signal.KIND_FIRST_BODY),
        pb.Signal(ticket="x" * 300, kind=pb.Signal.KIND_FIRST_BODY),
        pb.Signal(ticket="o.1", kind=pb.Signal.KIND_SERVED, endpoint="x" * 300),
        pb.Signal(ticket="o.1", kind=pb.Signal.KIND_COMPLETED),
        pb.Signal(ticket="o.1", kind=pb.Signal.KIND_COMPLETED, completion=b"\xc1"),
        pb.Signal(ticket="o.1", kind=pb.Signal.KIND_COMPLETED, completion=b"\x91" * 5_000),
        completed(outcome="no such outcome"),
        completed(details="x" * 10_000),
        completed(labels={str(n): "x" * 100 for n in range(100)}),
    ],
)
def test_a_signal_that_is_not_plausible_costs_no_other(bad):
    signals = list(map(encode_signal, SIGNALS))
    assert decode_signals(pb.Delivery(signals=[bad, *signals, bad])) == (SIGNALS, 2)


def test_no_more_signals_than_are_delivered_at_once_are_read():
    one = pb.Signal(ticket="o.1", kind=pb.Signal.KIND_FIRST_BODY)
    assert len(decode_signals(pb.Delivery(signals=[one] * MAX_SIGNALS))[0]) == MAX_SIGNALS
    with pytest.raises(ProtocolError):
        decode_signals(pb.Delivery(signals=[one] * (MAX_SIGNALS + 1)))


@pytest.mark.parametrize(
    "figures",
    [
        {"duration_ms": float("nan")},
        {"first_body_ms": float("inf")},
        {"output_tokens": -1},
        {"prompt_tokens": 1 << 50},
    ],
)
def test_a_request_ends_whatever_figures_its_end_is_told_with(figures):
    (signal,), refused = decode_signals(pb.Delivery(signals=[completed(cached_tokens=7, **figures)]))
    assert (signal.completion, refused) == (Completion(Outcome.FINISHED, cached_tokens=7), 0)


def test_details_of_any_length_do_not_keep_an_end_from_being_told():
    signal = encode_signal(Completed("o.1", Completion(Outcome.FAILED, details="€" * 100_000)))
    ((told,), refused) = decode_signals(pb.Delivery(signals=[signal]))
    assert (told.completion.outcome, len(told.completion.details), refused) == (Outcome.FAILED, 1024, 0)


@pytest.mark.parametrize(
    "signal", [FirstBody("\ud800"), Completed("o.1", Completion(Outcome.FINISHED, prompt_tokens=1 << 70))]
)
def test_what_cannot_travel_says_so(signal):
    with pytest.raises(ProtocolError, match="cannot be told"):
        encode_signal(signal)


def test_kinds_we_do_not_know_are_passed_over():
    assert decode_signals(pb.Delivery(signals=[pb.Signal(ticket="o.1")])) == ([], 0)
