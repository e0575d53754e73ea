"""Files that commands write their results to. `-` is standard output."""

import sys
from pathlib import Path

from extproc.core.errors import WarmrouteError

STANDARD_OUTPUT = "-"


def check_writable(option: str, name: str | None) -> None:
    """Before long work: that its result will have a place, as far as can be told.

    Raises:
        WarmrouteError: it would have none.
    """
    if name in (None, STANDARD_OUTPUT):
        return
    path = Path(name)
    if path.is_dir():
        raise WarmrouteError(f"cannot write {option} {name}: it is a folder")
    if not path.absolute().parent.is_dir():
        raise WarmrouteError(f"cannot write {option} {name}: there is no such folder")


def write_text(name: str, text: str) -> None:
    """Write a result. What is no valid Unicode in it is replaced.

    Raises:
        WarmrouteError: it cannot be written.
    """
    if name == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, "utf-8", errors="replace")
    except OSError as error:
        raise WarmrouteError(f"cannot write {name}: {error.strerror}") from None
