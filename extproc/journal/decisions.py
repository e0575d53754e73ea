"""What a decision is known by in a journal: its choice, and a digest of all it was made from."""

from typing import Any

import msgspec
import xxhash

from extproc.core.types import Decision

_ENCODER = msgspec.msgpack.Encoder()


def digest(decision: Decision) -> int:
    """64 bits over policy, chance and every candidate with every fact and price, to the last bit.

    Two decisions with equal digests were made alike. The request is not in it: where it was, its tokens are.
    """
    made = (
        decision.policy,
        decision.reason,
        decision.tie_seed,
        decision.inputs,
        decision.output,
        decision.candidates,
        decision.shadow,
    )
    return xxhash.xxh3_64_intdigest(_ENCODER.encode(made))


def summary(decision: Decision) -> dict[str, Any]:
    """As it is written down."""
    return {
        "lease": decision.lease_id,
        "worker": list(decision.chosen.worker),
        "reason": decision.reason.value,
        "digest": digest(decision),
    }
