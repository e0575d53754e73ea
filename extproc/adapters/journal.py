"""The journal of a running router: recorded, written, and given up without harm."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from extproc.adapters.journal_file import JournalWriter
from extproc.core.router import Router
from extproc.journal.header import Header, JournalError, Policies
from extproc.journal.tap import Recorder


class Journal:
    """Builds a router and records it, in memory until `open`.

    Args:
        path: the file.
        header: how the router is built.
        max_bytes: where the journal ends.
        keep: how many earlier journals remain.
        report: told once if the journal ends before its time.

    Raises:
        JournalError: there is no such folder, or nothing may be written there.
    """

    def __init__(
        self, path: Path, header: Header, max_bytes: int, keep: int, report: Callable[[str], None]
    ) -> None:
        self._header = header
        self._report = report
        _refuse_unwritable(path)
        self._path = path
        self._writer = JournalWriter(path, header, max_bytes, keep)
        self._recorder = Recorder(self._writer.write, self._ended)
        self.error: str | None = None
        """Why it has ended before its time."""

    def build(self, policies: Policies, new_lease_id: Callable[[], str]) -> Router:
        """The router, recorded from its first moment; see `Header.build`."""
        recorder = self._recorder
        router = self._header.build(policies, new_lease_id, recorder.prompt_hashes, recorder.event_hashes)
        recorder.attach(router)
        return router

    def open(self) -> None:
        """Begin the file: the router has started. That of the router before is kept as `path.1`.

        Raises:
            JournalError: the file cannot be written.
        """
        try:
            self._writer.open()
        except OSError as error:
            raise _cannot_write(self._path, error.errno or 0) from error

    def flush(self) -> None:
        """Hand what has come together to the system: what a sudden death cannot take away."""
        if self._recorder.recording:
            try:
                self._writer.flush()
            except OSError as error:
                self._recorder.give_up(error)

    def close(self) -> None:
        """The end of the journal."""
        self.flush()
        self._recorder.stop()
        self._writer.abandon()

    def _ended(self, text: str) -> None:
        self.error = text
        self._report(text)


def _refuse_unwritable(path: Path) -> None:
    """Find out before anybody is served; whoever else uses the file notices nothing."""
    if path.is_dir():
        raise _cannot_write(path, errno.EISDIR)
    if not path.parent.is_dir():
        raise _cannot_write(path, errno.ENOTDIR if path.parent.exists() else errno.ENOENT)
    if not os.access(path.parent, os.W_OK):  # one that is there is moved
        raise _cannot_write(path, errno.EACCES)


def _cannot_write(path: Path, number: int) -> JournalError:
    return JournalError(f"cannot write the journal {path}: {os.strerror(number)}")
