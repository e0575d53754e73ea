"""Real children encode here. Nothing waits for a time: what must come is asked for until it is there."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.adapters.prompt_messages import Job
from extproc.adapters.prompt_process import LOAD_S, PromptProcessError
from extproc.adapters.prompt_processes import PromptProcesses
from extproc.core.hashing import ChainKey, prompt_chain
from extproc.prompt.errors import Unsupported
from extproc.prompt.recipe import EncoderRecipe, Identity, identity_of
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import parse_request

RECIPE = EncoderRecipe(str(tiny_model_path()))
ENCODER = RECIPE.load()
IDENTITY = identity_of(ENCODER)
KEY = ChainKey(16, 0x1234_5678_9ABC_DEF0)
ENOUGH_S = 60.0


def chat(content, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return parse_request("POST", "/v1/chat/completions", {}, json.dumps(body).encode())


def completion(prompt, **fields):
    body = {"model": "m", "prompt": prompt, **fields}
    return parse_request("POST", "/v1/completions", {}, json.dumps(body).encode())


HELLO = chat("hello " * 40)


@pytest.fixture
def make():
    made = []

    def build(count=1, **options):
        processes = PromptProcesses(count, **options)
        made.append(processes)
        processes.begin()
        return processes

    yield build
    for processes in made:
        processes.close()


@pytest.fixture(scope="module")
def remote():
    processes = PromptProcesses(2)
    processes.begin()
    yield processes.of(RECIPE, IDENTITY)
    processes.close()


def elsewhere(encoder, request, chain=None):
    """What a child makes of a request, as soon as there is one that can."""
    return until(lambda: encoder.encode(request, chain))


def until(ask):
    ends = time.monotonic() + ENOUGH_S
    while (answer := ask()) is None or answer is False:
        assert time.monotonic() < ends
        time.sleep(0.005)
    return answer


def kill(processes):
    """Its one child has ended, and it is known."""
    [pid] = processes.pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: not processes.pids)


def check(encoder, request, chain=KEY):
    expected = ENCODER.encode(request)
    found = elsewhere(encoder, request, chain)
    assert found.prompt.prompts == expected.prompts
    assert [ids.itemsize for ids in found.prompt.prompts] == [4] * len(expected.prompts)
    if chain is None:
        assert found.prompt.chains == {}
    else:
        hashes = tuple(tuple(prompt_chain(ids, *chain)) for ids in expected.prompts)
        assert found.prompt.chains == {chain.block_size: hashes}
    return found


@settings(deadline=None, max_examples=30)
@given(text=st.text(min_size=1, max_size=400), repeat=st.integers(1, 200), size=st.sampled_from([1, 16, 64]))
def test_ids_and_hashes_are_those_of_the_router(remote, text, repeat, size):
    check(remote, chat(text * repeat), ChainKey(size, 2**64 - 1))


def test_conversations_are_rendered_and_completions_are_not(remote):
    assert check(remote, chat("a question")).encoded_s >= 0.0
    assert check(remote, completion("a text")).encoded_s is None


def test_batches_ids_and_prompts_shorter_than_a_block(remote):
    check(remote, completion(["one " * 300, "two " * 300, "3"]))
    check(remote, completion([5, 6, 7] * 100))
    check(remote, completion("3"), None)


def test_what_cannot_be_encoded_says_why_and_the_child_goes_on(remote):
    with pytest.raises(Unsupported) as error:
        elsewhere(remote, completion("a text", suffix="b"))
    assert error.value.reason == "suffix"
    check(remote, HELLO)


def test_prompts_that_begin_alike_go_to_the_child_that_remembers_them(make):
    processes = make(2)
    encoder = processes.of(RECIPE, IDENTITY)
    both = threading.Barrier(2)

    def begin(_):
        both.wait(ENOUGH_S)
        elsewhere(encoder, HELLO)

    with ThreadPoolExecutor(2) as threads:
        until(lambda: list(threads.map(begin, range(2))) and len(processes.pids) == 2)
    until(lambda: elsewhere(encoder, HELLO) and all(one.has(encoder._encoder) for one in processes._children))
    asked = {}
    for number in range(12):
        about = f"document {number} " * 400
        for turn in range(3):
            before = [child.encoded(1) for child in processes._children]
            elsewhere(encoder, chat(about + f"question {turn}"))
            after = [child.encoded(1) for child in processes._children]
            asked.setdefault(about, set()).add(before[0] == after[0])
    assert all(len(children) == 1 for children in asked.values())
    assert len(set().union(*asked.values())) == 2  # not all to the same one


def test_nothing_is_started_before_begin_nor_before_there_is_a_prompt(make):
    processes = PromptProcesses(2)
    encoder = processes.of(RECIPE, IDENTITY)
    assert encoder.encode(HELLO, None) is None
    processes.begin()
    assert processes.pids == ()
    assert encoder.encode(HELLO, None) is None  # it is starting: do it yourself
    assert processes.state().running == 1
    check(encoder, HELLO)
    processes.close()
    assert processes.state().running == 0
    assert processes.pids == ()


def test_without_children_every_thread_does_it_itself(make):
    assert make(0).of(RECIPE, IDENTITY).encode(HELLO, None) is None


def test_a_child_that_is_killed_while_idle_is_started_again(make):
    processes = make()
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, HELLO)
    kill(processes)
    assert encoder.encode(HELLO, None) is None
    check(encoder, HELLO)
    assert processes.state().lost == 1
    assert processes.state().running == 1


def test_the_prompt_that_a_child_had_when_it_ended_is_not_tried_again(make):
    processes = make()
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, HELLO)
    [pid] = processes.pids
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(encoder.encode, HELLO, None)
        until(lambda: processes._children[0]._jobs == 2)  # it has been given the prompt
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PromptProcessError, match="has ended"):
            asked.result(ENOUGH_S)
    check(encoder, HELLO)


def test_a_child_that_stands_still_is_ended_and_started_again(make):
    processes = make(patience_s=1.0)
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, HELLO)
    [pid] = processes.pids
    os.kill(pid, signal.SIGSTOP)
    huge = chat("more than a socket holds " * 40_000)
    with pytest.raises(PromptProcessError, match="took too long"):
        encoder.encode(huge, None)
    assert processes.pids == ()
    check(encoder, HELLO)


def test_each_start_after_a_failure_comes_later(make):
    now = [0.0]
    processes = make(clock=lambda: now[0])
    encoder = processes.of(RECIPE, IDENTITY)
    pauses = []
    for _ in range(3):
        encoder.encode(HELLO, None)
        kill(processes)
        encoder.encode(HELLO, None)
        assert processes.pids == ()
        paused = 0.0
        while not processes.pids:
            now[0] += 0.25
            paused += 0.25
            encoder.encode(HELLO, None)
        pauses.append(paused)
    assert pauses == [0.5, 1.0, 2.0]


def test_a_model_whose_files_have_changed_is_encoded_by_the_router(make, caplog):
    encoder = make().of(RECIPE, Identity("another", IDENTITY.template_version))
    until(lambda: encoder.encode(HELLO, None) is None and "have changed since the start" in caplog.text)
    assert encoder.encode(HELLO, None) is None


def test_a_model_that_a_child_cannot_read_is_encoded_by_the_router_and_others_are_not(make, caplog, tmp_path):
    processes = make()
    broken = processes.of(EncoderRecipe(str(tmp_path)), IDENTITY)
    until(lambda: broken.encode(HELLO, None) is None and "cannot encode long prompts" in caplog.text)
    check(processes.of(RECIPE, IDENTITY), HELLO)


def test_several_models_share_the_children(make, tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[0].content }}")
    recipe = EncoderRecipe(str(tiny_model_path()), chat_template=template)
    other = recipe.load()
    processes = make()
    encoders = (processes.of(RECIPE, IDENTITY), processes.of(recipe, identity_of(other)))
    for _ in range(2):
        found = [elsewhere(encoder, HELLO).prompt.prompts for encoder in encoders]
        assert found == [ENCODER.encode(HELLO).prompts, other.encode(HELLO).prompts]
    assert len(processes.pids) == 1


def test_a_child_that_makes_an_encoder_is_asked_nothing_meanwhile(make, tmp_path):
    processes = make()
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, HELLO)
    [pid] = processes.pids
    os.kill(pid, signal.SIGSTOP)  # it takes long to make the next one
    other = EncoderRecipe(str(tiny_model_path()), cache_bytes=0)
    assert processes.of(other, IDENTITY).encode(HELLO, None) is None
    for _ in range(3):
        assert encoder.encode(HELLO, KEY) is None
    os.kill(pid, signal.SIGCONT)
    for number in range(20):
        check(encoder, chat(f"question {number} " * 30))
    assert processes.pids == (pid,)


def test_an_answer_to_something_else_is_never_taken(make):
    processes = make()
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, HELLO)
    child = processes._children[0]
    child._link.send(Job(99, encoder._encoder.number, HELLO.kind, None))  # nobody waits for its answer
    child._link.send_bytes(chat("another " * 50).plain)
    with pytest.raises(PromptProcessError):
        encoder.encode(HELLO, KEY)
    assert processes.pids == ()
    check(encoder, HELLO)


def test_a_child_that_never_gets_its_encoder_is_started_again(make):
    now = [0.0]
    processes = make(clock=lambda: now[0])
    encoder = processes.of(RECIPE, IDENTITY)
    assert encoder.encode(HELLO, None) is None
    [pid] = processes.pids
    os.kill(pid, signal.SIGSTOP)
    now[0] = LOAD_S
    assert encoder.encode(HELLO, None) is None
    assert processes.pids == (pid,)
    now[0] = LOAD_S + 0.1
    assert encoder.encode(HELLO, None) is None
    assert processes.pids == ()
    now[0] += 1.0
    check(encoder, HELLO)


def test_where_none_can_be_started_threads_do_it(make, monkeypatch):
    def none(*_):
        raise OSError(24, "too many open files")

    processes = make()
    encoder = processes.of(RECIPE, IDENTITY)
    with monkeypatch.context() as patched:
        patched.setattr("extproc.adapters.prompt_process.socket.socketpair", none)
        assert encoder.encode(HELLO, None) is None
    assert processes.state().lost == 0
    check(encoder, HELLO)


def test_counts_outlive_the_child_and_memory_does_not(make):
    processes = make()
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, chat("word " * 9000))
    before, hashed = encoder.stats, processes.state().hashed
    assert before.new > 0
    assert before.size > 0
    assert hashed.new > 0
    kill(processes)
    encoder.encode(HELLO, None)
    gone = encoder.stats
    assert (gone.new, gone.known, gone.size, gone.pieces) == (before.new, before.known, 0, 0)
    check(encoder, chat("word " * 9000))
    assert encoder.stats.new == 2 * before.new
    assert processes.state().hashed.new == 2 * hashed.new


def test_where_memory_runs_out_the_child_goes_before_the_router(make):
    processes = make()
    check(processes.of(RECIPE, IDENTITY), HELLO)
    score = Path(f"/proc/{processes.pids[0]}/oom_score_adj")
    if not score.exists():
        pytest.skip("only Linux has it")
    assert score.read_text().strip() == "1000"


def test_closing_ends_a_child_that_has_a_prompt(make, caplog):
    processes = make()
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, HELLO)
    [pid] = processes.pids
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(encoder.encode, HELLO, None)
        until(lambda: processes._children[0]._jobs == 2)  # it has been given the prompt
        processes.close()
        with pytest.raises(PromptProcessError):
            asked.result(ENOUGH_S)
    assert processes.pids == ()
    assert encoder.encode(HELLO, None) is None
    assert "it is started again" not in caplog.text


def test_many_threads_get_what_each_has_asked_for(make):
    processes = make(2)
    encoder = processes.of(RECIPE, IDENTITY)
    check(encoder, HELLO)
    requests = [chat(f"question {number} " * 500) for number in range(24)]
    start = threading.Barrier(4)

    def ask(part):
        start.wait(ENOUGH_S)
        return [elsewhere(encoder, request, KEY).prompt.prompts for request in requests[part::4]]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))
    for part in range(4):
        assert found[part] == [ENCODER.encode(request).prompts for request in requests[part::4]]
