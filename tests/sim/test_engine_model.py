import random
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from extproc.core.types import AllBlocksCleared, BlockStored, KvEvent
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig, EngineRequest, Finished, RequestTooLongError, StepResult
from extproc.sim.time_model import TimeModel
from tests.support.engine_reference import ReferenceCache, residents_from

# One second a step, whatever it does.
SECOND = TimeModel(1000.0, 0.0, 0.0, 0.0, 0.0)


def tokens(start: int, count: int) -> "array[int]":
    return array("I", range(start, start + count))


def ask(
    model: EngineModel, name: str, prompt: "array[int]", output: int = 1, now: float = 0.0, **namespace: str
) -> EngineRequest:
    generated = tokens(50_000 + sum(prompt) % 1000, output)
    request = EngineRequest.from_tokens(name, prompt, generated, model.config, **namespace)
    model.submit(request, now)
    return request


def drain(model: EngineModel) -> list[StepResult]:
    results: list[StepResult] = []
    while (deadline := model.next_deadline()) is not None:
        results += model.tick(deadline)
    return results


def finished(results: list[StepResult]) -> dict[str, Finished]:
    return {done.request.request_id: done for result in results for done in result.finished}


def engine(**options: object) -> EngineModel:
    defaults: dict[str, object] = {
        "block_size": 4,
        "num_gpu_blocks": 64,
        "max_model_len": 200,
        "max_num_batched_tokens": 64,
        "time": SECOND,
    }
    return EngineModel(EngineConfig(**{**defaults, **options}))  # type: ignore[arg-type]  # named by each test


# --- time ------------------------------------------------------------------------------------------------


def test_an_idle_engine_has_no_deadline() -> None:
    model = engine()
    assert model.next_deadline() is None
    assert model.tick(100.0) == []


def test_a_request_takes_one_step_for_its_prompt_and_one_for_each_further_token() -> None:
    model = engine()
    ask(model, "a", tokens(0, 10), output=3, now=5.0)
    results = drain(model)
    assert [result.at for result in results] == [6.0, 7.0, 8.0]
    assert [first.ttft_s for result in results for first in result.first_tokens] == [1.0]
    assert finished(results)["a"].e2e_s == 3.0
    assert model.next_deadline() is None


def test_a_late_tick_does_not_shift_time() -> None:
    model = engine()
    ask(model, "a", tokens(0, 10), output=3, now=0.0)
    assert [result.at for result in model.tick(10.75)] == [1.0, 2.0, 3.0]


def test_a_request_is_not_scheduled_before_it_arrives() -> None:
    model = engine()
    ask(model, "a", tokens(0, 10), output=2, now=0.0)
    model.tick(0.0)
    ask(model, "b", tokens(100, 10), now=1.5)
    done = finished(drain(model))
    assert (done["a"].e2e_s, done["b"].e2e_s) == (2.0, 1.5)


def test_long_prompts_are_computed_in_chunks_beside_running_decodes() -> None:
    model = engine(max_num_batched_tokens=8)
    ask(model, "a", tokens(0, 4), output=4)
    model.tick(0.0)
    ask(model, "b", tokens(100, 20), now=0.5)
    results = drain(model)
    # a's decode takes 1 of 8 tokens of each step: 7 + 7 + 6 for b.
    assert finished(results)["b"].e2e_s == pytest.approx(3.5)
    assert [len(result.emitted) for result in results] == [1, 1, 1, 2]


def test_a_step_takes_what_the_time_model_says_of_its_work() -> None:
    model = engine(time=TimeModel(100, 10, 1, 1000, 100))
    ask(model, "a", tokens(0, 5), output=2)
    first, second = drain(model)
    assert first.at == pytest.approx(0.1 + 5 * 0.01 + 10 * 0.001)
    assert second.at - first.at == pytest.approx(0.1 + 1.0 + 5 * 0.1)


def test_no_more_sequences_run_than_allowed() -> None:
    model = engine(max_num_seqs=2)
    for index in range(5):
        ask(model, str(index), tokens(index * 100, 8), output=2)
    model.tick(0.0)
    assert (model.running, model.waiting) == (2, 3)
    done = finished(drain(model))
    assert [done[str(index)].e2e_s for index in range(5)] == [2.0, 2.0, 4.0, 4.0, 6.0]


# --- the prefix cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_a_repeated_prompt_hits_its_full_blocks_but_never_its_last_token(length: int, cached: int) -> None:
    model = engine()
    ask(model, "a", tokens(0, length))
    drain(model)
    ask(model, "b", tokens(0, length), now=10.0)
    assert finished(drain(model))["b"].cached_tokens == cached


def test_generated_tokens_are_cached_except_the_last() -> None:
    model = engine()
    request = ask(model, "a", tokens(0, 4), output=4)
    assert request.token_ids is not None
    drain(model)
    assert len(model.pool.residents()) == 1
    ask(model, "b", tokens(200, 4), output=5, now=10.0)
    drain(model)
    assert len(model.pool.residents()) == 3


def test_blocks_are_reusable_by_the_step_after_the_one_that_computes_them() -> None:
    model = engine(max_num_batched_tokens=8)
    ask(model, "a", tokens(0, 9))
    ask(model, "b", tokens(0, 9))
    done = finished(drain(model))
    assert (done["a"].cached_tokens, done["b"].cached_tokens) == (0, 8)


def test_salt_and_adapter_separate_caches() -> None:
    model = engine()
    for index, namespace in enumerate(
        [{}, {"cache_salt": "x"}, {"adapter": "x"}, {"adapter": "x", "cache_salt": "x"}]
    ):
        ask(model, str(index), tokens(0, 20), now=index * 10.0, **namespace)
        assert finished(drain(model))[str(index)].cached_tokens == 0
    ask(model, "again", tokens(0, 20), now=100.0, adapter="x")
    assert finished(drain(model))["again"].cached_tokens == 16


def test_an_aborted_prefill_leaves_its_finished_chunks() -> None:
    model = engine(max_num_batched_tokens=8)
    ask(model, "a", tokens(0, 40))
    model.tick(1.0)
    assert model.abort("a")
    assert not model.abort("a")
    drain(model)
    assert model.pool.usage == 0.0
    ask(model, "b", tokens(0, 40), now=10.0)
    assert finished(drain(model))["b"].cached_tokens == 16


def test_events_of_a_step_go_out_even_if_its_request_is_gone() -> None:
    model = engine()
    ask(model, "a", tokens(0, 8))
    model.tick(0.0)
    model.abort("a")
    (result,) = drain(model)
    assert [type(event) for event in result.events] == [BlockStored]
    assert result.emitted == []


def test_a_waiting_request_can_be_aborted() -> None:
    model = engine(max_num_seqs=1)
    ask(model, "a", tokens(0, 8))
    ask(model, "b", tokens(100, 8))
    model.tick(0.0)
    assert model.abort("b")
    assert set(finished(drain(model))) == {"a"}
    assert model.stats.finished["abort"] == 1


def test_a_reset_is_announced_with_the_next_step() -> None:
    model = engine()
    ask(model, "a", tokens(0, 8))
    model.tick(0.0)
    assert not model.reset_prefix_cache()
    drain(model)
    assert model.reset_prefix_cache()
    assert model.next_deadline() is None
    ask(model, "b", tokens(0, 8), now=10.0)
    results = drain(model)
    assert results[0].events[0] == AllBlocksCleared()
    assert finished(results)["b"].cached_tokens == 0


# --- memory ------------------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_served_is_refused_at_once() -> None:
    model = engine(max_model_len=20)
    ask(model, "fits", tokens(0, 19))
    with pytest.raises(RequestTooLongError, match="maximum context length of 20 tokens"):
        ask(model, "no", tokens(0, 20))
    assert set(finished(drain(model))) == {"fits"}


def test_the_last_one_in_is_preempted_and_still_finishes() -> None:
    model = engine(num_gpu_blocks=7, max_model_len=24)
    ask(model, "a", tokens(0, 8), output=16)
    ask(model, "b", tokens(100, 8), output=16)
    results = drain(model)
    done = finished(results)
    assert (done["a"].preemptions, done["b"].preemptions) == (0, 1)
    assert model.stats.preemptions == 1
    assert Counter(r.request_id for result in results for r in result.emitted) == {"a": 16, "b": 16}
    assert model.pool.usage == 0.0


def test_a_request_waits_until_all_of_it_fits() -> None:
    model = engine(num_gpu_blocks=9, max_model_len=32, max_num_batched_tokens=8)
    ask(model, "a", tokens(0, 16), output=4)
    ask(model, "b", tokens(100, 24))
    model.tick(3.0)
    assert (model.running, model.waiting) == (1, 1)
    assert set(finished(drain(model))) == {"a", "b"}


# --- what it reports ---------------------------------------------------------------------------------------


def test_a_snapshot_shows_the_batch_and_the_counters() -> None:
    model = engine(max_num_seqs=1)
    ask(model, "a", tokens(0, 9), output=3, adapter="lora")
    model.tick(0.0)
    ask(model, "b", tokens(0, 9), output=2, now=0.5, adapter="lora")
    fresh = model.snapshot()
    assert (fresh.running, fresh.waiting, fresh.kv_usage) == (0, 0, 0.0)  # no step has ended yet
    model.tick(1.0)
    late = model.snapshot()
    assert (late.running, late.waiting) == (1, 0)  # the step that has ended began without b
    assert late.kv_usage == pytest.approx(3 / 63)
    model.tick(2.0)
    busy = model.snapshot()
    assert (busy.running, busy.waiting, busy.kv_usage) == (1, 1, pytest.approx(3 / 63))
    assert (busy.block_size, busy.num_gpu_blocks, busy.adapters) == (4, 64, ("lora",))
    drain(model)
    idle = model.snapshot()
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)
    assert (idle.prefix_cache_queries, idle.prefix_cache_hits) == (18.0, 8.0)
    assert (idle.prompt_tokens, idle.generation_tokens) == (18.0, 5.0)
    assert idle.ttft is not None
    assert (idle.ttft.sum_s, idle.ttft.count) == (1.0 + 3.5, 2.0)
    assert idle.queue_time is not None
    assert (idle.queue_time.sum_s, idle.queue_time.count) == (2.5, 2.0)
    assert idle.inter_token is not None
    assert (idle.inter_token.sum_s, idle.inter_token.count) == (3.0, 3.0)


def test_an_aborted_request_is_in_no_count_of_an_idle_engine() -> None:
    model = engine()
    ask(model, "a", tokens(0, 9), output=5)
    model.tick(1.0)
    assert model.snapshot().running == 1
    model.abort("a")
    assert model.snapshot().running == 1  # until the step in flight has ended
    model.tick(2.0)
    assert (model.snapshot().running, model.snapshot().kv_usage) == (0, 0.0)


def test_a_misuse_is_refused() -> None:
    model = engine()
    ask(model, "a", tokens(0, 4))
    with pytest.raises(ValueError, match="'a' is in use"):
        ask(model, "a", tokens(0, 4))
    with pytest.raises(ValueError, match="at least one prompt token"):
        ask(model, "b", array("I"))


# --- against an independent engine -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([2, 4, 16]),
    blocks=st.integers(10, 30),
    budget=st.integers(3, 64),
)
def test_cached_tokens_equal_brute_force_under_eviction(
    seed: int, size: int, blocks: int, budget: int
) -> None:
    rnd = random.Random(seed)
    length = (blocks - 1) * size
    model = engine(
        block_size=size, num_gpu_blocks=blocks, max_model_len=length, max_num_batched_tokens=budget
    )
    reference = ReferenceCache(blocks, size)
    events: list[KvEvent] = []
    families = [[rnd.randrange(50) for _ in range(length)] for _ in range(3)]
    now = 0.0
    for index in range(30):
        family = rnd.choice(families)
        prompt = family[: rnd.randrange(1, length - 3)]
        if rnd.random() < 0.4:
            prompt = prompt[: max(1, len(prompt) // size * size)]
        if rnd.random() < 0.4:
            prompt[rnd.randrange(len(prompt))] = 99
        output = [rnd.randrange(50) for _ in range(rnd.randrange(1, length - len(prompt) + 1))]
        salt = rnd.choice([None, None, "s"])
        request = EngineRequest.from_tokens(
            str(index), array("I", prompt), array("I", output), model.config, cache_salt=salt
        )
        model.submit(request, now)
        results = drain(model)
        now = results[-1].at
        events += [event for result in results for event in result.events]
        (done,) = (done for result in results for done in result.finished)
        assert done.cached_tokens == reference.serve(salt, prompt, output, budget)
        assert residents_from(events) == model.pool.residents()
        assert list(model.pool.free_queue()) == reference.free


class EngineMachine(RuleBasedStateMachine):
    """Any mix of arrivals, aborts and resets: nothing leaks, events mirror the pool, tokens add up."""

    @initialize(
        blocks=st.integers(6, 20),
        size=st.sampled_from([1, 2, 4]),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
    )
    def start(self, blocks: int, size: int, seqs: int, budget: int) -> None:
        self.model = engine(
            block_size=size,
            num_gpu_blocks=blocks,
            max_model_len=(blocks - 1) * size,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
        )
        self.now = 0.0
        self.count = 0
        self.open: dict[str, EngineRequest] = {}
        self.got: Counter[str] = Counter()
        self.events: list[KvEvent] = []

    @rule(family=st.integers(0, 2), length=st.integers(1, 40), output=st.integers(1, 20))
    def arrive(self, family: int, length: int, output: int) -> None:
        self.count += 1
        name = str(self.count)
        try:
            self.open[name] = ask(self.model, name, tokens(family * 1000, length), output, self.now)
        except RequestTooLongError:
            assert length + output > self.model.config.max_model_len

    @rule(steps=st.floats(0.0, 6.0))
    def advance(self, steps: float) -> None:
        self.now += steps
        self._take(self.model.tick(self.now))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.open:
            name = data.draw(st.sampled_from(sorted(self.open)))
            assert self.model.abort(name)
            del self.open[name]

    @rule()
    def reset(self) -> None:
        self.model.reset_prefix_cache()

    def _take(self, results: list[StepResult]) -> None:
        for result in results:
            assert result.at <= self.now
            self.events += result.events
            self.got.update(request.request_id for request in result.emitted)
            for done in result.finished:
                request = self.open.pop(done.request.request_id)
                assert self.got[request.request_id] == request.output_tokens
                assert done.cached_tokens % self.model.config.block_size == 0
                assert 0 <= done.cached_tokens < request.prompt_tokens
                assert 0 < done.ttft_s <= done.e2e_s

    @invariant()
    def accounts(self) -> None:
        assert self.model.running + self.model.waiting == len(self.open)
        assert self.model.next_deadline() is not None or not self.open

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        while (deadline := self.model.next_deadline()) is not None:
            self.now = max(self.now, deadline)
            self._take(self.model.tick(deadline))
        assert not self.open
        pool = self.model.pool
        assert pool.free == pool.num_blocks - 1
        assert all(pool.references(block) == 0 for block in range(pool.num_blocks))
        self.events += pool.take_events()
        assert residents_from(self.events) == pool.residents()


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestEngine = EngineMachine.TestCase


def test_a_sequence_that_did_not_fit_is_admitted_when_one_block_more_of_it_can_be_hit() -> None:
    # 9 blocks in all. The second sequence needs 9, some of which the first is just generating.
    model = engine(num_gpu_blocks=10, max_model_len=36)
    first = ask(model, "first", tokens(0, 8), output=12)
    assert first.token_ids is not None
    model.tick(0.0)
    ask(model, "second", first.token_ids[:16] + tokens(900, 19), output=1, now=0.5)
    together = []
    for now in range(1, 12):
        model.tick(float(now))
        together.append(model.running)
    # After step 1 the first has 3 blocks, 2 of them full: 7 to come for the second, 6 are free. In the step
    # that fills its third block 6 to come are enough.
    assert together[:5] == [1, 1, 1, 2, 1]
