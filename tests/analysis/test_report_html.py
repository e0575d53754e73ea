import re
from html.parser import HTMLParser

from extproc.analysis.report_html import html_report, position_name, size_name
from tests.analysis.test_report import LINES, made

VOID = {"meta", "br", "link", "img"}


class Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href"), value  # nothing is fetched

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(**options) -> str:
    return html_report(made(**options), "warmroute analyze a.log")


def test_it_is_one_well_formed_page_with_charts():
    text = page()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert text.count("<svg") == 4
    for words in ("resend the first 10,000 tokens", "timestamp", "By tenant", "warmroute analyze a.log"):
        assert words in text


def test_text_of_prompts_is_escaped():
    lines = [line.replace(b"Answer", b"<script>alert(1)</script>") for line in LINES]
    text = page(lines=lines, show_text=True)
    assert "<script" not in text
    Checker().feed(text)


def test_a_log_without_requests_has_a_page_too():
    text = page(lines=[b"{"])
    Checker().feed(text)
    assert "no request to judge by" in text
    assert not re.search(r"\bnan\b", text)


def test_names_for_people():
    assert size_name(None) == "unlimited"
    assert size_name(100_000) == "100,000 tokens"
    assert position_name({"position": {"least": 5, "median": 5, "most": 5}}) == "5"
    assert position_name({"position": {"least": 5, "median": 7, "most": 1234}}) == "7 (5 to 1,234)"
