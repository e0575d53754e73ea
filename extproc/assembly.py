"""Parts of a running Warmroute, made from what the configuration says of them."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from extproc import __version__
from extproc.adapters.admission import Admission
from extproc.adapters.discovery import DnsDiscovery, FileDiscovery, Source, StaticDiscovery
from extproc.adapters.engine_key import EngineKey
from extproc.adapters.kubernetes_discovery import KubernetesDiscovery, KubernetesSettings
from extproc.adapters.kv_stream import KvSource
from extproc.adapters.name_resolution import ResolutionSettings
from extproc.adapters.peer_exchange import PeerSettings
from extproc.adapters.process_group import ProcessPlace, port_of
from extproc.adapters.prompt_normalizer import PromptNormalizer
from extproc.config import Config, ConfigError, Limits, Pool, book_of
from extproc.core.candidates import PoolFacts
from extproc.core.dp_ranks import learns_rank
from extproc.core.model_catalog import ModelCatalog, resolve_aliases
from extproc.core.rollout import Mode
from extproc.core.types import Member
from extproc.journal.header import Header
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.normalize import NormalizationMode
from extproc.prompt.recipe import EncoderRecipe
from extproc.protocol.addresses import parse_address
from extproc.protocol.kv_endpoints import resolve_kv_endpoint

_LIMITS = Limits()
_FEWEST_CORES = 2
_PROMPT_PROCESSES = 2


def load_encoder(pool: Pool, limits: Limits = _LIMITS) -> PromptEncoder | None:
    """The pool's encoder; None when no model path is configured.

    Raises:
        ConfigError: the model's files cannot be used.
    """
    model = pool.model
    if model.path is None:
        return None
    if not Path(model.path).is_dir():
        raise ConfigError(
            f"pool {pool.name}: model path {model.path} is not a folder; it must hold tokenizer.json "
            "and tokenizer_config.json, as the engine's model folder does. Without `model.path`, requests "
            "are routed by load only"
        )
    return encoder_recipe(pool, limits).load()


def encoder_recipe(pool: Pool, limits: Limits = _LIMITS) -> EncoderRecipe:
    """How the encoder of a pool with a model path is made."""
    model = pool.model
    return EncoderRecipe(
        str(model.path),
        chat_template=model.chat_template,
        content_format=model.content_format,
        template_kwargs=model.template_kwargs,
        fast=model.fast_tokenizer,
        exclude_tools_when_tool_choice_none=model.exclude_tools_when_tool_choice_none,
        template_limits=limits.template(),
        cache_bytes=round(model.prompt_cache_mb * (1 << 20)),
    )


def prompt_processes(config: Config, cores: int) -> int:
    """Processes of each router that encode long prompts, on a machine of so many cores."""
    if config.prompt_processes is not None:
        return config.prompt_processes
    return 0 if cores < _FEWEST_CORES else max(1, min(_PROMPT_PROCESSES, cores // config.processes))


def load_normalizer(config: Config, pool: Pool) -> PromptNormalizer | None:
    """What normalizes the pool's requests; None when nobody wants that."""
    section, tenants = pool.normalization, config.tenants
    default, modes = section.mode, {}
    if tenants is not None:
        modes = {name: tenant.normalization or section.mode for name, tenant in tenants.policies.items()}
        if tenants.unknown is not None:
            default = tenants.unknown.normalization or section.mode
    if {default, *modes.values()} == {NormalizationMode.DISABLED}:
        return None
    return PromptNormalizer(
        section.rules(),
        default,
        tenant_modes=modes,
        budget_ms=config.limits.prompt_budget_ms,
        body_limits=config.limits.body(),
    )


def load_revisions(pool: Pool, limits: Limits = _LIMITS) -> dict[str, PromptEncoder]:
    """Encoders of the pool's other revisions, where they are described as rendering or encoding differently.

    Raises:
        ConfigError: the files of one cannot be used.
    """
    encoders = {name: load_encoder(revised, limits) for name, revised in revised_pools(pool).items()}
    return {name: encoder for name, encoder in encoders.items() if encoder is not None}


def revised_pools(pool: Pool) -> dict[str, Pool]:
    """The pool as it would be with each of its other revisions that renders or encodes differently."""
    revised = {}
    for other in pool.model.revisions:
        changes = {"path": other.path, "chat_template": other.chat_template}
        given = {name: value for name, value in changes.items() if value is not None}
        if given:
            revised[other.revision] = pool.model_copy(update={"model": pool.model.model_copy(update=given)})
    return revised


def admission_of(config: Config) -> Admission:
    """Who may go where.

    Raises:
        ConfigError: the key of the salts cannot be read.
    """
    several = len(config.pools) > 1
    catalog = ModelCatalog(
        {pool.name: tuple(pool.model.names) for pool in config.pools},
        resolve_aliases(config.aliases),
        refuse_unknown=config.unknown_model == "refuse" or (config.unknown_model == "auto" and several),
    )
    tenants = config.tenants
    if tenants is None:
        return Admission(catalog)
    try:
        salter = None if tenants.salt_key is None else tenants.salt_key.salter()
    except ValueError as error:
        raise ConfigError(f"tenants.salt_key: {error}") from error
    return Admission(catalog, tenants.book(), tenants.sources(), salter)


def router_header(
    config: Config,
    facts: Mapping[str, PoolFacts],
    policies: Sequence[str],
    *,
    seed: int,
    started: datetime,
    clock: float,
) -> Header:
    """What the router is made from.

    Args:
        config: everything.
        facts: of each pool.
        policies: names of all that there are.
        seed: of the tie-breaks.
        started: wall time, with its zone.
        clock: monotonic seconds at that time.
    """
    rollout = config.rollout.settings()
    others = set(policies) if config.policy_header is not None else set[str]()
    if Mode.SHADOW in rollout.modes:
        others.add(config.rollout.baseline)
    return Header(
        seed=seed,
        policy=config.policy,
        pools=dict(facts),
        costs=config.cost.settings(),
        settings=config.router_settings(),
        tenants=book_of(config.tenants),
        others=tuple(name for name in policies if name in others),
        shadow=tuple(config.shadow),
        version=__version__,
        started=started.isoformat(timespec="milliseconds"),
        clock=clock,
    )


def engine_keys(config: Config) -> dict[str, EngineKey]:
    """The keys that engines ask for, by pool, where they do.

    Raises:
        ConfigError: one cannot be read.
    """
    # About once for each look at what workers serve, which tells first that a key was changed.
    pause_s = config.scrape.models_interval_s / 2
    keys = {pool.name: pool.engine_key(pause_s, time.monotonic) for pool in config.pools}
    return {name: key for name, key in keys.items() if key is not None}


def sources_of(pool: Pool) -> list[Source]:
    """Where the pool's members are learned from, in order of precedence."""
    kv = pool.kv_events
    template = Member(
        endpoint="",
        pool=pool.name,
        dp_size=pool.dp_size,
        dp_start_rank=pool.dp_start_rank,
        kv_events=kv.endpoint if kv.enabled else None,
        kv_replay=kv.replay if kv.enabled else None,
        kv_bind=kv.bind,
    )
    sources: list[Source] = []
    found = pool.discovery
    if found.static:
        sources.append(
            StaticDiscovery(
                [
                    Member(
                        endpoint=str(parse_address(worker.endpoint)),
                        pool=pool.name,
                        dp_size=worker.dp_size or pool.dp_size,
                        dp_start_rank=(
                            pool.dp_start_rank if worker.dp_start_rank is None else worker.dp_start_rank
                        ),
                        kv_events=(worker.kv_events or template.kv_events) if kv.enabled else None,
                        kv_replay=(worker.kv_replay or template.kv_replay) if kv.enabled else None,
                        kv_bind=kv.bind,
                        revision=worker.revision,
                        cold=worker.cold,
                    )
                    for worker in found.static
                ]
            )
        )
    if found.file is not None:
        sources.append(FileDiscovery(found.file, template))
    if found.dns is not None:
        resolution = ResolutionSettings(interval_s=found.dns.interval_s)
        sources.append(DnsDiscovery(found.dns.name, found.dns.port, template, resolution))
    if found.kubernetes is not None:
        sources.append(KubernetesDiscovery(KubernetesSettings(**found.kubernetes.model_dump()), template))
    return sources


def for_process(config: Config, place: ProcessPlace) -> Config:
    """The configuration of one process of several: what only one can have gets its number.

    Raises:
        ConfigError: something in it cannot be shared.
    """
    if place.count == 1:
        return config
    for pool in config.pools:
        if pool.kv_events.enabled and pool.kv_events.bind:
            raise ConfigError(
                f"pool {pool.name}: with `kv_events.bind` each engine connects to one process only; "
                "let engines bind their sockets, or use `processes: 1`"
            )
    log, journal, peers = config.decision_log, config.journal, config.peers
    if log.path not in ("", "-"):
        log = log.model_copy(update={"path": str(_numbered(Path(log.path), place.number))})
    if journal.path is not None:
        journal = journal.model_copy(update={"path": _numbered(journal.path, place.number)})
    changes: dict[str, object] = {"listen": port_of(peers.listen, place.number)}
    if peers.snapshot.path is not None:
        path = _numbered(peers.snapshot.path, place.number)
        changes["snapshot"] = peers.snapshot.model_copy(update={"path": path})
    peers = peers.model_copy(update=changes)
    return config.model_copy(update={"decision_log": log, "journal": journal, "peers": peers})


def _numbered(path: Path, number: int) -> Path:
    return path if number == 0 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def peer_settings(config: Config, place: ProcessPlace, owner: str, epoch: int) -> PeerSettings | None:
    """How to exchange load with other replicas; None when there are none.

    Raises:
        ConfigError: the token cannot be read.
    """
    peers = config.peers
    if place.count == 1 and not peers.several:
        return None
    listen = (peers.listen,) if peers.listen else ()
    if place.count > 1:
        listen = (*listen, place.socket(place.number))
    return PeerSettings(
        name=peers.name_of(config.listen, place.number),
        epoch=epoch,
        owner=owner,
        listen=listen,
        fixed=(*place.siblings, *peers.static),
        interval_s=peers.interval_s,
        security=peers.security(),
    )


def peer_sources(config: Config) -> list[Source]:
    """Where addresses of other replicas are learned; each has as many processes as we have."""
    dns = config.peers.dns
    if dns is None:
        return []
    resolution = ResolutionSettings(interval_s=dns.interval_s)
    return [
        DnsDiscovery(dns.name, dns.port + process, Member(endpoint=""), resolution)
        for process in range(config.processes)
    ]


def kv_sources(member: Member, topic: str, told_rank: int | None = None) -> list[KvSource]:
    """The KV event streams of a member, one per data-parallel rank.

    Args:
        member: whose.
        topic: of its pool.
        told_rank: what its metrics page calls its only rank (see `core.dp_ranks`): ports are those of that.

    Raises:
        ValueError: an address cannot be one of an engine; the message says why.
    """
    if member.kv_events is None:
        return []
    # Where the engines connect to us, a wildcard stays one.
    host = "*" if member.kv_bind else parse_address(member.endpoint).host
    learned = told_rank if learns_rank(member) else None
    sources = []
    for worker in member.workers():
        rank = worker.dp_rank if learned is None else learned
        events, replay = (
            None if template is None else resolve_kv_endpoint(template, host, rank)
            for template in (member.kv_events, member.kv_replay)
        )
        if events is not None:
            sources.append(KvSource(worker, events, replay, member.kv_bind, topic, alone=member.dp_size == 1))
    return sources
