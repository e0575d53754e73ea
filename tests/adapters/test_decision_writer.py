import json
from random import Random

import pytest

from extproc.adapters.decision_writer import REDACTED, DecisionLog, LogSettings
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.policies import TokenLoad
from extproc.core.router import Router
from extproc.core.types import Completion, Outcome
from tests.support.core import NAMESPACE, members, request

PROMPT = list(range(1, 200))


@pytest.fixture
def router():
    ids = iter(range(10**6))
    costs = CostSettings()
    router = Router(
        TokenLoad(costs),
        Random(1),
        new_lease_id=lambda: str(next(ids)),
        pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, 16)},
    )
    router.on_membership(members(2), 0.0)
    return router


def finish(router, request_id="r", outcome=Outcome.FINISHED, **fields):
    decision = router.schedule(request(PROMPT, request_id=request_id), 1.0)
    return router.release(decision.lease_id, Completion(outcome, **fields), 2.0)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_that_cannot_be_written_is_said_once_and_harms_nobody(tmp_path, router):
    said = []
    log = DecisionLog(str(tmp_path / "missing" / "x.jsonl"), on_error=said.append)
    for _ in range(3):
        log.write(finish(router))
    log.close()
    assert len(said) == 1
    assert "requests go on" in said[0]
    assert log.failures >= 3


def test_it_recovers_when_the_folder_appears(tmp_path, router):
    folder = tmp_path / "late"
    log = DecisionLog(str(folder / "x.jsonl"), on_error=lambda _: None)
    log.write(finish(router))
    folder.mkdir()
    log.write(finish(router))
    log.close()
    assert len(lines(folder / "x.jsonl")) == 1


def test_an_empty_path_is_off(router):
    log = DecisionLog("", on_error=pytest.fail)
    log.write(finish(router))
    log.close()


def test_a_sample_is_the_same_for_everyone_and_about_its_share(tmp_path, router):
    def written(name):
        log = DecisionLog(str(tmp_path / name), pytest.fail, LogSettings(sample=0.25))
        for n in range(400):
            log.write(finish(router, f"request-{n}"))
        log.close()
        return [line["request_id"] for line in lines(tmp_path / name)]

    once = written("one.jsonl")
    assert once == written("two.jsonl")
    assert 60 < len(once) < 140
    assert {line["sample"] for line in lines(tmp_path / "one.jsonl")} == {0.25}


def test_what_went_wrong_is_always_written(tmp_path, router):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(path), pytest.fail, LogSettings(sample=0.0))
    log.write(finish(router))
    log.write(finish(router, "failed", Outcome.FAILED))
    log.close()
    (entry,) = lines(path)
    assert entry["request_id"] == "failed"
    assert "sample" not in entry


def test_hidden_fields_are_hidden_everywhere_and_found_all_the_same(tmp_path, router):
    path = tmp_path / "decisions.jsonl"
    recent = RecentDecisions()
    settings = LogSettings(redact=frozenset({"request_id", "adapter", "prefix_key"}))
    log = DecisionLog(str(path), pytest.fail, settings, recent)
    log.write(finish(router, "secret"))
    log.close()
    (entry,) = lines(path)
    assert entry["request_id"] == entry["prefix_key"] == REDACTED
    assert entry["adapter"] is None
    assert recent.find("secret") == entry


def test_a_model_that_is_hidden_is_hidden_under_its_alias_too():
    log = DecisionLog("", pytest.fail, LogSettings(redact=frozenset({"model"})))
    assert log.hide({"model": "acme-7b", "alias": "acme", "pool": "p"}) == {
        "model": REDACTED,
        "alias": REDACTED,
        "pool": "p",
    }
    assert log.hide({"model": "acme-7b", "alias": None}) == {"model": REDACTED, "alias": None}


def test_the_last_lines_are_kept_word_for_word_even_those_not_written(tmp_path, router):
    recent = RecentDecisions()
    log = DecisionLog("", pytest.fail, LogSettings(sample=0.0), recent)
    log.write(finish(router, "a"))
    written = DecisionLog(str(tmp_path / "x.jsonl"), pytest.fail, None, recent)
    written.write(finish(router, "b"))
    written.close()
    assert recent.find("a")["request_id"] == "a"
    assert [recent.find("b")] == lines(tmp_path / "x.jsonl")


def test_a_log_that_grows_too_large_is_rotated(tmp_path, router):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(path), pytest.fail, LogSettings(max_bytes=20_000, keep=2))
    for n in range(60):
        log.write(finish(router, str(n)))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["decisions.jsonl", "decisions.jsonl.1", "decisions.jsonl.2"]
    assert all(file.stat().st_size <= 20_000 for file in files)
    kept = [line["request_id"] for file in reversed(files) for line in lines(file)]
    assert kept == [str(n) for n in range(60 - len(kept), 60)]


def test_standard_output_gets_the_lines(capsysbinary, router):
    log = DecisionLog("-", pytest.fail)
    log.write(finish(router))
    log.close()
    assert json.loads(capsysbinary.readouterr().out)["request_id"] == "r"
