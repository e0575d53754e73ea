import json

import pytest

from loadtests.live.load import Throughput
from loadtests.live.quality import Run
from loadtests.live.report import (
    OVERHEAD_HEAD,
    QUALITY_HEAD,
    Slice,
    document,
    markdown,
    overhead_cells,
    overhead_rows,
    quality_cells,
    quality_rows,
)
from loadtests.live.schedule import Latency

ABOUT = {"date": "2026-01-02", "machine": "2 cores", "command": "run it", "engines": "4 engines"}
ABOUT["throughput_tool"] = "wrk -t1 -c16"


def one(p50, p95, rate, failed=0):
    return Slice(Latency(p50, p95, p95, 10, failed), Throughput(rate, 0))


SLICES = {
    ("2 KB", "direct"): [one(1.0, 2.0, 4000), one(5.0, 9.0, 2000), one(2.0, 3.0, 4000)],
    ("2 KB", "Envoy"): [one(1.5, 2.5, 1000), one(5.4, 9.4, 900), one(2.6, 3.6, 1100)],
    ("2 KB", "ours"): [one(3.0, 4.0, 500, failed=2), one(7.0, 12.0, 600), one(4.1, 6.0, 550)],
    ("2 KB", "broken"): [Slice(None, None)],
}


def test_added_latency_is_against_the_same_round_and_throughput_against_envoy():
    rows = {row.target: row for row in overhead_rows(SLICES, {"ours": "warmroute serve"}, "direct", "Envoy")}
    # A slow round is slow for both: p50 differences 2.0, 2.0, 2.1; p95 2.0, 3.0, 3.0.
    assert rows["ours"].added_p50_ms == pytest.approx(2.0)
    assert rows["ours"].added_p95_ms == pytest.approx(3.0)
    assert rows["ours"].throughput_ratio == pytest.approx(0.55)
    assert rows["ours"].command == "warmroute serve"
    assert (rows["ours"].requests, rows["ours"].failed) == (30, 2)
    assert rows["direct"].added_p50_ms == 0
    assert rows["Envoy"].throughput_ratio == 1
    assert rows["broken"].added_p50_ms is None
    assert rows["broken"].per_second is None


def run(ttfts, prompt, cached, failures=()):
    return Run(list(ttfts), prompt, cached, list(failures), 1.0)


RUNS = {
    ("documents", "round robin"): [run([100, 200], 1000, 250), run([120, 240], 1000, 350)],
    ("documents", "ours"): [run([10, 100], 1000, 900), run([20, 140], 1000, 800, ["x"])],
    ("documents", "gone"): [run([], 0, 0, ["a", "b"])],
}


def test_quality_is_the_median_of_repetitions_and_a_ratio_to_round_robin():
    rows = {row.target: row for row in quality_rows(RUNS, {}, "round robin")}
    ours = rows["ours"]
    assert ours.cached_share == pytest.approx(0.85)
    assert ours.cached_shares == (0.9, 0.8)
    assert ours.ttft_p50_ms == 15
    assert ours.ttft_p50_ratio == pytest.approx(15 / 110)
    assert ours.ttft_p95_ratio == pytest.approx(120 / 220)
    assert (ours.requests, ours.failed) == (5, 1)
    assert rows["gone"].cached_share is None
    assert rows["gone"].ttft_p50_ratio is None


def test_every_row_has_every_column_and_missing_is_not_zero():
    overhead = overhead_rows(SLICES, {}, "direct", "Envoy")
    quality = quality_rows(RUNS, {}, "round robin")
    assert {len(overhead_cells(row)) for row in overhead} == {len(OVERHEAD_HEAD)}
    assert {len(quality_cells(row)) for row in quality} == {len(QUALITY_HEAD)}
    assert overhead_cells(overhead[-1])[1:5] == ["-"] * 4
    assert quality_cells(quality[1]) == ["ours", "85.0%", "15", "120", "0.14", "0.55", "1 of 5"]


def test_reports_name_the_command_behind_every_row_and_what_was_left_out():
    commands = {"ours": "warmroute serve -c x", "Envoy": "envoy y", "direct": "-", "broken": "-"}
    overhead = overhead_rows(SLICES, commands, "direct", "Envoy")
    quality = quality_rows(RUNS, commands, "round robin")
    text = markdown(ABOUT, overhead, quality, ["smg: not installed"])
    assert "2026-01-02, 2 cores: `run it`" in text
    assert "- ours: `warmroute serve -c x`" in text
    assert "- skipped: smg: not installed" in text
    assert "**documents**, 4 engines" in text
    assert "**Prompts of 2 KB** (max req/s: wrk -t1 -c16)" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(OVERHEAD_HEAD) + 1, len(QUALITY_HEAD) + 1}
    made = json.loads(json.dumps(document(ABOUT, overhead, quality, ["smg: not installed"])))
    assert made["command"] == "run it"
    assert len(made["overhead"]) == 4
    assert made["quality"][1]["cached_shares"] == [0.9, 0.8]
    assert made["skipped"] == ["smg: not installed"]
