"""Command line: argv to command. Thin.

Each command is a module of this package with `HELP` (one line), `configure(parser)` and
`run(args) -> int` (the exit code); it is imported only when it is needed.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from extproc import __version__
from extproc.cli.option_types import HelpFormatter
from extproc.core.errors import WarmrouteError

COMMANDS: dict[str, str] = {
    "serve": "extproc.cli.serve",
    "check": "extproc.cli.check",
    "envoy-config": "extproc.cli.envoy_config",
    "health": "extproc.cli.health",
    "explain": "extproc.cli.explain",
    "top": "extproc.cli.top",
    "report": "extproc.cli.report",
    "replay": "extproc.cli.replay",
    "analyze": "extproc.cli.analyze",
    "normalize": "extproc.cli.normalize",
    "demo": "extproc.cli.demo",
    "engine": "extproc.cli.engine",
    "simulate": "extproc.cli.simulate",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Exit codes: 0 success; 1 the command ran and found something wrong; 2 it could not run (usage or
    configuration); 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="warmroute",
        description="Route each LLM request to the vLLM replica where it is cheapest to serve.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, path in COMMANDS.items():
        if wanted in COMMANDS and name != wanted:
            commands.add_parser(name)
            continue
        module = importlib.import_module(path)
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            formatter_class=HelpFormatter,
        )
        module.configure(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        code: int = args.run(args)
    except WarmrouteError as error:
        print(f"warmroute {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code
