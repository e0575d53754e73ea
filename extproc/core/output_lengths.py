"""How many tokens a request will generate: learned from what ended, by model, tenant and class of prompt.

    expected = median of the last samples of the most specific level that has enough of them
    high     = their 90 % quantile
    both at most the request's own limit (`max_tokens`, `max_completion_tokens`)

Levels, most specific first: (model, tenant, class), (model, tenant), model, prior. A level counts with
`enough` samples; until then the next one answers. A hint of the client replaces what was learned, counts up
to `LONGEST` tokens of the decode clock (32,768: one that is absurd would make its worker look full for
minutes), and is capped likewise. Quantiles of a bounded window are robust: single stragglers do not move the
median, and show in `high`. Samples are forgotten as newer ones come, and when they are older than `memory_s`.

An answer that was cut at its limit says only that the true length is not below it: it counts as the limit or
as the present expectation, whichever is more, so that many small limits do not make the rest look short.

Tokens, per sequence; seconds. Defaults: window 64, enough 8, memory 6 hours, prior from
`CostSettings.expected_output_tokens` (128), 1,024 keys (the one longest without a sample is forgotten first).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from extproc.core.decode_clock import LONGEST
from extproc.core.types import LengthEstimate, LengthSource, RoutingRequest

WINDOW = 64
ENOUGH = 8
MEMORY_S = 6 * 3600.0
MAX_KEYS = 1024
HIGH = 0.9
_PRIOR_HIGH = 4.0  # times the expected length

_Key = tuple[str, ...]
_SOURCES = {3: LengthSource.CLASS, 2: LengthSource.TENANT, 1: LengthSource.MODEL}


class Recent:
    """Samples of the last `memory_s` seconds, at most `size`, with any quantile of them."""

    __slots__ = ("_memory_s", "_ordered", "_samples", "_size")

    def __init__(self, size: int = WINDOW, memory_s: float = MEMORY_S) -> None:
        self._size = size
        self._memory_s = memory_s
        self._samples: deque[tuple[float, float]] = deque()
        self._ordered: list[float] = []

    def add(self, sample: float, now: float) -> None:
        """Record a sample."""
        if len(self._samples) >= self._size:
            self._drop_oldest()
        self._samples.append((now, sample))
        insort(self._ordered, sample)

    def count(self, now: float) -> int:
        """How many samples there are that are not too old."""
        while self._samples and now - self._samples[0][0] > self._memory_s:
            self._drop_oldest()
        return len(self._samples)

    def quantile(self, share: float) -> float:
        """The sample at rank `ceil(share * n)`.

        Raises:
            IndexError: there is none.
        """
        return self._ordered[max(0, math.ceil(share * len(self._ordered)) - 1)]

    def _drop_oldest(self) -> None:
        _, sample = self._samples.popleft()
        del self._ordered[bisect_left(self._ordered, sample)]


class OutputLengths:
    """Lengths of all models. See the module.

    Args:
        prior_tokens: expected until anything is known.
        enough: samples a level needs.
        memory_s: age at which samples are forgotten.
    """

    def __init__(self, prior_tokens: float, *, enough: int = ENOUGH, memory_s: float = MEMORY_S) -> None:
        self._prior = prior_tokens
        self._enough = enough
        self._memory_s = memory_s
        self._levels: dict[_Key, Recent] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def observe(self, request: RoutingRequest, tokens: int, now: float) -> None:
        """One sequence of `request` ended by itself, or at its limit, after `tokens` generated tokens."""
        sample = float(tokens)
        limit = request.max_output_tokens
        if tokens == limit:
            sample = max(sample, self._learned(request, now).expected)
        for key in _keys(request):
            recent = self._levels.pop(key, None)
            if recent is None:
                if len(self._levels) >= MAX_KEYS:
                    del self._levels[next(iter(self._levels))]
                recent = Recent(memory_s=self._memory_s)
            self._levels[key] = recent
            recent.add(sample, now)

    def estimate(self, request: RoutingRequest, now: float) -> LengthEstimate:
        """What to expect of one sequence of `request`."""
        hint = request.expected_output_tokens
        if hint is not None:
            bounded = min(float(hint), LONGEST)
            known = LengthEstimate(bounded, bounded, LengthSource.HINT)
        else:
            known = self._learned(request, now)
        limit = request.max_output_tokens
        if limit is None:
            return known
        return known._replace(expected=min(known.expected, limit), high=min(known.high, limit))

    def _learned(self, request: RoutingRequest, now: float) -> LengthEstimate:
        for key in _keys(request):
            recent = self._levels.get(key)
            if recent is not None and recent.count(now) >= self._enough:
                return LengthEstimate(recent.quantile(0.5), recent.quantile(HIGH), _SOURCES[len(key)])
        return LengthEstimate(self._prior, _PRIOR_HIGH * self._prior, LengthSource.PRIOR)


def _keys(request: RoutingRequest) -> Iterator[_Key]:
    """The levels of a request, most specific first; those that say nothing are left out."""
    if request.prompt_class:
        yield (request.model, request.tenant, request.prompt_class)
    if request.tenant:
        yield (request.model, request.tenant)
    yield (request.model,)
