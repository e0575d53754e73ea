"""`warmroute analyze`: do your requests repeat tokens, what breaks it, and would routing by prefix pay?"""

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc import __version__
from extproc.cli.option_types import listed, whole
from extproc.cli.output_files import STANDARD_OUTPUT, check_writable, write_text
from extproc.core.errors import WarmrouteError

if TYPE_CHECKING:
    from extproc.config import Pool

HELP = "read logs of requests: which tokens repeat, what breaks prefixes, what routing by prefix would save"

_FIELDS = ("tenant", "session", "class", "time", "template")
_PIPE_WIDTH = 120
_wholes = listed(int, lambda value: value > 0, "whole numbers above 0")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = (
        "Shapes are recognised line by line: request bodies, gateways' logs with the body, LiteLLM, Envoy "
        "access and tap logs, vLLM request logs; plain, gzip or zstd. Nothing leaves this machine, and the "
        "report holds no text of prompts unless --show-text is given."
    )
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="files, in the order of time; -: standard input"
    )
    how = parser.add_argument_group("tokens")
    how.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder with the model's tokenizer.json (default: a small stand-in)",
    )
    how.add_argument("--chat-template", metavar="FILE", help="if the engine runs with one")
    how.add_argument("-c", "--config", metavar="FILE", help="tokenize as a pool of this configuration does")
    how.add_argument("--pool", metavar="NAME", help="which pool (default: the first)")
    how.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"where a line has {', '.join(_FIELDS)}, as in tenant=meta.team; repeatable",
    )
    fleet = parser.add_argument_group("the fleet to estimate for")
    fleet.add_argument(
        "--replicas", type=_wholes, default=[2, 4, 8], metavar="N,…", help="numbers of replicas"
    )
    fleet.add_argument(
        "--cache-tokens", type=_wholes, default=[100_000, 500_000], metavar="N,…", help="KV cache of each"
    )
    fleet.add_argument("--block-size", type=whole, default=16, metavar="N", help="tokens per KV block")
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "--json", metavar="FILE", help="write everything as JSON (-: standard output, nothing else)"
    )
    out.add_argument("--html", metavar="FILE", help="write one self-contained page with charts")
    out.add_argument("--show-text", action="store_true", help="show text of prompts, not only its shape")
    run_options = parser.add_argument_group("how it runs")
    run_options.add_argument(
        "--jobs", type=whole, metavar="N", help="processes that tokenize (default: by size)"
    )
    run_options.add_argument(
        "--memory", type=whole, default=512, metavar="MIB", help="memory for remembered prompts"
    )
    run_options.add_argument("--limit", type=whole, metavar="N", help="stop after N prompts")
    run_options.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Analyse. Exit code 1 when the logs hold no request that can be read.

    Raises:
        WarmrouteError: a log or the tokenizer cannot be read, or an option is wrong.
    """
    from rich.console import Console

    from extproc.adapters.log_files import LogFile
    from extproc.analysis.analyzer import Analyzer, Settings
    from extproc.analysis.report import report_of
    from extproc.analysis.report_html import html_report
    from extproc.cli.analyze_jobs import spec_of
    from extproc.cli.analyze_text import print_report

    for option, name in (("--json", args.json), ("--html", args.html)):
        check_writable(option, name)
    fields = _fields(args.field)
    spec = spec_of(args.tokenizer, args.chat_template, _pool(args))
    if args.logs.count("-") > 1:
        raise WarmrouteError("standard input can be read once only")
    logs = [LogFile(name) for name in args.logs]
    settings = Settings(
        block_size=args.block_size,
        replicas=tuple(sorted(set(args.replicas))),
        cache_tokens=tuple(sorted(set(args.cache_tokens))),
        tree_bytes=args.memory * 1024 * 1024,
    )
    decode = spec.decoder()
    analyzer = Analyzer(settings, decode)
    _read(args, logs, spec, fields, analyzer)
    about: dict[str, Any] = {
        "version": __version__,
        "logs": [Path(name).name for name in args.logs],
        "tokenizer_note": spec.note,
        "block_size": settings.block_size,
        "problems": [problem for log in logs for problem in log.problems],
    }
    if spec.stand_in and any(form.startswith("vllm-") for form in analyzer.forms):
        about["problems"].append(
            "the log holds token ids, which are exact; give --tokenizer to tell what breaks prefixes"
        )
    if analyzer.counts.bad and not analyzer.requests:
        about["problems"].append(
            "one request (or list of requests) per line is read; of a document spread over lines, "
            "`jq -c . FILE` makes one line"
        )
    report = report_of(analyzer, decode, about, show_text=args.show_text)
    if args.html is not None:
        write_text(args.html, html_report(report, _command(args)))
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    if args.json is not None:
        write_text(args.json, text)
    if STANDARD_OUTPUT not in (args.json, args.html):
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(width=_PIPE_WIDTH, highlight=False)
        print_report(report, console)
    return 0 if analyzer.requests else 1


def _read(args: argparse.Namespace, logs: Any, spec: Any, fields: dict[str, str], analyzer: Any) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from extproc.cli.analyze_jobs import default_jobs, read_logs

    sizes = [log.size for log in logs]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %" if total else ""),
        TextColumn("{task.fields[prompts]:,} prompts"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=args.quiet,
        transient=True,
    )
    task = bar.add_task("reading", total=total, prompts=0)

    def progress(_log: Any, _lines: int) -> None:
        bar.update(task, completed=sum(log.position for log in logs), prompts=analyzer.requests)

    jobs = default_jobs(logs) if args.jobs is None else args.jobs
    results = read_logs(logs, spec, fields, jobs, progress)
    with bar:
        for log, result in results:
            analyzer.add_line(log.name, result)
            if args.limit is not None and analyzer.requests >= args.limit:
                break
    results.close()


def _pool(args: argparse.Namespace) -> "Pool | None":
    if args.config is None:
        return None
    from extproc import config as configuration

    pools = configuration.load(args.config).pools
    if args.pool is None:
        return pools[0]
    for pool in pools:
        if pool.name == args.pool:
            return pool
    raise WarmrouteError(f"no pool is called {args.pool!r}; there are {', '.join(p.name for p in pools)}")


def _fields(given: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for item in given:
        name, _, path = item.partition("=")
        if name not in _FIELDS or not path:
            raise WarmrouteError(f"--field {item}: it must be NAME=PATH with one of {', '.join(_FIELDS)}")
        fields[name] = path
    return fields


def _command(args: argparse.Namespace) -> str:
    words = ["warmroute", "analyze", *args.logs]
    for name in ("tokenizer", "chat_template", "config", "pool", "limit"):
        if getattr(args, name) is not None:
            words += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    for item in args.field:
        words += ["--field", item]
    for name in ("replicas", "cache_tokens"):
        words += ["--" + name.replace("_", "-"), ",".join(map(str, getattr(args, name)))]
    words += ["--block-size", str(args.block_size), "--memory", str(args.memory)]
    return shlex.join(words)
