import json
from datetime import UTC, datetime

from extproc.adapters.decision_writer import DecisionLog, LogSettings
from extproc.adapters.holding import Ending, Wait
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.unserved_log import unserved_record
from extproc.analysis.mode_report import ModeReport
from tests.support.core import request

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def wait(ending, held_ms=1500.0, **fields):
    return Wait(request(request_id="r", prompt_tokens=100, tenant="acme", **fields), ending, held_ms, 2)


def test_it_says_how_the_wait_ended_and_how_long_it_was():
    line = unserved_record(wait(Ending.EXPIRED), AT)
    assert (line["request_id"], line["tenant"], line["pool"]) == ("r", "acme", "default")
    assert (line["decision"], line["outcome"], line["status"]) == ("expired", "expired", 429)
    assert line["admission"] == {"held_ms": 1500.0, "priority": 2}
    assert (line["received"], line["time"]) == (
        "2026-01-02T03:04:03.500+00:00",
        "2026-01-02T03:04:05.000+00:00",
    )
    assert line["candidate_workers"] == []
    assert unserved_record(wait(Ending.LEFT), AT)["status"] is None


def test_it_is_always_written_and_hides_what_is_to_be_hidden(tmp_path):
    file, recent = tmp_path / "log", RecentDecisions()
    log = DecisionLog(str(file), print, LogSettings(sample=0.0, redact=frozenset({"tenant"})), recent)
    log.write_unserved(wait(Ending.REFUSED))
    log.close()
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert line["tenant"] == "[redacted]"
    assert line == recent.find("r")


def test_a_report_counts_it_as_unfinished():
    report = ModeReport()
    report.add(unserved_record(wait(Ending.LEFT), AT))
    assert (report.unfinished, report.foreign, report.groups) == (1, 0, {})
