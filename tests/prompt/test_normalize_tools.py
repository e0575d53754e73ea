import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prompt.normalize_text import Rule, TextRules
from extproc.prompt.normalize_tools import MAX_DEPTH, tool_edits
from extproc.protocol.json_edit import apply_edits, parse_document

RULES = TextRules()
NUMBERS = ["1", "-0", "1.50", "1e400", "123456789012345678901234567890", "0.1000"]
KEYS = st.sampled_from(
    ["description", "title", "default", "enum", "properties", "type", "a", "é", "\U0001f600", "\ue000", '"']
)


def objects(values):
    return st.lists(st.tuples(KEYS, values), max_size=5).map(
        lambda members: "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in members) + "}"
    )


VALUES = st.recursive(
    st.sampled_from([*NUMBERS, "true", "null", r'"\u00e9\/"', '"é"', r'"e\u0301 \r\n x"', '"Date: 1\\nx"']),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]") | objects(inner),
    max_leaves=12,
)
TOOLS = st.lists(objects(VALUES), max_size=3).map(lambda tools: f" [{', '.join(tools)}] ".encode())


def normal(body, *, key_order=True, rules=RULES):
    counts = Counter()
    return apply_edits(body, tool_edits(parse_document(body), rules, counts, key_order=key_order)), counts


class Shuffled:
    """JSON text of a document whose objects list their members in a random order."""

    def __init__(self, rng):
        self.rng = rng

    def dumps(self, value):
        if isinstance(value, dict):
            members = [f"{json.dumps(key)}: {self.dumps(inner)}" for key, inner in value.items()]
            return "{" + ", ".join(self.rng.sample(members, len(members))) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(self.dumps, value)) + "]"
        return json.dumps(value)


@given(TOOLS)
def test_it_is_idempotent(body):
    once, counts = normal(body)
    assert normal(once) == (once, Counter())
    assert (once != body) == bool(counts)


@given(TOOLS, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(body, rng):
    document = json.loads(body)
    spell = Shuffled(rng).dumps
    assert normal(spell(document).encode())[0] == normal(spell(document).encode())[0]


@given(TOOLS)
def test_nothing_but_order_changes_where_only_order_may(body):
    changed, counts = normal(body, rules=TextRules(line_ends=False, unicode=False, trailing_spaces=False))
    assert json.loads(changed) == json.loads(body)
    assert sorted(changed) == sorted(body)
    assert set(counts) <= {Rule.KEY_ORDER}


@given(TOOLS)
def test_numbers_keep_their_digits(body):
    def numbers(of):
        found = []
        json.loads(of, parse_int=found.append, parse_float=found.append)
        return sorted(found)

    assert numbers(normal(body)[0]) == numbers(body)


@given(TOOLS)
def test_keys_keep_their_order_where_that_is_wanted(body):
    changed, counts = normal(body, key_order=False)
    assert Rule.KEY_ORDER not in counts

    def keys(of):
        found = []
        json.loads(of, object_pairs_hook=lambda pairs: found.append([key for key, _ in pairs]))
        return found

    assert keys(changed) == keys(body)


def test_members_move_as_the_bytes_they_are():
    body = rb'[{"b" : 1.50,"a":{"z":1e2, "\u0061":"\/\u00e9" }, "c":[{"y":0,"x":-0}]}]'
    expected = rb'[{"a":{"\u0061":"\/\u00e9", "z":1e2 },"b" : 1.50, "c":[{"x":-0,"y":0}]}]'
    changed, counts = normal(body)
    assert changed == expected
    assert counts == {Rule.KEY_ORDER: 3}


def test_of_equal_keys_the_last_one_still_counts():
    body = rb'[{"b":1,"a":1,"\u0062":2}]'
    changed, _ = normal(body)
    assert changed == rb'[{"a":1,"b":1,"\u0062":2}]'
    assert json.loads(changed) == json.loads(body)


def test_descriptions_are_texts_and_data_is_not():
    schema = {
        "description": "One \r\ntwo",
        "properties": {
            "description": {"type": "string", "title": "T ", "default": {"description": "kept \r\n"}},
            "default": {"description": "a schema\t"},
        },
        "enum": [{"title": "kept "}],
        "pattern": "kept ",
    }
    body = json.dumps([{"type": "function", "function": {"name": "kept ", "parameters": schema}}]).encode()
    changed, counts = normal(body)
    (tool,) = json.loads(changed)
    found = tool["function"]["parameters"]
    assert found["description"] == "One\ntwo"
    assert found["properties"]["description"]["title"] == "T"
    assert found["properties"]["description"]["default"] == {"description": "kept \r\n"}
    assert found["properties"]["default"]["description"] == "a schema"
    assert (found["enum"], found["pattern"]) == (schema["enum"], schema["pattern"])
    assert tool["function"]["name"] == "kept "
    assert counts == {Rule.LINE_ENDS: 1, Rule.TRAILING_SPACES: 3, Rule.KEY_ORDER: 4}


def test_a_description_has_no_header_and_no_fragments():
    rules = TextRules(fragment_tag="d", volatile_lines=("Date:",))
    body = json.dumps([{"description": "Date: 1\n<d>2</d><d>1</d>"}]).encode()
    assert normal(body, rules=rules) == (body, Counter())


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b'"x"', b"[1, null, []]"])
def test_what_is_no_tool_is_let_be(body):
    assert normal(body) == (body, Counter())


def test_what_is_nested_too_deeply_is_let_be():
    inner = b'{"b":1,"a":2}'
    deep = b"[" * MAX_DEPTH + inner + b"]" * MAX_DEPTH
    assert normal(b"[" + deep + b"]")[0] == b"[" + deep + b"]"
    near = b"[" * (MAX_DEPTH - 1) + inner + b"]" * (MAX_DEPTH - 1)
    assert b'{"a":2,"b":1}' in normal(b"[" + near + b"]")[0]


def test_order_is_by_code_point_and_a_permutation_is_found_again():
    keys = ["", "A", "Z", "a", "z", "é", "\ue000", "\U0001f600"]
    rng = random.Random(4)
    for _ in range(20):
        shuffled = dict.fromkeys(rng.sample(keys, len(keys)), 1)
        changed, _ = normal(json.dumps([shuffled]).encode())
        assert list(json.loads(changed)[0]) == keys
