import asyncio
import itertools
import json
import threading
import time
from array import array

import pytest

from extproc.adapters.prompt_process import Elsewhere, PromptProcessError
from extproc.adapters.prompt_service import PromptService
from extproc.adapters.telemetry.stages import Stages
from extproc.adapters.worker_tokenizer import WorkerTokenizerError
from extproc.core.hashing import ChainKey, ChainMemo, prompt_chain
from extproc.prompt.encoder import EncodedPrompt, PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.prompt.template_guard import TemplateLimits
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import LoadOnly, parse_request

IDS = EncodedPrompt((array("I", [1, 2, 3]),))
PATIENT_MS = 60_000.0


def chat(content="q", **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return parse_request("POST", "/v1/chat/completions", {}, json.dumps(body).encode())


SMALL, LONG, LONGER = chat(), chat("word " * 4000), chat("word " * 60_000)


class Encoder:
    """Answers at once, or when `gate` opens; notes the threads it ran in."""

    def __init__(self, outcome=IDS, *, gated=False):
        self.outcome = outcome
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.threads = []
        if not gated:
            self.gate.set()

    def encode(self, request, mark=None):
        self.threads.append(threading.current_thread())
        self.entered.release()
        self.gate.wait(60)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Worker:
    def __init__(self, outcome):
        self.outcome = outcome
        self.timeouts = []

    async def encode(self, request, *, timeout_s):
        self.timeouts.append(timeout_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def make():
    made = []

    def build(encoder, **options):
        service = PromptService(encoder, **{"budget_ms": PATIENT_MS, **options})
        made.append((service, encoder))
        return service

    yield build
    for service, encoder in made:
        if isinstance(encoder, Encoder):
            encoder.gate.set()
        service.close()


async def entered(encoder):
    assert await asyncio.to_thread(encoder.entered.acquire, timeout=60)


async def test_small_prompts_stay_on_the_loop_and_long_ones_leave_it(make):
    encoder = Encoder()
    service = make(encoder)
    assert await service.encode(SMALL) == IDS
    assert await service.encode(LONG) == IDS
    assert encoder.threads[0] is threading.current_thread()
    assert encoder.threads[1] is not threading.current_thread()


async def test_stages_of_an_encoding_are_told(make):
    def stages():
        return Stages(time.monotonic)

    def names(watched):
        return [stage.name for stage in watched.all()]

    real = make(PromptEncoder.load(tiny_model_path()))
    inline, threaded = stages(), stages()
    assert isinstance(await real.encode(SMALL, inline), EncodedPrompt)
    assert isinstance(await real.encode(LONG, threaded), EncodedPrompt)
    assert names(inline) == ["render", "tokenize"]
    assert names(threaded) == ["wait", "render", "tokenize"]
    encoder, given_up = Encoder(gated=True), stages()
    assert isinstance(await make(encoder, budget_ms=20.0).encode(LONG, given_up), LoadOnly)
    encoder.gate.set()  # what its thread tells from now on belongs to nobody
    assert names(given_up) == ["no-ids"]


async def test_small_requests_with_template_arguments_leave_the_loop(make):
    encoder = Encoder()
    await make(encoder).encode(chat(chat_template_kwargs={"n": 1}))
    assert encoder.threads[0] is not threading.current_thread()


async def test_one_small_prompt_over_the_budget_sends_all_to_threads(make):
    encoder = Encoder()
    service = make(encoder, budget_ms=-1.0)
    for _ in range(2):  # the first pays for what is used for the first time, and tells nothing
        assert await service.encode(SMALL) == IDS
    service._budget_s = 60.0  # enough for a thread to begin
    assert await service.encode(SMALL) == IDS
    here = threading.current_thread()
    assert [thread is here for thread in encoder.threads] == [True, True, False]


async def test_a_template_that_loops_is_ended_and_soon_has_the_event_loop_no_more(make, tmp_path):
    endless = tmp_path / "endless.jinja"
    endless.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    limits = TemplateLimits(seconds=0.05)
    real = PromptEncoder.load(tiny_model_path(), chat_template=endless, template_limits=limits)
    threads = []

    class Watched:
        def encode(self, request, mark=None):
            threads.append(threading.current_thread())
            return real.encode(request, mark)

    service = make(Watched(), budget_ms=1.0)
    for _ in range(2):
        assert await service.encode(SMALL) == LoadOnly("unsupported:template-limit", "m")
    service._budget_s = 60.0  # enough for a thread to begin
    assert await service.encode(SMALL) == LoadOnly("unsupported:template-limit", "m")
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, True, False]


async def test_a_small_prompt_that_waits_for_a_core_stays_on_the_loop(make, monkeypatch):
    encoder = Encoder()
    service = make(encoder, budget_ms=1.0)
    loop = asyncio.get_running_loop()
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(loop, "time", lambda: next(hours))
    for _ in range(3):
        assert await service.encode(SMALL) == IDS
    monkeypatch.undo()
    assert {thread is threading.current_thread() for thread in encoder.threads} == {True}


async def test_a_spent_budget_means_load_only_and_the_loop_stays_free(make):
    encoder = Encoder(gated=True)
    service = make(encoder, budget_ms=20.0)
    assert await service.encode(LONG) == LoadOnly("prompt-budget", "m")


async def test_abandoned_encodings_keep_their_places_until_they_end(make):
    encoder = Encoder(gated=True)
    service = make(encoder, budget_ms=20.0, threads=1, places=2)
    running = asyncio.create_task(service.encode(LONG))
    await entered(encoder)
    queued = asyncio.create_task(service.encode(LONG))
    assert [await running, await queued] == [LoadOnly("prompt-budget", "m")] * 2
    assert await service.encode(LONG) == LoadOnly("prompt-busy", "m")
    encoder.gate.set()
    service._budget_s = 60.0
    async with asyncio.timeout(60):
        while await service.encode(LONG) != IDS:  # noqa: ASYNC110 - what it waits for is asked, not told
            await asyncio.sleep(0.01)
    # The queued one was dropped before it began.
    assert len(encoder.threads) == 2


async def test_a_failing_encoder_never_stops_a_request(make, caplog):
    service = make(Encoder(ZeroDivisionError()))
    assert await service.encode(SMALL) == LoadOnly("prompt-error", "m")
    assert await service.encode(LONG) == LoadOnly("prompt-error", "m")
    assert "routed by load" in caplog.text


async def test_unsupported_requests_say_why(make):
    service = make(Encoder(Unsupported("renderer")))
    assert await service.encode(SMALL) == LoadOnly("unsupported:renderer", "m")
    assert await service.encode(LONG) == LoadOnly("unsupported:renderer", "m")


async def test_a_worker_is_asked_within_what_is_left_of_the_budget(make):
    worker = Worker(IDS)
    service = make(Encoder(Unsupported("renderer")), worker_tokenizer=worker)
    assert await service.encode(LONG) == IDS
    assert 0 < worker.timeouts[0] <= PATIENT_MS / 1000


async def test_a_spent_budget_asks_nobody(make):
    worker = Worker(IDS)
    service = make(Encoder(Unsupported("renderer")), worker_tokenizer=worker, budget_ms=-1.0)
    assert await service.encode(SMALL) == LoadOnly("prompt-budget", "m")
    assert worker.timeouts == []


@pytest.mark.parametrize("reason", ["multimodal", "stored-history"])
async def test_workers_are_not_asked_what_their_ids_would_not_answer(make, reason):
    worker = Worker(IDS)
    service = make(Encoder(Unsupported(reason)), worker_tokenizer=worker)
    assert await service.encode(SMALL) == LoadOnly(f"unsupported:{reason}", "m")
    assert worker.timeouts == []


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (TimeoutError(), "prompt-budget"),
        (WorkerTokenizerError("no worker"), "unsupported:renderer"),
    ],
)
async def test_a_worker_that_does_not_answer_means_load_only(make, failure, reason):
    service = make(Encoder(Unsupported("renderer")), worker_tokenizer=Worker(failure))
    assert await service.encode(SMALL) == LoadOnly(reason, "m")


async def test_concurrent_long_prompts_get_the_ids_they_would_get_alone(make):
    encoder = PromptEncoder.load(tiny_model_path())
    service = make(encoder)
    requests = [chat(f"question {number} " * 1600) for number in range(40)]
    results = await asyncio.gather(*map(service.encode, requests))
    assert results == [encoder.encode(request) for request in requests]


async def test_long_prompts_are_hashed_in_their_thread_and_short_ones_are_not(make, monkeypatch):
    threads = []

    class Memo(ChainMemo):
        def prompt_chain(self, *args):
            threads.append(threading.current_thread())
            return super().prompt_chain(*args)

    monkeypatch.setattr("extproc.adapters.prompt_service.REMEMBERED", Memo())
    encoder = Encoder()
    service, key = make(encoder), ChainKey(1, 7)
    assert (await service.encode(SMALL, chain=key)).chains == {}
    found = await service.encode(LONG, chain=key)
    assert found.chains == {1: (tuple(prompt_chain(IDS.prompts[0], 1, 7)),)}
    assert threads == [encoder.threads[1]]
    assert (await service.encode(LONG)).chains == {}


class Answers:
    """Processes that answer as they are told; None: there is none."""

    count = 3

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def encode(self, request, chain):
        self.asked.append((request, chain))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_longer_prompts_are_encoded_elsewhere_and_by_their_thread_where_nobody_is(make):
    there = EncodedPrompt((array("I", [7]),), {16: ((),)})
    processes, encoder = Answers(Elsewhere(there, 0.0), None), Encoder()
    service, key = make(encoder, processes=processes), ChainKey(16, 7)
    assert await service.encode(SMALL, chain=key) == IDS
    assert (await service.encode(LONG, chain=key)).prompts == IDS.prompts
    assert processes.asked == []
    assert await service.encode(LONGER, chain=key) is there
    assert len(encoder.threads) == 2
    assert (await service.encode(LONGER, chain=key)).prompts == IDS.prompts
    assert len(encoder.threads) == 3
    assert processes.asked == [(LONGER, key)] * 2


async def test_a_prompt_that_is_lost_elsewhere_is_not_tried_here(make):
    encoder = Encoder()
    service = make(encoder, processes=Answers(PromptProcessError("it has ended")))
    assert await service.encode(LONGER) == LoadOnly("prompt-error", "m")
    assert encoder.threads == []


async def test_what_cannot_be_encoded_elsewhere_is_asked_of_a_worker(make):
    worker = Worker(IDS)
    service = make(Encoder(), processes=Answers(Unsupported("renderer")), worker_tokenizer=worker)
    assert await service.encode(LONGER) == IDS
    assert len(worker.timeouts) == 1


async def test_there_is_a_thread_for_each_process(make):
    encoder = Encoder(gated=True)
    service = make(encoder, processes=Answers(None, None, None), threads=1)
    asked = [asyncio.create_task(service.encode(LONGER)) for _ in range(3)]
    for _ in asked:
        await entered(encoder)  # all at one time
    encoder.gate.set()
    assert await asyncio.gather(*asked) == [IDS] * 3


async def test_stages_elsewhere_are_told_as_those_here(make):
    for encoded_s, stages in ((0.0, ["wait", "render", "tokenize"]), (None, ["wait", "tokenize"])):
        watched = Stages(time.monotonic)
        await make(Encoder(), processes=Answers(Elsewhere(IDS, encoded_s))).encode(LONGER, watched)
        assert [stage.name for stage in watched.all()] == stages
