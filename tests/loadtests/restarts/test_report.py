import json

from loadtests.restarts.evaluate import Period, Sample
from loadtests.restarts.play import Load, Run
from loadtests.restarts.report import HEAD, cells, document, markdown, noise_text, report, seconds_text
from loadtests.restarts.routers import Restart

ABOUT = {"date": "2026-01-01", "machine": "a", "command": "b"}


def made(share_while_down=0.9, scenario="rolling", failures=(), decided=None, down_s=12):
    """Ten requests a second: a control of 20 s, then one restart, then 10 s more."""
    end = 30 + down_s
    load = Load("", iter(()), 1.0, 1)
    for number in range(end * 10):
        at = number / 10
        load.sent[f"r{number}"] = at
        share = share_while_down if 20 <= at < 20 + down_s else 0.9
        load.samples.append(Sample(at, 1000, round(share * 1000)))
    load.failures = list(failures)
    restart = Restart("A", 20.0, 21.0, 20.0 + down_s, 20.5 + down_s)
    runs = [Run("control", 0, Period(0.0, 20.0)), Run(scenario, 0, Period(20.0, end), [restart])]
    return report(load, runs, set(load.sent) if decided is None else decided)


def test_nothing_lost_is_all_right():
    found = made()
    control, rolling = found.rows
    assert found.kept
    assert found.noise.width_s == 1.0
    assert (control.during, control.down_s) == (None, ())
    assert (rolling.during, rolling.after, rolling.failed, rolling.passed_by) == (0.9, 0.9, 0, 0)
    assert rolling.down_s == (12.0,)
    assert rolling.complete_s == (0.5,)


def test_a_loss_that_lasts_is_not():
    found = made(share_while_down=0.8)
    assert not found.kept
    assert found.rows[1].dip.below_s >= 12
    assert made(share_while_down=0.8, down_s=5).kept
    assert made(share_while_down=0.86).kept


def test_both_at_once_are_not_judged():
    assert made(share_while_down=0.1, scenario="together").kept


def test_a_request_that_fails_at_any_time_is_too_much():
    found = made(failures=[(5.0, "r50: HTTP 503")])
    assert not found.kept
    assert [row.failed for row in found.rows] == [1, 0]
    assert found.failures == ("r50: HTTP 503",)


def test_requests_that_no_router_placed_are_counted():
    found = made(decided={f"r{number}" for number in range(420) if number % 10})
    assert [(row.passed_by, row.requests) for row in found.rows] == [(20, 200), (22, 220)]


def test_a_row_has_a_cell_for_each_head_and_seconds_from_before_the_stop():
    found = made(share_while_down=0.5)
    for row in found.rows:
        assert len(cells(row)) == len(HEAD)
    assert seconds_text(found.rows[1]).startswith("rolling, round 1: 90 90 90 90 90 | 50 50")
    assert "windows of 1 s" in noise_text(found.noise)


def test_it_is_written_as_json_and_markdown():
    found = made()
    written = json.loads(json.dumps(document(ABOUT, found)))
    assert written["kept"] is True
    assert [run["scenario"] for run in written["runs"]] == ["control", "rolling"]
    text = markdown(ABOUT, found)
    assert "| rolling | 90.0%" in text
    assert "`b`" in text
