"""Parts of a running Warmroute, made from what the configuration says of them."""

from datetime import datetime
from pathlib import Path

from extproc.adapters.admission import Admission
from extproc.adapters.discovery import DnsDiscovery, FileDiscovery, Source, StaticDiscovery
from extproc.adapters.kubernetes_discovery import KubernetesDiscovery, KubernetesSettings
from extproc.adapters.kv_subscriber import KvSource, resolve_kv_endpoint
from extproc.adapters.name_resolution import ResolutionSettings
from extproc.adapters.prompt_normalizer import PromptNormalizer
from extproc.config import Config, ConfigError, Pool
from extproc.core.model_catalog import ModelCatalog, resolve_aliases
from extproc.core.types import Member
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.normalize import NormalizationMode
from extproc.protocol.addresses import parse_address


def load_encoder(pool: Pool) -> PromptEncoder | None:
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
            "and tokenizer_config.json, as the engine's model folder does"
        )
    return PromptEncoder.load(
        model.path,
        chat_template=model.chat_template,
        content_format=model.content_format,
        template_kwargs=model.template_kwargs,
        fast=model.fast_tokenizer,
        exclude_tools_when_tool_choice_none=model.exclude_tools_when_tool_choice_none,
        clock=datetime.now,
    )


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
        section.rules(), default, tenant_modes=modes, budget_ms=config.limits.prompt_budget_ms
    )


def load_revisions(pool: Pool) -> dict[str, PromptEncoder]:
    """Encoders of the pool's other revisions, where they are described as rendering or encoding differently.

    Raises:
        ConfigError: the files of one cannot be used.
    """
    encoders = {}
    for other in pool.model.revisions:
        changes = {"path": other.path, "chat_template": other.chat_template}
        given = {name: value for name, value in changes.items() if value is not None}
        if given:
            model = pool.model.model_copy(update=given)
            encoder = load_encoder(pool.model_copy(update={"model": model}))
            if encoder is not None:
                encoders[other.revision] = encoder
    return encoders


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


def sources_of(pool: Pool) -> list[Source]:
    """Where the pool's members are learned from, in order of precedence."""
    kv = pool.kv_events
    template = Member(
        endpoint="",
        pool=pool.name,
        dp_size=pool.dp_size,
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


def kv_sources(member: Member, topic: str) -> list[KvSource]:
    """The KV event streams of a member, one per data-parallel rank.

    Raises:
        ValueError: an address cannot be one of an engine; the message says why.
    """
    if member.kv_events is None:
        return []
    # Where the engines connect to us, a wildcard stays one.
    host = "*" if member.kv_bind else parse_address(member.endpoint).host
    sources = []
    for worker in member.workers():
        events, replay = (
            None if template is None else resolve_kv_endpoint(template, host, worker.dp_rank)
            for template in (member.kv_events, member.kv_replay)
        )
        if events is not None:
            sources.append(KvSource(worker, events, replay, member.kv_bind, topic))
    return sources
