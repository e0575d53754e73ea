"""What each pool's requests need before they are routed: its encoders, its normalizer, its revisions."""

from collections.abc import Callable
from contextlib import AsyncExitStack

import aiohttp

from extproc.adapters.cores import cores
from extproc.adapters.engine_key import EngineKey
from extproc.adapters.prompt_processes import PATIENCE_S, PromptProcesses, RemoteEncoder
from extproc.adapters.prompt_service import PromptService
from extproc.adapters.request_preparation import PoolContext
from extproc.adapters.worker_tokenizer import WorkerTokenizer
from extproc.assembly import (
    encoder_recipe,
    engine_keys,
    load_encoder,
    load_normalizer,
    load_revisions,
    prompt_processes,
    revised_pools,
)
from extproc.config import Config, Pool
from extproc.core.candidates import PoolFacts
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.piece_cache import PieceCacheStats
from extproc.prompt.recipe import identity_of

ReadyWorker = Callable[[str], str | None]
"""URL of a ready worker of a pool; None: none is ready."""


class PoolContexts:
    """Loads the encoders of all pools, and makes the contexts around them.

    Attributes:
        facts: what the router must know of each pool.
        processes: encode long prompts, from their `begin` on.
        keys: of the pools' engines, where they ask for one.

    Raises:
        ConfigError: the files of a model, or a key, cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.keys = engine_keys(config)
        self._encoders = {pool.name: load_encoder(pool, config.limits) for pool in config.pools}
        self._revisions = {pool.name: load_revisions(pool, config.limits) for pool in config.pools}
        self.processes = PromptProcesses(
            prompt_processes(config, cores()), patience_s=PATIENCE_S + config.limits.template_ms / 1000
        )
        self._remote: dict[str, list[RemoteEncoder]] = {}
        self.facts = {pool.name: self._facts_of(pool) for pool in config.pools}

    def open(
        self, cleanup: AsyncExitStack, ready: ReadyWorker, report: Callable[[str], None]
    ) -> dict[str, PoolContext]:
        """The contexts, by pool name, in the order of the configuration.

        Args:
            cleanup: what they need closed is pushed there.
            ready: who is asked to tokenize, where that is configured.
            report: told, in one line a pool, how its prompts are encoded.
        """
        cleanup.callback(self.processes.close)
        return {pool.name: self._context(pool, cleanup, ready, report) for pool in self._config.pools}

    def prompt_caches(self) -> dict[str, list[PieceCacheStats]]:
        """What the pools' encoders remember; a pool's revisions have encoders of their own."""
        own = self.own_caches()
        return {name: [*own[name], *(one.stats for one in self._remote.get(name, ()))] for name in own}

    def own_caches(self) -> dict[str, list[PieceCacheStats]]:
        """The same without what the other processes remember."""
        return {
            name: [one.encoder.stats for one in (encoder, *self._revisions[name].values())]
            for name, encoder in self._encoders.items()
            if encoder is not None
        }

    def _facts_of(self, pool: Pool) -> PoolFacts:
        encoder = self._encoders[pool.name]
        return PoolFacts(
            pool.model.revision,
            "" if encoder is None else encoder.tokenizer_revision,
            pool.block_size,
            learn_revision=pool.model.revision_from == "models",
            tokenizer_revisions={
                name: other.tokenizer_revision for name, other in self._revisions[pool.name].items()
            },
        )

    def _context(
        self, pool: Pool, cleanup: AsyncExitStack, ready: ReadyWorker, report: Callable[[str], None]
    ) -> PoolContext:
        facts, encoder = self.facts[pool.name], self._encoders[pool.name]

        def service(one: PromptEncoder, made_for: Pool) -> PromptService:
            recipe = encoder_recipe(made_for, self._config.limits)
            remote = self.processes.of(recipe, identity_of(one))
            self._remote.setdefault(pool.name, []).append(remote)
            prompts = PromptService(
                one,
                budget_ms=self._config.limits.prompt_budget_ms,
                worker_tokenizer=_worker_tokenizer(pool, cleanup, ready, self.keys.get(pool.name)),
                processes=remote,
            )
            cleanup.callback(prompts.close)
            return prompts

        prompts = None
        if encoder is not None:
            prompts = service(encoder, pool)
            report(
                f"pool {pool.name}: encoding with {encoder.encoder.name}"
                + (f" ({encoder.encoder.note})" if encoder.encoder.note else "")
            )
            problem = encoder.chat_problem
            if problem is not None and pool.model.worker_tokenize == "off":
                report(
                    f"pool {pool.name}: no chat is rendered here ({problem}): they are routed by load only"
                )
        else:
            report(f"pool {pool.name}: no model path, so requests are routed by load only")
        normalizer = load_normalizer(self._config, pool)
        if normalizer is not None:
            cleanup.callback(normalizer.close)
        return PoolContext(
            pool.name,
            prompts,
            facts.model_revision,
            facts.tokenizer_revision,
            set(pool.model.names),
            normalizer,
            revisions={
                name: (other.tokenizer_revision, service(other, revised_pools(pool)[name]))
                for name, other in self._revisions[pool.name].items()
            },
            template_version="" if encoder is None else encoder.template_version,
        )


def _worker_tokenizer(
    pool: Pool, cleanup: AsyncExitStack, ready: ReadyWorker, key: EngineKey | None
) -> WorkerTokenizer | None:
    if pool.model.worker_tokenize == "off":
        return None
    session = aiohttp.ClientSession()
    cleanup.push_async_callback(session.close)
    return WorkerTokenizer(session, lambda: ready(pool.name), pool.model.worker_tokenize, key)
