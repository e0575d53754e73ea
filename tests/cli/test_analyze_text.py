import io

import pytest
from rich.console import Console

from extproc.cli.analyze_text import print_report
from tests.analysis.test_report import made


def printed(**options) -> str:
    out = io.StringIO()
    print_report(made(**options), Console(file=out, width=140, highlight=False))
    return out.getvalue()


def test_the_verdict_comes_first_and_everything_is_there():
    text = printed()
    assert text.startswith("Fix the prompts first")
    for title in (
        *("Do users resend", "What repeats", "find in its caches", "What breaks prefixes"),
        *("The biggest shared beginnings", "By use", "By tenant", "What was read"),
    ):
        assert title in text
    assert "timestamp" in text
    assert "put the time behind everything" in text
    assert "--show-text" in text


@pytest.mark.parametrize("show", [False, True])
def test_text_of_prompts_only_where_asked_for(show):
    text = printed(show_text=show)
    assert ("Current time:" in text) is show
    assert ("--show-text" in text) is not show


def test_lines_that_are_no_requests_are_told_with_their_places():
    text = printed(lines=[b"{"])
    assert "There is no request to judge by." in text
    assert "not valid JSON (cut off?) (log:1)" in text
