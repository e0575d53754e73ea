"""`warmroute demo`: see what routing by prefix does, on one machine, in about a minute."""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from extproc.cli.output_files import STANDARD_OUTPUT, check_writable, write_text
from extproc.core.errors import WarmrouteError
from extproc.demo import results
from extproc.demo.client import Client
from extproc.demo.stack import Stack, StackSettings, audit
from extproc.demo.vllm_command import CPU_BLOCK_SIZE
from extproc.demo.workload import Workload, WorkloadSettings, build

HELP = "run engines, router and a real Envoy here, and compare round robin with Warmroute"
POLICIES = ("round-robin", "token-load")
_VLLM_START_S = 300.0
_TRIED = "try-it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    workload = WorkloadSettings()
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated", help="kind of engine")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="Python that has vLLM (default: this one)")
    parser.add_argument("--engines", type=int, default=3, metavar="N", help="number of engines")
    parser.add_argument("--documents", type=int, default=workload.documents, metavar="N", help="documents")
    parser.add_argument(
        "--questions", type=int, default=workload.questions, metavar="N", help="questions per document"
    )
    parser.add_argument("--concurrency", type=int, default=6, metavar="N", help="users at once")
    parser.add_argument("--seed", type=int, default=workload.seed, metavar="N", help="seed of the workload")
    parser.add_argument("--json", metavar="FILE", help="write the figures here (`-`: standard output)")
    parser.add_argument("--keep", action="store_true", help="leave it running afterwards, until Ctrl-C")
    parser.add_argument("--work-dir", metavar="DIR", help="keep configurations and logs in this folder")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Exit code 1 when any request failed."""
    for name in ("engines", "documents", "questions", "concurrency"):
        if getattr(args, name) < 1:
            raise WarmrouteError(f"--{name} must be at least 1")
    check_writable("--json", args.json)
    vllm_python = _vllm_python(args)
    console = Console(stderr=args.json == STANDARD_OUTPUT)
    with _work_dir(args.work_dir) as directory:
        try:
            measured = asyncio.run(_main(args, vllm_python, directory, console))
        except asyncio.CancelledError:
            console.print("interrupted; everything that was started has been stopped")
            return 130
    return 1 if any(result.failures for result in measured) else 0


def _vllm_python(args: argparse.Namespace) -> str | None:
    if args.engine == "simulated":
        return None
    if args.vllm_python:
        return str(args.vllm_python)
    named = os.environ.get("WARMROUTE_VLLM_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("vllm") is None:
        raise WarmrouteError(
            "vLLM is not installed beside this Python: name one that has it with --vllm-python, "
            "or leave out --engine vllm to use simulated engines"
        )
    return sys.executable


@contextlib.contextmanager
def _work_dir(named: str | None) -> Iterator[Path]:
    if named:
        path = Path(named)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WarmrouteError(f"--work-dir {named}: {error.strerror}") from error
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="warmroute-demo-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


async def _main(
    args: argparse.Namespace, vllm_python: str | None, directory: Path, console: Console
) -> list[results.PolicyResult]:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
    settings = WorkloadSettings(documents=args.documents, questions=args.questions, seed=args.seed)
    workload = build(settings)
    console.print(
        f"{settings.documents} long documents with {settings.questions} questions each and {settings.chats} "
        f"chats of {settings.turns} turns: {workload.requests} requests, {args.concurrency} at a time, "
        f"first by round robin, then by Warmroute."
    )
    measured: list[results.PolicyResult] = []
    for policy in POLICIES:
        stack = Stack(
            _stack_settings(args, policy, vllm_python), _subdirectory(directory, policy), _say(console)
        )
        async with stack:
            measured.append(await _measure(stack, workload, policy, args.concurrency, console))
            if policy == POLICIES[-1]:
                _show(measured, args.json, console)
                if args.keep:
                    _curl_lines(stack, console)
                    await asyncio.Event().wait()
    return measured


def _stack_settings(args: argparse.Namespace, policy: str, vllm_python: str | None) -> StackSettings:
    if vllm_python is None:
        return StackSettings(policy, engines=args.engines)
    blocks = StackSettings(policy).engine_blocks * StackSettings(policy).block_size // CPU_BLOCK_SIZE
    return StackSettings(
        policy,
        engines=args.engines,
        vllm_python=vllm_python,
        engine_blocks=blocks,
        start_deadline_s=_VLLM_START_S,
    )


def _subdirectory(directory: Path, policy: str) -> Path:
    path = directory / policy
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()
    return path


def _say(console: Console) -> "results.Callback":
    return lambda text: console.print(f"  {text}", style="dim")


async def _measure(
    stack: Stack, workload: Workload, policy: str, concurrency: int, console: Console
) -> results.PolicyResult:
    progress = Progress(
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with progress:
        bar = progress.add_task(policy, total=workload.requests)
        client = Client(stack.url, stack.model, concurrency, lambda: progress.advance(bar))
        result = await client.run(workload, policy)
    result.exact, result.audited = await _audited(stack.decisions, result.requests - len(result.failures))
    for failure in result.failures[:5]:
        console.print(f"  failed: {failure}", style="red")
    return result


async def _audited(decisions: Path, expected: int) -> tuple[int, int]:
    """The audit, once the access log has told of every request (or has had its time)."""
    for _ in range(40):
        exact, total = audit(decisions)
        if total >= expected:
            break
        await asyncio.sleep(0.05)
    return exact, total


def _show(measured: list[results.PolicyResult], json_file: str | None, console: Console) -> None:
    console.print()
    console.print(results.table(measured))
    console.print(
        "Every document fits on some replica, but not all documents on every replica. Round robin makes "
        "each replica prefill each document again and again; Warmroute sends a question where its document "
        "is already computed, unless waiting there would take longer.",
        style="dim",
    )
    if json_file:
        write_text(json_file, json.dumps(results.report(measured), indent=2) + "\n")
        if json_file != STANDARD_OUTPUT:
            console.print(f"figures written to {json_file}", style="dim")


def _ourselves() -> str:
    """How this command was called, for others of ours."""
    called = sys.argv[0]
    return shlex.quote(called) if Path(called).name == "warmroute" else f"{sys.executable} -m extproc"


def _curl_lines(stack: Stack, console: Console) -> None:
    body = json.dumps(
        {"model": stack.model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello there"}]}
    )
    console.print(f"\nStatus page: {stack.status_page}", markup=False, highlight=False)
    console.print("\nStill running. Try, from another terminal (Ctrl-C here ends it):", style="bold")
    for line in (
        f"curl -s {stack.url}/v1/models",
        (
            f"curl -s {stack.url}/v1/chat/completions -H 'content-type: application/json' "
            f"-H 'x-request-id: {_TRIED}' -d '{body}'"
        ),
        f"{_ourselves()} explain {_TRIED} --admin {stack.status_page}   # why it went where it went",
        f"tail -n 1 {stack.decisions}   # the same as a line of the decision log",
    ):
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)
