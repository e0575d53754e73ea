import json
from array import array
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.analyzer import Analyzer, Settings
from extproc.analysis.breakers import anchors_of
from extproc.analysis.prompts import LineResult, LogClock, Prompt, PromptReader
from extproc.analysis.volatile import Kind
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from extproc.prompt.tokenizer import load_tokenizer
from extproc.protocol.openai import InferenceRequest, RequestKind
from tests.support.planted_log import STARTS, VALUES, planted_log

WORTH = 16  # tokens: findings that cost less are none


@cache
def reader() -> PromptReader:
    clock = LogClock()
    return PromptReader(PromptEncoder.load(tiny_model_path(), clock=clock), clock, {})


@cache
def tokenizer():
    return load_tokenizer(tiny_model_path(), {})


def decode(data: bytes) -> str:
    ids = array("I")
    ids.frombytes(data)
    return tokenizer().decode(ids.tolist(), skip_special_tokens=False)


def analyzed(lines, **settings) -> Analyzer:
    analyzer = Analyzer(Settings(**settings), decode)
    for number, line in enumerate(lines, 1):
        analyzer.add_line("log", reader().read(number, line))
    return analyzer


def prompt(ids, namespace="m", **fields) -> Prompt:
    data = array("I", ids).tobytes()
    model = namespace.partition("\0")[0]
    return Prompt(data, namespace, model, anchors_of(data), "body", "t", **fields)


def common(one, other) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


# --- against brute force ---------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["m", "m\0salt", "n"]), st.lists(st.integers(0, 1), min_size=1, max_size=20)
        ),
        max_size=40,
    )
)
def test_repeated_tokens_are_what_brute_force_counts(prompts):
    analyzer = Analyzer(Settings(block_size=4, replicas=(1, 2), cache_tokens=(8, 1 << 20)), decode)
    earlier = []
    tokens = blocks = 0
    for namespace, ids in prompts:
        analyzer.add(prompt(ids, namespace))
        shared = max((common(ids, other) for name, other in earlier if name == namespace), default=0)
        tokens += shared
        blocks += min(shared, len(ids) - 1) // 4 * 4
        earlier.append((namespace, ids))
    assert (analyzer.repeated, analyzer.repeated_blocks) == (tokens, blocks)
    assert analyzer.tokens == sum(len(ids) for _, ids in prompts)
    # One replica is one cache; a cache that forgets nothing finds all there is.
    assert analyzer.spread_hits[1] == blocks
    assert analyzer.spread_hits[2] <= blocks
    for pool in analyzer.pools.values():
        assert pool[(1, 1 << 20, True)].hit_tokens == pool[(1, 1 << 20, False)].hit_tokens
        assert pool[(1, 8, False)].hit_tokens <= pool[(1, 1 << 20, False)].hit_tokens
    assert sum(pool[(1, 1 << 20, False)].hit_tokens for pool in analyzer.pools.values()) == blocks


def located(log):
    """Of every prompt its ids, and tokens where the plant begins, ends, and where the question begins."""
    encoder = PromptEncoder.load(tiny_model_path())
    for body, plant, start in zip(log.bodies, log.plants, STARTS, strict=False):
        text = encoder.render(InferenceRequest(RequestKind.CHAT, "m", body, 0))
        encoded = tokenizer().encode(text, add_special_tokens=False)
        at = text.index(plant)
        question = text.index(f"---\n{start} ") + 4

        def token_of(character, offsets=encoded.offsets):
            return next(at for at, (low, high) in enumerate(offsets) if low <= character < high)

        yield encoded.ids, token_of(at), token_of(at + len(plant) - 1) + 1, token_of(question)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", list(VALUES))
def test_a_planted_value_is_found_in_its_place_at_its_price(kind, seed):
    log = planted_log(kind, seed=seed)
    analyzer = analyzed(log.lines())
    cost, begins, requests = 0, set(), 0
    earlier = []
    for ids, begin, end, _ in located(log):
        shared = max((common(ids, other) for other, _ in earlier), default=0)
        lost = max((common(ids[end:], other[stop:]) for other, stop in earlier), default=0)
        lost -= max(0, shared - end)
        earlier.append((ids, end))
        if lost >= WORTH:
            cost += lost
            requests += 1
            begins.add(begin)
    found = [breaker for breaker in analyzer.finder.breakers.values() if breaker.kind is Kind(kind)]
    assert sum(breaker.tokens for breaker in found) == cost
    assert sum(breaker.requests for breaker in found) == requests
    assert {at for breaker in found for at in breaker.positions} == begins
    assert {breaker.kind for breaker in analyzer.finder.breakers.values()} == {Kind(kind)}
    assert analyzer.finder.recoverable == cost > 0.3 * analyzer.tokens


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["fragment order", "key order", "white space"])
def test_planted_order_and_writing_are_found_in_their_place_at_their_price(kind, seed):
    log = planted_log(kind, seed=seed)
    analyzer = analyzed(log.lines())
    cost, requests, begins = 0, 0, []
    earlier = []
    for (ids, begin, end, question), body, plant in zip(located(log), log.bodies, log.plants, strict=True):
        shared = max((common(ids, other) for other, *_ in earlier), default=0)
        # All this would have been hit, had what came before been written as it is now.
        if kind == "white space":
            said = "".join(body["messages"][0]["content"].split())
            reach = max((question for _, _, other in earlier if other == said), default=0)
        else:
            said = sorted(plant)
            reach = max(
                (end + common(ids[end:], o[stop:]) for o, stop, text in earlier if text == said), default=0
            )
        if reach - shared >= WORTH:
            cost += reach - shared
            requests += 1
            begins.append(begin)
        earlier.append((ids, end, said))
    found = [breaker for breaker in analyzer.finder.breakers.values() if breaker.kind is Kind(kind)]
    assert sum(breaker.requests for breaker in found) == requests
    assert sum(breaker.tokens for breaker in found) == pytest.approx(cost, abs=2 * requests)
    assert min(at for breaker in found for at in breaker.positions) >= min(begins)
    assert analyzer.finder.recoverable == pytest.approx(cost, abs=2 * requests)


def test_a_log_without_breakers_has_none():
    assert analyzed(planted_log("none").lines()).finder.breakers == {}


# --- what else is counted --------------------------------------------------------------------------


def test_how_a_beginning_came_to_be_shared():
    analyzer = Analyzer(Settings(block_size=4), decode)
    system, answer = list(range(100, 140)), list(range(400, 410))
    for at in range(30):
        analyzer.add(prompt([*system, 1000 + at, 2000]))
    document = [*system, *range(500, 600)]
    for at in range(3):
        analyzer.add(prompt([*document, 3000 + at]))
    analyzer.add(prompt([*document, 3000]))
    analyzer.add(prompt([*document, 3000, *answer]))
    analyzer.add(prompt([1, 2, 3]))
    uses = {name: group.requests for name, group in analyzer.groups["use"].groups.items()}
    # The first twenty shares of the system text are not many yet.
    assert uses == {"unique": 2, "document": 19 + 2, "template": 11, "identical": 1, "session": 1}


def test_groups_add_up():
    lines = [
        json.dumps({"tenant": f"t{at % 3}", "class": "rag", "body": body}).encode()
        for at, body in enumerate(planted_log("none").bodies)
    ]
    analyzer = analyzed(lines)
    for kind in ("use", "class", "tenant", "template", "model"):
        groups = analyzer.groups[kind].groups.values()
        assert sum(group.requests for group in groups) == 40
        assert sum(group.tokens for group in groups) == analyzer.tokens
        assert sum(group.repeated for group in groups) == analyzer.repeated_blocks
    assert set(analyzer.groups["tenant"].groups) == {"t0", "t1", "t2"}
    assert analyzer.groups["session"].groups == {}


def test_the_first_tokens_are_resent_or_not():
    analyzer = Analyzer(Settings(), decode)
    long = list(range(10_000))
    for ids in (long, [*long, 1], [2, *long[1:]], long[:900]):
        analyzer.add(prompt(ids))
    assert (analyzer.long[10_000].prompts, analyzer.long[10_000].resent) == (3, 1)
    assert (analyzer.long[1_000].prompts, analyzer.long[1_000].resent) == (3, 1)
    assert analyzer.longest == 10_001


def test_ages_are_since_the_shared_beginning_was_last_used():
    analyzer = Analyzer(Settings(), decode)
    for time, last in ((0.0, 1), (50.0, 2), (51.0, 3), (None, 4)):
        analyzer.add(prompt([7] * 40 + [last], time=time))
    counts = dict(zip(analyzer.ages.bounds, analyzer.ages.counts, strict=False))
    assert {bound: count for bound, count in counts.items() if count} == {60.0: 1, 1.0: 1}
    assert (analyzer.first_time, analyzer.last_time) == (0.0, 51.0)


def test_lines_are_counted_with_examples_that_are_few():
    analyzer = Analyzer(Settings(), decode)
    for number in range(20):
        analyzer.add_line("a.log", LineResult(number, bad="cut off"))
        analyzer.add_line("a.log", LineResult(number, skipped=True))
        analyzer.add_line("b.log", LineResult(number, unsupported="multimodal"))
    assert (analyzer.counts.lines, analyzer.counts.skipped) == (60, 20)
    assert analyzer.counts.bad == {"cut off": 20}
    assert analyzer.examples["cut off"] == [f"a.log:{number}" for number in range(5)]
    assert analyzer.counts.unsupported == {"multimodal": 20}


def test_requests_that_vllm_logs_twice_count_once():
    lines = [
        b'DEBUG 1] Request 7 JSON body: {"model": "m", "messages": [{"role": "user", "content": "hi"}]}',
        b"DEBUG 1] Request chatcmpl-7 details: prompt: None, prompt_token_ids: [1, 2, 3], x",
        b"INFO 1] Received request chatcmpl-7: params: SamplingParams(n=1), lora_request: None.",
    ]
    analyzer = analyzed(lines * 5)
    assert (analyzer.requests, analyzer.counts.duplicates, analyzer.counts.skipped) == (5, 5, 5)


def test_more_models_than_pools_share_the_last():
    analyzer = Analyzer(Settings(), decode)
    for at in range(20):
        analyzer.add(prompt([1, 2, 3], f"model {at}"))
    assert len(analyzer.pools) == 8
    assert analyzer.requests == 20
