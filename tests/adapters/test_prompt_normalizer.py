import asyncio
import gzip
import json
import threading

import pytest

from extproc.adapters import prompt_normalizer
from extproc.adapters.prompt_normalizer import PromptNormalizer
from extproc.core.types import Normalization
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.normalize import NormalizationMode, NormalizationRules
from extproc.prompt.normalize_text import TextRules
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import parse_request
from tests.adapters.test_routing_service import Service

CHAT = "/v1/chat/completions"
DRY_RUN, APPLY, DISABLED = NormalizationMode.DRY_RUN, NormalizationMode.APPLY, NormalizationMode.DISABLED
PATIENT_MS = 60_000.0


def chat(text):
    return json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    ).encode()


DIRTY, CLEAN = chat("one \r\ntwo"), b'"one\\ntwo"'


@pytest.fixture
def make():
    made = []

    def build(mode=APPLY, rules=None, **options):
        made.append(
            PromptNormalizer(rules or NormalizationRules(), mode, **{"budget_ms": PATIENT_MS, **options})
        )
        return made[-1]

    yield build
    for normalizer in made:
        normalizer.close()


async def normal(normalizer, body, *, headers=None, **fields):
    headers = headers or {}
    request = parse_request("POST", CHAT, headers, body)
    result = await normalizer.normalize(request, body=body, path=CHAT, headers=headers, **fields)
    if result.body is None:
        assert result.request is request
    return result


async def test_what_is_routed_by_is_what_goes_on(make):
    result = await normal(make(), DIRTY)
    assert CLEAN in result.body
    assert result.request == parse_request("POST", CHAT, {}, result.body)
    assert result.report == Normalization("applied", {"line-ends": 1, "trailing-spaces": 1})


async def test_a_dry_run_reports_and_changes_nothing(make):
    result = await normal(make(DRY_RUN), DIRTY)
    assert result.body is None
    assert result.report == Normalization("dry-run", {"line-ends": 1, "trailing-spaces": 1})


@pytest.mark.parametrize(
    ("body", "options", "outcome"),
    [
        (chat("clean"), {}, "unchanged"),
        (DIRTY, {"rules": NormalizationRules(max_body_bytes=10)}, "skipped:too-large"),
        (chat("one").decode().encode("utf-16"), {}, "skipped:not-editable"),
    ],
)
async def test_what_passes_as_it_came_and_why(make, body, options, outcome):
    result = await normal(make(**options), body)
    assert (result.body, result.report) == (None, Normalization(outcome, {}))


async def test_compressed_bodies_pass_as_they_came(make):
    result = await normal(make(), gzip.compress(DIRTY), headers={"content-encoding": "gzip"})
    assert (result.body, result.report.outcome) == (None, "skipped:content-encoding")


async def test_tenants_may_have_it_their_own_way(make):
    normalizer = make(DISABLED, tenant_modes={"a": APPLY, "b": DRY_RUN})
    assert (await normal(normalizer, DIRTY)).report is None
    assert (await normal(normalizer, DIRTY, tenant="other")).report is None
    assert (await normal(normalizer, DIRTY, tenant="a")).report.outcome == "applied"
    assert (await normal(normalizer, DIRTY, tenant="b")).report.outcome == "dry-run"


async def test_long_bodies_are_normalized_elsewhere_with_the_same_result(make):
    body = chat("word \r\n" * 5_000)
    here = await normal(make(inline_bytes=1 << 20), body)
    there = await normal(make(inline_bytes=0), body)
    assert here == there
    assert here.report.changes == {"line-ends": 5_000, "trailing-spaces": 5_000}


async def test_what_takes_too_long_or_is_too_much_at_once_passes_as_it_came(make, monkeypatch):
    gate, entered = threading.Event(), threading.Semaphore(0)

    def slow(kind, body, rules, stop):
        entered.release()
        gate.wait(60)
        raise AssertionError("nobody waits for this")

    monkeypatch.setattr(prompt_normalizer, "normalize", slow)
    try:
        late = await normal(make(inline_bytes=0, budget_ms=1.0), DIRTY)
        assert (late.body, late.report.outcome) == (None, "skipped:budget")
        full = make(inline_bytes=0, places=1)
        waiting = asyncio.create_task(normal(full, DIRTY))
        for _ in range(2):
            assert await asyncio.to_thread(entered.acquire, timeout=60)
        assert (await normal(full, DIRTY)).report.outcome == "skipped:busy"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    finally:
        gate.set()


async def test_a_fault_of_ours_is_not_the_requests(make, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(prompt_normalizer, "normalize", broken)
    for inline_bytes in (0, 1 << 20):
        result = await normal(make(inline_bytes=inline_bytes), DIRTY)
        assert (result.body, result.report.outcome) == (None, "skipped:error")
    assert "passes as it came" in caplog.text


async def test_places_are_given_back(make):
    normalizer = make(inline_bytes=0, places=1)
    for _ in range(3):
        assert (await normal(normalizer, DIRTY)).report.outcome == "applied"


# --- in the service --------------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path, make):
    service = Service(tmp_path, PromptEncoder.load(tiny_model_path()))
    rules = NormalizationRules(TextRules(fragment_tag="doc"))
    service.service._pools["default"].normalizer = make(rules=rules)
    yield service
    service.decisions.close()
    service.prompts.close()


async def test_the_body_that_goes_on_is_the_one_that_was_tokenized(service):
    text = "A long document with several words in it. " * 20
    first = await service.ask(CHAT, chat(f"<doc>{text}</doc>\n<doc>b</doc>"))
    second = await service.ask(CHAT, chat(f"<doc>b</doc>\r\n<doc>{text}</doc>"))
    assert json.loads(first.body or chat(f"<doc>{text}</doc>\n<doc>b</doc>")) == json.loads(second.body)
    leases = [service.router.ledger.get(route.lease_id) for route in (first, second)]
    assert leases[0].decision.request.prompts == leases[1].decision.request.prompts
    there = next(c for c in leases[1].decision.candidates if c.worker == leases[0].worker)
    assert there.cached_tokens > 0
    for lease in leases:
        service.finish(lease)
    assert service.log()[1]["normalization"] == {
        "outcome": "applied",
        "changes": {"line-ends": 1, "fragment-order": 2},
    }
    counters = service.service.counters
    assert counters.normalization == {"applied": 1, "unchanged": 1}
    assert counters.normalized == {"line-ends": 1, "fragment-order": 2}


async def test_what_is_not_understood_is_not_normalized(service):
    route = await service.ask("/v1/embeddings", b'{"model":"tiny","input":"a \\r\\n"}')
    assert route.body is None
    service.finish(service.router.ledger.get(route.lease_id))
    assert service.log()[0]["normalization"] is None
    assert service.service.counters.normalization == {}


@pytest.mark.parametrize(
    ("said", "found"),
    [("document", "document"), (" RAG-Set ", "rag-set"), ("anything else", "unique"), (None, "unique")],
)
async def test_a_client_may_declare_the_class_of_its_prompt(service, said, found):
    headers = {} if said is None else {"x-warmroute-prefix-class": said}
    service.finish(await service.routed(CHAT, chat("a prompt of some length " * 10), headers=headers))
    assert service.log()[0]["prompt_class"] == found
