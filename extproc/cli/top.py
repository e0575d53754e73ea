"""`warmroute top`: the status page in a terminal."""

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from extproc.adapters.admin_client import (
    DEFAULT_URL,
    TOKEN_VARIABLE,
    AdminClient,
    AdminClientError,
    token_from,
)
from extproc.cli.option_types import checked
from extproc.cli.top_view import view

HELP = "watch a running Warmroute: workers, decisions, prefixes, warnings"
_PLAIN_WIDTH = 160


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--admin", metavar="URL", default=DEFAULT_URL, help="the Warmroute to ask")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"token of its admin server (else the environment variable {TOKEN_VARIABLE})",
    )
    parser.add_argument(
        "--interval",
        type=checked(float, lambda value: 0.1 <= value <= 3600, "a number of seconds from 0.1 to 3600"),
        default=1.0,
        metavar="SECONDS",
        help="between two looks",
    )
    parser.add_argument(
        "--once", action="store_true", help="print once and end; so it does without a terminal"
    )


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C; once where there is no terminal."""
    if args.once or not sys.stdout.isatty():
        console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
        return asyncio.run(_once(args, console))
    return asyncio.run(_watch(args, Console(highlight=False)))


async def _once(args: argparse.Namespace, console: Console) -> int:
    async with AdminClient(args.admin, token_from(args.token_file)) as client:
        console.print(view(await client.state(), None))
    return 0


async def _watch(args: argparse.Namespace, console: Console) -> int:
    async with AdminClient(args.admin, token_from(args.token_file)) as client:
        state = await client.state()  # a wrong address is an error, not an empty screen
        with Live(view(state, console.height), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(args.interval)
                try:
                    state = await client.state()
                    live.update(view(state, console.height), refresh=True)
                except AdminClientError as error:
                    live.update(
                        Text(f"{error}\nlast seen {state['time']}; trying again", style="red"), refresh=True
                    )
