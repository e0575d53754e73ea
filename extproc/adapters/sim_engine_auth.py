"""The simulated engine's `--api-key`, as vLLM's: some paths answer 401 without it."""

import hmac
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from extproc.adapters.engine_key import GUARDED

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def asking_for(keys: Sequence[str]) -> Middleware:
    """A middleware that lets guarded requests pass that have one of these keys; all, if there are none."""
    known = [key.encode() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if known and request.method != "OPTIONS" and request.path.startswith(GUARDED):
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not any(
                hmac.compare_digest(given.encode(errors="replace"), key) for key in known
            ):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check
