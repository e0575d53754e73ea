r"""How far the sequences on one worker have come with decoding, as expected without a signal.

Theory of operation
-------------------
Continuous batching gives every decoding sequence one token per step, so one number per worker stands for the
progress of all of them: the steps it is expected to have made,

    steps(now) = steps(then) + (now - then) / tpot(sequences, context)

with the learned time per output token (`extproc.core.step_model`), set anew whenever the load changes. A
sequence has generated `steps - start` tokens, `start` being the count when its prefill ended; their sum over
all sequences is kept, not computed. A progress signal moves `start`, so that what was reported is true from
then on.

A sequence is expected to end at step `end = start + expected length`. One that goes on past it is one of the
longer ones: its length is then taken to be the high estimate, and after that twice what it was, at most its
limit. At the limit it has ended, and only the news of it is missing: it grows no further.

    state \ event   announce     start         correct    end reached      stop
    new             -> waiting   -> decoding
    waiting                      -> decoding   decoding   end moves        -> gone
    decoding                     (ignored)     decoding   end moves, or    -> gone
                                                          -> full
    full                         (ignored)     decoding                    -> gone

Reading at any time changes no answer: due changes are worked off in the order and as of the time they were
due. Steps and tokens are real numbers; times are seconds, `tpot_ms` milliseconds.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from extproc.core.types import LengthEstimate

LONGEST = 32_768.0  # tokens, of a sequence without a limit: nothing that is still open grows without bound
_POINTS = (0.125, 0.375, 0.625, 0.875)
_SHORTEST = 1.0
_MIN_TPOT_MS = 0.1  # a fit may come out near zero; time does not stand still


@dataclass(slots=True, eq=False)
class Run:
    """The sequences of one request, as a worker's clock sees them. Mutable; owned by the clock."""

    sequences: int
    prompt: float  # tokens, per sequence
    expected: float  # tokens, per sequence
    high: float
    limit: float
    length: float  # tokens each is now taken to become
    start: float | None = None  # step at which decoding began; None: waiting
    end: float = 0.0  # step at which it is expected to end
    full: bool = False

    @classmethod
    def of(
        cls, sequences: int, output: LengthEstimate | None, limit: int | None, prompt_tokens: float = 0.0
    ) -> "Run":
        """A run that has not begun. Without an estimate it is taken to be as short as can be."""
        bound = float(limit) if limit is not None else LONGEST
        expected = _SHORTEST if output is None else max(_SHORTEST, output.expected)
        high = expected if output is None else max(expected, output.high)
        length = min(expected, bound)
        prompt = prompt_tokens / max(1, sequences)
        return cls(sequences, prompt, length, min(high, bound), max(bound, _SHORTEST), length)


class DecodeClock:
    """One worker. See the module."""

    __slots__ = (
        "_at",
        "_bases",
        "_behind",
        "_decoding",
        "_ends",
        "_full_tokens",
        "_owners",
        "_starts",
        "_steps",
        "_tpot_ms",
    )

    def __init__(self, now: float) -> None:
        self._at = now
        self._steps = 0.0
        self._tpot_ms = math.inf
        self._decoding = 0  # sequences that grow
        self._starts = 0.0  # sum of their starts
        self._full_tokens = 0.0  # of those that do not grow any more
        self._ends: list[float] = []  # one per sequence, ascending
        self._owners: list[Run] = []
        self._bases: list[float] = []  # context less steps: what it adds to the steps made is its context
        self._behind: list[float] | None = None  # sums of bases from each place to the end

    @property
    def decoding(self) -> int:
        """Sequences that grow with each step."""
        return self._decoding

    def pace(self, tpot_ms: float | None, now: float) -> None:
        """From now on a step takes so long; None: not known, nothing progresses without a signal."""
        self.advance(now)
        self._tpot_ms = math.inf if tpot_ms is None else max(_MIN_TPOT_MS, tpot_ms)

    def announce(self, run: Run, now: float, wait_s: float) -> None:
        """A run is to begin decoding in `wait_s` seconds."""
        self.advance(now)
        run.end = self._steps + self._in(wait_s) + run.expected
        self._insert(run)

    def start(self, run: Run, at: float) -> None:
        """Its prefill ended at `at`."""
        if run.start is not None:
            return
        self.advance(at)
        self._remove(run)
        run.start = self._steps
        run.end = run.start + run.length
        self._decoding += run.sequences
        self._starts += run.sequences * run.start
        self._insert(run)

    def correct(self, run: Run, generated: float, now: float) -> None:
        """Its sequences have generated `generated` tokens each, whatever was expected. It must have begun."""
        if run.start is None:
            return
        self.advance(now)
        start = self._steps - generated
        if run.full:
            self._full_tokens -= run.sequences * run.limit
            run.full = False
            self._decoding += run.sequences
            self._starts += run.sequences * start
        else:
            self._starts += run.sequences * (start - run.start)
            self._remove(run)
        run.limit = max(run.limit, generated)
        run.start, run.end = start, start + run.length
        self._insert(run)

    def stop(self, run: Run, now: float) -> None:
        """It has ended."""
        self.advance(now)
        if run.full:
            self._full_tokens -= run.sequences * run.limit
            return
        self._remove(run)
        if run.start is not None:
            self._shrink(run, run.start)

    def generated(self, run: Run, now: float) -> float:
        """Tokens each of its sequences is expected to have generated."""
        self.advance(now)
        if run.start is None:
            return 0.0
        return min(run.limit, max(0.0, self._steps_at(now) - run.start))

    def tokens(self, now: float) -> float:
        """Generated by all sequences here, ended ones not counted."""
        self.advance(now)
        growing = self._steps * self._decoding - self._starts
        return max(0.0, growing) + max(0.0, self._full_tokens)

    def beside(self, length: float, now: float) -> float:
        """Steps that a sequence of `length` tokens shares with each of those here, summed over them.

        The sum of min(length, what remains of it) over all sequences, as the mean over four points of the
        number of sequences still there times `length`: no sum over sequences is needed, and another sequence
        never makes it less.
        """
        return self.ahead(length, now)[1]

    def context_beside(self, length: float, now: float) -> float:
        """Tokens of context, summed over the steps of a sequence of `length` tokens, that the others hold.

        Prompts and what will have been generated by then, of those still there; at the points of `beside`.
        """
        return self.ahead(length, now)[2]

    def ahead(self, length: float, now: float) -> tuple[float, float, float]:
        """`tokens`, `beside` and `context_beside`."""
        # Every candidate of every decision is read here: one pass, no calls that can be left out.
        ends = self._ends
        if now > self._at or (ends and ends[0] <= self._steps):
            self.advance(now)
            ends = self._ends
        steps = self._steps
        tokens = steps * self._decoding - self._starts
        tokens = max(tokens, 0.0)
        if self._full_tokens > 0.0:
            tokens += self._full_tokens
        if not ends:
            return tokens, 0.0, 0.0
        behind = self._behind
        if behind is None:
            behind = [*accumulate(reversed(self._bases), initial=0.0)]
            behind.reverse()
            self._behind = behind
        count = len(ends)
        index, there, context = 0, 0, 0.0
        for point in _POINTS:
            step = steps + length * point
            index = bisect_right(ends, step, index)
            there += count - index
            context += behind[index] + step * (count - index)
        context *= length / len(_POINTS)
        return tokens, length * there / len(_POINTS), max(0.0, context)

    def advance(self, now: float) -> None:
        """Work off what is due; `_steps` are those made by `now` then. Changes no answer."""
        if now > self._at:
            self._steps += (now - self._at) * 1000.0 / self._tpot_ms
            self._at = now
        ends = self._ends
        while ends and ends[0] <= self._steps:
            self._passed(self._owners[0])

    def _passed(self, run: Run) -> None:
        """`run` was expected to have ended by now."""
        self._remove(run)
        if run.start is None:
            run.end += run.expected * (math.floor((self._steps - run.end) / run.expected) + 1)
        elif run.length >= run.limit:
            run.full = True
            self._full_tokens += run.sequences * run.limit
            self._shrink(run, run.start)
            return
        else:
            run.length = min(run.limit, max(run.high, 2.0 * run.length))
            run.end = run.start + run.length
        self._insert(run)

    def _shrink(self, run: Run, start: float) -> None:
        self._decoding -= run.sequences
        self._starts -= run.sequences * start
        if not self._decoding:
            self._starts = 0.0  # nothing of what rounding left stays

    def _steps_at(self, now: float) -> float:
        return self._steps + self._in(max(0.0, now - self._at))

    def _in(self, seconds: float) -> float:
        return seconds * 1000.0 / self._tpot_ms

    def _insert(self, run: Run) -> None:
        index = bisect_right(self._ends, run.end)
        self._ends[index:index] = [run.end] * run.sequences
        self._owners[index:index] = [run] * run.sequences
        base = run.prompt - (self._steps if run.start is None else run.start)
        self._bases[index:index] = [base] * run.sequences
        self._behind = None

    def _remove(self, run: Run) -> None:
        index = bisect_left(self._ends, run.end)
        while index < len(self._ends) and self._owners[index] is not run:
            index += 1
        del self._ends[index : index + run.sequences]
        del self._owners[index : index + run.sequences]
        del self._bases[index : index + run.sequences]
        self._behind = None
