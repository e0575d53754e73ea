"""What an engine has in hand: the sequences inside it, and the batch of them that a step computes.

Plain records of the engine model, which alone decides about them; the batch counts its work as it is filled.
"""

from extproc.sim.engine_types import EngineRequest


class ActiveSequence:
    """A request inside the engine. `computed` of its `known` tokens have their KV in `blocks`."""

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "blocks",
        "cached_blocks",
        "cached_tokens",
        "capacity",
        "commit_at",
        "computed",
        "due",
        "first_token_at",
        "gone",
        "known",
        "last_token_at",
        "offset",
        "order",
        "preemptions",
        "prompt",
        "request",
        "scheduled",
        "total",
    )

    def __init__(self, request: EngineRequest, now: float) -> None:
        self.request = request
        self.arrived_at = now
        self.prompt = request.prompt_tokens
        self.total = request.prompt_tokens + request.output_tokens
        self.known = request.prompt_tokens
        self.computed = 0
        self.scheduled = 0  # tokens of the step in flight
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that fit in `blocks`
        self.cached_blocks = 0  # leading blocks that carry a hash
        self.commit_at = 0  # computed tokens at which the next block becomes full
        self.cached_tokens = 0
        self.preemptions = 0
        self.gone = False
        self.admitted_at: float | None = None
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        # Only where `FleetEngine` counts steps instead of tokens: see there.
        self.offset: int | None = None
        self.order = 0
        self.due = -1


class Step:
    """Sequences in the step being scheduled or in flight, and its work as the `TimeModel` counts it."""

    __slots__ = ("context", "decodes", "pairs", "prefill", "sequences")

    def __init__(self) -> None:
        self.sequences: list[ActiveSequence] = []
        self.prefill = 0
        self.pairs = 0.0
        self.decodes = 0
        self.context = 0

    def add(self, sequence: ActiveSequence, tokens: int) -> None:
        """Compute `tokens` more tokens of `sequence`."""
        computed = sequence.computed
        sequence.scheduled = tokens
        self.sequences.append(sequence)
        if tokens == 1 and computed >= sequence.prompt:
            self.decodes += 1
            self.context += computed
        else:
            self.prefill += tokens
            self.pairs += tokens * computed + tokens * (tokens - 1) / 2
