import pytest

from extproc.protocol.hold_hints import body_priority, priority_of, timeout_ms

HEADER = "x-priority"


@pytest.mark.parametrize(
    ("said", "body", "most", "expected"),
    [
        (None, None, None, 0),
        ("3", None, None, 3),
        (" -2 ", None, None, -2),
        ("3", 7, None, 3),  # the header counts for more
        (None, 7, None, 7),
        ("high", 7, None, 7),
        ("9", None, 2, 2),
        ("1", None, 2, 1),
        (None, None, 2, 2),
        (None, None, -4, -4),
        ("0", None, -4, -4),
        ("1000", None, None, 100),
        ("-1000", None, None, -100),
        ("9" * 5000, None, None, 0),
        ("1.5", None, None, 0),
    ],
)
def test_priority(said, body, most, expected):
    headers = {} if said is None else {HEADER: said}
    assert priority_of(headers, HEADER, body, most) == expected


def test_no_header_is_read_where_none_is_named():
    assert priority_of({HEADER: "3"}, None, None, None) == 0


@pytest.mark.parametrize(
    ("value", "expected"), [(3, -3), (-2, 2), (True, None), ("3", None), (1.5, None), (None, None)]
)
def test_priority_of_a_body_goes_the_other_way(value, expected):
    assert body_priority({"priority": value}) == expected
    assert body_priority({}) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"a": "1500"}, 1500),
        ({"b": "20"}, 20),
        ({"a": "1500", "b": "20"}, 1500),
        ({"a": "0", "b": "20"}, 20),
        ({"a": "-5"}, None),
        ({"a": "10s"}, None),
    ],
)
def test_timeout(headers, expected):
    assert timeout_ms(headers, ("a", "b")) == expected
