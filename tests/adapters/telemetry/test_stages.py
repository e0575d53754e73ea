from extproc.adapters.telemetry.stages import Stage, Stages
from tests.adapters.telemetry.values import Clock


def test_each_stage_begins_where_the_one_before_ended():
    clock = Clock(5.0)
    stages = Stages(clock)
    for name, now in (("parse", 5.5), ("match", 5.75), ("decide", 7.0)):
        clock.now = now
        stages.mark(name)
    assert stages.all() == [
        Stage("parse", 5.0, 5.5),
        Stage("match", 5.5, 5.75),
        Stage("decide", 5.75, 7.0),
    ]
    assert (stages.started, stages.ended) == (5.0, 7.0)


def test_a_fork_counts_only_when_it_is_joined():
    clock = Clock()
    stages = Stages(clock)
    given_up, used = stages.fork(), stages.fork()
    clock.now = 1.0
    given_up.mark("render")
    used.mark("wait")
    stages.join(used)
    clock.now = 3.0
    stages.mark("tokenize")
    given_up.mark("tokenize")
    assert stages.all() == [Stage("wait", 0.0, 1.0), Stage("tokenize", 1.0, 3.0)]


def test_a_stage_may_have_ended_a_moment_ago_but_not_before_the_one_before_it():
    clock = Clock()
    stages = Stages(clock)
    clock.now = 1.0
    stages.mark("wait")
    clock.now = 3.0
    stages.mark("render", ago_s=0.5)
    stages.mark("tokenize")
    stages.mark("match", ago_s=9.0)
    assert [(stage.name, stage.end) for stage in stages.all()] == [
        ("wait", 1.0),
        ("render", 2.5),
        ("tokenize", 3.0),
        ("match", 3.0),
    ]


def test_clock_times_become_wall_times():
    stages = Stages(Clock(100.0), lambda: 1_700_000_000_000_000_000)
    assert stages.unix_ns(100.25) == 1_700_000_000_250_000_000
    assert stages.all() == []
    assert stages.ended == 100.0
