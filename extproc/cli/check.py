"""`warmroute check`: the doctor."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from random import SystemRandom

from rich.console import Console

from extproc import config as configuration
from extproc.adapters.discovery import Discovery
from extproc.adapters.doctor import Doctor, Expectation
from extproc.adapters.doctor_findings import Finding, Status
from extproc.adapters.kv_subscriber import KvSource
from extproc.assembly import kv_sources, load_encoder, sources_of
from extproc.config import Config, Pool
from extproc.core.types import Member

HELP = "look for mistakes in a setup: config, reachability, block size, KV events, token ids"
_DISCOVERY_WAIT_S = 10.0
_MARKS = {Status.OK: "[green]ok  [/]", Status.WARN: "[yellow]warn[/]", Status.FAIL: "[red]FAIL[/]"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="configuration file (YAML)")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when any check failed; warnings do not count."""
    config = configuration.load(args.config)
    console = Console(highlight=False, soft_wrap=True)
    findings = asyncio.run(_examine(config, None if args.json else console))
    failed = sum(finding.status is Status.FAIL for finding in findings)
    if args.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif failed:
        console.print(f"\n{failed} of {len(findings)} checks failed", style="red")
    else:
        warned = sum(finding.status is Status.WARN for finding in findings)
        passed = f"{len(findings) - warned} checks passed"
        console.print(f"\n{passed}" + (f", {warned} warned" if warned else ""), style="green")
    return 1 if failed else 0


async def _examine(config: Config, console: Console | None) -> list[Finding]:
    findings: list[Finding] = []

    def say(finding: Finding) -> None:
        findings.append(finding)
        if console is not None:
            console.print(
                f"{_MARKS[finding.status]} {finding.subject}: [bold]{finding.check}[/]: ", end="", markup=True
            )
            console.print(finding.detail, markup=False)
            if finding.advice:
                console.print(f"       -> {finding.advice}", markup=False)

    for pool in config.pools:
        encoder = load_encoder(pool)
        if encoder is None:
            say(
                Finding(
                    f"pool {pool.name}", "model", Status.WARN,
                    "no `model.path`: requests are routed by load only",
                    "set it to the folder with the engine's tokenizer.json and tokenizer_config.json",
                )
            )  # fmt: skip
        else:
            note = f" ({encoder.encoder.note})" if encoder.encoder.note else ""
            detail = f"tokenizer loaded, encoding with {encoder.encoder.name}{note}"
            say(Finding(f"pool {pool.name}", "model", Status.OK, detail))
        members = await _members(pool, say)
        expected = Expectation(tuple(pool.model.names), pool.block_size, encoder, pool.model.revision)
        doctor = Doctor(SystemRandom())
        for member in members:
            async for finding in doctor.examine(member, _sources(member, pool, say), expected):
                say(finding)
    return findings


def _sources(member: Member, pool: Pool, say: Callable[[Finding], None]) -> list[KvSource] | None:
    """Where the member's events come from; None when the addresses cannot be right."""
    try:
        return kv_sources(member, pool.kv_events.topic)
    except ValueError as error:
        say(
            Finding(
                member.endpoint, "KV events", Status.FAIL, str(error),
                "correct `kv_events.endpoint` and `kv_events.replay`: they are what the engine's "
                "--kv-events-config says",
            )
        )  # fmt: skip
        return None


async def _members(pool: Pool, say: Callable[[Finding], None]) -> tuple[Member, ...]:
    """The pool's workers as discovery finds them."""
    found = asyncio.Event()
    errors: list[str] = []

    def on_members(members: tuple[Member, ...]) -> None:
        if members:
            found.set()

    discovery = Discovery(sources_of(pool), on_members=on_members, on_error=errors.append)
    async with discovery:
        try:
            await asyncio.wait_for(found.wait(), _DISCOVERY_WAIT_S)
        except TimeoutError:
            why = "; ".join(dict.fromkeys(errors)) or "the sources name none"
            say(
                Finding(
                    f"pool {pool.name}", "workers", Status.FAIL, f"none found: {why}",
                    "check the pool's `discovery` settings",
                )
            )  # fmt: skip
            return ()
        members = discovery.members
    say(Finding(f"pool {pool.name}", "workers", Status.OK, ", ".join(m.endpoint for m in members)))
    for error in dict.fromkeys(errors):
        say(Finding(f"pool {pool.name}", "workers", Status.WARN, error, "check the pool's `discovery`"))
    return members
