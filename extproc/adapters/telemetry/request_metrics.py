"""What is counted of requests and KV events, and how it follows from what the router returned."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from extproc.adapters.telemetry.catalogue import requests
from extproc.adapters.telemetry.labels import FewValues, ServedModels
from extproc.adapters.telemetry.stages import HOLD, TOTAL, Stages
from extproc.adapters.telemetry.tally import Tally
from extproc.core.kv_lifetimes import Evictions
from extproc.core.outcomes import Released, answered, is_leak
from extproc.core.types import Candidate, Completion, Decision, Outcome, Reason, ShadowChoice

_MS = 1000.0
_TIMEOUT_STATUS = frozenset({408, 504})
_PREFILLED = frozenset({Outcome.FINISHED, Outcome.CANCELLED, Outcome.FAILED})


class RequestMetrics(Tally):
    """Everything that is counted when it happens.

    Args:
        registry: where the series are exposed from.
        models: which model names may become labels.
    """

    def __init__(self, registry: CollectorRegistry, models: ServedModels) -> None:
        super().__init__(requests.REQUEST_METRICS)
        registry.register(self)
        self._models = models
        self._classes = FewValues()
        self._causes = FewValues()
        self._tenants = FewValues()

    def pool_known(self, pool: str) -> None:
        """Begin what alerts watch at 0, or their first increment would go unseen."""
        self.add(requests.LEASES_LOST, 0.0, pool)
        self.add(requests.TIMEOUTS, 0.0, pool, "")
        self.add(requests.EVICTIONS, 0.0, pool)
        for result in ("taken", "denied", "passed"):
            self.add(requests.WARM_REQUESTS, 0.0, pool, "", result)

    def decided(self, decision: Decision, stages: Stages) -> None:
        """A request was routed."""
        request, chosen, reason = decision.request, decision.chosen, decision.reason.value
        pool = request.pool
        group = (pool, self._classes.of(request.prompt_class))
        self.add(requests.DECISIONS, 1.0, pool, decision.policy, reason, request.mode.value)
        if request.load_only is not None:
            self.add(requests.LOAD_ONLY, 1.0, pool, self._causes.of(request.load_only))
        if request.normalization is not None:
            outcome, changes = request.normalization
            self.add(requests.NORMALIZED, 1.0, pool, outcome)
            for rule, count in changes.items():
                self.add(requests.NORMALIZATION_CHANGES, count, pool, outcome, rule)
        held, began = 0.0, stages.started
        for name, end in stages.marks:
            if name == HOLD:
                held += end - began
            else:
                self.observe(requests.DECISION_SECONDS, end - began, name)
            began = end
        self.observe(requests.DECISION_SECONDS, stages.ended - stages.started - held, TOTAL)
        self.observe(requests.QUEUE_WAIT, chosen.cost.queue_ms / _MS, *group, reason)
        result = warm_result(decision)
        if result is not None:
            self.add(requests.WARM_REQUESTS, 1.0, *group, result)
        for choice in decision.shadow:
            self._shadow(pool, chosen, choice)

    def rejected(self, why: str) -> None:
        """A request was refused."""
        self.add(requests.REJECTIONS, 1.0, why)

    def waited(self, pool: str, tenant: str, ending: str, held_s: float) -> None:
        """A request that may be held was not, or no longer is."""
        self.add(requests.ADMISSIONS, 1.0, pool, self._tenants.of(tenant), ending)
        if ending != "passed":
            self.observe(requests.HELD_SECONDS, held_s, pool, ending)

    def evicted(self, pool: str, evictions: Evictions) -> None:
        """Engines of `pool` evicted blocks."""
        if evictions.blocks:
            self.add(requests.EVICTIONS, evictions.blocks, pool)
        for age in evictions.ages_s:
            self.observe(requests.EVICTED_AGE, age, pool)

    def finished(self, released: Released, trace_id: str | None = None) -> None:
        """A request has ended. `trace_id`: hex, where it was traced."""
        decision, completion = released.lease.decision, released.completion
        pool, outcome = decision.request.pool, completion.outcome.value
        group = (pool, self._classes.of(decision.request.prompt_class))
        if completion.status is not None and 200 <= completion.status < 300:
            self._models.served(decision.request.model)
        model = self._models.label(decision.request.model)
        exemplar = None if trace_id is None else {"trace_id": trace_id}
        self.add(requests.REQUESTS, 1.0, model, *group, outcome)
        if timed_out(completion):
            self.add(requests.TIMEOUTS, 1.0, *group)
        if completion.attempts is not None and completion.attempts > 1:
            self.add(requests.RETRIES, completion.attempts - 1, pool)
        if is_leak(completion):
            self.add(requests.LEASES_LOST, 1.0, pool)
        if completion.duration_ms is not None:
            seconds = completion.duration_ms / _MS
            self.observe(requests.REQUEST_SECONDS, seconds, *group, outcome, exemplar=exemplar)
        self._first_token(released, group, exemplar)
        self._tokens(released, model, group)
        self._prediction(released, pool)

    # --- inside ------------------------------------------------------------------------------------

    def _shadow(self, pool: str, chosen: Candidate, choice: ShadowChoice) -> None:
        difference = (chosen.cost.total_ms - choice.chosen.cost.total_ms) / _MS
        if choice.chosen.worker == chosen.worker:
            self.add(requests.SHADOW_DECISIONS, 1.0, pool, choice.policy, "same")
            return
        result = "cheaper" if difference > 0.0 else "dearer"
        self.add(requests.SHADOW_DECISIONS, 1.0, pool, choice.policy, result)
        self.add(requests.SHADOW_REGRET, abs(difference), pool, choice.policy, result)

    def _first_token(
        self, released: Released, group: tuple[str, str], exemplar: dict[str, str] | None
    ) -> None:
        decision, completion = released.lease.decision, released.completion
        # The first byte of an answer that is not streamed comes with its last.
        if not decision.request.stream:
            return
        if completion.first_body_ms is not None:
            labels = (*group, warmth(released), decision.request.mode.value)
            self.observe(requests.TTFT, completion.first_body_ms / _MS, *labels, exemplar=exemplar)
        error = ttft_error_ms(released)
        if error is not None:
            direction = "late" if error > 0.0 else "early"
            self.observe(requests.TTFT_ERROR, abs(error) / _MS, group[0], direction, exemplar=exemplar)

    def _tokens(self, released: Released, model: str, group: tuple[str, str]) -> None:
        completion = released.completion
        if completion.outcome not in _PREFILLED:
            return
        total = prompt_tokens(released)
        cached = completion.cached_tokens
        if cached is None:
            self.add(requests.INPUT_TOKENS, total, model, *group, "unknown")
        else:
            self.add(requests.INPUT_TOKENS, min(cached, total), model, *group, "cached")
            self.add(requests.INPUT_TOKENS, max(0, total - cached), model, *group, "uncached")
        if completion.output_tokens is not None:
            self.add(requests.OUTPUT_TOKENS, completion.output_tokens, model, *group)
        known = released.predicted_cached_tokens if cached is None else cached
        mode = released.lease.decision.request.mode.value
        self.add(requests.COLD_TOKENS, total, *group, mode)
        self.add(requests.PREFILL_TOKENS, max(0, total - (known or 0)), *group, mode)

    def _prediction(self, released: Released, pool: str) -> None:
        predicted, actual = released.predicted_cached_tokens, released.completion.cached_tokens
        if predicted is None or actual is None or released.lease.sequences != 1:
            return
        result = "exact" if predicted == actual else "over" if predicted > actual else "under"
        self.add(requests.PREDICTIONS, 1.0, pool, result)
        self.add(requests.CACHED_PREDICTED, predicted, pool)
        self.add(requests.CACHED_ACTUAL, actual, pool)


def held(candidate: Candidate) -> int:
    """Tokens of the prompt that a candidate is predicted to have, in any tier."""
    return candidate.cached_tokens + candidate.offloaded_tokens


def warm_result(decision: Decision) -> str | None:
    """What became of a warm worker's advantage; None when no worker had one."""
    if not any(held(candidate) for candidate in decision.candidates):
        return None
    if decision.reason is Reason.WARM_DENIED_WAIT:
        return "denied"
    return "taken" if held(decision.chosen) else "passed"


def prompt_tokens(released: Released) -> int:
    """As the engine counted them, else as we did."""
    reported = released.completion.prompt_tokens
    return released.lease.decision.request.prompt_tokens if reported is None else reported


def warmth(released: Released) -> str:
    """`warm`, `partial` or `cold`: as the engine reported, else as predicted; `unknown` without either."""
    cached = released.completion.cached_tokens
    if cached is None:
        cached = released.predicted_cached_tokens
    if cached is None:
        return "unknown"
    if cached <= 0:
        return "cold"
    # Only full blocks can be hit, and the last token is always computed.
    block = released.lease.decision.chosen.block_size or 1
    return "warm" if prompt_tokens(released) - cached <= block * released.lease.sequences else "partial"


def ttft_error_ms(released: Released) -> float | None:
    """Actual minus predicted time to first token, from when the request was sent on; None: not comparable."""
    decision, completion = released.lease.decision, released.completion
    took = completion.upstream_first_body_ms
    served = completion.served_by in (None, decision.chosen.worker.endpoint)
    if took is None or not decision.request.stream or not served or decision.request.load_only is not None:
        return None
    if not answered(completion):
        return None
    return took - decision.chosen.cost.ttft_ms


def timed_out(completion: Completion) -> bool:
    """Whether a time limit of the gateway (or of a proxy behind it) ended the request."""
    return completion.status in _TIMEOUT_STATUS or "timeout" in (completion.details or "")


__all__: Sequence[str] = (
    "RequestMetrics", "held", "prompt_tokens", "timed_out", "ttft_error_ms", "warm_result", "warmth",
)  # fmt: skip
