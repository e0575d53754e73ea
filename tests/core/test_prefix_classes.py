from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.hashing import prompt_chain, token_array
from extproc.core.prefix_classes import PrefixClass, PrefixClasses
from extproc.core.types import Completion, LengthSource, Outcome
from tests.core.test_editions import NAMESPACE, member, router_of
from tests.core.test_router import make_router
from tests.support.core import request

BLOCK = 16
GROUP = ("default", "tiny")
UNIQUE, SESSION, TEMPLATE = PrefixClass.UNIQUE, PrefixClass.SESSION, PrefixClass.SYSTEM_TEMPLATE
DOCUMENT, RAG = PrefixClass.DOCUMENT, PrefixClass.RAG_SET


class Traffic:
    """Prompts put together from texts; each text is the same tokens whenever it is named."""

    def __init__(self, classes=None):
        self.classes = PrefixClasses() if classes is None else classes
        self.now = 1000.0
        self.serial = 0

    def text(self, name, tokens):
        rng = Random(f"{name}")
        return [rng.randrange(30_000) for _ in range(tokens)]

    def fresh(self, tokens):
        self.serial += 1
        return self.text(f"fresh-{self.serial}", tokens)

    def ask(self, *parts, group=GROUP):
        self.now += 1.0
        tokens = [token for part in parts for token in part]
        return self.classes.observe(group, prompt_chain(token_array(tokens), BLOCK, seed=7), self.now)


def majority(found):
    return max(set(found), key=found.count)


def test_prompts_with_nothing_in_common_are_unique():
    traffic = Traffic()
    assert {traffic.ask(traffic.fresh(500)) for _ in range(50)} == {UNIQUE}


def test_a_system_prompt_that_many_start_with_is_a_template():
    traffic = Traffic()
    system = traffic.text("system", 700)
    found = [traffic.ask(system, traffic.fresh(300)) for _ in range(200)]
    assert found[0] is UNIQUE
    assert found[1] is DOCUMENT  # two prompts are not many
    assert set(found[70:]) == {TEMPLATE}


def test_a_burst_makes_no_template():
    traffic = Traffic()
    document = traffic.text("document", 700)
    found = []
    for _ in range(50):
        found.append(traffic.ask(document, traffic.fresh(300)))
        traffic.now -= 0.9
    assert TEMPLATE not in found


@pytest.mark.parametrize("documents", [3, 40])
def test_questions_about_documents_under_one_template(documents):
    traffic = Traffic()
    rng = Random(1)
    system = traffic.text("system", 300)
    texts = [traffic.text(f"document-{n}", 2000) for n in range(documents)]
    asked, found = set(), []
    for _ in range(400):
        number = rng.randrange(documents)
        kind = traffic.ask(system, texts[number], traffic.fresh(40))
        if number in asked:
            found.append(kind)
        asked.add(number)
    assert found.count(DOCUMENT if documents > 10 else TEMPLATE) > 0.75 * len(found), found


@pytest.mark.parametrize("question", [(1, 2, 3), (5, 6, 7), (17, 40, 60), (200, 201, 202), (1, 40, 80)])
def test_short_questions_do_not_make_a_document_a_session(question):
    traffic = Traffic()
    others = [traffic.text(f"other-{n}", 1500) for n in range(30)]
    found = []
    for number in range(600):
        kind = traffic.ask(others[number % 30], traffic.fresh(question[number // 30 % 3]))
        if number >= 120:
            found.append(kind)
    assert found.count(DOCUMENT) > 0.95 * len(found)


def test_turns_of_a_conversation_are_a_session():
    traffic = Traffic()
    system = traffic.text("system", 300)
    chats = [list(system) for _ in range(10)]
    later = []
    for turn in range(6):
        for number, chat in enumerate(chats):
            chat.extend(traffic.text(f"question-{number}-{turn}", 50))
            kind = traffic.ask(chat)
            chat.extend(traffic.text(f"answer-{number}-{turn}", 120))
            if turn > 0:
                later.append(kind)
    assert set(later) == {SESSION}


def test_an_answer_asked_for_again_is_still_a_session():
    traffic = Traffic()
    chat = traffic.text("question", 200)
    traffic.ask(chat)
    assert traffic.ask(chat, traffic.text("answer", 100)) is SESSION
    assert traffic.ask(chat, traffic.text("another answer", 100)) is SESSION


def test_combinations_of_retrieved_pieces_are_a_rag_set():
    traffic = Traffic()
    rng = Random(2)
    system = traffic.text("system", 300)
    pieces = [traffic.text(f"piece-{n}", 400) for n in range(6)]
    found = []
    for number in range(800):
        chosen = sorted(rng.sample(range(6), 3))
        kind = traffic.ask(system, *(pieces[n] for n in chosen), traffic.fresh(30))
        if number >= 200:
            found.append(kind)
    assert majority(found) is RAG
    assert found.count(RAG) > 0.6 * len(found)


def test_a_document_under_a_template_within_a_template_is_no_rag_set():
    traffic = Traffic()
    rng = Random(3)
    system = traffic.text("system", 300)
    teams = [traffic.text(f"team-{n}", 300) for n in range(3)]
    found = []
    for number in range(1500):
        team, document = rng.randrange(3), rng.randrange(30)
        text = traffic.text(f"document-{team}-{document}", 600)
        kind = traffic.ask(system, teams[team], text, traffic.fresh(60))
        if number >= 600:
            found.append(kind)
    assert found.count(DOCUMENT) > 0.95 * len(found)


def test_a_little_in_common_is_not_enough():
    traffic = Traffic()
    header = traffic.text("header", 2 * BLOCK)
    assert {traffic.ask(header, traffic.fresh(2000)) for _ in range(100)} == {UNIQUE}


def test_the_same_prompt_again_is_a_document_and_no_session():
    traffic = Traffic()
    prompt = traffic.text("prompt", 300)
    assert [traffic.ask(prompt) for _ in range(5)] == [UNIQUE, *[DOCUMENT] * 4]


def test_what_was_not_used_for_an_hour_starts_anew():
    traffic = Traffic()
    document = traffic.text("document", 700)
    traffic.ask(document, traffic.fresh(50))
    traffic.now += 3599
    assert traffic.ask(document, traffic.fresh(50)) is DOCUMENT
    traffic.now += 3601
    assert traffic.ask(document, traffic.fresh(50)) is UNIQUE


def test_shares_are_of_the_prompts_for_one_model():
    traffic = Traffic()
    system = traffic.text("system", 700)
    found = []
    for _ in range(100):
        found.append(traffic.ask(system, traffic.fresh(300)))
        for _ in range(20):
            traffic.ask(traffic.fresh(40), group=("default", "busy"))
    assert set(found[70:]) == {TEMPLATE}


def test_a_prompt_without_a_full_block_is_unique_and_costs_nothing():
    classes = PrefixClasses()
    assert classes.observe(GROUP, [], 1.0) is UNIQUE
    assert len(classes) == 0


def test_memory_is_bounded_and_what_is_in_use_stays():
    traffic = Traffic(PrefixClasses(max_nodes=500))
    system = traffic.text("system", 300)
    for _ in range(300):
        traffic.ask(system, traffic.fresh(300))
        traffic.ask(traffic.fresh(3000))
        assert len(traffic.classes) <= 500
    assert traffic.ask(system, traffic.fresh(300)) is TEMPLATE


def test_groups_are_bounded():
    classes = PrefixClasses(max_nodes=10)
    for number in range(5000):
        classes.observe(("pool", str(number)), [2 * number, 2 * number + 1], float(number))
    assert len(classes._prompts) <= 1024


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=40), st.floats(0, 5000)), min_size=1, max_size=30
    ),
    st.integers(1, 30),
)
def test_any_traffic_is_judged_the_same_each_time_whenever_it_is_put_down(prompts, max_nodes):
    def run(put_down):
        classes, now, found = PrefixClasses(max_nodes), 0.0, []
        for number, (blocks, pause) in enumerate(prompts):
            now += pause
            tokens = token_array([block for block in blocks for _ in range(BLOCK)] + [0])
            found.append(classes.observe(GROUP, prompt_chain(tokens, BLOCK, seed=1), now))
            if put_down(number):
                classes.settle()
        assert len(classes) <= max_nodes
        return found, len(classes)

    assert run(lambda _: True) == run(lambda _: False) == run(lambda number: number % 3 == 1)


def test_the_next_prompt_knows_the_one_before_it():
    traffic = Traffic()
    text = traffic.text("shared", 500)
    assert [traffic.ask(text, traffic.fresh(100)) for _ in range(2)] == [UNIQUE, DOCUMENT]


# --- in the router ---------------------------------------------------------------------------------------


def decided(router, tokens, now, **fields):
    decision = router.schedule(request(tokens, **fields), now)
    router.release(decision.lease_id, Completion(Outcome.FINISHED, output_tokens=900), now)
    return decision


def test_a_decision_has_the_class_of_its_prompt():
    router, traffic = make_router(), Traffic()
    document = traffic.text("document", 500)
    found = [decided(router, document + traffic.fresh(60), float(now)).request for now in range(3)]
    assert [ask.prompt_class for ask in found] == [UNIQUE, DOCUMENT, DOCUMENT]


def test_what_the_client_says_goes_before_what_was_learned_and_teaches_all_the_same():
    router, traffic = make_router(), Traffic()
    document = traffic.text("document", 500)
    said = decided(router, document + traffic.fresh(60), 1.0, prompt_class="rag-set")
    assert said.request.prompt_class == "rag-set"
    assert decided(router, document + traffic.fresh(60), 2.0).request.prompt_class == DOCUMENT


def test_what_is_routed_by_load_has_no_class():
    assert decided(make_router(), [], 1.0, prompt_tokens=500, load_only="budget").request.prompt_class == ""


def test_lengths_are_learned_by_class():
    router, traffic = make_router(), Traffic()
    for number in range(20):
        last = decided(router, traffic.fresh(100), float(number), max_output=None)
    assert (last.output.source, last.output.expected) == (LengthSource.CLASS, 900.0)


@pytest.mark.parametrize("revisions", [("v1", "v1"), ("v1", "v2"), ("v2", "v2")])
def test_during_a_rolling_update_a_request_has_one_class(revisions):
    router = router_of([member(number, revision) for number, revision in enumerate(revisions)])
    found = [
        decided(router, list(range(500)) + [900 + now] * 60, float(now), namespace=NAMESPACE).request
        for now in range(3)
    ]
    assert [ask.prompt_class for ask in found] == [UNIQUE, DOCUMENT, DOCUMENT]
