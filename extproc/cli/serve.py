"""`warmroute serve`: the external processor, in one process or several."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from extproc import config as configuration
from extproc.adapters.line_output import LineOutput
from extproc.adapters.policy_plugins import available_policies
from extproc.adapters.process_group import ProcessGroup, ProcessPlace, reserve
from extproc.adapters.service_log import start_log
from extproc.adapters.warm_up import settle
from extproc.app import App
from extproc.assembly import for_process
from extproc.cli.option_types import checked
from extproc.protocol.addresses import parse_address

HELP = "run the external processor that Envoy asks for every request"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument("--listen", metavar="HOST:PORT", help="listen here instead of where the file says")
    parser.add_argument(
        "--policy", choices=available_policies(), help="use this policy instead of the file's"
    )
    parser.add_argument(
        "--processes",
        type=checked(int, lambda count: 1 <= count <= 64, "a number of processes from 1 to 64"),
        metavar="N",
        help="routers that share the port, instead of the file's",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, for looking for faults")
    parser.add_argument("--place", nargs=3, help=argparse.SUPPRESS)  # number, count, folder


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Status goes to standard error, the decision log where configured.

    Raises:
        WarmrouteError: the configuration or an option cannot be used, or a port is taken.
    """
    start_log(verbose=args.verbose)
    if args.listen is not None:
        parse_address(args.listen, lowest_port=0)
    config = configuration.load(args.config)
    options = ("listen", "policy", "processes")
    overrides = {key: value for key in options if (value := getattr(args, key)) is not None}
    config = config.model_copy(update=overrides)
    if args.place is not None:
        number, count, folder = args.place
        return asyncio.run(_serve(config, ProcessPlace(int(number), int(count), Path(folder))))
    if config.processes > 1:
        return asyncio.run(_supervise(config, args))
    return asyncio.run(_serve(config, ProcessPlace()))


async def _serve(config: configuration.Config, place: ProcessPlace) -> int:
    stop, number = asyncio.Event(), place.number

    def say(text: str) -> None:
        _say(text if place.count == 1 else f"[{number}] {text}")

    _on_signals(stop.set)
    async with App(for_process(config, place), say, place):
        settle()
        await stop.wait()
        say("stopping: no new requests; open ones are finished by Envoy")
    return 0


async def _supervise(config: configuration.Config, args: argparse.Namespace) -> int:
    for_process(config, ProcessPlace(0, config.processes))  # what cannot be shared is said once
    held, listen = reserve(config.listen)

    def command(place: ProcessPlace) -> list[str]:
        words = [sys.executable, "-m", "extproc", "serve", "--config", args.config, "--listen", listen]
        words += ["--policy", config.policy, "--processes", str(config.processes)]
        words += ["--verbose"] if args.verbose else []
        return [*words, "--place", str(place.number), str(place.count), str(place.folder)]

    with held:
        group = ProcessGroup(command, config.processes, _say)
        _on_signals(group.stop)
        _say(f"{config.processes} processes on {listen}")
        return await group.run()


def _on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


_errors = LineOutput(lambda: sys.stderr)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # requests do not depend on who reads it
        _errors.write(f"warmroute: {text}\n".encode())
