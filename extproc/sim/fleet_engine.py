"""The engine model without its work per token, for fleets and long runs.

Theory of operation. In `EngineModel` every step visits every sequence of the batch. But a sequence that is
decoding does the same thing in each step, except where it fills a block, needs one, or ends; and when that
will be is known beforehand. So the decoding sequences are kept as a *group*: its size and the context it
reads are two numbers, and a calendar by step number says which of its members need attention in which step.

    step k, computed tokens of a member before it:   offset + k - 1      (offset = known tokens - step number)
    needs a block     when computed reaches the capacity of its blocks:  k = capacity + 1 - offset
    fills a block     at `commit_at` computed tokens:                    k = commit_at - offset
    ends              with its last token:                               k = total - 1 - offset

What else is in the batch, prompts being computed, goes through `EngineModel` as before. That is at most one
sequence which was there already, the last one admitted: a prompt that is cut by the token budget leaves
nothing for anybody behind it. (So the budget must be larger than the batch.)

While only the group is running and the calendar is empty, steps differ in nothing but the context they read.
Such a *quiet run* of steps is one: its deadline is the end of its last step. Whoever comes in the middle of
it makes the engine settle first: the steps that are over are counted, and what is left of the run is given up
if the next step may be another than was thought.

    step in flight    ends at `_step_ends`; `_rest` quiet steps follow it, the last one ending at the deadline
    settle(now)       the step in flight becomes the one that is in flight at `now`
    submit, abort     settled; the deadline becomes the end of the step in flight

Steps, times, events, first tokens, ends and statistics are those of `EngineModel`, which a test compares
step by step; only `StepResult.emitted` stays empty, and steps with nothing to tell are left out.
"""

import math
from heapq import heappop, heappush
from operator import attrgetter

from extproc.sim.engine_batch import ActiveSequence, Step
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig, EngineRequest, StepResult

_by_order = attrgetter("order")
_NEVER = 1 << 62


class FleetEngine(EngineModel):
    """See the module's docstring.

    Raises:
        ValueError: `max_num_seqs` is not below `max_num_batched_tokens`.
    """

    __slots__ = (
        "_context",
        "_decodes",
        "_due",
        "_due_numbers",
        "_end_numbers",
        "_ended",
        "_ends",
        "_joined",
        "_number",
        "_partial",
        "_rest",
        "_step_ends",
    )

    def __init__(self, config: EngineConfig) -> None:
        if config.max_num_seqs >= config.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({config.max_num_seqs}) must be below max_num_batched_tokens "
                f"({config.max_num_batched_tokens}), so that a full batch leaves room for a prompt"
            )
        super().__init__(config)
        self._number = 0  # of the step in flight, or of the next one
        self._ended = 0.0  # when the last step ended
        self._decodes = 0  # size of the group
        self._context = 0  # computed tokens of the group
        self._joined = 0  # members so far
        self._due: dict[int, list[ActiveSequence]] = {}
        self._ends: dict[int, list[ActiveSequence]] = {}
        self._due_numbers: list[int] = []  # heaps of the keys of both
        self._end_numbers: list[int] = []
        self._partial: ActiveSequence | None = None
        self._rest = 0
        self._step_ends = 0.0

    def submit(self, request: EngineRequest, now: float) -> None:
        """As `EngineModel.submit`."""
        self.settle(now)
        super().submit(request, now)
        self._give_up_rest()

    def settle(self, now: float) -> None:
        """Count the quiet steps that ended before `now`. Statistics are then those at `now`."""
        if self._rest and self._step_ends < now:
            self._skip(self._rest, now)

    def step_left_s(self, now: float) -> float:
        """As `EngineModel.step_left_s`, once it has settled."""
        return 0.0 if self._step is None else max(0.0, self._step_ends - now)

    def tick(self, now: float) -> list[StepResult]:
        """As `EngineModel.tick`, without the steps that bring nothing to tell."""
        results: list[StepResult] = []
        while (at := self._deadline) is not None and at <= now:
            step = self._step
            if step is not None:
                if self._rest:
                    self._skip(self._rest, None)
                result = self._end_step(step, at)
                if result.events or result.first_tokens or result.finished:
                    results.append(result)
            self._begin_step(at)
        self.settle(math.nextafter(now, math.inf))
        return results

    def _after_step(self, sequence: ActiveSequence) -> tuple[ActiveSequence, int, int]:
        if sequence.offset is None:
            return super()._after_step(sequence)
        known = sequence.offset + self._number + 1
        return sequence, known - 1, known

    def abort(self, request_id: str) -> bool:
        """As `EngineModel.abort`."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._leave(sequence)
            if sequence is self._partial:
                self._partial = None
            self._give_up_rest()
        return super().abort(request_id)

    # --- quiet runs ------------------------------------------------------------------------------------

    def _begin_step(self, at: float) -> None:
        super()._begin_step(at)
        step, ends = self._step, self._deadline
        if step is None or ends is None:
            return
        self._step_ends = ends
        if step.sequences or self.pool.has_events or not self._nobody_can_join():
            return
        # The last step that begins and ends like the one in flight.
        last = min(_first(self._due_numbers, self._number + 1) - 1, _first(self._end_numbers, self._number))
        self._rest = rest = last - self._number
        if rest > 0:
            time, decodes, context = self.config.time, step.decodes, step.context
            fixed, per_token = time.base_ms + time.decode_ms_per_sequence * decodes, time.context_ms_per_token
            for _ in range(rest):
                context += decodes
                ends += (fixed + per_token * context) / 1000.0
            self._deadline = ends

    def _nobody_can_join(self) -> bool:
        """Whether the next step will admit nobody, if nothing but tokens changes until then."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return True
        return self._is_blocked(self._waiting[0])

    def _skip(self, most: int, before: float | None) -> None:
        """Count up to `most` quiet steps that end before a time (None: whenever) and let the next one fly."""
        step = self._step
        assert step is not None  # noqa: S101 - there is no rest without a step
        time, decodes, context = self.config.time, step.decodes, step.context
        fixed, per_token = time.base_ms + time.decode_ms_per_sequence * decodes, time.context_ms_per_token
        began, ends = self._step_began, self._step_ends
        spans: list[float] = []
        while len(spans) < most and (before is None or ends < before):
            spans.append(ends - began)
            began = ends
            context += decodes
            ends = began + (fixed + per_token * context) / 1000.0
        count = len(spans)
        stats = self.stats
        low, high = min(spans), max(spans)
        if not stats.inter_token.observe_run(low, high, sum(spans) * decodes, count * decodes):
            for span in spans:
                stats.inter_token.observe(span, decodes)
        stats.generation_tokens += decodes * count
        stats.step_tokens.observe(decodes, count)
        self._context += decodes * count
        self._number += count
        self._rest -= count
        step.context = context
        self._step_began = self._ended = began
        self._step_ends = ends
        self._report(began)

    def _give_up_rest(self) -> None:
        if self._rest:
            self._rest = 0
            self._deadline = self._step_ends

    # --- a step ----------------------------------------------------------------------------------------

    def _schedule_running(self, step: Step, budget: int) -> tuple[int, bool]:
        preempted = False
        due = self._due.pop(self._number, None)
        if due is not None:
            if len(due) > 1:
                due.sort(key=_by_order)
            for sequence in due:
                # One that was preempted, and perhaps is back, has another date.
                if sequence.due == self._number and self._attend(sequence):
                    preempted = True
        step.decodes = self._decodes
        step.context = self._context
        budget -= self._decodes
        partial, self._partial = self._partial, None
        if partial is None:
            return budget, preempted
        # The base class goes through the list of running sequences: show it the one outside of the group.
        running, self._running = self._running, [partial]
        budget, starved = super()._schedule_running(step, budget)
        if not self._running:
            running.pop()
        self._running = running
        return budget, preempted or starved

    def _end_step(self, step: Step, at: float) -> StepResult:
        stats = self.stats
        result = StepResult(at, self.pool.take_events(), [], [], [])
        steady = self._decodes
        self._context += steady
        self._number += 1
        self._ended = at
        self._end_members(at, result)
        computed, tokens = self._end_prompts(step, at, result)
        if steady:
            stats.inter_token.observe(at - self._step_began, steady)
        stats.generation_tokens += steady + tokens
        stats.step_tokens.observe(computed + steady + tokens)
        if result.finished:
            self._running = [sequence for sequence in self._running if not sequence.gone]
        self._step = None
        self._report(self._step_began)
        return result

    def _end_members(self, at: float, result: StepResult) -> None:
        """Members of the group whose last token this step brought."""
        ends = self._ends.pop(self._number - 1, None)
        if ends is None:
            return
        if len(ends) > 1:
            ends.sort(key=_by_order)
        for sequence in ends:
            # One that was preempted, and perhaps is back, has another date.
            if sequence.offset is not None and sequence.offset + self._number == sequence.total:
                self._leave(sequence)
                self._finish(sequence, at, result)

    def _end_prompts(self, step: Step, at: float, result: StepResult) -> tuple[int, int]:
        """Sequences outside of the group. Returns prompt tokens computed to the end, and tokens generated."""
        computed = tokens = 0
        for sequence in step.sequences:
            if sequence.gone:
                continue
            sequence.computed += sequence.scheduled
            if sequence.computed < sequence.known:
                self._partial = sequence
                continue
            if sequence.known == sequence.prompt:
                computed += sequence.prompt - sequence.cached_tokens
                self._first_token(sequence, at, result)
            else:
                self.stats.inter_token.observe(at - sequence.last_token_at)
            tokens += 1
            sequence.known += 1
            if sequence.known == sequence.total:
                self._finish(sequence, at, result)
            else:
                self._join(sequence)
        return computed, tokens

    # --- the group -------------------------------------------------------------------------------------

    def _join(self, sequence: ActiveSequence) -> None:
        """From the next step on it decodes."""
        sequence.offset = sequence.known - self._number
        sequence.order = self._joined
        self._joined += 1
        self._decodes += 1
        self._context += sequence.computed
        _enter(self._ends, self._end_numbers, sequence.total - 1 - sequence.offset, sequence)
        self._plan(sequence)

    def _leave(self, sequence: ActiveSequence) -> None:
        if sequence.offset is not None:
            self._decodes -= 1
            self._context -= sequence.offset + self._number - 1
            sequence.offset = None
            sequence.due = -1

    def _plan(self, sequence: ActiveSequence) -> None:
        """Note when the sequence needs attention next."""
        assert sequence.offset is not None  # noqa: S101 - members have one
        at = min(sequence.capacity + 1, sequence.commit_at)
        sequence.due = at - sequence.offset
        if at < sequence.total:
            _enter(self._due, self._due_numbers, sequence.due, sequence)

    def _attend(self, sequence: ActiveSequence) -> bool:
        """Get a member the block it needs, and make the one that is full reusable. True if memory ran out."""
        assert sequence.offset is not None  # noqa: S101 - members have one
        starved = False
        end = sequence.offset + self._number
        if end > sequence.capacity:
            while not self.pool.free:
                starved = True
                victim = self._running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return True
            self._extend(sequence, self.pool.allocate(1))
        if end >= sequence.commit_at:
            self._commit(sequence, end)
        self._plan(sequence)
        return starved

    def _preempt(self, sequence: ActiveSequence) -> None:
        if sequence is self._partial:
            self._partial = None
        elif sequence.offset is not None:
            sequence.known = sequence.offset + self._number
            sequence.last_token_at = self._ended
            self._leave(sequence)
        super()._preempt(sequence)


def _enter(
    calendar: dict[int, list[ActiveSequence]], numbers: list[int], number: int, sequence: ActiveSequence
) -> None:
    there = calendar.get(number)
    if there is None:
        calendar[number] = [sequence]
        heappush(numbers, number)
    else:
        there.append(sequence)


def _first(numbers: list[int], least: int) -> int:
    """The smallest of a heap of numbers that is at least `least`; smaller ones are dropped."""
    while numbers and numbers[0] < least:
        heappop(numbers)
    return numbers[0] if numbers else _NEVER
