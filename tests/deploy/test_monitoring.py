"""Alert rules and dashboard ask for metrics that exist; alerts fire when they should, and only then."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from extproc.adapters.telemetry.catalogue import METRICS
from extproc.protocol.engine_metrics import SAMPLE_NAMES
from tests.support.prometheus import RULES, require

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
OURS = {name for metric in METRICS for name in metric.series}
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
NAME = re.compile(r"\b(?:warmroute_\w+|vllm:\w+|process_\w+)")


def load_generator():
    spec = importlib.util.spec_from_file_location("grafana_dashboard", GRAFANA / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
DASHBOARD = json.loads((GRAFANA / "warmroute.json").read_text())
ALERTS = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_is_in_step_with_its_table(capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_the_check_sees_a_difference(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "FILE", tmp_path / "warmroute.json")
    assert generate.main(["--check"]) == 1
    assert "is old" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("source", ["dashboard", "alerts"])
def test_only_metrics_that_exist_are_asked_for(source):
    asked = QUERIES if source == "dashboard" else [rule["expr"] for rule in ALERTS.values()]
    named = {name for expression in asked for name in NAME.findall(expression)}
    engine = {name for name in named if name.startswith("vllm:")}
    assert named - engine - OURS - PROCESS == set()
    assert engine <= set(SAMPLE_NAMES)
    assert named, source


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_alert_says_what_it_means_and_what_to_do():
    for name, rule in ALERTS.items():
        assert name.startswith("Warmroute")
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 60


def test_promtool_accepts_the_rules():
    done = subprocess.run(
        [require("promtool"), "check", "rules", RULES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# What a healthy fleet shows, and per alert: the fault, and after how many minutes of it the alert must fire,
# not before. Values are promtool's: start, then what each minute adds.
WORKERS = [f'pool="default",worker="10.0.0.{n}:8000",instance="router"' for n in (1, 2)]


def series(name, **labels):
    pairs = ",".join(f'{key}="{value}"' for key, value in {**labels, "instance": "router"}.items())
    return f"warmroute_{name}{{{pairs}}}"


HEALTHY = {
    series("build_info", version="1"): "1x60",
    series("workers", pool="default", state="ready"): "2x60",
    series("access_log_streams"): "2x60",
    series("decisions_total", pool="default", policy="token-load", reason="cold-idle"): "0+600x60",
    series("requests_total", pool="default", outcome="finished"): "0+600x60",
    series("timeouts_total", pool="default", prompt_class=""): "0x60",
    series("leases_lost_total", pool="default"): "0x60",
    series("load_only_total", pool="default", cause="path"): "0+300x60",
    series("ext_proc_errors_total", kind="routing"): "0x60",
    series("warm_requests_total", pool="default", prompt_class="", result="taken"): "0+500x60",
    series("warm_requests_total", pool="default", prompt_class="", result="denied"): "0+10x60",
    **{f'warmroute_worker_diverging{{{worker},cause="none"}}': "0x60" for worker in WORKERS},
    **{f"warmroute_worker_ready{{{worker}}}": "1x60" for worker in WORKERS},
    **{f"warmroute_worker_last_resort{{{worker}}}": "0x60" for worker in WORKERS},
    **{f"warmroute_worker_metrics_age_seconds{{{worker}}}": "1x60" for worker in WORKERS},
    **{f"warmroute_worker_kv_events_complete{{{worker}}}": "1x60" for worker in WORKERS},
    **{f"warmroute_worker_queued_prefill_seconds{{{worker}}}": "0.8x60" for worker in WORKERS},
}
ONE, OTHER = WORKERS
FAULTS = {
    "WarmrouteMissing": ({series("build_info", version="1"): None}, 5),
    "WarmrouteNoWorkerReady": (
        {series("workers", pool="default", state="ready"): "0x60"},
        1,
    ),
    "WarmrouteLastResort": ({f"warmroute_worker_last_resort{{{ONE}}}": "1x60"}, 2),
    "WarmroutePredictionsDiverge": ({f'warmroute_worker_diverging{{{ONE},cause="none"}}': "1x60"}, 5),
    "WarmrouteMetricsStale": ({f"warmroute_worker_metrics_age_seconds{{{ONE}}}": "20x60"}, 1),
    "WarmrouteKvEventsStale": ({f"warmroute_worker_kv_events_complete{{{ONE}}}": "0x60"}, 10),
    "WarmrouteWarmDenied": (
        {series("warm_requests_total", pool="default", prompt_class="", result="denied"): "0+100x60"},
        11,
    ),
    "WarmrouteHerd": (
        {
            f"warmroute_worker_queued_prefill_seconds{{{ONE}}}": "8x60",
            f"warmroute_worker_queued_prefill_seconds{{{OTHER}}}": "0.1x60",
        },
        2,
    ),
    "WarmrouteLeasesLost": ({series("leases_lost_total", pool="default"): "0 1x60"}, 1),
    "WarmrouteAccessLogMissing": ({series("access_log_streams"): "0x60"}, 3),
    "WarmrouteFaults": ({series("ext_proc_errors_total", kind="routing"): "0 1x60"}, 1),
    "WarmroutePromptsNotRead": (
        {series("load_only_total", pool="default", cause="prompt-budget"): "0+100x60"},
        11,
    ),
    "WarmrouteTimeouts": (
        {series("timeouts_total", pool="default", prompt_class=""): "0+30x60"},
        6,
    ),
}


def unit_test(fed, checks):
    """A promtool test: `checks` are (minute, alerts that fire then)."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in fed.items() if values],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts],
            }
            for minute, alerts in checks
        ],
    }


def run_promtool(tmp_path, tests):
    path = tmp_path / "tests.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}),
        encoding="utf-8",
    )
    return subprocess.run(
        [require("promtool"), "test", "rules", path], capture_output=True, text=True, check=False
    )


def test_a_healthy_fleet_raises_no_alert_and_each_fault_its_own_in_time(tmp_path):
    assert set(FAULTS) == set(ALERTS)
    tests = [unit_test(HEALTHY, [(30, [])])]
    for alert, (fault, minutes) in FAULTS.items():
        unknown = set(fault) - set(HEALTHY) - {s for s in fault if "prompt-budget" in s}
        assert unknown == set()
        tests.append(unit_test({**HEALTHY, **fault}, [(minutes - 1, []), (minutes, [alert])]))
    done = run_promtool(tmp_path, tests)
    assert done.returncode == 0, done.stderr + done.stdout


def test_promtool_would_notice(tmp_path):
    fault, minutes = FAULTS["WarmrouteHerd"]
    done = run_promtool(tmp_path, [unit_test({**HEALTHY, **fault}, [(minutes, [])])])
    assert done.returncode != 0
