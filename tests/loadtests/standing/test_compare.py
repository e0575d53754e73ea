import math

from extproc.sim.experiment import Load
from loadtests.standing.cases import Traces
from loadtests.standing.compare import Row, Setup, compare, row_of

SETUP = Setup(Traces(), (1, 2), 100, replicas=2)
LOAD = Load("concurrency", 4)


def test_every_run_of_a_case_is_in_its_row():
    row = row_of(SETUP, "documents", "round-robin", LOAD)
    assert len(row.p99_ms) == 2
    assert len(set(row.p99_ms)) == 2  # seeds differ
    assert row.middle_ms == sum(row.p99_ms) / 2
    assert row == row_of(SETUP, "documents", "round-robin", LOAD)


def test_a_failed_run_is_worse_than_any_time():
    assert Row("x", (10.0, None, None)).middle_ms == math.inf
    assert Row("x", (10.0, None, 20.0)).middle_ms == 20.0


def test_rows_come_best_first():
    told = []
    policies = ["round-robin", "token-load"]
    [(name, load, rows)] = compare(SETUP, ["documents"], policies, {"documents": LOAD}, 2, told.append)
    assert (name, load) == ("documents", LOAD)
    assert [row.policy for row in rows] == ["token-load", "round-robin"]
    assert rows[0].cached > rows[1].cached
    assert told[0] == "documents: at concurrency 4"
