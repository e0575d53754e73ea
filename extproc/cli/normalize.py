"""`warmroute normalize`: what normalization would do to recorded requests."""

import argparse
import gzip
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from extproc import config as configuration
from extproc.config import Config, ConfigError
from extproc.prompt.normalize import NormalizationRules, find_edits
from extproc.prompt.normalize_text import Counts
from extproc.protocol.json_edit import Edit, JsonEditError, apply_edits
from extproc.protocol.openai import PATHS, BadRequest, RequestKind, decode_json

HELP = "try normalization on recorded request bodies: what would change, and how often"
_CONTEXT = 48  # characters shown of a changed place
_SHOWN_PLACES = 4  # of one request
_PATH_OF = {kind: path for path, kind in PATHS.items()}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "files",
        nargs="*",
        default=["-"],
        metavar="FILE",
        help="one body, or one per line, gzipped if it ends in .gz; - is standard input",
    )
    parser.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help="use a pool's rules from this configuration, whatever their mode",
    )
    parser.add_argument("--pool", metavar="NAME", help="whose rules; default: the first pool's")
    parser.add_argument(
        "--path",
        choices=sorted(PATHS),
        help="endpoint the bodies were sent to; default: guessed from each body",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the normalized bodies here, each with a line end; - is standard output",
    )
    parser.add_argument(
        "--show", type=int, default=3, metavar="N", help="show changes of the first N changed bodies"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


@dataclass(slots=True)
class Report:
    """What was found. `problems`: bodies that cannot be normalized, by why."""

    bodies: int = 0
    changed: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    bodies_by_rule: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)

    def add(self, counts: Counts) -> None:
        """One more body that could be read."""
        self.changed += bool(counts)
        for rule, count in counts.items():
            self.changes[rule.value] += count
            self.bodies_by_rule[rule.value] += 1

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        rules = {
            rule: {"bodies": self.bodies_by_rule[rule], "changes": count}
            for rule, count in sorted(self.changes.items())
        }
        return {
            "bodies": self.bodies,
            "changed": self.changed,
            "rules": rules,
            "not_normalized": dict(sorted(self.problems.items())),
        }


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when some bodies could not be read."""
    rules = _rules(args)
    kind = None if args.path is None else PATHS[args.path]
    report = Report()
    out = Console(stderr=args.json or args.output == "-", highlight=False, soft_wrap=True)
    if any(_is_same_file(name, args.output) for name in args.files):
        raise ConfigError(f"{args.output} is an input: name another file for the output")
    with ExitStack() as stack:
        output = None if args.output is None else stack.enter_context(_Output(args.output))
        for body in _bodies(args.files):
            _one(body, kind, rules, report, out if report.changed < args.show else None, output)
    if args.json:
        stream = sys.stderr if args.output == "-" else sys.stdout
        json.dump(report.plain(), stream, indent=2)
        stream.write("\n")
    else:
        _print(report, out)
    return 1 if any(why != "too-large" for why in report.problems) else 0


def _rules(args: argparse.Namespace) -> NormalizationRules:
    if args.config is None:
        if args.pool is not None:
            raise ConfigError("--pool needs --config")
        return NormalizationRules()
    config: Config = configuration.load(args.config)
    wanted = args.pool or config.pools[0].name
    for pool in config.pools:
        if pool.name == wanted:
            return pool.normalization.rules()
    raise ConfigError(
        f"{args.config} has no pool {wanted!r}: {', '.join(pool.name for pool in config.pools)}"
    )


def _one(
    body: bytes,
    kind: RequestKind | None,
    rules: NormalizationRules,
    report: Report,
    out: Console | None,
    output: "_Output | None",
) -> None:
    """Normalize one body, count and show what changes, and write it."""
    report.bodies += 1
    counts, edits = Counts(), list[Edit]()
    try:
        found = kind or _guess(body)
        if len(body) > rules.max_body_bytes:
            report.problems["too-large"] += 1
        else:
            edits = find_edits(found, body, rules, counts)
            if edits and out is not None:
                _show(report.bodies, found, body, edits, counts, out)
            report.add(counts)
    except (BadRequest, RecursionError):
        report.problems["not-json"] += 1
    except JsonEditError:
        report.problems["not-editable"] += 1
    except _UnknownKindError:
        report.problems["unknown-endpoint"] += 1
    if output is not None:
        output.write(apply_edits(body, edits))


class _UnknownKindError(Exception):
    """The body does not tell which endpoint it is for."""


def _guess(body: bytes) -> RequestKind:
    document = decode_json(body)
    if isinstance(document, dict):
        if "messages" in document:
            return RequestKind.MESSAGES if "system" in document else RequestKind.CHAT
        if "prompt" in document:
            return RequestKind.COMPLETION
        if "input" in document:
            return RequestKind.RESPONSES
    raise _UnknownKindError


# --- in and out ------------------------------------------------------------------------------------------


def _bodies(files: list[str]) -> Iterator[bytes]:
    """Bodies of all files, with a progress bar where a terminal shows errors and the size is known."""
    for name in files:
        if name == "-":
            yield from _split(sys.stdin.buffer)
            continue
        path, packed = Path(name), name.endswith(".gz")
        try:
            with (
                cast("BinaryIO", gzip.open(path)) if packed else path.open("rb") as file,
                _progress() as progress,
            ):
                task = progress.add_task(path.name, total=None if packed else path.stat().st_size)
                for body in _split(file):
                    progress.advance(task, len(body))
                    yield body
        except (OSError, EOFError, zlib.error) as error:
            why = (isinstance(error, OSError) and error.strerror) or error
            raise ConfigError(f"cannot read {name}: {why}") from error


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _split(file: BinaryIO) -> Iterator[bytes]:
    """A body per line; the whole file is one body if its first line is none and all of it is."""
    first = next((line for line in file if line.strip()), b"")
    if _is_json(first):
        yield first.rstrip(b"\r\n")
        yield from (line.rstrip(b"\r\n") for line in file if line.strip())
        return
    whole = first + file.read()
    if _is_json(whole):
        yield whole
    else:
        yield from (line.rstrip(b"\r") for line in whole.split(b"\n") if line.strip())


def _is_json(text: bytes) -> bool:
    try:
        decode_json(text)
    except (BadRequest, RecursionError):
        return False
    return True


def _is_same_file(one: str, other: str | None) -> bool:
    return other not in (None, "-") and one != "-" and Path(one).resolve() == Path(str(other)).resolve()


class _Output:
    """Where normalized bodies go: a file, or standard output."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file: BinaryIO

    def __enter__(self) -> Self:
        try:
            self._file = sys.stdout.buffer if self._name == "-" else Path(self._name).open("wb")
        except OSError as error:
            raise ConfigError(f"cannot write {self._name}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._name != "-":
            self._file.close()

    def write(self, body: bytes) -> None:
        """Append a body and the end of its line, unless it has one."""
        self._file.write(body if body.endswith(b"\n") else body + b"\n")


# --- what people read ------------------------------------------------------------------------------------


def _show(
    number: int, kind: RequestKind, body: bytes, edits: list[Edit], counts: Counts, out: Console
) -> None:
    changes = ", ".join(f"{rule.value} {count}" for rule, count in sorted(counts.items()))
    out.print(f"[bold]body {number}[/] ({_PATH_OF[kind]}): {changes}")
    for edit in edits[:_SHOWN_PLACES]:
        before, after = body[edit.start : edit.end].decode(errors="replace"), edit.replacement.decode()
        at = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
        start = max(0, at - _CONTEXT // 3)
        out.print(f"  byte {edit.start}:", markup=False)
        out.print(f"    - {before[start : start + _CONTEXT]}", markup=False, style="red")
        out.print(f"    + {after[start : start + _CONTEXT]}", markup=False, style="green")
    if len(edits) > _SHOWN_PLACES:
        out.print(f"  and {len(edits) - _SHOWN_PLACES} more places")


def _print(report: Report, out: Console) -> None:
    if report.changes:
        table = Table("rule", "bodies", "changes", box=None)
        for rule, count in sorted(report.changes.items()):
            table.add_row(rule, f"{report.bodies_by_rule[rule]:,}", f"{count:,}")
        out.print(table)
    out.print(f"{report.changed:,} of {report.bodies:,} bodies would change")
    for why, count in sorted(report.problems.items()):
        out.print(f"{count:,} not normalized: {why}", style="yellow")
