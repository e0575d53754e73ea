"""What `warmroute analyze` prints."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.analysis.report_html import percent, position_name, size_name

Report = dict[str, Any]

_COLOURS = {"yes": "green", "some": "yellow", "no": "red", "unknown": "red"}
_ROWS = 8


def print_report(report: Report, console: Console) -> None:
    """The report, in a few screens."""
    verdict = report["verdict"]
    console.print(Text(verdict["headline"], style=f"bold {_COLOURS[verdict['worth']]}"))
    for reason in verdict["reasons"]:
        console.print(Text(f"- {reason}"))
    if not report["requests"]:
        _print_lines(report, console)
        return
    _head(console, "Do users resend the first 10,000 tokens?")
    console.print(Text(report["first_tokens_answer"]))
    _print_lengths(report, console)
    _print_placement(report, console)
    _print_breakers(report, console)
    _print_prefixes(report, console)
    _print_groups(report, console)
    _print_lines(report, console)


def _head(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right", no_wrap=at > 0)
    return table


def _print_lengths(report: Report, console: Console) -> None:
    _head(console, "What repeats")
    repeated, lengths = report["repeated"], report["lengths"]
    console.print(
        Text(
            f"{report['requests']:,} prompts, {report['input_tokens']:,} input tokens, "
            f"{percent(repeated['share'])} of them repeat the beginning of an earlier prompt "
            f"({percent(repeated['block_share'])} in full blocks of {report['block_size']})."
        )
    )
    table = _table("tokens", "prompts of that length", "share that much", "repeated tokens")
    low = -1
    rows = zip(lengths["prompts"], lengths["shared"], lengths["shared_tokens"], strict=True)
    for bound, (prompts, shared, tokens) in zip([*lengths["bounds"], None], rows, strict=True):
        name = f"over {low:,}" if bound is None else str(bound) if not bound else f"{low + 1:,}-{bound:,}"
        if prompts or shared:
            table.add_row(name, f"{prompts:,}", f"{shared:,}", f"{tokens:,}")
        low = low if bound is None else bound
    console.print(table)


def _print_placement(report: Report, console: Console) -> None:
    _head(console, "Input tokens a fleet would find in its caches")
    table = _table("cache per replica", "replicas", "random", "by prefix", "gain", "busiest / mean")
    rows = report["placement"]
    for row in sorted(rows, key=lambda row: (row["cache_tokens"] is None, row["cache_tokens"] or 0)):
        uneven = row["imbalance_prefix"]
        table.add_row(
            size_name(row["cache_tokens"]),
            str(row["replicas"]),
            percent(row["random"]),
            percent(row["prefix"]),
            percent(row["prefix"] - row["random"]),
            "-" if uneven is None else f"{uneven:.2f}",
        )
    console.print(table)


def _print_breakers(report: Report, console: Console) -> None:
    breakers = report["breakers"]
    _head(console, "What breaks prefixes")
    if not breakers["found"]:
        console.print("Nothing was found that breaks otherwise equal prompts.")
        return
    text = (
        f"{percent(breakers['recoverable_share'])} of input tokens would repeat an earlier beginning but "
        f"for what stands before them; another {percent(breakers['behind_text_share'])} stand behind text "
        "that differs."
    )
    if not breakers["exact"]:
        text += f" Estimated from {breakers['compared']:,} of {breakers['candidates']:,} prompts."
    console.print(Text(text))
    table = _table("what stands there", "at token", "prompts", "tokens lost", "of input", "behind", "is")
    for row in breakers["found"][:_ROWS]:
        table.add_row(
            row["kind"],
            position_name(row),
            f"{row['requests']:,}",
            f"{row['tokens']:,}",
            percent(row["share"]),
            Text(repr(row["before"].strip()[-18:])),
            Text(repr(row["example"].strip()[:18])),
        )
    console.print(table)
    for kind, advice in {row["kind"]: row["advice"] for row in breakers["found"][:_ROWS]}.items():
        console.print(Text(f"- {kind}: {advice}."))
    if not report["text_shown"]:
        console.print(Text("Texts are given by their shape; --show-text shows them.", style="dim"))


def _print_prefixes(report: Report, console: Console) -> None:
    _head(console, "The biggest shared beginnings")
    table = _table("ends with", "tokens", "prompts", "repeated tokens")
    for row in report["prefixes"][:_ROWS]:
        table.add_row(
            Text(repr(row["ends"][-48:])),
            f"{row['tokens']:,}",
            f"{row['requests']:,}",
            f"{row['repeated_tokens']:,}",
        )
    console.print(table)


def _print_groups(report: Report, console: Console) -> None:
    where = report["groups_for"]
    note = f"{where['replicas']} replicas, {where['cache_tokens']:,} KV tokens each"
    for kind, rows in report["groups"].items():
        if not rows or (len(rows) == 1 and kind != "use"):
            continue
        _head(console, f"By {kind} ({note})")
        table = _table(kind, "prompts", "tokens", "repeated", "random", "by prefix", "lost")
        for row in rows[:_ROWS]:
            table.add_row(
                Text(row["name"]),
                f"{row['requests']:,}",
                f"{row['tokens']:,}",
                percent(row["repeated_share"]),
                percent(row["random_share"]),
                percent(row["prefix_share"]),
                percent(row["lost_share"]),
            )
        console.print(table)


def _print_lines(report: Report, console: Console) -> None:
    lines = report["lines"]
    _head(console, "What was read")
    console.print(
        Text(
            f"{lines['read']:,} lines: {lines['bad']:,} unreadable, {lines['not_encoded']:,} that cannot be "
            f"tokenized here, {lines['skipped']:,} that are no generation requests"
            + (f", {lines['duplicates']:,} that tell of a request again" if lines["duplicates"] else "")
            + "."
        )
    )
    for row in (*lines["bad_reasons"], *lines["not_encoded_reasons"]):
        console.print(Text(f"- {row['lines']:,}: {row['reason']} ({', '.join(row['examples'])})"))
    for note in (report["tokenizer_note"], *report["problems"], *report["bounds"]["notes"]):
        if note:
            console.print(Text(f"- {note}"))
