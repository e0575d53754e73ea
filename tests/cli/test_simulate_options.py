import argparse
import shlex

import pytest

from extproc.cli import simulate_options
from extproc.core.errors import WarmrouteError


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate_options.load_options(parser.add_argument_group())
    simulate_options.fleet_options(parser.add_argument_group())
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    "wrong", [("--rate", "0"), ("--rate", "1", "--concurrency", "1"), ("--concurrency", "x")]
)
def test_wrong_options_are_usage_errors(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        options(*wrong)
    assert wrong[0] in capsys.readouterr().err


def test_the_command_reproduces_the_options():
    given = options(
        "--workload", "flood", "--rate", "1,2.5", "--no-kv-replay", "--seed", "3", "--replicas", "7"
    )
    words = shlex.split(simulate_options.command(given))
    assert words[:2] == ["warmroute", "simulate"]
    assert vars(options(*words[2:])) == vars(given)


def test_options_that_hold_requests_are_in_the_command_too():
    given = options("--priorities", "gold=1", "--admission-wait-s", "2", "--routers", "1,2")
    command = simulate_options.command(given)
    assert "--priorities gold=1" in command
    assert "--admission-wait-s 2.0" in command
    assert "--routers 1,2" in command


def test_the_fleet_is_what_the_options_say():
    given = options(
        "--replicas", "3", "--network-ms", "2", "--kv-delay-ms", "5", "--no-kv-events", "--warmup", "9"
    )
    fleet = simulate_options.fleet_settings(given, 32)
    assert (fleet.replicas, fleet.network_s, fleet.kv_delay_s) == (3, 0.002, 0.005)
    assert (fleet.kv_events, fleet.kv_replay, fleet.warmup_requests) == (False, True, 9)
    assert fleet.engine.block_size == 32


def test_requests_are_held_as_the_options_say_and_else_as_by_default():
    default = simulate_options.fleet_settings(options(), 16).hold
    given = options(
        "--priorities", "gold=2, silver=1", "--admission-wait-s", "2", "--admission-queue-ms", "200",
        "--admission-requests", "50",
    )  # fmt: skip
    hold = simulate_options.fleet_settings(given, 16).hold
    assert (hold.priorities, hold.max_wait_s) == ({"gold": 2, "silver": 1}, 2.0)
    assert (hold.room.max_queue_ms, hold.queue.max_requests) == (200.0, 50)
    assert (default.priorities, default.queue.max_bytes) == ({}, hold.queue.max_bytes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "nothing"), "no preset is called"),
        (("--priorities", "gold"), "'gold' is not TENANT=NUMBER"),
    ],
)
def test_what_the_fleet_cannot_be_is_said(arguments, message):
    with pytest.raises(WarmrouteError, match=message):
        simulate_options.fleet_settings(options(*arguments), 16)
