import pytest

from extproc.analysis.log_fields import Fields, header_map, parse_time, read_fields


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1764481644, 1764481644.0),
        (1764481644.5, 1764481644.5),
        ("1764481644.5", 1764481644.5),
        (1764481644500, 1764481644.5),
        (1764481644500000, 1764481644.5),
        (1764481644500000000, 1764481644.5),
        ("2025-11-30T05:47:24Z", 1764481644.0),
        ("2025-11-30T06:47:24+01:00", 1764481644.0),
        ("2025-11-30 05:47:24", 1764481644.0),
        ("yesterday", None),
        ("1.2.3", None),
        (None, None),
        (True, None),
        ([], None),
    ],
)
def test_times_in_any_unit(value, seconds):
    assert parse_time(value) == seconds


def test_fields_of_a_gateway_line():
    levels = [
        {"@timestamp": 1764481644, "headers": {"X-Tenant-Id": "blue", "X-Session-ID": "s1"}},
        {"model": "m", "metadata": {"class": "rag", "prompt_version": "v7"}},
    ]
    assert read_fields(levels, {}) == Fields(1764481644.0, "blue", "s1", "rag", "v7")


def test_fields_may_be_named():
    levels = [{"meta": {"Team": "red", "when": "2025-11-30T05:47:24Z"}}, {"prompt_cache_key": "k"}]
    custom = {"tenant": "meta.team", "time": "meta.when", "class": "meta.none.deeper"}
    assert read_fields(levels, custom) == Fields(1764481644.0, "red", "k", None, None)


def test_nothing_said_is_nothing():
    assert read_fields([{"tenant": "-", "team": {"id": 1}}], {}) == Fields()
    assert read_fields([], {}) == Fields()


def test_headers_as_mapping_and_as_list():
    assert header_map({"request_headers": {"A-B": "c"}}) == {"a-b": "c"}
    assert header_map({"headers": [{"key": ":path", "value": "/x"}, {"key": 1}, "odd"]}) == {":path": "/x"}
    assert header_map({"headers": "text"}) == {}
