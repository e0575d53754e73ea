"""The doctor on names and tenants: do they lead to what real engines serve, and is a cache really kept apart?

Besides looking at `/v1/models`, it sends each worker of a salted tenant one small completion three times:
twice as it is, and once with a `cache_salt`, which must find nothing cached.
"""

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import aiohttp

from extproc.adapters.doctor_findings import Finding, Status
from extproc.adapters.engine_key import EngineKey, headers_for
from extproc.core.errors import ProtocolError
from extproc.core.tenancy import Isolation, TenantBook
from extproc.core.types import Member
from extproc.protocol.model_cards import ModelCard, parse_model_cards

_TIMEOUT_S = 30.0
_PROMPT_TOKENS = 600  # several blocks of any usual size
_TOKEN_RANGE = (5, 250)  # in every vocabulary, and special in few


async def served_by(member: Member, key: EngineKey | None = None) -> tuple[ModelCard, ...]:
    """What a worker serves; nothing if it does not say (the doctor's other checks tell why).

    Args:
        member: whom to ask.
        key: of its pool's engines; None: they ask for none.
    """
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://{member.endpoint}", timeout=timeout) as session:
        try:
            async with session.get(
                "/v1/models",
                headers=headers_for(key, "/v1/models"),
                allow_redirects=False,
                raise_for_status=True,
            ) as reply:
                return parse_model_cards(await reply.read())
        except (aiohttp.ClientError, TimeoutError, ProtocolError):
            return ()


def check_aliases(aliases: Mapping[str, str], served: Iterable[str]) -> list[Finding]:
    """Whether what aliases finally stand for is served. `served`: every name of every worker."""
    names = set(served)
    found = []
    for alias, model in aliases.items():
        if not names:
            break
        if model in names:
            found.append(Finding(f"alias {alias}", "aliases", Status.OK, f"stands for {model}"))
        else:
            found.append(
                Finding(
                    f"alias {alias}", "aliases", Status.FAIL, f"stands for {model}, which no worker serves",
                    f"served are {', '.join(sorted(names))}: correct the alias, or load what it stands for",
                )
            )  # fmt: skip
    return found


def check_revisions(
    pool: str, own: str, described: Iterable[str], served: Mapping[str, str]
) -> list[Finding]:
    """Model revisions of a pool's workers. `served`: revision by endpoint, as configured or told."""
    known = {own, *described}
    others = sorted({revision for revision in served.values() if revision not in known})
    if len(set(served.values())) <= 1 and not others:
        return []
    counts = {revision: list(served.values()).count(revision) for revision in served.values()}
    detail = ", ".join(f"{count} on {revision or '(no name)'}" for revision, count in sorted(counts.items()))
    if not others:
        return [Finding(f"pool {pool}", "revisions", Status.OK, detail)]
    return [
        Finding(
            f"pool {pool}", "revisions", Status.WARN, f"{detail}; {', '.join(others)} not described",
            "their tokenizer and chat template are taken to be the pool's: describe them in "
            "`model.revisions` where they are not",
        )
    ]  # fmt: skip


def check_tenants(book: TenantBook, members: Mapping[str, Sequence[Member]]) -> list[Finding]:
    """Whether each tenant can reach something. `members`: by pool."""
    found = []
    named = list(book.policies.items()) + ([] if book.unknown is None else [("(unknown)", book.unknown)])
    for tenant, policy in named:
        pools = [pool for pool in members if policy.permits_pool(pool)]
        workers = [
            worker.endpoint
            for pool in pools
            for member in members[pool]
            for worker in member.workers()[:1]
            if policy.permits(worker)
        ]
        where = f"pools {', '.join(pools)}" if pools else "no pool"
        if pools and not workers and any(members[pool] for pool in pools):
            found.append(
                Finding(
                    f"tenant {tenant}", "tenants", Status.FAIL, f"{where}, but none of their workers",
                    "correct its `workers`: they are `ip:port` or `ip` of what discovery finds",
                )
            )  # fmt: skip
            continue
        detail = f"{where}; {len(workers)} workers; cache {policy.isolation.value}"
        found.append(Finding(f"tenant {tenant}", "tenants", Status.OK, detail))
    if book.unknown is None:
        found.append(Finding("tenant (unknown)", "tenants", Status.OK, "everyone else is refused"))
    return found


def salted_pools(book: TenantBook, pools: Iterable[str]) -> list[str]:
    """Pools that a salted tenant may use."""
    policies = [*book.policies.values(), *([] if book.unknown is None else [book.unknown])]
    salted = [policy for policy in policies if policy.isolation is Isolation.SALTED]
    return [pool for pool in pools if any(policy.permits_pool(pool) for policy in salted)]


async def check_isolation(member: Member, model: str, rng: Random, key: EngineKey | None = None) -> Finding:
    """Whether a salt keeps a prompt apart in a worker's cache. `key`: of its pool's engines."""
    who = member.endpoint
    prompt = [rng.randint(*_TOKEN_RANGE) for _ in range(_PROMPT_TOKENS)]
    salt = f"warmroute-check-{rng.getrandbits(64):016x}"
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://{who}", timeout=timeout) as session:
        try:
            _, plain, salted = [
                await _cached(session, {"model": model, "prompt": prompt, **extra}, key)
                for extra in ({}, {}, {"cache_salt": salt})
            ]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Finding(
                who, "isolation", Status.WARN, f"could not be tried: {error}", "see the other checks"
            )
    if salted:
        return Finding(
            who, "isolation", Status.FAIL, f"the engine ignores `cache_salt`: {salted} tokens were cached",
            "tenants are not kept apart there: use a vLLM that knows `cache_salt` (0.9 or newer)",
        )  # fmt: skip
    if not plain:
        return Finding(
            who, "isolation", Status.WARN, "the engine reports no cached tokens, so it cannot be seen",
            "start it with --enable-prompt-tokens-details and prefix caching",
        )  # fmt: skip
    return Finding(who, "isolation", Status.OK, f"{plain} tokens cached, none of them under a salt")


async def _cached(session: aiohttp.ClientSession, body: dict[str, Any], key: EngineKey | None) -> int:
    request = {"max_tokens": 1, "temperature": 0, **body}
    path = "/v1/completions"
    async with session.post(
        path, json=request, headers=headers_for(key, path), allow_redirects=False, raise_for_status=True
    ) as reply:
        usage = (await reply.json()).get("usage") or {}
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
