"""`warmroute serve`: the external processor."""

import argparse
import asyncio
import logging
import signal
import sys

from extproc import config as configuration
from extproc.adapters.policy_plugins import available_policies
from extproc.app import App

HELP = "run the external processor that Envoy asks for every request"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument("--listen", metavar="HOST:PORT", help="listen here instead of where the file says")
    parser.add_argument(
        "--policy", choices=available_policies(), help="use this policy instead of the file's"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, for looking for faults")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Status goes to standard error, the decision log where configured."""
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    config = configuration.load(args.config)
    overrides = {key: value for key in ("listen", "policy") if (value := getattr(args, key)) is not None}
    return asyncio.run(_serve(config.model_copy(update=overrides)))


async def _serve(config: configuration.Config) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with App(config, _say):
        await stop.wait()
        _say("stopping: no new requests; open ones are finished by Envoy")
    return 0


def _say(text: str) -> None:
    print(f"warmroute: {text}", file=sys.stderr, flush=True)
