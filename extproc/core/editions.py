"""One request as each model revision among the candidates sees it.

While an update rolls through a pool, its workers serve different revisions of one model. KV blocks of one are
nothing to the other, and where the tokenizer or the chat template changed, even the token ids differ. So the
workers are taken by revision, and a prefix is looked up for each in its own namespace, with its own ids:

| a worker's revision | looked up with |
|---|---|
| the request's namespace | the request's prompts |
| described in `renditions` | the prompts as that revision renders and encodes them |
| another one | the request's prompts, in a namespace of that revision: the tokenizer is the same |
| not known (yet) | nothing: no prefix is claimed |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from extproc.core.candidates import CandidateBuilder, Scope
from extproc.core.prefix_hits import Chains
from extproc.core.shortlist import SMALL
from extproc.core.types import Candidate, LengthEstimate, RoutingRequest, WorkerId
from extproc.core.worker_table import WorkerState


class Edition(NamedTuple):
    """The request for the workers of one revision."""

    request: RoutingRequest
    states: Sequence[WorkerState]


def quote(builder: CandidateBuilder, request: RoutingRequest, state: WorkerState, now: float) -> Candidate:
    """One worker, priced as its revision sees the request. Changes nothing."""
    return builder.quote(_edition(request, state.revision), state, now)


def editions(request: RoutingRequest, states: Sequence[WorkerState]) -> list[Edition]:
    """The request by revision, in the order of the first worker of each. All of `states`, each once."""
    own = request.namespace.model_revision
    if all(state.revision == own for state in states):
        return [Edition(request, states)]
    by_revision: dict[str | None, list[WorkerState]] = {}
    for state in states:
        by_revision.setdefault(state.revision, []).append(state)
    return [Edition(_edition(request, revision), group) for revision, group in by_revision.items()]


class Built(NamedTuple):
    """Candidates of all revisions, in the order of their states.

    `seen`: for each worker the request as its revision sees it, and the block hashes it was looked up with.
    """

    candidates: list[Candidate]
    seen: Mapping[WorkerId, tuple[RoutingRequest, Chains]]
    output: LengthEstimate


def build(
    builder: CandidateBuilder,
    request: RoutingRequest,
    states: Sequence[WorkerState],
    now: float,
    mark: Callable[[str], None] | None = None,
    scope: Scope | None = None,
) -> Built:
    """One candidate per state. `mark` is told when the first lookup is over; `states` must not be empty.

    With a `scope` there are only those of a shortlist, of each revision that has many workers.
    """
    found: dict[WorkerId, Candidate] = {}
    seen: dict[WorkerId, tuple[RoutingRequest, Chains]] = {}
    outputs: list[LengthEstimate] = []
    own = request.namespace.model_revision
    one = scope is not None and scope.view.all_serve(own)
    for edition in [Edition(request, states)] if one else editions(request, states):
        few = scope is None or len(edition.states) <= SMALL
        candidates, chains, output = builder.build(
            edition.request,
            edition.states,
            now,
            None if outputs else mark,
            None if few or scope is None else scope.narrowed(edition.states),
        )
        request.prompt_class = request.prompt_class or edition.request.prompt_class
        outputs.append(output)
        for candidate in candidates:
            found[candidate.worker] = candidate
            seen[candidate.worker] = (edition.request, chains)
    if len(outputs) == 1:
        return Built(list(found.values()), seen, outputs[0])
    priced = (found[state.id] for state in states if state.id in found)
    ordered = [replace(candidate, position=position) for position, candidate in enumerate(priced)]
    return Built(ordered, seen, outputs[0])


def _edition(request: RoutingRequest, revision: str | None) -> RoutingRequest:
    if revision == request.namespace.model_revision:
        return request
    if revision is None:
        return replace(request, prompts=(), chains=None)
    namespace = request.namespace._replace(model_revision=revision)
    rendition = request.renditions.get(revision)
    if rendition is None:
        return replace(request, namespace=namespace, chains=None)
    return replace(
        request,
        namespace=namespace._replace(tokenizer_revision=rendition.tokenizer_revision),
        prompts=rendition.prompts,
        prompt_tokens=sum(map(len, rendition.prompts)) or request.prompt_tokens,
        chains=None,
    )
