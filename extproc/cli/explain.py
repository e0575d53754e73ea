"""`warmroute explain`: why one request went where it went, and what became of it."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from extproc.adapters.admin_client import DEFAULT_URL, TOKEN_VARIABLE, AdminClient, token_from
from extproc.adapters.decision_reader import find_decision
from extproc.protocol.explanation_text import SHOWN, as_text

HELP = "tell why a request went where it went, and what became of it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "request_id",
        metavar="REQUEST_ID",
        help="its x-request-id, as in the decision log and on the status page",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--log",
        metavar="FILE",
        help="look in this decision log, and in what it was rotated to; `-`: standard input",
    )
    where.add_argument("--admin", metavar="URL", default=DEFAULT_URL, help="ask this running Warmroute")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"token of its admin server (else the environment variable {TOKEN_VARIABLE})",
    )
    parser.add_argument("--all", action="store_true", help=f"list all candidates, not only the first {SHOWN}")
    parser.add_argument("--json", action="store_true", help="print the line of the decision log")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when nothing is known of the request."""
    line = _from_log(args) if args.log is not None else asyncio.run(_from_admin(args))
    if line is None:
        return 1
    if args.json:
        json.dump(line, sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(as_text(line, None if args.all else SHOWN))
    return 0


def _from_log(args: argparse.Namespace) -> dict[str, Any] | None:
    found = find_decision(args.log, args.request_id)
    if found is None:
        print(f"{args.log} has no line about the request {args.request_id}", file=sys.stderr)
        return None
    if found.lines > 1:
        print(
            f"{found.where} has {found.lines} lines with this request id; this is the last", file=sys.stderr
        )
    return found.line


async def _from_admin(args: argparse.Namespace) -> dict[str, Any] | None:
    async with AdminClient(args.admin, token_from(args.token_file)) as client:
        found = await client.explained(args.request_id)
    if found is None:
        print(
            f"{args.admin} knows nothing of the request {args.request_id} (any more); "
            "give --log FILE to look in the decision log",
            file=sys.stderr,
        )
        return None
    decision: dict[str, Any] = found["decision"]
    return decision
