"""One decision, told to a human: from its line in the decision log, and from nothing else.

So the command, the admin endpoint and the status page say what the log says. Fields that a line lacks (it is
older, or a field is hidden) are left out of the story.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TERMS = {"queue_ms": "queue", "prefill_ms": "prefill", "decode_ms": "decode", "kv_risk_ms": "KV risk"}
"""Cost terms of a candidate in a line, and what they are called."""

_MATTERS_MS = 0.5
_MATTERS_SHARE = 0.05
_TIE_SHARE = 0.02
_TIE_RULE = "; of equals the longest predicted hit goes first, then the fewest requests, then chance"

_REASONS = {
    "warm-exact": "It holds all of the prompt's prefix that can be reused.",
    "warm-partial": "It holds a part of the prompt's prefix.",
    "cold-idle": "It holds nothing of the prompt, and had no request of ours.",
    "cold-busy": "It holds nothing of the prompt, and was at work for us.",
    "cold-pool": "It serves cold requests only, and no worker holds most of this prompt.",
}

_RULES = {
    "round-robin": "round-robin gives each request to the next worker; prices play no part.",
    "session-affinity": "session-affinity keeps a session on one worker, unless that has too much of our "
    "load.",
    "least-load": "least-load takes the worker with the least queued prefill, then the fewest requests.",
    "kv-affinity": "kv-affinity takes the longest predicted hit, whatever else is going on there.",
    "prefix-affinity": "prefix-affinity takes the longest predicted hit among workers that have not too many "
    "of our requests.",
}

_OUTCOMES = {
    "finished": "It finished",
    "cancelled": "The client left before it finished",
    "failed": "The worker failed after it had accepted it",
    "rejected": "It never reached a worker",
    "lost": "How it ended was never told; it was written off",
    "open": "It is not over yet",
    "refused": "It was refused at once, or displaced: too many waited",
    "expired": "It was refused: no worker had room for as long as it could wait",
    "left": "The client left while it was held",
}

_OBSERVED = "observe"
_MODES = {
    _OBSERVED: "Mode observe: the gateway chose who serves it; this is what would have been chosen here.",
    "shadow": "Mode shadow: the baseline policy decided.",
}

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision in words.

    Attributes:
        headline: which request went where, and why in a word.
        request: what was asked, in short sentences.
        why: why the winner won, the weightiest first.
        happened: what became of it, prediction against outcome.
        shadows: what other policies would have done.
    """

    headline: str
    request: tuple[str, ...]
    why: tuple[str, ...]
    happened: tuple[str, ...]
    shadows: tuple[str, ...]


def explain(line: Line) -> Explanation:
    """The story of one line."""
    return Explanation(
        headline=_headline(line),
        request=tuple(_request(line)),
        why=tuple(_why(line)),
        happened=tuple(_happened(line)),
        shadows=tuple(_shadows(line)),
    )


def milliseconds(value: float | None, signed: bool = False) -> str:
    """A duration to read: `12.3 ms`, `1.24 s`."""
    if value is None:
        return "?"
    sign = "+" if signed and value > 0 else ""
    if abs(value) >= 10_000:
        return f"{sign}{value / 1000:,.1f} s"
    return f"{sign}{value:,.1f} ms"


def candidates(line: Line) -> Sequence[Line]:
    """The candidates of a line, in order of preference."""
    found = line.get("candidate_workers") or ()
    return [candidate for candidate in found if isinstance(candidate, Mapping)]


def _headline(line: Line) -> str:
    request, chosen = line.get("request_id"), line.get("selected_worker") or "no worker"
    if line.get("mode") == _OBSERVED:
        return f"Request {request}, only observed, would have gone to {chosen}: {line.get('decision')}"
    return f"Request {request} -> {chosen}: {line.get('decision')}"


# --- what was asked ------------------------------------------------------------------------------------


def _request(line: Line) -> list[str]:
    model, adapter = line.get("model") or "no model named", line.get("adapter")
    said = [f"Model {model}" + (f" (adapter {adapter})" if adapter else "") + f", pool {line.get('pool')}."]
    size = f"{line.get('prompt_tokens') or 0:,} prompt tokens"
    key, kind = line.get("prefix_key"), line.get("prompt_class")
    said.append(size + (f", prefix {key}" if key else "") + (f", class {kind}" if kind else "") + ".")
    expected = line.get("expected_output")
    if isinstance(expected, Mapping) and expected.get("expected") is not None:
        said.append(
            f"About {expected['expected']:,.0f} tokens of answer expected ({expected.get('source')})."
        )
    if line.get("policy") is not None:
        said.append(f"Decided {line.get('decided') or line.get('time')} by the policy {line.get('policy')}.")
    if line.get("mode") in _MODES:
        said.append(_MODES[str(line["mode"])])
    return said + _wait(line)


def _wait(line: Line) -> list[str]:
    """How long it was held, where requests are."""
    admission = line.get("admission")
    if not isinstance(admission, Mapping) or not admission.get("held_ms"):
        return []
    priority = admission.get("priority")
    said = f"It was held for {milliseconds(admission['held_ms'])} because every worker was full"
    return [said + (f", with priority {priority:+d}." if priority else ".")]


# --- why -------------------------------------------------------------------------------------------------


def _why(line: Line) -> list[str]:
    said: list[str] = []
    found, reason = candidates(line), str(line.get("decision"))
    if line.get("load_only"):
        said.append(f"Prefixes could not be compared, so load alone decided: {line['load_only']}.")
    if not found:
        return said
    winner, others = found[0], found[1:]
    if not others:
        said.append(f"{winner['worker']} was the only worker that could take it.")
    elif line.get("policy") in _RULES:
        said.append(f"{_RULES[str(line['policy'])][0].upper()}{_RULES[str(line['policy'])][1:]}")
    elif reason == "warm-denied-share":
        said.append(_full(winner, others))
    elif reason.startswith("warm-denied"):
        said.append(_denied(winner, others))
    else:
        said.append(_price(line, winner, others))
        said += _difference(winner, min(others, key=_total))
    if reason in _REASONS:
        said.append(_REASONS[reason])
    elif reason == "session-moved":
        said.append("The session's own worker had too much of our load.")
    said += _beliefs(winner)
    return said


def _total(candidate: Line) -> float:
    return float(candidate.get("total_ms") or 0.0)


def _price(line: Line, winner: Line, others: Sequence[Line]) -> str:
    best = min(others, key=_total)
    ours, theirs = _total(winner), _total(best)
    settings = line.get("settings")
    tie_ms = float(settings.get("tie_ms") or 0.0) if isinstance(settings, Mapping) else 0.0
    if abs(ours - theirs) <= max(tie_ms, _TIE_SHARE * min(ours, theirs)):
        rule = _TIE_RULE if line.get("policy") == "token-load" else ""
        return (
            f"{winner['worker']} ({milliseconds(ours)}) and {best['worker']} ({milliseconds(theirs)}) count "
            f"as equally cheap{rule}."
        )
    if ours < theirs:
        return (
            f"{winner['worker']} is predicted to be cheapest: {milliseconds(ours)}, the next is "
            f"{best['worker']} with {milliseconds(theirs)} ({milliseconds(theirs - ours, signed=True)})."
        )
    return (
        f"The policy {line.get('policy')} preferred it, although {best['worker']} is predicted to be "
        f"cheaper: {milliseconds(theirs)} against {milliseconds(ours)}."
    )


def _difference(winner: Line, other: Line) -> list[str]:
    """The terms that make the difference to `other`, largest first."""
    differences = {
        term: float(other.get(term) or 0.0) - float(winner.get(term) or 0.0)
        for term in TERMS
        if term in winner and term in other
    }
    weight = max((abs(value) for value in differences.values()), default=0.0)
    if weight < _MATTERS_MS:
        return []
    said = []
    for term, value in sorted(differences.items(), key=lambda pair: -abs(pair[1])):
        if abs(value) < max(_MATTERS_MS, _MATTERS_SHARE * weight):
            continue
        more = "more" if value > 0 else "less"
        said.append(f"{milliseconds(abs(value))} {more} {TERMS[term]}{_behind(term, winner, other)}")
    return [f"Of the difference, {other['worker']} would have had: {'; '.join(said)}."]


def _behind(term: str, winner: Line, other: Line) -> str:
    """What a term's difference comes from."""
    if term == "prefill_ms":
        mine, theirs = winner.get("uncovered_tokens"), other.get("uncovered_tokens")
        if mine is not None and theirs is not None and mine != theirs:
            return f" ({theirs:,} tokens to compute instead of {mine:,})"
    if term in ("queue_ms", "decode_ms"):
        mine, theirs = winner.get("sequences"), other.get("sequences")
        if mine is not None and theirs is not None and mine != theirs:
            return f" ({theirs} sequences running instead of {mine})"
    return ""


def _denied(winner: Line, others: Sequence[Line]) -> str:
    warm = min((c for c in others if _hit(c)), key=_total, default=others[0])
    return (
        f"{warm['worker']} holds {_hit(warm):,} tokens of the prompt, but its first token is predicted after "
        f"{milliseconds(_ttft(warm))}; warmth is not worth that wait beside {milliseconds(_ttft(winner))} on "
        f"{winner['worker']}."
    )


def _full(winner: Line, others: Sequence[Line]) -> str:
    warm = min((c for c in others if _hit(c)), key=_total, default=others[0])
    shares = warm.get("shares")
    taken = shares if isinstance(shares, Mapping) else {}
    has = "has the prefix as well" if _hit(winner) else "gets a copy of the prefix"
    return (
        f"Of the time of {warm['worker']}, requests with this prefix have taken "
        f"{float(taken.get('prefix_share') or 0.0):.0%} lately, and warm requests "
        f"{float(taken.get('warm_share') or 0.0):.0%}: the rest is kept for others, and {winner['worker']} "
        f"{has}."
    )


def _hit(candidate: Line) -> int:
    return int(candidate.get("cached_tokens") or 0) + int(candidate.get("offloaded_tokens") or 0)


def _ttft(candidate: Line) -> float:
    return float(candidate.get("queue_ms") or 0.0) + float(candidate.get("prefill_ms") or 0.0)


def _beliefs(winner: Line) -> list[str]:
    said = []
    confidence = winner.get("confidence")
    if confidence is not None and confidence < 1.0:
        said.append(
            f"Only {confidence:.0%} of its predicted hit was counted on: predictions there failed lately."
        )
    if winner.get("doubtful_tokens"):
        said.append(
            f"{winner['doubtful_tokens']:,} more tokens may be there, but events about them were lost."
        )
    if winner.get("metrics_age_s") is None:
        said.append("It had not reported metrics yet; its load is what we sent there.")
    return said


# --- what happened ---------------------------------------------------------------------------------------


def _happened(line: Line) -> list[str]:
    outcome = str(line.get("outcome"))
    ended = _OUTCOMES.get(outcome, f"It ended: {outcome}")
    details = []
    if line.get("status") is not None:
        details.append(f"status {line['status']}")
    if line.get("duration_ms") is not None:
        details.append(f"after {milliseconds(line['duration_ms'])}")
    if line.get("output_tokens") is not None:
        details.append(f"{line['output_tokens']:,} tokens generated")
    if line.get("details"):
        details.append(str(line["details"]))
    said = [", ".join([ended, *details]) + "."]
    said += _served(line)
    if outcome == "open":
        return said
    said += _cached(line)
    said += _first_token(line)
    return said


def _served(line: Line) -> list[str]:
    served, chosen = line.get("served_by"), str(line.get("selected_worker"))
    attempts = line.get("attempts") or 1
    if served is not None and line.get("mode") == _OBSERVED:
        return [f"The gateway sent it to {served}" + (f", at attempt {attempts}." if attempts > 1 else ".")]
    if served is not None and served != chosen.partition("#")[0]:
        return [f"It was served by {served} instead of {chosen}, at attempt {attempts}."]
    return [f"It took {attempts} attempts."] if attempts > 1 else []


def _cached(line: Line) -> list[str]:
    predicted, actual = line.get("predicted_cached_tokens"), line.get("actual_cached_tokens")
    if actual is None and predicted is None:
        return []
    if actual is None:
        return [f"Cached tokens: {predicted:,} predicted; the engine did not report any number."]
    if predicted is None:
        return [f"Cached tokens: {actual:,} reported; there was no prediction."]
    verdict = "exactly as predicted" if actual == predicted else f"off by {actual - predicted:+,}"
    return [f"Cached tokens: {predicted:,} predicted, {actual:,} reported: {verdict}."]


def _first_token(line: Line) -> list[str]:
    predicted = line.get("predicted_ttft_ms")
    measured = line.get("upstream_ttft_ms")
    if measured is None:
        measured = line.get("ttft_ms")
    if measured is None:
        return []
    if line.get("stream") is False:
        return [
            f"Not streamed: the first byte, after {milliseconds(measured)}, was that of the whole answer."
        ]
    if predicted is None:
        return [f"First token after {milliseconds(measured)}."]
    error = measured - predicted
    share = f", {error / predicted:+.0%}" if predicted > 0 else ""
    off = f"{milliseconds(error, signed=True)}{share}"
    return [f"First token: {milliseconds(predicted)} predicted, {milliseconds(measured)} measured ({off})."]


def _shadows(line: Line) -> list[str]:
    said = []
    for policy, choice in (line.get("shadow") or {}).items():
        same = choice.get("worker") == line.get("selected_worker")
        where = "the same worker" if same else f"{choice.get('worker')}"
        price = milliseconds(choice.get("total_ms"))
        said.append(f"{policy} would have chosen {where} ({choice.get('decision')}, {price}).")
    return said
