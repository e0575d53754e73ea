import sys
from types import ModuleType

import pytest

from extproc.cli.simulate_jobs import Job, peers, policy_maker, run_job, run_jobs
from extproc.core.errors import WarmrouteError
from extproc.sim.experiment import Load
from extproc.sim.fleet import FleetSettings
from extproc.sim.hardware import ENGINE_PRESETS
from extproc.sim.policies import POLICIES
from extproc.sim.routing import PolicyUnavailableError
from extproc.sim.sessions import WorkloadOptions


def missing(facts, seed):
    raise PolicyUnavailableError("pip install something")


def job(policy, load=None, knee=None):
    settings = FleetSettings(replicas=2, engine=ENGINE_PRESETS["instant"].engine(16))
    return Job("documents", WorkloadOptions(limit=40), policy, settings, load, knee)


def test_ours_come_first():
    assert policy_maker("token-load") is POLICIES["token-load"]


def test_a_factory_of_any_module_is_a_policy():
    assert policy_maker(f"{__name__}:missing") is missing
    with pytest.raises(WarmrouteError, match="nothing_there"):
        policy_maker(f"{__name__}:nothing_there")


def test_peers_are_what_the_checkout_has(monkeypatch):
    module = ModuleType("loadtests.peers")
    module.PEERS = {"their-router": missing}  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "loadtests.peers", module)
    assert peers() == {"their-router": missing}
    assert policy_maker("their-router") is missing


def test_without_a_checkout_there_are_no_peers(monkeypatch):
    monkeypatch.setitem(sys.modules, "loadtests", None)
    monkeypatch.setitem(sys.modules, "loadtests.peers", None)
    assert peers() == {}


def test_a_policy_that_cannot_run_is_skipped_with_its_reason():
    outcome = run_job(job(f"{__name__}:missing"))
    assert (outcome.results, outcome.skipped) == ((), "pip install something")


def test_jobs_in_processes_give_what_they_give_here():
    jobs = [job("round-robin", Load("rate", 5.0)), job("token-load", Load("rate", 5.0))]
    here = dict(run_jobs(jobs, 1, lambda *_: None))
    there = dict(run_jobs(jobs, 2, lambda *_: None))
    assert {at: outcome.results for at, outcome in here.items()} == {
        at: outcome.results for at, outcome in there.items()
    }


def test_a_knee_is_one_job_with_many_results():
    outcome = run_job(job("round-robin", Load("rate", 1.0), 50.0))
    assert len(outcome.results) > 1
