from array import array
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.breakers import GRAM, BreakerFinder, anchors_of
from extproc.analysis.prefix_tree import PrefixTree
from extproc.analysis.volatile import Kind


def tokens(ids) -> bytes:
    return array("I", ids).tobytes()


def decode(data: bytes) -> str:
    ids = array("I")
    ids.frombytes(data)
    return "".join(f"{token} " if token < 1000 else f"w{token} " for token in ids)


class Log:
    """A tree and a finder, as the analyzer has them. Tokens below 1000 read as numbers."""

    def __init__(self, **options) -> None:
        self.tree = PrefixTree(1 << 30)
        self.finder = BreakerFinder(decode, Random(0), **options)

    def add(self, ids, label="t") -> float:
        data = tokens(ids)
        shared, path = self.tree.add("", data)
        return self.finder.look(data, shared, path, anchors_of(data), label)


def document(seed: int, length: int = 200) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1000, 1 << 20) for _ in range(length)]


@given(st.lists(st.integers(0, 2000), max_size=200), st.lists(st.integers(0, 2000), max_size=30))
def test_equal_text_has_equal_anchors_wherever_it_stands(text, before):
    alone = anchors_of(tokens(text))
    moved = anchors_of(tokens([*before, *text]))
    expected = [(at + len(before), digest) for at, digest in zip(alone.positions, alone.hashes, strict=True)]
    found = [item for item in zip(moved.positions, moved.hashes, strict=True) if item[0] >= len(before)]
    assert found == expected
    assert all(at + GRAM <= len(text) for at in alone.positions)


def test_the_prompt_with_the_same_document_is_found_among_many():
    log = Log()
    for at in range(30):
        log.add([5000, 10 + at, *document(at % 3), 7000 + at])
    [breaker] = log.finder.breakers.values()
    assert (breaker.kind, breaker.requests, breaker.tokens) == (Kind.COUNTER, 27, 27 * 200)
    assert set(breaker.positions) == {1}
    assert log.finder.recoverable == 27 * 200


def test_conversations_that_go_on_are_not_compared():
    log = Log()
    history = document(1)
    for at in range(5):
        assert log.add([*history, *document(2)[: 40 * at]]) == 0
    assert log.finder.breakers == {}


def test_beyond_the_limit_a_share_is_compared_and_counts_for_the_others():
    log = Log(full=50)
    for at in range(1000):
        log.add([5000, 10 + at % 900, *document(at % 3), 7000 + at])
    assert 50 < log.finder.compared < log.finder.candidates / 2
    true = 997 * 200
    assert 0.6 * true < log.finder.recoverable < 1.4 * true


def test_anchors_are_bounded_and_the_latest_stay():
    log = Log(anchors=100)
    for at in range(50):
        log.add([5000, 10 + at, *document(at)])
    assert len(log.finder._anchors) <= 100
    assert log.finder.anchors_dropped > 0
    assert log.add([5000, 99, *document(49)]) == 200
    assert log.add([5000, 98, *document(0)]) == 0


def test_text_that_was_forgotten_is_not_compared_with():
    log = Log()
    log.tree = PrefixTree(3000)
    for at in range(20):
        log.add([5000 + at, *document(at)])
    assert log.add([1, *document(0)]) == 0


def test_many_places_are_merged(monkeypatch):
    monkeypatch.setattr("extproc.analysis.breakers.GROUPS", 3)
    log = Log()
    for at in range(40):
        log.add([2000 + at % 10, 5, 6 * 10 ** (at % 7 // 3), 10 + at, *document(3)])
    assert len(log.finder.breakers) <= 3 + len(Kind)
