from extproc.sim.engine_stats import EngineStats


def test_cached_prompt_tokens_were_not_computed() -> None:
    stats = EngineStats()
    stats.first_token(prompt_tokens=100, cached_tokens=64, ttft_s=0.5)
    assert (stats.prompt_tokens, stats.computed_tokens) == (100, 36)
    assert stats.ttft.totals().sum_s == 0.5


def test_the_phases_of_a_request_add_up() -> None:
    stats = EngineStats()
    stats.request_finished(
        "length",
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=5,
        preemptions=1,
        queue_s=1.0,
        prefill_s=2.0,
        decode_s=8.0,
    )
    assert stats.inference.totals().sum_s == 10.0
    assert stats.e2e.totals().sum_s == 11.0
    assert stats.time_per_output_token.totals().sum_s == 2.0
    assert stats.finished == {"stop": 0, "length": 1, "abort": 0}


def test_one_token_has_no_time_per_output_token() -> None:
    stats = EngineStats()
    stats.request_finished(
        "stop",
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=1,
        preemptions=0,
        queue_s=0.0,
        prefill_s=1.0,
        decode_s=0.0,
    )
    assert stats.time_per_output_token.count == 0
