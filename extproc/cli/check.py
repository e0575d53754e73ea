"""`warmroute check`: the doctor."""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from random import SystemRandom

from rich.console import Console

from extproc import config as configuration
from extproc.adapters.discovery import Discovery
from extproc.adapters.doctor import Doctor, Expectation
from extproc.adapters.doctor_findings import Finding, Status
from extproc.adapters.doctor_names import (
    check_aliases,
    check_isolation,
    check_revisions,
    check_tenants,
    salted_pools,
    served_by,
)
from extproc.adapters.doctor_ranks import rank_told_by
from extproc.adapters.engine_key import EngineKey
from extproc.adapters.kv_stream import KvSource
from extproc.assembly import engine_keys, kv_sources, load_encoder, load_revisions, sources_of
from extproc.config import Config, Pool, book_of
from extproc.core.errors import WarmrouteError
from extproc.core.model_catalog import resolve_aliases
from extproc.core.tenancy import TenantBook
from extproc.core.types import Member
from extproc.prompt.encoder import PromptEncoder
from extproc.protocol.model_cards import ModelCard

HELP = "look for mistakes in a setup: config, reachability, block size, KV events, token ids, names, tenants"
_DISCOVERY_WAIT_S = 10.0
_DISCOVERY_POLL_S = 0.01
_FILES = (
    "the model's tokenizer.json, tokenizer_config.json, config.json and, if there is one, "
    "chat_template.jinja or .json"
)
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

    pools: dict[str, tuple[Member, ...]] = {}
    served: dict[str, tuple[ModelCard, ...]] = {}
    keys = engine_keys(config)
    for pool in config.pools:
        encoder = _load(pool, say)
        pools[pool.name] = await _members(pool, say)
        for member in pools[pool.name]:
            served[member.endpoint] = await served_by(member, keys.get(pool.name))
        await _workers(pool, encoder, pools[pool.name], served, say, keys.get(pool.name))
    names = [card.id for cards in served.values() for card in cards]
    for finding in check_aliases(resolve_aliases(config.aliases), names):
        say(finding)
    if config.tenants is not None:
        async for finding in _tenants(book_of(config.tenants), pools, served, keys):
            say(finding)
    return findings


def _load(pool: Pool, say: Callable[[Finding], None]) -> PromptEncoder | None:
    """The pool's encoder, and what is to be said of it."""
    try:
        encoder = load_encoder(pool)
    except WarmrouteError as error:
        say(_unusable(pool, error))
        return None
    if encoder is None:
        say(
            Finding(
                f"pool {pool.name}", "model", Status.WARN,
                "no `model.path`: requests are routed by load only",
                f"set it to a folder with {_FILES}",
            )
        )  # fmt: skip
        return None
    note = f" ({encoder.encoder.note})" if encoder.encoder.note else ""
    detail = f"tokenizer loaded, encoding with {encoder.encoder.name}{note}; reuse {encoder.encoder.reuse}"
    say(Finding(f"pool {pool.name}", "model", Status.OK, detail))
    return encoder


def _load_others(pool: Pool, say: Callable[[Finding], None]) -> Mapping[str, PromptEncoder]:
    """The encoders of the pool's other revisions, where they have their own."""
    try:
        return load_revisions(pool)
    except WarmrouteError as error:
        say(_unusable(pool, error))
        return {}


def _unusable(pool: Pool, error: WarmrouteError) -> Finding:
    return Finding(
        f"pool {pool.name}", "model", Status.FAIL, str(error),
        f"put {_FILES} there; no weights are needed. `warmroute serve` does not start like this",
    )  # fmt: skip


async def _workers(
    pool: Pool,
    encoder: PromptEncoder | None,
    members: Sequence[Member],
    served: Mapping[str, Sequence[ModelCard]],
    say: Callable[[Finding], None],
    key: EngineKey | None,
) -> None:
    """Each worker by itself, as of its model revision; then their revisions side by side."""
    doctor = Doctor(SystemRandom())
    others = _load_others(pool, say)
    revisions: dict[str, str] = {}
    for member in members:
        revision = revisions[member.endpoint] = _revision(pool, member, served[member.endpoint])
        names = tuple(pool.model.names)
        expected = Expectation(names, pool.block_size, others.get(revision, encoder), revision, key)
        sources = _sources(member, pool, await rank_told_by(member), say)
        async for finding in doctor.examine(member, sources, expected):
            say(finding)
    described = [other.revision for other in pool.model.revisions]
    for finding in check_revisions(pool.name, pool.model.revision, described, revisions):
        say(finding)


async def _tenants(
    book: TenantBook,
    pools: Mapping[str, Sequence[Member]],
    served: Mapping[str, Sequence[ModelCard]],
    keys: Mapping[str, EngineKey],
) -> AsyncIterator[Finding]:
    """Whether tenants reach what they may use, and are kept apart where that is promised."""
    for finding in check_tenants(book, pools):
        yield finding
    for pool in salted_pools(book, pools):
        for member in pools[pool]:
            base = next((card.id for card in served[member.endpoint] if card.parent is None), None)
            if base is not None:
                yield await check_isolation(member, base, SystemRandom(), keys.get(pool))


def _revision(pool: Pool, member: Member, cards: Sequence[ModelCard]) -> str:
    """The model revision of a worker: as configured, else as it tells, else the pool's."""
    if member.revision is not None:
        return member.revision
    if pool.model.revision_from == "models":
        return next((card.root for card in cards if card.parent is None and card.root), "")
    return pool.model.revision


def _sources(
    member: Member, pool: Pool, told_rank: int | None, say: Callable[[Finding], None]
) -> list[KvSource] | None:
    """Where the member's events come from; None when the addresses cannot be right."""
    try:
        return kv_sources(member, pool.kv_events.topic, told_rank)
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
    errors: list[str] = []
    discovery = Discovery(sources_of(pool), on_members=lambda _: None, on_error=errors.append)
    async with discovery:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCOVERY_WAIT_S):
                # Each source has some of its own; that one has found none, nobody is told.
                while not (discovery.complete and discovery.members):  # noqa: ASYNC110
                    await asyncio.sleep(_DISCOVERY_POLL_S)
        members = discovery.members
    if not members:
        why = "; ".join(dict.fromkeys(errors)) or "the sources name none"
        say(
            Finding(
                f"pool {pool.name}", "workers", Status.FAIL, f"none found: {why}",
                "check the pool's `discovery` settings",
            )
        )  # fmt: skip
        return ()
    say(Finding(f"pool {pool.name}", "workers", Status.OK, ", ".join(m.endpoint for m in members)))
    for error in dict.fromkeys(errors):
        say(Finding(f"pool {pool.name}", "workers", Status.WARN, error, "check the pool's `discovery`"))
    return members
