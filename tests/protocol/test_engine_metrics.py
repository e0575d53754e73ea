import gzip
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from extproc.core.errors import ProtocolError
from extproc.core.types import EngineMetrics, HistogramTotals
from extproc.protocol.engine_metrics import (
    SAMPLE_NAMES,
    _samples,
    has_unwanted_samples,
    parse_engine_metrics,
)

PAGE = gzip.decompress((Path(__file__).parents[1] / "data/vllm/metrics_0.32.txt.gz").read_bytes()).decode()


def page(*lines):
    return "".join(f"{line}\n" for line in lines)


def only(text):
    metrics = parse_engine_metrics(text)
    assert list(metrics) == [0]
    return metrics[0]


def test_a_real_page_of_vllm_0_32():
    expected = EngineMetrics(
        running=0,
        waiting=0,
        deferred=0,
        kv_usage=0.0,
        block_size=128,
        num_gpu_blocks=1024,
        prefix_cache_queries=90300.0,
        prefix_cache_hits=59648.0,
        preemptions=0.0,
        prompt_tokens=90300.0,
        generation_tokens=60.0,
        ttft=HistogramTotals(1.3061213493347168, 15),
        queue_time=HistogramTotals(0.0002497709995168407, 15),
        prefill_time=HistogramTotals(1.25123729500001, 15),
        inter_token=HistogramTotals(0.10146530200040615, 45),
        model_name="tiny",
        awake=True,
    )
    assert parse_engine_metrics(PAGE) == {0: expected}
    assert parse_engine_metrics(PAGE.encode()) == {0: expected}


def test_an_engine_that_was_put_to_sleep_says_so_by_rank():
    awake = PAGE.index('sleep_state="awake"')
    line = PAGE[PAGE.rindex("\n", 0, awake) + 1 : PAGE.index("\n", awake)]
    asleep = line.rpartition(" ")[0] + " 0.0"
    assert parse_engine_metrics(PAGE.replace(line, asleep))[0].awake is False
    other = line.replace('engine="0"', 'engine="1"')
    both = PAGE.replace(line, f"{asleep}\n{other}")
    assert [one.awake for one in parse_engine_metrics(both).values()] == [False, True]
    assert parse_engine_metrics("vllm:num_requests_running 1\n")[0].awake is None


def test_a_page_filtered_to_the_sample_names_says_the_same():
    lines = [line for line in PAGE.splitlines() if line.partition("{")[0] in SAMPLE_NAMES]
    assert len(lines) < 30
    assert parse_engine_metrics(page(*lines)) == parse_engine_metrics(PAGE)
    assert has_unwanted_samples(PAGE)
    assert not has_unwanted_samples(page("# HELP vllm:x y", *lines, ""))


@pytest.mark.parametrize("name", SAMPLE_NAMES)
def test_pitfall_70_a_missing_family_is_unknown_and_harms_no_other(name):
    full = parse_engine_metrics(PAGE)[0]
    rest = [line for line in PAGE.splitlines() if line.partition("{")[0] != name]
    metrics = parse_engine_metrics(page(*rest))[0]
    changed = {key for key in full.__slots__ if getattr(full, key) != getattr(metrics, key)}
    assert all(getattr(metrics, key) is None for key in changed)
    if any(line.startswith(name + "{") for line in PAGE.splitlines()):
        assert len(changed) == (2 if name == "vllm:cache_config_info" else 1)
    else:
        assert not changed


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.25', "kv_usage", 0.25),
        ('vllm:kv_cache_usage_perc{model_name="m"} 0.5', "kv_usage", 0.5),
        ("vllm:gpu_prefix_cache_queries_total 7", "prefix_cache_queries", 7.0),
        ("vllm:gpu_prefix_cache_hits_total 3", "prefix_cache_hits", 3.0),
        ("vllm:gpu_prefix_cache_queries 7", "prefix_cache_queries", 7.0),
        ("vllm:num_preemptions_total 2", "preemptions", 2.0),
        ("vllm:num_requests_running 4.0", "running", 4),
        ("vllm:num_requests_waiting 1e2", "waiting", 100),
        ("vllm:num_requests_waiting 3 1795995509000", "waiting", 3),
    ],
)
def test_pitfall_75_old_and_new_names_are_read(text, field, value):
    assert getattr(only(page(text)), field) == value


def test_the_older_name_of_a_histogram_is_read():
    old = page("vllm:time_per_output_token_seconds_sum 3", "vllm:time_per_output_token_seconds_count 4")
    assert only(old).inter_token == HistogramTotals(3, 4)
    new = page("vllm:inter_token_latency_seconds_sum 1", "vllm:inter_token_latency_seconds_count 2")
    assert only(old + new).inter_token == HistogramTotals(1, 2)
    assert only(new + old).inter_token == HistogramTotals(1, 2)


@pytest.mark.parametrize("order", [1, -1])
def test_the_newer_name_wins(order):
    lines = ["vllm:gpu_cache_usage_perc 0.1", "vllm:kv_cache_usage_perc 0.2"][::order]
    assert only(page(*lines)).kv_usage == 0.2


def test_names_that_only_begin_alike_are_not_read():
    text = page(
        'vllm:num_requests_waiting_for_godot{engine="0"} 5',
        'vllm:num_requests_running{engine="0"} 1',
    )
    assert only(text) == EngineMetrics(running=1)


def test_who_waits_for_a_grammar_is_told_apart():
    text = page(
        'vllm:num_requests_waiting{engine="0"} 5',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 2',
    )
    metrics = only(text)
    assert (metrics.waiting, metrics.deferred, metrics.crowded) == (5, 2, 3)
    assert only(page('vllm:num_requests_waiting{engine="0"} 5')).crowded == 5  # before there were reasons
    assert EngineMetrics().crowded == 0


def test_blocks_of_all_ranks_together_are_shared_out():
    ranks = [
        f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="25000"}} 1.0'
        for rank in range(4)
    ]
    assert {one.num_gpu_blocks for one in parse_engine_metrics(page(*ranks)).values()} == {6250}
    assert only(page(ranks[0])).num_gpu_blocks == 25000


def test_several_engines_of_one_page():
    text = page(
        'vllm:num_requests_running{engine="0",model_name="m"} 1.0',
        'vllm:num_requests_running{engine="2",model_name="m"} 3.0',
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="10"} 1.0',
        'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="11"} 1.0',
    )
    metrics = parse_engine_metrics(text)
    assert {rank: (one.running, one.num_gpu_blocks) for rank, one in metrics.items()} == {
        0: (1, 10),
        1: (None, 11),
        2: (3, None),
    }


def test_information_without_a_rank_holds_for_all():
    text = page(
        'vllm:num_requests_running{engine="0"} 1',
        'vllm:num_requests_running{engine="1"} 1',
        'vllm:cache_config_info{block_size="32",num_gpu_blocks="None"} 1',
    )
    for metrics in parse_engine_metrics(text).values():
        assert (metrics.block_size, metrics.num_gpu_blocks) == (32, None)


def adapters_line(at, names="a", engine=""):
    return (
        f'vllm:lora_requests_info{{{engine}max_lora="2",running_lora_adapters="{names}",'
        f'waiting_lora_adapters=""}} {at}'
    )


def test_of_several_ranks_who_writes_into_one_series_is_not_known():
    """vLLM leaves the rank out: taken for each, every rank would look full of the others' adapters."""
    ranks = [f'vllm:num_requests_running{{engine="{rank}"}} 1' for rank in (4, 5)]
    found = parse_engine_metrics(page(*ranks, adapters_line(5, "a,b")))
    assert [(one.adapters, one.max_adapters) for one in found.values()] == [((), 2)] * 2
    assert parse_engine_metrics(page(ranks[0], adapters_line(5, "a,b")))[4].adapters == ("a", "b")
    named = adapters_line(5, "c", 'engine="5",')
    assert [one.adapters for one in parse_engine_metrics(page(*ranks, adapters_line(6), named)).values()] == [
        (),
        ("c",),
    ]


def test_times_that_several_processes_have_added_up_tell_of_nobody():
    """Each API server of an engine writes the series, and a page has their sum."""
    now = 1.7961e9
    idle = adapters_line(2 * now, "")
    assert only(page(adapters_line(now))).adapters == ("a",)
    assert only(page(adapters_line(now), adapters_line(now + 5, "b"))).adapters == ("b",)
    for lines in ((idle, adapters_line(now)), (adapters_line(2 * now), adapters_line(now, "b"))):
        found = only(page(*lines))
        assert (found.adapters, found.max_adapters) == ((), 2)


def test_a_real_page_of_one_node_of_a_hybrid_deployment():
    """vLLM 0.32, two ranks of four from 2 on, two API servers."""
    data = Path(__file__).parents[1] / "data/vllm/metrics_0.32_hybrid.txt.gz"
    text = gzip.decompress(data.read_bytes()).decode()
    found = parse_engine_metrics(text.replace('running_lora_adapters=""', 'running_lora_adapters="a"'))
    assert {
        rank: (one.prompt_tokens, one.num_gpu_blocks, one.adapters, one.max_adapters)
        for rank, one in found.items()
    } == {2: (600.0, 64, (), 2), 3: (600.0, 64, (), 2)}


def test_information_alone_is_rank_zero():
    assert only(page('vllm:cache_config_info{block_size="32"} 1')).block_size == 32


@given(st.permutations([(3.0, "old"), (7.5, "new,b"), (5.0, "mid"), (math.nan, "never")]))
def test_the_newest_lora_series_counts(series):
    template = (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="%s",waiting_lora_adapters="w, b"} %s'
    )
    lines = [template % (names, at) for at, names in series]
    assert only(page(*lines)).adapters == ("b", "new", "w")


def test_series_of_one_rank_are_added():
    text = page(
        'vllm:num_requests_running{model_name="a"} 1',
        'vllm:num_requests_running{model_name="b"} 2',
        'vllm:kv_cache_usage_perc{model_name="a"} 0.1',
        'vllm:kv_cache_usage_perc{model_name="b"} 0.3',
    )
    assert only(text) == EngineMetrics(running=3, kv_usage=0.3, model_name="a")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1"])
def test_values_that_mean_nothing_are_unknown(value):
    text = page(
        f"vllm:num_requests_running {value}",
        f"vllm:kv_cache_usage_perc {value}",
        f"vllm:time_to_first_token_seconds_sum {value}",
        "vllm:time_to_first_token_seconds_count 3",
        "vllm:num_requests_waiting 2",
    )
    assert only(text) == EngineMetrics(waiting=2)


def test_a_share_above_one_is_unknown():
    assert only(page("vllm:kv_cache_usage_perc 97.0")).kv_usage is None


def test_escaped_label_values_are_the_librarys_business():
    text = page(r'vllm:num_requests_running{model_name="a\"}, 5 \\ x"} 2')
    assert only(text) == EngineMetrics(running=2, model_name='a"}, 5 \\ x')


@pytest.mark.parametrize("text", ["", "\n", "# HELP x y\n", "process_cpu_seconds_total 4.5\n", "# EOF\n"])
def test_a_page_without_an_engine_is_empty(text):
    assert parse_engine_metrics(text) == {}


@pytest.mark.parametrize(
    "text",
    [
        "<!DOCTYPE html>\n<html></html>\n",
        '{"error": "no"}\n',
        "vllm:num_requests_running\n",
        "vllm:num_requests_running{ 1\n",
        'vllm:num_requests_running{engine="0"} many\n',
        'vllm:num_requests_running{engine="zero"} 1\n',
        'vllm:num_requests_running{engine="0"} 1',
        b"\xff\xfe\n",
    ],
)
def test_garbage_is_a_protocol_error(text):
    with pytest.raises(ProtocolError):
        parse_engine_metrics(text)


@given(st.integers(0, len(PAGE) - 1))
def test_a_page_cut_off_never_gives_a_wrong_value(length):
    full = parse_engine_metrics(PAGE)[0]
    try:
        metrics = parse_engine_metrics(PAGE[:length]).get(0, EngineMetrics())
    except ProtocolError:
        return
    for name in full.__slots__:
        assert getattr(metrics, name) in {getattr(full, name), None, ()}


@given(st.text())
def test_any_text_gives_metrics_or_a_protocol_error(text):
    try:
        metrics = parse_engine_metrics(text)
    except ProtocolError:
        return
    assert all(isinstance(one, EngineMetrics) for one in metrics.values())


@given(st.lists(st.sampled_from(PAGE.splitlines()), max_size=40), st.text(max_size=30))
def test_lines_in_any_order_with_rubbish_between_them(lines, rubbish):
    middle = len(lines) // 2
    try:
        metrics = parse_engine_metrics(page(*lines[:middle], rubbish, *lines[middle:]))
    except ProtocolError:
        return
    assert set(metrics) <= {0}


def test_how_many_adapters_fit_on_the_gpu():
    line = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 5\n'
    assert parse_engine_metrics(line)[0].max_adapters == 4
    assert parse_engine_metrics("vllm:num_requests_running 1\n")[0].max_adapters is None


LABEL_TEXT = st.text(st.sampled_from('ab" \\n{},=}'), max_size=8)


@given(st.dictionaries(st.sampled_from(["engine", "model_name", "x"]), LABEL_TEXT, max_size=3), st.floats())
def test_remembered_series_are_read_as_the_library_reads_their_lines(labels, value):
    escaped = {
        name: text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        for name, text in labels.items()
    }
    inside = ",".join(f'{name}="{text}"' for name, text in escaped.items())
    line = f"vllm:num_requests_running{{{inside}}} {value!r}"
    expected = [
        (sample.name, sample.labels, str(float(sample.value)))
        for family in text_string_to_metric_families(line)
        for sample in family.samples
    ]
    for _ in range(2):  # the second time its series is known
        assert [(name, dict(found), str(number)) for name, found, number in _samples([line])] == expected


def test_a_line_with_a_time_is_no_series_with_another_value():
    assert parse_engine_metrics("vllm:num_requests_running 3 1700000000\n")[0].running == 3
    assert parse_engine_metrics('vllm:num_requests_running{engine="0"} 4 1700000000\n')[0].running == 4


@pytest.mark.parametrize(
    "page",
    [
        "vllm:num_requests_running{" + ",".join(f'a{number}="1"' for number in range(201)) + "} 1\n",
        'vllm:num_requests_running{a="' + "x" * 40_000 + '"} 1\n',
        "vllm:num_requests_running " + "9" * 40_000 + "\n",
        "".join(f'vllm:num_requests_running{{engine="{number}"}} 1\n' for number in range(9000)),
    ],
    ids=["labels", "long label", "long value", "samples"],
)
def test_a_page_that_would_take_long_is_a_protocol_error(page):
    with pytest.raises(ProtocolError, match=r"too long|more than"):
        parse_engine_metrics(page)


def test_of_thousands_of_old_adapter_series_the_newest_are_read():
    series = 'vllm:lora_requests_info{{max_lora="{number}",running_lora_adapters="a{number}"}} {number}\n'
    page = "".join(series.format(number=number) for number in range(1, 20_000))
    assert parse_engine_metrics(page)[0].max_adapters == 19_999
