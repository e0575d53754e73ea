"""`python -m extproc` and the `warmroute` command."""

import sys

from extproc.cli import main as run


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(run())


if __name__ == "__main__":
    main()
