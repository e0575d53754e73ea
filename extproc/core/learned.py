"""What the router learns from finished requests: lengths, and what first and further tokens cost."""

from extproc.core.arrivals import Arrivals
from extproc.core.cost import CostSettings
from extproc.core.estimators import ReuseShares
from extproc.core.leases import WorkerLoad
from extproc.core.outcomes import Released, answered
from extproc.core.output_lengths import OutputLengths
from extproc.core.step_model import StepModels
from extproc.core.ttft_model import TtftModels
from extproc.core.types import WorkerId

# A request teaches what prefill costs only if next to nothing was queued ahead of it, or came beside it.
_ALONE_SHARE = 0.05
_ALONE_TOKENS = 8
# Where most of the time went into others' prefill, what is left is mostly error.
_MIN_DECODING_SHARE = 0.5
_MIN_OUTPUT = 16  # tokens: shorter answers say little about the time of one


class Learned:
    """All estimates, with priors from the settings until there are samples."""

    def __init__(self, costs: CostSettings) -> None:
        self.outputs = OutputLengths(costs.expected_output_tokens)
        self.reuse = ReuseShares()
        self.ttft = TtftModels(costs.ttft_prior())
        self.steps = StepModels(costs.step_prior())
        self._arrivals = Arrivals()
        self._left_waiting = Arrivals()

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self.ttft.forget(worker)
        self._arrivals.forget(worker)
        self._left_waiting.forget(worker)

    def sent(self, worker: WorkerId, uncovered_tokens: int, waiting: int, now: float) -> None:
        """A request with so much to compute was sent to `worker`, where so many waited at the last scrape."""
        self._arrivals.note(worker, uncovered_tokens, now)
        self.seen(worker, waiting, now)

    def seen(self, worker: WorkerId, waiting: int, now: float) -> None:
        """`worker` was scraped: that many requests found no place in its last step."""
        if waiting:
            self._left_waiting.note(worker, waiting, now)

    def learn(self, released: Released, load: WorkerLoad, prefill_beside_ms: float) -> None:
        """Take in a finished request.

        Args:
            released: the request.
            load: of its worker just before it was released.
            prefill_beside_ms: prefill booked there after it, which slowed its decoding down.
        """
        lease, completion = released.lease, released.completion
        request, chosen = lease.decision.request, lease.decision.chosen
        self.learn_lengths(released)
        if not answered(completion) or lease.sequences != 1:
            return
        # Without a stream the first byte is the last token's.
        if request.stream and completion.served_by in (None, chosen.worker.endpoint):
            self._first_token(released)
            self._further_tokens(released, load, prefill_beside_ms)

    def learn_lengths(self, released: Released) -> None:
        """Take in how long a finished request was, wherever it was served."""
        lease, completion = released.lease, released.completion
        request = lease.decision.request
        if not answered(completion) or lease.sequences != 1:
            return
        if completion.cached_tokens is not None and request.prompt_tokens > 0:
            self.reuse.observe(request.pool, request.prompt_tokens, completion.cached_tokens)
        if completion.output_tokens is not None:
            self.outputs.observe(request, completion.output_tokens, released.released_at)

    def _first_token(self, released: Released) -> None:
        request, chosen = released.lease.decision.request, released.lease.decision.chosen
        took_ms, cached = released.completion.upstream_first_body_ms, released.completion.cached_tokens
        if took_ms is None:
            return
        prompt = request.prompt_tokens
        if request.load_only is not None:  # it was estimated by its size
            prompt = released.completion.prompt_tokens or prompt
        cached = chosen.cached_tokens if cached is None else cached
        uncovered = max(0, prompt - cached)
        admitted_at = released.lease.admitted_at
        first_token_at = admitted_at + took_ms / 1000.0
        around = self._arrivals.between(chosen.worker, admitted_at, first_token_at)
        # An engine without memory or places keeps requests waiting for seconds, whatever there is to compute.
        if around is None or self._left_waiting.between(chosen.worker, admitted_at, first_token_at) != 0:
            return
        beside = around - chosen.uncovered_tokens + chosen.queued_prefill_tokens
        if beside <= _ALONE_SHARE * uncovered + _ALONE_TOKENS:
            self.ttft.of(request.pool).observe(
                chosen.worker,
                uncovered=uncovered,
                cached=cached,
                sequences=chosen.sequences,
                ttft_ms=took_ms,
            )

    def _further_tokens(self, released: Released, load: WorkerLoad, prefill_beside_ms: float) -> None:
        request, chosen = released.lease.decision.request, released.lease.decision.chosen
        completion = released.completion
        tokens, first_ms, all_ms = completion.output_tokens, completion.first_body_ms, completion.duration_ms
        if tokens is None or tokens < _MIN_OUTPUT or first_ms is None or all_ms is None:
            return
        decoding_ms = all_ms - first_ms - prefill_beside_ms
        if decoding_ms < _MIN_DECODING_SHARE * (all_ms - first_ms):
            return
        # Load changes while a request decodes; the mean of its two ends stands for it.
        self.steps.of(request.pool).observe(
            sequences=(chosen.sequences + 1 + load.sequences) / 2,
            context_tokens=(chosen.context_tokens + request.prompt_tokens + load.context_tokens) / 2,
            tpot_ms=decoding_ms / (tokens - 1),
        )
