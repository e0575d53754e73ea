"""HTTP requests as the gateway shows them."""

import json
from typing import Any

from extproc.adapters.routing import HttpRequest


def http(body: Any = b"", *, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields):
    """One request; a `body` that is no bytes is sent as JSON."""
    given = {"method": "POST", "subset": None, "trace_parent": None, "request_id": "r", **fields}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpRequest(path=path, headers=headers or {}, body=raw, **given)
