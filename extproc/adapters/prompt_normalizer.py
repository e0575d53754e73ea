"""Normalizes request bodies within a time budget, off the event loop where that takes long.

Whatever goes wrong, the body passes as it came, and the report says why. What was changed is parsed again, so
what is routed by is what the engine will read.
"""

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from extproc.core.types import Normalization
from extproc.prompt.normalize import NormalizationMode, NormalizationRules, Normalized, normalize
from extproc.protocol.body_limits import DEFAULT_LIMITS, BodyLimits
from extproc.protocol.openai import InferenceRequest, LoadOnly, parse_request

_log = logging.getLogger(__name__)

_PLAIN = ("", "identity")


class NormalizedRequest(NamedTuple):
    """What goes on: the request to route by, its body if that was changed, and the report."""

    request: InferenceRequest
    body: bytes | None = None
    report: Normalization | None = None


class PromptNormalizer:
    """Normalizes the requests of one pool.

    Args:
        rules: what is normalized.
        mode: whether it is.
        tenant_modes: the same for tenants that have it their own way, by name.
        budget_ms: most time a request may wait for it.
        inline_bytes: bodies up to this size are normalized on the event loop.
        places: larger ones under way at one time; more pass as they came.
        body_limits: how much of a normalized body is read again.
    """

    def __init__(
        self,
        rules: NormalizationRules,
        mode: NormalizationMode,
        *,
        tenant_modes: Mapping[str, NormalizationMode] | None = None,
        budget_ms: float = 200.0,
        inline_bytes: int = 16 << 10,
        places: int = 16,
        body_limits: BodyLimits = DEFAULT_LIMITS,
    ) -> None:
        self._rules = rules
        self._mode = mode
        self._tenant_modes = dict(tenant_modes or {})
        self._budget_s = budget_ms / 1000
        self._inline_bytes = inline_bytes
        self._free = places
        self._body_limits = body_limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="normalize")

    async def normalize(
        self,
        request: InferenceRequest,
        *,
        body: bytes,
        path: str,
        headers: Mapping[str, str],
        tenant: str = "",
    ) -> NormalizedRequest:
        """Normalize the body of a request. Never raises for what it contains.

        Args:
            request: what `body` was parsed to.
            body: as it came.
            path: of the HTTP request.
            headers: of the HTTP request, names in lower case.
            tenant: whose it is.
        """
        mode = self._tenant_modes.get(tenant, self._mode)
        if mode is NormalizationMode.DISABLED:
            return NormalizedRequest(request)
        if headers.get("content-encoding", "").strip().lower() not in _PLAIN:
            return _skipped(request, "content-encoding")
        try:
            result = await self._result(request, body)
            return self._outcome(request, result, path, headers, dry_run=mode is NormalizationMode.DRY_RUN)
        except Exception:
            _log.exception("normalizing a %s request failed; it passes as it came", request.kind.value)
            return _skipped(request, "error")

    def close(self) -> None:
        """Start no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _result(self, request: InferenceRequest, body: bytes) -> Normalized:
        if len(body) <= self._inline_bytes or len(body) > self._rules.max_body_bytes:
            return normalize(request.kind, body, self._rules)
        if self._free == 0:
            return Normalized.untouched(body, "busy")
        self._free -= 1
        late = threading.Event()
        job = asyncio.get_running_loop().run_in_executor(
            self._thread, normalize, request.kind, body, self._rules, late.is_set
        )
        job.add_done_callback(self._done)
        done, _ = await asyncio.wait({job}, timeout=self._budget_s)
        if not done:
            late.set()
            job.cancel()
            return Normalized.untouched(body, "budget")
        return job.result()

    def _outcome(
        self,
        request: InferenceRequest,
        result: Normalized,
        path: str,
        headers: Mapping[str, str],
        *,
        dry_run: bool,
    ) -> NormalizedRequest:
        if result.skipped is not None:
            return _skipped(request, result.skipped)
        changes = {str(rule): count for rule, count in sorted(result.counts.items())}
        if not changes:
            return NormalizedRequest(request, report=Normalization("unchanged", {}))
        if dry_run:
            return NormalizedRequest(request, report=Normalization("dry-run", changes))
        changed = parse_request("POST", path, headers, result.body, self._body_limits)
        if isinstance(changed, LoadOnly):
            return _skipped(request, changed.reason)
        return NormalizedRequest(changed, result.body, Normalization("applied", changes))

    def _done(self, _: "asyncio.Future[Normalized]") -> None:
        self._free += 1


def _skipped(request: InferenceRequest, why: str) -> NormalizedRequest:
    return NormalizedRequest(request, report=Normalization(f"skipped:{why}", {}))
