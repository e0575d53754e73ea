"""Whether routing by prefix is worth it for a log, and whether its users resend long beginnings.

The measure is what a fleet saves: input tokens hit with placement by prefix, less those that random placement
hits anyhow, as a share of all (`gain`) and per request. Shares alone say little: 10 % of short prompts is
no work worth saving.
"""

from typing import Any

from extproc.analysis.volatile import Kind

GAIN, SOME_GAIN = 0.10, 0.03
TOKENS, SOME_TOKENS = 200, 50
"""Tokens per request that must be saved for a yes, and for a maybe."""
NOTHING = 0.05
_FEW = 200  # requests
_WORTH_MENTIONING = 0.02


def judge(report: dict[str, Any]) -> dict[str, Any]:
    """`worth` (`yes`, `some`, `no`, `unknown`), a `headline` and the `reasons`."""
    requests = report["requests"]
    if not requests:
        return {"worth": "unknown", "headline": "There is no request to judge by.", "reasons": []}
    middle = report["groups_for"]
    row = next(
        row
        for row in report["placement"]
        if row["replicas"] == middle["replicas"] and row["cache_tokens"] == middle["cache_tokens"]
    )
    gain = row["prefix"] - row["random"]
    saved = gain * report["mean_tokens"]
    repeated = report["repeated"]["share"]
    recoverable = report["breakers"]["recoverable_share"]
    reasons = [
        f"{repeated:.1%} of input tokens repeat the beginning of an earlier prompt.",
        (
            f"On {row['replicas']} replicas with {row['cache_tokens']:,} KV tokens each, random placement "
            f"finds {row['random']:.1%} in a cache, placement by prefix {row['prefix']:.1%}: "
            f"{saved:,.0f} tokens less to compute per request, of {report['mean_tokens']:,.0f}."
        ),
    ]
    if gain >= GAIN and saved >= TOKENS:
        worth, headline = "yes", "Routing by prefix is worth it for this traffic."
    elif gain >= SOME_GAIN and saved >= SOME_TOKENS:
        worth, headline = "some", "Routing by prefix saves something for this traffic, not much."
    else:
        worth = "no"
        headline = "As the prompts are now, routing by prefix saves little; route by load."
        if repeated < NOTHING:
            reasons.append("Hardly anything repeats, so there is little to route by.")
        elif row["random"] >= 0.9 * row["prefix"]:
            reasons.append("What repeats is repeated so widely that every replica has it anyhow.")
        elif row["prefix"] < 0.5 * repeated:
            reasons.append("The caches are too small to keep what repeats until it comes again.")
        else:
            reasons.append("Prompts are too short for the saving to matter.")
    if recoverable >= _WORTH_MENTIONING:
        top = next((row for row in report["breakers"]["found"] if row["kind"] != Kind.TEXT), None)
        most = "" if top is None else f"; most of it: {top['kind']} at token {top['position']['median']:,}"
        reasons.append(
            f"Breakers hide another {recoverable:.1%} of input tokens from every cache{most}. Fix them "
            "first: that helps without any router too."
        )
        if worth == "no" and recoverable >= GAIN:
            worth = "some"
            headline = "Fix the prompts first: breakers hide most of what routing by prefix could save."
    if requests < _FEW:
        reasons.append(f"Only {requests:,} requests: judge by a day of traffic.")
    return {"worth": worth, "headline": headline, "reasons": reasons, "gain": gain, "saved_tokens": saved}


def first_tokens_answer(report: dict[str, Any]) -> str:
    """Do users resend the first 10,000 tokens? In words."""
    rows = {row["first_tokens"]: row for row in report["resent"]}
    asked = rows[10_000]
    if asked["prompts"]:
        share = asked["resent"] / asked["prompts"]
        word = "Yes" if share >= 0.5 else "Sometimes" if share >= 0.1 else "Rarely" if share else "No"
        return (
            f"{word}: of {asked['prompts']:,} prompts with at least 10,000 tokens, {share:.1%} begin with "
            "10,000 tokens that had come before."
        )
    longest = report["longest_tokens"]
    for threshold in sorted(rows, reverse=True):
        row = rows[threshold]
        if row["prompts"]:
            share = row["resent"] / row["prompts"]
            return (
                f"No prompt is that long (the longest has {longest:,} tokens). Of {row['prompts']:,} with at "
                f"least {threshold:,}, {share:.1%} begin with {threshold:,} tokens that had come before."
            )
    return f"No prompt is that long: the longest has {longest:,} tokens."
