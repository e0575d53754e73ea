import json
import unicodedata
from array import array
from random import Random

import pytest

from extproc.analysis.differences import FAR, differences
from extproc.analysis.prefix_tree import common_bytes
from extproc.analysis.volatile import Kind
from extproc.prompt.tiny import tiny_model_path
from extproc.prompt.tokenizer import load_tokenizer
from tests.support.planted_log import words

TOKENIZER = load_tokenizer(tiny_model_path(), {})
RNG = Random(5)
DOCUMENT = words(RNG, 150)
FRAGMENTS = [f"{letter} {words(RNG, 40)}.\n" for letter in "ABCD"]
SCHEMA = {word: {"type": "string", "description": words(RNG, 6)} for word in ("city", "unit", "day")}


def encode(text: str) -> bytes:
    return array("I", TOKENIZER.encode(text, add_special_tokens=False).ids).tobytes()


def decode(tokens: bytes) -> str:
    ids = array("I")
    ids.frombytes(tokens)
    return TOKENIZER.decode(ids.tolist(), skip_special_tokens=False)


def count(text: str) -> int:
    return len(encode(text)) // 4


def compare(one: str, other: str, shared: int | None = None):
    earlier, later = encode(one), encode(other)
    same = common_bytes(earlier, later) // 4
    return differences(earlier, later, same, same if shared is None else shared, decode)


def backwards(schema: dict) -> dict:
    return {key: schema[key] for key in reversed(schema)}


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (Kind.TIMESTAMP, "2026-11-30T05:47:24Z", "2026-12-01T16:22:59Z"),
        (Kind.DATE, "2026-11-30", "2026-12-01"),
        (Kind.UUID, "123e4567-e89b-12d3-a456-426614174000", "987fcdeb-51a2-43d7-9b1c-0123456789ab"),
        (Kind.IDENTIFIER, "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"),
        (Kind.COUNTER, "17", "42"),
        (Kind.TEXT, "quite", "rather"),
    ],
)
def test_what_stands_before_equal_text_is_named_and_priced(kind, one, other):
    later = f"Rules.\nIt is {other}\n{DOCUMENT}\nWhy?"
    [found] = compare(f"Rules.\nIt is {one}\n{DOCUMENT}\nHow?", later)
    assert found.kind is kind
    before = count("Rules.\nIt is")
    assert before <= found.position <= before + 1
    assert found.cost == count(later) - count(f"Rules.\nIt is {other}") - count("Why?")
    assert found.value.lstrip().startswith(other[:2])
    assert not found.far


def test_a_user_is_told_by_what_stands_before():
    [found] = compare(f"User: Ann Lee\n{DOCUMENT}\nWhy?", f"User: Bob Moss\n{DOCUMENT}\nHow?")
    assert (found.kind, found.position) == (Kind.USER, count("User:"))


def test_each_of_two_breakers_costs_what_follows_it():
    later = f"It is 2026-12-01\n{DOCUMENT}\nturn 42\n{FRAGMENTS[0]}Why?"
    first, second = compare(f"It is 2026-11-30\n{DOCUMENT}\nturn 17\n{FRAGMENTS[0]}How?", later)
    assert (first.kind, second.kind) == (Kind.DATE, Kind.COUNTER)
    assert first.cost == pytest.approx(count(f"\n{DOCUMENT}\nturn "), abs=2)
    assert second.cost == pytest.approx(count("\n" + FRAGMENTS[0]), abs=2)


def test_what_is_hit_through_another_prompt_costs_nothing():
    one, other = f"turn 17\n{DOCUMENT}\nHow?", f"turn 42\n{DOCUMENT}\nWhy?"
    whole = compare(one, other)[0].cost
    assert compare(one, other, shared=count("turn 42") + 50)[0].cost == whole - 50
    assert compare(one, other, shared=count(other)) == []


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (3, 1, 0, 2), (2, 3, 0, 1), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_fragments_in_another_order_are_one_finding(order):
    later = "Rules.\n" + "".join(FRAGMENTS[at] for at in order) + "Why?"
    [found] = compare("Rules.\n" + "".join(FRAGMENTS) + "How?", later)
    assert found.kind is Kind.FRAGMENT_ORDER
    assert found.position == count("Rules.\n")
    assert found.cost == pytest.approx(count(later) - found.position - count("Why?"), abs=3)


def test_keys_in_another_order_are_one_finding_up_to_the_next_difference():
    one, other = (f"Tools: {json.dumps(schema)}\n{DOCUMENT}\n" for schema in (SCHEMA, backwards(SCHEMA)))
    [found] = compare(one + "How?", other + "Why?")
    assert found.kind is Kind.KEY_ORDER
    assert found.position == pytest.approx(count('Tools: {"'), abs=1)
    assert found.cost == count(other + "Why?") - found.position - count("Why?")


@pytest.mark.parametrize("end", ["\r\n", " \n"])
@pytest.mark.parametrize("length", [3, 40])
def test_line_ends_are_one_finding_however_short_the_lines(end, length):
    lines = [words(Random(at), length) for at in range(12)]
    later = end.join(lines) + "\n\nWhy?"
    found = compare("\n".join(lines) + "\n\nHow?", later)
    assert [finding.kind for finding in found] == [Kind.WHITESPACE]
    first = count(lines[0])
    assert found[0].position == pytest.approx(first, abs=1)
    assert found[0].cost == pytest.approx(count(later) - first, abs=10)


def test_another_unicode_form_of_the_same():
    text = "The oﬀice ﬁles ﬂat oﬀers, " * 12  # letters joined into one, as word processors do
    found = compare(f"About {text} How?", f"About {unicodedata.normalize('NFKC', text)} Why?")
    assert [finding.kind for finding in found] == [Kind.UNICODE]


def test_equal_text_behind_much_other_text_is_no_breaker():
    one, other = (
        f"{' '.join(str(Random(seed + at).random()) for at in range(FAR // 4))}\n{DOCUMENT}"
        for seed in (1000, 2000)
    )
    [found] = compare(one, other)
    assert found.far
    assert found.cost == pytest.approx(count(DOCUMENT), abs=2)


def test_different_prompts_have_no_findings():
    assert compare(f"x {words(Random(1), 100)}", f"y {words(Random(2), 100)}") == []
