"""Everything an analysis found, as one JSON-able object. Texts of prompts are in it only where asked for."""

from collections.abc import Callable, Iterator
from typing import Any

from extproc.analysis.analyzer import Analyzer
from extproc.analysis.breakers import Breaker, Decoder
from extproc.analysis.prefix_tree import Node, PrefixTree
from extproc.analysis.tally import Buckets, Group
from extproc.analysis.verdict import first_tokens_answer, judge
from extproc.analysis.volatile import ADVICE, shape

Report = dict[str, Any]

_PREFIXES = 10
_BREAKERS = 20
_GROUPS = 15
_CANDIDATES = 400
_SHOWN = 24  # tokens of a text shown
_NEAR = 0.1  # prefixes whose lengths differ by less are one
_REASONS = 8


def report_of(analyzer: Analyzer, decode: Decoder, about: dict[str, Any], *, show_text: bool) -> Report:
    """The report.

    Args:
        analyzer: after the last line.
        decode: tokens to text.
        about: what was analysed and how: put in front.
        show_text: give texts of prompts as they are, instead of their shape.
    """
    shown: Callable[[str], str] = (lambda text: text) if show_text else shape
    tokens = analyzer.tokens
    report: Report = {
        **about,
        "lines": _lines(analyzer),
        "forms": dict(analyzer.forms.most_common()),
        "requests": analyzer.requests,
        "input_tokens": tokens,
        "mean_tokens": _ratio(tokens, analyzer.requests),
        "longest_tokens": analyzer.longest,
        "time_span_s": None
        if analyzer.first_time is None or analyzer.last_time is None
        else analyzer.last_time - analyzer.first_time,
        "repeated": {
            "tokens": analyzer.repeated,
            "share": _ratio(analyzer.repeated, tokens),
            "block_tokens": analyzer.repeated_blocks,
            "block_share": _ratio(analyzer.repeated_blocks, tokens),
        },
        "lengths": {
            "bounds": [int(bound) for bound in analyzer.lengths.bounds],
            "prompts": analyzer.lengths.counts,
            "shared": analyzer.shared.counts,
            "shared_tokens": analyzer.shared_tokens,
            "prompt_quantiles": _quantiles(analyzer.lengths),
            "shared_quantiles": _quantiles(analyzer.shared),
        },
        "reuse_age_s": {"bounds": list(analyzer.ages.bounds), "requests": analyzer.ages.counts},
        "placement": _placement(analyzer),
        "groups_for": dict(zip(("replicas", "cache_tokens"), analyzer.middle, strict=True)),
        "groups": {
            kind: [_group(name, group) for name, group in groups.largest(_GROUPS)]
            for kind, groups in analyzer.groups.items()
        },
        "prefixes": [_prefix(node, name, decode, shown) for node, name in _largest(analyzer.tree)],
        "breakers": _breakers(analyzer, shown),
        "resent": [
            {"first_tokens": threshold, "prompts": long.prompts, "resent": long.resent}
            for threshold, long in analyzer.long.items()
        ],
        "text_shown": show_text,
        "bounds": _bounds(analyzer),
    }
    report["first_tokens_answer"] = first_tokens_answer(report)
    report["verdict"] = judge(report)
    return report


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _lines(analyzer: Analyzer) -> dict[str, Any]:
    counts = analyzer.counts
    examples = analyzer.examples
    return {
        "read": counts.lines,
        "skipped": counts.skipped,
        "duplicates": counts.duplicates,
        "bad": counts.bad.total(),
        "not_encoded": counts.unsupported.total(),
        "bad_reasons": [
            {"reason": reason, "lines": count, "examples": examples[reason]}
            for reason, count in counts.bad.most_common(_REASONS)
        ],
        "not_encoded_reasons": [
            {"reason": reason, "lines": count, "examples": examples[reason]}
            for reason, count in counts.unsupported.most_common(_REASONS)
        ],
    }


def _quantiles(buckets: Buckets) -> dict[str, float | None]:
    return {f"p{round(share * 100)}": buckets.quantile(share) for share in (0.5, 0.9, 0.99)}


def _placement(analyzer: Analyzer) -> list[dict[str, Any]]:
    tokens = analyzer.tokens
    rows: list[dict[str, Any]] = []
    for replicas in analyzer.settings.replicas:
        for size in analyzer.settings.cache_tokens:
            shares: dict[bool, float] = {}
            uneven: dict[bool, float] = {}
            for prefix in (False, True):
                fleets = [pool[(replicas, size, prefix)] for pool in analyzer.pools.values()]
                shares[prefix] = _ratio(sum(fleet.hit_tokens for fleet in fleets), tokens)
                # Of several models' pools the one that has most to do.
                busiest = max(fleets, key=lambda fleet: sum(fleet.computed), default=None)
                uneven[prefix] = 1.0 if busiest is None else busiest.imbalance
            rows.append(
                {
                    "replicas": replicas,
                    "cache_tokens": size,
                    "random": shares[False],
                    "prefix": shares[True],
                    "imbalance_random": uneven[False],
                    "imbalance_prefix": uneven[True],
                }
            )
        rows.append(
            {
                "replicas": replicas,
                "cache_tokens": None,
                "random": _ratio(analyzer.spread_hits[replicas], tokens),
                "prefix": _ratio(analyzer.repeated_blocks, tokens),
                "imbalance_random": None,
                "imbalance_prefix": None,
            }
        )
    return rows


def _group(name: str, group: Group) -> dict[str, Any]:
    return {
        "name": name,
        "requests": group.requests,
        "tokens": group.tokens,
        "repeated_share": _ratio(group.repeated, group.tokens),
        "random_share": _ratio(group.random_hits, group.tokens),
        "prefix_share": _ratio(group.prefix_hits, group.tokens),
        "lost_share": _ratio(group.lost, group.tokens),
    }


def _nodes(tree: PrefixTree) -> Iterator[tuple[Node, str]]:
    for name, root in tree.roots.items():
        stack = list((root.children or {}).values())
        while stack:
            node = stack.pop()
            if node.count > 1:
                yield node, name
                stack.extend((node.children or {}).values())


def _largest(tree: PrefixTree) -> list[tuple[Node, str]]:
    """Prefixes whose sharing saves most; of those that are nearly the same only one."""
    candidates = sorted(
        ((node, name) for node, name in _nodes(tree) if _is_end(node)),
        key=lambda item: ((item[0].count - 1) * item[0].end, item[0].end),
        reverse=True,
    )[:_CANDIDATES]
    chosen: list[tuple[Node, str]] = []
    for node, name in candidates:
        if not any(_near(node, other) or _near(other, node) for other, _ in chosen):
            chosen.append((node, name))
        if len(chosen) == _PREFIXES:
            break
    return chosen


def _is_end(node: Node) -> bool:
    """Whether prompts part here, more than a few."""
    if not node.children:
        return True
    on = max(child.count for child in node.children.values())
    return node.count - on >= max(2, _NEAR * node.count)


def _near(above: Node, below: Node) -> bool:
    """Whether one prefix begins the other and is hardly shorter."""
    at: Node | None = below
    while at is not None and at is not above:
        at = at.parent
    return at is not None and above.end >= (1 - _NEAR) * below.end


def _prefix(node: Node, namespace: str, decode: Decoder, shown: Callable[[str], str]) -> dict[str, Any]:
    tokens = PrefixTree.tokens_of(node) or b""
    return {
        "tokens": node.end,
        "requests": node.count,
        "repeated_tokens": (node.count - 1) * node.end,
        "model": namespace.partition("\0")[0],
        "begins": shown(decode(tokens[: _SHOWN * 4])),
        "ends": shown(decode(tokens[-_SHOWN * 4 :])),
    }


def _breakers(analyzer: Analyzer, shown: Callable[[str], str]) -> dict[str, Any]:
    finder = analyzer.finder
    ordered = sorted(finder.breakers.values(), key=lambda breaker: -breaker.tokens)
    return {
        "candidates": finder.candidates,
        "compared": finder.compared,
        "exact": finder.compared == finder.candidates,
        "recoverable_tokens": round(finder.recoverable),
        "recoverable_share": _ratio(finder.recoverable, analyzer.tokens),
        "behind_text_tokens": round(finder.behind_text),
        "behind_text_share": _ratio(finder.behind_text, analyzer.tokens),
        "repeated_elsewhere_tokens": round(finder.far_tokens),
        "found": [_breaker(breaker, analyzer.tokens, shown) for breaker in ordered[:_BREAKERS]],
    }


def _breaker(breaker: Breaker, tokens: int, shown: Callable[[str], str]) -> dict[str, Any]:
    positions = sorted(breaker.positions.elements())
    return {
        "kind": breaker.kind.value,
        "requests": round(breaker.requests),
        "tokens": round(breaker.tokens),
        "share": _ratio(breaker.tokens, tokens),
        "per_request": _ratio(breaker.tokens, breaker.requests),
        "position": {
            "least": positions[0],
            "median": positions[len(positions) // 2],
            "most": positions[-1],
        },
        "before": shown(breaker.examples[0])[-40:],
        "example": shown(breaker.examples[1])[:40],
        "templates": [name for name, _ in breaker.labels.most_common(3)],
        "advice": ADVICE[breaker.kind],
    }


def _bounds(analyzer: Analyzer) -> dict[str, Any]:
    tree, finder = analyzer.tree, analyzer.finder
    notes: list[str] = []
    if tree.forgotten:
        notes.append(
            f"prompts were remembered within {analyzer.settings.tree_bytes // 2**20} MiB; "
            f"{tree.forgotten:,} tokens, the longest unused, were forgotten, so repeated shares are lower "
            "bounds (--memory raises the limit)"
        )
    if finder.anchors_dropped:
        notes.append(
            "repeated text behind a breaker is found if it came up within about the last "
            f"{analyzer.settings.anchors * 16:,} new tokens"
        )
    if finder.compared < finder.candidates:
        notes.append(
            f"{finder.compared:,} of {finder.candidates:,} prompts with text to compare were compared; the "
            "figures for breakers are estimates from them"
        )
    merged = sorted(kind for kind, groups in analyzer.groups.items() if groups.merged)
    if merged:
        notes.append(f"more different names than are counted apart: {', '.join(merged)}")
    return {
        "tree_bytes": analyzer.settings.tree_bytes,
        "tree_nodes": tree.nodes,
        "tree_held_bytes": tree.held_bytes,
        "forgotten_tokens": tree.forgotten,
        "notes": notes,
    }
