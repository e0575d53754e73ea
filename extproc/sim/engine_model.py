"""One vLLM engine core as a discrete-event model: scheduler, block pool and a clock that is passed in.

Theory of operation. The engine works in steps. Beginning a step schedules it: running sequences first, in
the order they were admitted, then waiting ones, first come first served, until the token budget, the
sequence limit or the memory is used up. Blocks are allocated, and full ones made reusable, at that moment.
The step then takes the time the `TimeModel` says; when it ends its KV events go out, every sequence that has
caught up with its tokens gets the next one, finished sequences give their blocks back, and the next step
begins at exactly that time (however late `tick` was called: model time does not drift).

    waiting    --scheduled: the whole sequence must fit in the free blocks-->      running
    running    --memory runs out: last admitted first; recomputed from scratch-->  waiting (in front)
    running    --last token-->                                                     gone
    any        --abort: blocks that are already full stay cached-->                gone

What its metrics tell of the sequences and of memory is as of the end of the last step, as in the engine: a
request that came since is in neither count, so one that is counted as waiting was left over by a step.

Source: `vllm/v1/core/sched/scheduler.py` (0.32) without speculation, connectors or priorities. Its
asynchronous mode begins a step before the last one's tokens are known; what is cached is the same.
"""

from collections import Counter, deque

from extproc.core.types import EngineMetrics
from extproc.sim.block_pool import BlockPool
from extproc.sim.engine_batch import ActiveSequence, Step
from extproc.sim.engine_stats import EngineStats
from extproc.sim.engine_types import (
    EngineConfig,
    EngineRequest,
    Finished,
    FirstToken,
    Gauges,
    Outlook,
    RequestTooLongError,
    StepResult,
)


class EngineModel:
    """See the module's docstring. Not thread-safe; every method takes or returns at once.

    The host calls `tick(now)` whenever `next_deadline()` has come, and publishes what it returns.
    """

    __slots__ = (
        "_blocked",
        "_deadline",
        "_reported",
        "_running",
        "_sequences",
        "_step",
        "_step_began",
        "_waiting",
        "config",
        "pool",
        "stats",
    )

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks, config.block_size, emit_events=config.emit_events)
        self.stats = EngineStats()
        self._sequences: dict[str, ActiveSequence] = {}
        self._waiting: deque[ActiveSequence] = deque()
        self._running: list[ActiveSequence] = []
        self._step: Step | None = None
        self._step_began = 0.0
        self._deadline: float | None = None
        # The waiting sequence that did not fit, the free blocks there were, and the hash of the first block
        # it would have had to compute: while there are no more free blocks and no more hits, it cannot fit.
        self._blocked: tuple[ActiveSequence, int, int | None] | None = None
        self._reported = Gauges(0, 0, 0.0)

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue a request. It can be scheduled by the first step that begins at or after `now`.

        Raises:
            RequestTooLongError: prompt and output exceed `max_model_len`.
            ValueError: the prompt or the output is empty, or the id is in use.
        """
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        length = request.prompt_tokens + request.output_tokens
        if length > self.config.max_model_len:
            raise RequestTooLongError(
                f"{request.prompt_tokens} prompt tokens and {request.output_tokens} output tokens exceed the "
                f"model's maximum context length of {self.config.max_model_len} tokens; shorten the prompt "
                "or lower the output limit"
            )
        sequence = ActiveSequence(request, now)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        if self._deadline is None:
            self._deadline = now

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it is. False if it is unknown or already finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.gone = True
        if sequence.admitted_at is not None and sequence in self._running:
            self._running.remove(sequence)
            self.pool.release(sequence.blocks)
        else:
            self._waiting.remove(sequence)
        self.stats.finished["abort"] += 1
        if self._step is None:  # the engine has an empty step for that
            self._report(self._step_began)
        return True

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None while the engine is idle."""
        return self._deadline

    def tick(self, now: float) -> list[StepResult]:
        """End every step that is over by `now`, beginning the next one each time. Oldest first."""
        results: list[StepResult] = []
        while self._deadline is not None and self._deadline <= now:
            at = self._deadline
            if self._step is not None:
                results.append(self._end_step(self._step, at))
            self._begin_step(at)
        return results

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; refused (False) while sequences hold blocks.

        The event that says so goes out with the next step, as in the engine.
        """
        return self.pool.reset()

    # --- what the engine reports -----------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences waiting to be scheduled, preempted ones included."""
        return len(self._waiting)

    @property
    def decode_blocks(self) -> int:
        """KV blocks of the sequences that are past their first token, each counted for every holder."""
        return sum(len(s.blocks) for s in self._running if s.first_token_at > 0.0)

    def outlook(self) -> list[Outlook]:
        """What every sequence has before it when the step in flight has ended, the running ones first."""
        return [
            Outlook(s.request, computed, known - computed, s.total - known, s.admitted_at is not None)
            for s, computed, known in map(self._after_step, (*self._running, *self._waiting))
            if known < s.total
        ]

    def _after_step(self, sequence: ActiveSequence) -> tuple[ActiveSequence, int, int]:
        """Computed and known tokens once the step in flight has ended."""
        if self._step is None or sequence not in self._step.sequences:
            return sequence, sequence.computed, sequence.known
        computed = sequence.computed + sequence.scheduled
        return sequence, computed, sequence.known + (computed >= sequence.known)

    def step_left_s(self, now: float) -> float:
        """Seconds until the step in flight ends; 0 while the engine is idle."""
        return 0.0 if self._deadline is None else max(0.0, self._deadline - now)

    def adapters(self) -> tuple[Counter[str], Counter[str]]:
        """Requests by adapter: running, waiting."""
        running = Counter(s.request.adapter for s in self._running if s.request.adapter is not None)
        waiting = Counter(s.request.adapter for s in self._waiting if s.request.adapter is not None)
        return running, waiting

    @property
    def reported(self) -> Gauges:
        """What the engine's metrics say of its sequences and its memory: as of the end of the last step."""
        return self._reported

    def _report(self, began: float) -> None:
        new = 0  # that no step has seen yet
        for sequence in reversed(self._waiting):
            if sequence.arrived_at <= began:
                break
            new += 1
        self._reported = Gauges(len(self._running), len(self._waiting) - new, self.pool.usage)

    def snapshot(self) -> EngineMetrics:
        """The engine's metrics as a scrape would show them."""
        stats, config, reported = self.stats, self.config, self._reported
        running, waiting = self.adapters()
        return EngineMetrics(
            running=reported.running,
            waiting=reported.waiting,
            deferred=0,
            kv_usage=reported.kv_usage,
            block_size=config.block_size,
            num_gpu_blocks=config.num_gpu_blocks,
            prefix_cache_queries=float(stats.prefix_queries),
            prefix_cache_hits=float(stats.prefix_hits),
            preemptions=float(stats.preemptions),
            prompt_tokens=float(stats.prompt_tokens),
            generation_tokens=float(stats.generation_tokens),
            ttft=stats.ttft.totals(),
            queue_time=stats.queue.totals(),
            prefill_time=stats.prefill.totals(),
            inter_token=stats.inter_token.totals(),
            adapters=tuple(sorted({*running, *waiting})),
        )

    # --- a step ----------------------------------------------------------------------------------------

    def _begin_step(self, at: float) -> None:
        step = Step()
        budget, preempted = self._schedule_running(step, self.config.max_num_batched_tokens)
        if self._waiting and not preempted:
            self._schedule_waiting(step, budget, at)
        if not (step.sequences or step.decodes):
            self._step = None
            self._deadline = self._waiting[0].arrived_at if self._waiting else None
            self._report(at)
            return
        self._step = step
        self._step_began = at
        self._deadline = at + self.config.time.step_s(step.prefill, step.pairs, step.decodes, step.context)

    def _schedule_running(self, step: Step, budget: int) -> tuple[int, bool]:
        """Returns the budget left and whether a sequence was preempted."""
        running = self._running
        preempted = False
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            tokens = sequence.known - sequence.computed
            tokens = min(tokens, budget)
            end = sequence.computed + tokens
            if end > sequence.capacity:
                need = -(-(end - sequence.capacity) // self.config.block_size)
                while need > self.pool.free:
                    preempted = True
                    victim = running.pop()
                    self._preempt(victim)
                    if victim is sequence:
                        return budget, preempted
                self._extend(sequence, self.pool.allocate(need))
            if end >= sequence.commit_at:
                self._commit(sequence, end)
            step.add(sequence, tokens)
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, step: Step, budget: int, at: float) -> None:
        size, pool, stats = self.config.block_size, self.pool, self.stats
        while self._waiting and budget and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            if sequence.arrived_at > at:
                return
            if self._is_blocked(sequence):
                return
            # The last token is always computed: its logits are what the step is for.
            limit = (sequence.known - 1) // size
            hits = pool.match(sequence.request.block_hashes, limit)
            start = len(hits) * size
            # Admitted only if all of its tokens fit, although this step may compute a part of them.
            if -(-sequence.known // size) - len(hits) + pool.unreferenced(hits) > pool.free:
                missing = sequence.request.block_hashes[len(hits)] if len(hits) < limit else None
                self._blocked = (sequence, pool.free, missing)
                return
            self._blocked = None
            self._waiting.popleft()
            self._running.append(sequence)
            if not sequence.preemptions:
                stats.prefix_queries += sequence.known
                stats.prefix_hits += start
                sequence.cached_tokens = start
                sequence.admitted_at = at
            tokens = min(sequence.known - start, budget)
            pool.touch(hits)
            self._extend(sequence, hits)
            self._extend(sequence, pool.allocate(-(-tokens // size)))
            sequence.computed = start
            sequence.cached_blocks = len(hits)
            self._commit(sequence, start + tokens)
            step.add(sequence, tokens)
            budget -= tokens

    def _is_blocked(self, sequence: ActiveSequence) -> bool:
        """Whether it is known that the sequence, the first that waits, does not fit."""
        if self._blocked is None:
            return False
        blocked, free, missing = self._blocked
        if sequence is not blocked or self.pool.free > free:
            return False
        return missing is None or not self.pool.holds(missing)

    def _extend(self, sequence: ActiveSequence, blocks: list[int]) -> None:
        sequence.blocks += blocks
        sequence.capacity = len(sequence.blocks) * self.config.block_size

    def _commit(self, sequence: ActiveSequence, end: int) -> None:
        """Make the blocks that are full after `end` tokens reusable."""
        full = end // self.config.block_size
        if full > sequence.cached_blocks:
            request = sequence.request
            self.pool.cache(
                sequence.blocks,
                request.block_hashes,
                sequence.cached_blocks,
                full,
                request.token_ids,
                request.adapter,
                request.cache_salt,
            )
            sequence.cached_blocks = full
        sequence.commit_at = (full + 1) * self.config.block_size

    def _preempt(self, sequence: ActiveSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.capacity = 0
        sequence.computed = 0
        sequence.cached_blocks = 0
        sequence.preemptions += 1
        self.stats.preemptions += 1
        self._waiting.appendleft(sequence)

    def _end_step(self, step: Step, at: float) -> StepResult:
        stats, began = self.stats, self._step_began
        result = StepResult(at, self.pool.take_events(), [], [], [])
        emitted = result.emitted
        steady = computed_prompts = 0
        for sequence in step.sequences:
            if sequence.gone:
                continue
            sequence.computed += sequence.scheduled
            if sequence.computed < sequence.known:
                continue
            if sequence.known == sequence.prompt:
                computed_prompts += sequence.prompt - sequence.cached_tokens
                self._first_token(sequence, at, result)
            elif sequence.last_token_at == began:
                steady += 1
            else:
                stats.inter_token.observe(at - sequence.last_token_at)
            sequence.known += 1
            sequence.last_token_at = at
            emitted.append(sequence.request)
            if sequence.known == sequence.total:
                self._finish(sequence, at, result)
        if steady:
            stats.inter_token.observe(at - began, steady)
        stats.generation_tokens += len(emitted)
        stats.step_tokens.observe(computed_prompts + len(emitted))
        if result.finished:
            self._running = [sequence for sequence in self._running if not sequence.gone]
        self._step = None
        self._report(began)
        return result

    def _first_token(self, sequence: ActiveSequence, at: float, result: StepResult) -> None:
        admitted = sequence.admitted_at
        assert admitted is not None  # noqa: S101 - a token comes out of a step, and that starts by admission
        sequence.first_token_at = at
        ttft = at - sequence.arrived_at
        self.stats.first_token(sequence.request.prompt_tokens, sequence.cached_tokens, ttft)
        result.first_tokens.append(
            FirstToken(sequence.request, sequence.cached_tokens, admitted - sequence.arrived_at, ttft)
        )

    def _finish(self, sequence: ActiveSequence, at: float, result: StepResult) -> None:
        request, admitted = sequence.request, sequence.admitted_at
        assert admitted is not None  # noqa: S101 - as above
        sequence.gone = True
        del self._sequences[request.request_id]
        self.pool.release(sequence.blocks)
        self.stats.request_finished(
            request.finish_reason,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            output_tokens=request.output_tokens,
            preemptions=sequence.preemptions,
            queue_s=admitted - sequence.arrived_at,
            prefill_s=sequence.first_token_at - admitted,
            decode_s=at - sequence.first_token_at,
        )
        result.finished.append(
            Finished(
                request,
                sequence.cached_tokens,
                sequence.first_token_at - sequence.arrived_at,
                at - sequence.arrived_at,
                sequence.preemptions,
            )
        )
