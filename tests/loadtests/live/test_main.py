import pytest

from loadtests.live.__main__ import parser, quality_targets
from loadtests.live.bench import FULL_OVERHEAD, with_rounds
from loadtests.live.schedule import LOADS


def test_round_robin_comes_first_and_ours_last():
    targets = quality_targets(["token-load", "least-load"], ["cache_aware", "round_robin"])
    names = [target.name for target in targets]
    assert names[0] == "Envoy round robin"
    assert names[-2:] == ["Envoy + Warmroute", "Warmroute least-load"]
    assert len(names) == len(set(names)) == 9
    assert targets[-1].policy == "least-load"


def test_defaults_are_the_full_measurement():
    args = parser().parse_args([])
    assert (args.quick, args.only, args.engine, args.engines) == (False, None, "simulated", 4)
    assert args.peer_policies == ["cache_aware"]
    with pytest.raises(SystemExit):
        parser().parse_args(["--engines", "0"])


def test_every_load_has_a_rate():
    assert {load.size for load in LOADS} == set(FULL_OVERHEAD.rates)
    assert with_rounds(FULL_OVERHEAD, 2).rounds == 2
