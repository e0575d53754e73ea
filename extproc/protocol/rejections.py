"""Requests we refuse, in OpenAI's error shape: `{"error": {"message", "type", "param", "code"}}`.

A message tells the client what to change. It never repeats the body (it may be private, and large).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.protocol.endpoint_picker import NO_ENDPOINT_STATUS, SHED_STATUS, check_header

_WHY = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Reject:
    """An answer to the client in the place of a worker's.

    `why` ends up in Envoy's response code details as `warmroute_<why>`, so it is `[a-z0-9_]+`.
    """

    status: int
    message: str
    why: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 400 <= self.status <= 599:
            raise ValueError(f"{self.status} is not an error status")
        if not _WHY.fullmatch(self.why):
            raise ValueError(f"why must be [a-z0-9_]+, not {self.why!r}")
        for name, value in self.headers.items():
            check_header(name, value)

    @property
    def details(self) -> str:
        """Machine-readable reason for Envoy's access log."""
        return f"warmroute_{self.why}"

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )


def malformed(message: str, *, param: str | None = None, why: str = "malformed") -> Reject:
    """400: the request cannot be understood; `message` says what to change."""
    return Reject(400, message, why, param=param)


def empty_body() -> Reject:
    """400: a request that needs a body has an empty one."""
    return malformed("The request body is empty: send a JSON object.", why="empty_body")


def not_permitted(message: str) -> Reject:
    """403: this caller may not use this model or pool."""
    return Reject(403, message, "not_permitted", type="permission_error", code="permission_denied")


def unknown_model(model: str) -> Reject:
    """404: nobody serves this model."""
    message = f"The model `{model[:256]}` does not exist."
    return Reject(
        404, message, "unknown_model", type="not_found_error", code="model_not_found", param="model"
    )


def not_isolable(message: str, status: int = 415) -> Reject:
    """415: this caller's cache cannot be kept apart for this request; `message` says what to send instead."""
    return Reject(status, message, "not_isolable", code="not_isolable")


def routing_failed() -> Reject:
    """503: an error of ours, where going on without us would break a promise to tenants."""
    return Reject(503, "The request could not be routed; try again.", "routing_failed", type="server_error")


def body_too_large(limit: int) -> Reject:
    """413: the body exceeds `limit` bytes."""
    return Reject(413, f"The request body exceeds {limit} bytes.", "body_too_large", code="request_too_large")


def overloaded(retry_after_s: int | None = None, why: str = "overloaded") -> Reject:
    """429: shed because of load."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return Reject(
        SHED_STATUS,
        "All replicas of this model are at their limit; try again later.",
        why,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=headers,
    )


def left_while_held() -> Reject:
    """499: nobody reads it; the client has gone while we held its request."""
    return Reject(499, "The client left while its request was held.", "left_while_held", type="client_error")


def no_ready_endpoint(message: str = "No replica of this model is ready; try again later.") -> Reject:
    """503: no ready endpoint may serve this request."""
    return Reject(
        NO_ENDPOINT_STATUS, message, "no_ready_endpoint", type="server_error", code="service_unavailable"
    )
