"""Makes the decisions of a journal again: as they were, and as they would have been.

Theory of operation
-------------------
**As they were.** A router is built as the recorded one was and told everything that one was told. Each of its
decisions must have the recorded digest; one that has not is a drift.

**As they would have been.** A second router, with another policy or other settings, is told the same and
asked about every request beside the first. It says what it would have chosen, and then books the request
where it really went. So each of its answers is about what was really known at that moment; load, caches, KV
events and ends of requests stay those that were recorded. (What a policy's own choices would lead to, over
time, is a question for `warmroute simulate`: a recording does not hold what the engines would have answered.)
Both choices are compared at the prices of the recorded router.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from extproc.core.chooser import as_ordered
from extproc.core.errors import NoEndpointError
from extproc.core.router import Router
from extproc.core.shortlist import SMALL
from extproc.core.types import (
    BlockStored,
    Candidate,
    Decision,
    Reason,
    RoutingRequest,
    WorkerId,
)
from extproc.journal import values
from extproc.journal.decisions import digest
from extproc.journal.header import Header, JournalError, Policies
from extproc.journal.symbols import Symbol, SymbolReader
from extproc.journal.tap import INPUTS, Entry


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a journal.

    Attributes:
        number: of the entry, from 0.
        at: the router's clock.
        recorded: what was written of the decision.
        decision: the decision made again; None: refused.
        exact: whether it is the recorded one, to the last bit.
        instead: the other router's choice, as the recorded router priced it; None: there is no other router,
            it would have refused, or has no such candidate.
        instead_reason: why it would have chosen that.
    """

    number: int
    at: float
    recorded: Mapping[str, Any]
    decision: Decision | None
    exact: bool
    instead: Candidate | None = None
    instead_reason: Reason | None = None


@dataclass(slots=True)
class _Steered:
    """Has a router's last word: keeps its choice, and puts the worker that really got the request first."""

    towards: WorkerId | None = None
    answer: tuple[Candidate, Reason] | None = None

    def last_word(self, ordered: list[Candidate], reason: Reason) -> list[Candidate]:
        self.answer = (ordered[0], reason)
        return sorted(ordered, key=lambda candidate: candidate.worker != self.towards)


@dataclass(slots=True)
class _Hashes:
    """Stands for all hashing of one call: what it was found to be when recorded."""

    prompts: values.PromptHashes = field(default_factory=dict)
    events: dict[tuple[Symbol, ...], list[list[int] | None]] = field(default_factory=dict)

    def expect(self, hashes: values.EventHashes | values.PromptHashes) -> None:
        self.prompts, self.events = {}, {}
        if isinstance(hashes, dict):
            self.prompts = hashes
            return
        for handles, found in hashes:
            self.events.setdefault(handles, []).append(found)

    def of_prompts(self, request: RoutingRequest, size: int) -> tuple[tuple[int, ...], ...]:
        nothing = ((),) * len(request.prompts)
        return self.prompts.get((request.namespace.model_revision, size), nothing)

    def of_event(
        self, event: BlockStored, parent: int | None, model_revision: str, tokenizer_revision: str
    ) -> list[int] | None:
        del parent, model_revision, tokenizer_revision
        waiting = self.events.get(event.block_hashes)
        return waiting.pop(0) if waiting else None


@dataclass(slots=True)
class _Seat:
    """One router and what it is fed with."""

    router: Router
    hashes: _Hashes
    steered: _Steered
    lease: list[str]


class Replay:
    """Runs a journal.

    Args:
        header: of the journal.
        policies: all there are, by name.
        instead: how the other router is built; None: there is none.

    Raises:
        JournalError: a policy is not installed here.
    """

    def __init__(self, header: Header, policies: Policies, instead: Header | None = None) -> None:
        self.header = header
        self._was = _seat(header, policies, steered=False)
        self._instead = None if instead is None else _seat(instead, policies, steered=True)
        self._symbols = SymbolReader()
        self._hints = {name: values.parameters(getattr(Router, name)) for name in INPUTS}
        self.inputs = 0
        self.last: float | None = None
        self.first: float | None = None

    def run(self, entries: Iterable[Entry]) -> Iterator[Step]:
        """Feed entries; one step for each request among them.

        Raises:
            JournalError: an entry makes no sense.
        """
        for number, entry in enumerate(entries):
            try:
                name = INPUTS[entry[0]]
                arguments, hashes = self._unpack(name, entry)
            except (LookupError, TypeError, ValueError) as error:
                raise JournalError(f"entry {number} of the journal cannot be read: {error}") from error
            self.inputs += 1
            at = arguments.get("now")
            if at is not None:
                self.first = at if self.first is None else self.first
                self.last = at
            for seat in (self._was, self._instead):
                if seat is not None:
                    seat.hashes.expect(hashes)
            if name == "schedule":
                yield self._decide(number, arguments, entry[3])
                continue
            for seat in (self._was, self._instead):
                if seat is not None:
                    getattr(seat.router, name)(**arguments)

    def _unpack(
        self, name: str, entry: Entry
    ) -> tuple[dict[str, Any], values.EventHashes | values.PromptHashes]:
        arguments: dict[str, Any] = {}
        for (parameter, hint), value in zip(self._hints[name].items(), entry[1], strict=True):
            if parameter == "request":
                arguments[parameter] = values.unpack_request(value)
            elif parameter == "events":
                arguments[parameter] = values.unpack_events(value, self._symbols)
            else:
                arguments[parameter] = values.restored(value, hint)
        if name == "schedule":
            return arguments, values.unpack_prompt_hashes(entry[2], self._symbols)
        if name == "on_kv_events":
            return arguments, values.unpack_event_hashes(entry[2], self._symbols)
        return arguments, {}

    def _decide(self, number: int, arguments: dict[str, Any], recorded: Mapping[str, Any]) -> Step:
        at, ask = arguments["now"], arguments["request"]
        self._was.lease[0] = recorded.get("lease", "")
        answer = quoted = None
        if self._instead is not None and "lease" in recorded:
            answer = self._ask(self._instead, replace(ask), at, recorded)
        if answer is not None and len(self._was.router.table) > SMALL:  # it may be on no shortlist
            quoted = self._was.router.quote(replace(ask), answer[0].worker, at)
        try:
            decision = self._was.router.schedule(replace(ask), at)
        except NoEndpointError:
            return Step(number, at, recorded, None, "refused" in recorded)
        exact = digest(decision) == recorded.get("digest")
        if answer is None:
            return Step(number, at, recorded, decision, exact)
        wanted, reason = answer
        priced = next((c for c in decision.candidates if c.worker == wanted.worker), quoted)
        return Step(number, at, recorded, decision, exact, priced, reason)

    def _ask(
        self, seat: _Seat, request: RoutingRequest, at: float, recorded: Mapping[str, Any]
    ) -> tuple[Candidate, Reason] | None:
        seat.lease[0] = recorded["lease"]
        seat.steered.towards, seat.steered.answer = WorkerId(*recorded["worker"]), None
        try:
            seat.router.schedule(request, at)
        except NoEndpointError:
            return None
        return seat.steered.answer


def _seat(header: Header, policies: Policies, *, steered: bool) -> _Seat:
    hashes, lease, steering = _Hashes(), [""], _Steered()
    router = header.build(
        policies,
        lambda: lease[0],
        hashes.of_prompts,
        hashes.of_event,
        steering.last_word if steered else as_ordered,
        price_all=steered,  # the one it is steered to must be among them
    )
    return _Seat(router, hashes, steering, lease)
