"""How a recorded router was built: the first thing in a journal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Self

import msgspec

from extproc.core.candidates import PoolFacts, PromptHashes, prompt_hashes
from extproc.core.chooser import LastWord, as_ordered
from extproc.core.cost import CostSettings
from extproc.core.errors import WarmrouteError
from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.policies.base import Policy
from extproc.core.router import Router, RouterSettings
from extproc.core.tenancy import EVERYTHING, TenantBook

FORMAT = 1

Policies = Mapping[str, type[Policy]]


class JournalError(WarmrouteError):
    """A journal cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Header:
    """Everything that `Router` is built from.

    Attributes:
        seed: of the router's generator.
        policy: name of the policy that decides.
        pools: facts by pool.
        costs: see `Router`.
        settings: see `Router`.
        tenants: see `Router`.
        others: names of the policies a request may ask for.
        shadow: names of the policies in shadow.
        version: of the Warmroute that recorded.
        started: wall clock when it began, ISO 8601.
        clock: the router's clock then.
    """

    seed: int
    policy: str
    pools: dict[str, PoolFacts]
    costs: CostSettings
    settings: RouterSettings
    tenants: TenantBook = EVERYTHING
    others: tuple[str, ...] = ()
    shadow: tuple[str, ...] = ()
    version: str = ""
    started: str = ""
    clock: float = 0.0

    def build(
        self,
        policies: Policies,
        new_lease_id: Callable[[], str],
        prompt_hashes: PromptHashes = prompt_hashes,
        event_hashes: EventHashes = event_chain,
        last_word: LastWord = as_ordered,
        *,
        price_all: bool = False,
    ) -> Router:
        """A router as it was built.

        Args:
            policies: all there are, by name.
            new_lease_id: see `Router`.
            prompt_hashes: see `Router`.
            event_hashes: see `Router`.
            last_word: see `Router`.
            price_all: see `Router`.

        Raises:
            JournalError: a policy it was built with is not installed here.
        """

        def make(name: str) -> Policy:
            if name not in policies:
                raise JournalError(
                    f"the journal was made with the policy {name!r}, which is not installed here; "
                    "install the package that offers it"
                )
            return policies[name](self.costs)

        return Router(
            make(self.policy),
            Random(self.seed),  # noqa: S311 - breaks ties, guards nothing
            new_lease_id=new_lease_id,
            others=[make(name) for name in self.others],
            shadow=[make(name) for name in self.shadow],
            pools=self.pools,
            costs=self.costs,
            settings=self.settings,
            tenants=self.tenants,
            prompt_hashes=prompt_hashes,
            event_hashes=event_hashes,
            last_word=last_word,
            price_all=price_all,
        )

    def changed(self, **fields: Any) -> Self:
        """The same with other fields."""
        return replace(self, **fields)

    def pack(self) -> dict[str, Any]:
        """As it is written."""
        packed: dict[str, Any] = msgspec.to_builtins(self)
        return {"warmroute journal": FORMAT} | packed

    @classmethod
    def unpack(cls, packed: Any) -> Self:
        """What `pack` has written.

        Raises:
            JournalError: it is no journal, or one of another format.
        """
        found = packed.get("warmroute journal") if isinstance(packed, dict) else None
        if found is None:
            raise JournalError("this is no Warmroute journal")
        if found != FORMAT:
            raise JournalError(
                f"the journal has format {found}, this Warmroute reads {FORMAT}; "
                f"replay it with Warmroute {packed.get('version', 'of that time')}"
            )
        try:
            return msgspec.convert(packed, cls)
        except msgspec.ValidationError as error:
            raise JournalError(f"the journal's header cannot be read: {error}") from error
