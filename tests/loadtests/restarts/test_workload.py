import json
from collections import Counter
from itertools import islice, pairwise

from loadtests.restarts.workload import QUICK, bodies

# In 45 requests: 27 questions (three rounds of the documents) and 18 turns (three rounds of the chats).
ROUNDS = 3
REQUESTS = 45


def sent(seed=1, count=REQUESTS):
    return [json.loads(body)["messages"] for body in islice(bodies(QUICK, "tiny", seed), count)]


def test_the_same_seed_gives_the_same_requests():
    assert sent(1) == sent(1) != sent(2)


def test_every_document_is_asked_about_equally_often_and_never_with_the_same_question():
    asked = [messages for messages in sent() if len(messages[0]["content"]) > 200]
    counts = Counter(messages[0]["content"] for messages in asked)
    assert len(counts) == QUICK.documents
    assert set(counts.values()) == {ROUNDS}
    assert len({messages[1]["content"] for messages in asked}) == len(asked)


def test_chats_grow_by_a_turn_and_begin_anew_when_they_are_over():
    turns = [messages for messages in sent(count=300) if len(messages[0]["content"]) <= 200]
    by_first = {}
    for messages in turns:
        by_first.setdefault(messages[1]["content"], []).append(messages)
    assert len(by_first) > QUICK.chats
    for chat in by_first.values():
        for before, after in pairwise(chat):
            assert after[: len(before)] == before
            assert len(after) == len(before) + 2
        assert len(chat[-1]) <= 2 * QUICK.turns
    # All ages at once.
    assert len({len(messages) for messages in turns[: QUICK.chats]}) > 1
