"""`warmroute replay`: the decisions of a journal again, and what others would have been."""

import argparse
import dataclasses
import json
import sys
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pydantic
import yaml
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from extproc import config as configuration
from extproc.adapters.journal_file import JournalReader
from extproc.adapters.policy_plugins import available_policies
from extproc.core.cost import CostSettings
from extproc.core.errors import WarmrouteError
from extproc.core.router import RouterSettings
from extproc.journal.header import Header
from extproc.journal.replay import Replay
from extproc.journal.what_if import Spread, Tally, spread

HELP = "decide the requests of a journal again: exactly, and under other policies or settings"
_EVERY = 250  # requests between two words of progress
_NOTHING = "No request is in it: nothing to compare."
# Where the bounds of a setting are: section and field of the configuration.
_BOUNDED: dict[str, tuple[type[pydantic.BaseModel], str]] = {
    **{field.name: (configuration.Cost, field.name) for field in dataclasses.fields(CostSettings)},
    "stale_after_s": (configuration.Scrape, "stale_after_s"),
    "failure_limit": (configuration.Scrape, "failure_limit"),
    "lease_expiry_s": (configuration.Limits, "lease_expiry_s"),
    "max_index_blocks": (configuration.Limits, "index_blocks"),
    "peer_fade_after_s": (configuration.Peers, "fade_after_s"),
    "peer_gone_after_s": (configuration.Peers, "gone_after_s"),
    # Those that the configuration does not have: times, as those it has.
    "stream_grace_s": (configuration.Limits, "lease_expiry_s"),
    "unreachable_s": (configuration.Limits, "lease_expiry_s"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("journal", type=Path, metavar="JOURNAL", help="what `journal.path` names")
    other = parser.add_argument_group("what if", "compare with another policy or other settings")
    other.add_argument("--policy", choices=available_policies(), help="another policy")
    other.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help="policy and costs of this configuration instead of the recorded",
    )
    other.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value of a setting of the cost model or the router, such as max_extra_ttft_ms=500",
    )
    parser.add_argument("--show", type=int, default=8, metavar="N", help="changed decisions to list")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when not every decision was reproduced, or there is none."""
    reader = JournalReader(args.journal)
    other = _other(reader.header, args)
    replay = Replay(reader.header, available_policies(), other)
    tally = Tally()
    started = time.monotonic()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[done]:,} requests"),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task("replay", total=None, done=0)
        for step in replay.run(reader.entries()):
            tally.add(step)
            if tally.requests % _EVERY == 0:
                progress.update(task, done=tally.requests)
    took_s = time.monotonic() - started
    if args.json:
        json.dump(_as_json(reader, replay, other, tally, args.show), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _print(reader, replay, other, tally, args.show, took_s)
    if args.json and not tally.requests:
        print(f"warmroute replay: {_NOTHING}", file=sys.stderr)
    return 0 if 0 < tally.exact == tally.requests else 1


def _other(header: Header, args: argparse.Namespace) -> Header | None:
    """How the other router is built; None when nothing is asked for.

    Raises:
        WarmrouteError: a setting is unknown, or its value cannot be one or is out of its bounds.
    """
    if args.policy is None and args.config is None and not args.set:
        return None
    changes: dict[str, Any] = {"shadow": ()}
    costs, settings = header.costs, header.settings
    if args.config is not None:
        config = configuration.load(args.config)
        changes |= {"policy": config.policy, "others": ()}
        costs, settings = config.cost.settings(), config.router_settings()
    if args.policy is not None:
        changes |= {"policy": args.policy, "others": ()}
    for text in args.set:
        name, value = _setting(text)
        if name in {field.name for field in dataclasses.fields(CostSettings)}:
            costs = dataclasses.replace(costs, **{name: value})
        else:
            settings = dataclasses.replace(settings, **{name: value})
    if args.set and settings.peer_fade_after_s >= settings.peer_gone_after_s:
        raise WarmrouteError("--set: `peer_fade_after_s` must be less than `peer_gone_after_s`")
    return header.changed(costs=costs, settings=settings, **changes)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    hints = typing.get_type_hints(CostSettings) | typing.get_type_hints(RouterSettings)
    name = name.strip().removeprefix("cost.")
    if not equals or name not in hints:
        raise WarmrouteError(f"--set {text}: write NAME=VALUE; the names are {', '.join(sorted(hints))}")
    try:
        found = msgspec.convert(yaml.safe_load(value), hints[name])
        section, field = _BOUNDED[name]
        bounds = section.model_fields[field]
        pydantic.TypeAdapter(Annotated[bounds.annotation, bounds]).validate_python(found)
    except pydantic.ValidationError as error:
        raise WarmrouteError(f"--set {text}: {error.errors()[0]['msg']}") from error
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise WarmrouteError(f"--set {text}: {error}") from error
    return name, found


def _changed_settings(header: Header, other: Header) -> dict[str, Any]:
    """What is different in `other`, by name."""
    found: dict[str, Any] = {} if other.policy == header.policy else {"policy": other.policy}
    for before, after in ((header.costs, other.costs), (header.settings, other.settings)):
        for field in dataclasses.fields(before):
            if getattr(before, field.name) != getattr(after, field.name):
                found[field.name] = getattr(after, field.name)
    return found


# --- for people ------------------------------------------------------------------------------------------


def _print(
    reader: JournalReader, replay: Replay, other: Header | None, tally: Tally, show: int, took_s: float
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    header = reader.header
    span_s = 0.0 if replay.first is None or replay.last is None else replay.last - replay.first
    console.print(
        f"Journal of Warmroute {header.version or '?'} from {header.started or '?'}: {header.policy}, "
        f"{tally.requests:,} requests and {replay.inputs:,} inputs in {span_s:,.0f} s",
        markup=False,
    )
    if reader.torn:
        console.print("Its end is missing: the router was stopped in the middle, or is still writing.")
    if not tally.requests:
        console.print(_NOTHING)
        return
    share = tally.exact / tally.requests
    done = f"{tally.exact:,} of {tally.requests:,} decisions reproduced exactly"
    percent = "100 %" if tally.exact == tally.requests else f"{min(share, 0.9999):.2%}"
    console.print(f"{done} ({percent}), in {took_s:.1f} s", style="green" if share == 1 else "red")
    if tally.drifts:
        console.print(f"The first that differ: entries {', '.join(map(str, tally.drifts[:5]))}.")
        console.print(
            f"The journal was written by Warmroute {header.version or '?'}; "
            "replay it with that version and the same policies."
        )
    if other is not None:
        _print_comparison(console, header, other, tally, show)


def _print_comparison(console: Console, header: Header, other: Header, tally: Tally, show: int) -> None:
    changed = _changed_settings(header, other)
    what = ", ".join(f"{name} = {value}" for name, value in changed.items()) or "nothing different"
    console.print(f"\nWhat if: {what}", style="bold")
    console.print(
        "Each decision is made again from what was known when it was made. Load, caches and ends of requests "
        "stay as recorded; both choices are priced as the recorded router did."
    )
    if not tally.compared:
        console.print("No decision could be compared.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("", "as recorded", "what if", "difference"):
        table.add_column(head, justify="left" if not head else "right")
    table.add_row(
        "other worker chosen",
        "",
        f"{tally.changed:,} of {tally.compared:,}",
        f"{tally.changed / tally.compared:.1%}",
    )
    was, instead = tally.was, tally.instead
    table.add_row(*_row("tokens predicted cached", was.cached_tokens, instead.cached_tokens, 0))
    table.add_row(*_row("tokens to prefill", was.prefill_tokens, instead.prefill_tokens, 0))
    for name, mine, theirs in (
        ("predicted TTFT", spread(was.ttft_ms), spread(instead.ttft_ms)),
        ("predicted cost", spread(was.total_ms), spread(instead.total_ms)),
    ):
        for part in Spread._fields:
            table.add_row(*_row(f"{name}, ms, {part}", getattr(mine, part), getattr(theirs, part), 1))
    console.print(table)
    if not tally.changed:
        return
    reasons = Table(box=None, pad_edge=False, header_style="bold", title="", title_justify="left")
    for head, justify in (("as recorded", "left"), ("what if", "left"), ("decisions", "right")):
        reasons.add_column(head, justify="right" if justify == "right" else "left")
    for (before, after), count in tally.reasons.most_common():
        reasons.add_row(before, after, f"{count:,}")
    console.print(reasons)
    if show > 0:
        console.print(_changes(tally, show))


def _changes(tally: Tally, show: int) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="bold", title="The largest differences (predicted cost in ms)",
        title_justify="left", title_style="bold",
    )  # fmt: skip
    for head in ("<request", "<as recorded", "cost", "<what if", "cost", "difference"):
        left = head.startswith("<")
        table.add_column(head.removeprefix("<"), justify="left" if left else "right", overflow="fold")
    for change in tally.largest(show):
        table.add_row(
            change.request_id,
            f"{change.worker} {change.reason}",
            f"{change.total_ms:,.1f}",
            f"{change.instead} {change.instead_reason}",
            f"{change.instead_total_ms:,.1f}",
            f"{change.difference_ms:+,.1f}",
        )
    return table


def _row(name: str, was: float | None, instead: float | None, digits: int) -> Sequence[str]:
    if was is None or instead is None:
        return (name, "-", "-", "")
    share = f" ({(instead - was) / was:+.1%})" if was else ""
    return (name, f"{was:,.{digits}f}", f"{instead:,.{digits}f}", f"{instead - was:+,.{digits}f}{share}")


# --- for programs ----------------------------------------------------------------------------------------


def _as_json(
    reader: JournalReader, replay: Replay, other: Header | None, tally: Tally, show: int
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "version": reader.header.version,
        "started": reader.header.started,
        "policy": reader.header.policy,
        "inputs": replay.inputs,
        "torn": reader.torn,
        "requests": tally.requests,
        "exact": tally.exact,
        "drifts": tally.drifts,
    }
    if other is None:
        return out
    sides = {}
    for name, side in (("as_recorded", tally.was), ("what_if", tally.instead)):
        sides[name] = {
            "cached_tokens": side.cached_tokens,
            "prefill_tokens": side.prefill_tokens,
            "ttft_ms": spread(side.ttft_ms)._asdict(),
            "total_ms": spread(side.total_ms)._asdict(),
        }
    out["what_if"] = {
        "settings": _changed_settings(reader.header, other),
        "compared": tally.compared,
        "changed": tally.changed,
        "reasons": [
            {"as_recorded": before, "what_if": after, "decisions": count}
            for (before, after), count in tally.reasons.most_common()
        ],
        **sides,
        "largest": [dataclasses.asdict(change) for change in tally.largest(show)],
    }
    return out
