"""What a policy is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from random import Random
from typing import ClassVar

from extproc.core.cost import CostSettings
from extproc.core.types import NO_INPUTS, Candidate, PolicyInputs, Reason, RoutingRequest


class Needs(Enum):
    """Which candidates a policy is given, where more than `shortlist.SMALL` workers may serve a request."""

    EVERY_WORKER = auto()
    """All of them, priced one by one: a decision takes longer the more there are."""

    SHORTLIST = auto()
    """The cheapest, those that answer soonest and those that hold most: see `extproc.core.shortlist`."""


class Policy(ABC):
    """Orders candidates. Pure apart from its own small state; it never changes load or index.

    A policy's docstring states its formula, inputs and defaults.

    Attributes:
        name: what it is called.
        needs: which candidates it must be given to do as it says. A policy that compares predicted costs only
            may ask for a shortlist; one that counts workers, or goes by anything else, needs every worker.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs.EVERY_WORKER

    def __init__(self, settings: CostSettings) -> None:
        self._settings = settings

    @abstractmethod
    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """The candidates in order of preference (at least one goes in), and why the first is first."""

    def inputs(self, request: RoutingRequest) -> PolicyInputs:
        """What the last `order` used besides its arguments and the settings: its own state, for the log.

        With it, a decision can be made again from its own line.
        """
        del request
        return NO_INPUTS


def warmth(request: RoutingRequest, chosen: Candidate) -> Reason:
    """The reason that describes what `chosen` offers this request."""
    prompts = request.keyed_prompts
    if not prompts:
        return Reason.LOAD_ONLY
    if chosen.cached_tokens > 0:
        # What is left is less than a block per sequence when the whole reusable prefix is there.
        full = chosen.block_size is not None and (chosen.uncovered_tokens <= chosen.block_size * prompts)
        return Reason.WARM_EXACT if full else Reason.WARM_PARTIAL
    return Reason.COLD_IDLE if chosen.active == 0 else Reason.COLD_BUSY
