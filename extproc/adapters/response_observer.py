"""What the parts of a response reveal, for gateways that show us responses. The bytes are only read."""

from dataclasses import dataclass

from extproc.core.types import Completion, Outcome
from extproc.protocol.endpoint_picker import Metadata, served_endpoint
from extproc.protocol.ext_proc_messages import Event, ResponseBody, ResponseHeaders, ResponseTrailers
from extproc.protocol.usage import UsageReader


@dataclass(frozen=True, slots=True)
class Seen:
    """News in one part of the response."""

    served: str | None = None
    first_body: bool = False
    completion: Completion | None = None


class ResponseObserver:
    """One response. Times are clock seconds: `begun` when the request came, `answered` when it was routed."""

    def __init__(self, begun: float, answered: float) -> None:
        self._begun = begun
        self._answered = answered
        self._status: int | None = None
        self._served: str | None = None
        self._usage: UsageReader | None = None
        self._first_body: float | None = None
        self._ended = False

    def see(self, event: Event, metadata: Metadata, now: float) -> Seen:
        """Take in a part of the response. `metadata`: all that was said on this stream so far."""
        served: str | None = None
        first_body = ended = False
        match event:
            case ResponseHeaders():
                self._read_headers(event)
                served = self._served = served_endpoint(metadata)
                ended = event.end_of_stream
            case ResponseBody():
                first_body = self._first_body is None and bool(event.body)
                if first_body:
                    self._first_body = now
                if self._usage is not None:
                    self._usage.feed(event.body)
                ended = event.end_of_stream
            case ResponseTrailers():
                ended = True
            case _:
                pass
        if not ended or self._ended:
            return Seen(served, first_body)
        self._ended = True
        return Seen(served, first_body, self._completion(now))

    def _read_headers(self, event: ResponseHeaders) -> None:
        status = event.headers.get(":status", "")
        self._status = int(status) if status.isascii() and status.isdigit() else None
        if event.headers.get("content-encoding", "identity") == "identity":
            self._usage = UsageReader(event.headers.get("content-type"))

    def _completion(self, now: float) -> Completion:
        usage = self._usage.finish() if self._usage is not None else None
        first = self._first_body
        return Completion(
            outcome=Outcome.FINISHED,
            served_by=self._served,
            status=self._status,
            first_body_ms=None if first is None else (first - self._begun) * 1000,
            upstream_first_body_ms=None if first is None else (first - self._answered) * 1000,
            duration_ms=(now - self._begun) * 1000,
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            output_tokens=usage.output_tokens if usage else None,
        )
