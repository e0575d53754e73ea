import re
from html.parser import HTMLParser

from extproc.sim.policies import POLICIES
from extproc.sim.report_html import html_report
from extproc.sim.results import result_of
from tests.support.fleet import documents, simulate

VOID = {"meta", "br"}


class Structure(HTMLParser):
    """Every element that was opened is closed, in order."""

    def __init__(self, page):
        super().__init__()
        self.stack, self.seen, self.text = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(*loads, replicas=3):
    results = [
        result_of(name, simulate(documents(40), POLICIES[name], replicas=replicas), load)
        for load in (loads or ({},))
        for name in ("round-robin", "token-load")
    ]
    return html_report(
        {"workload": "<docs>", "replicas": replicas}, results, 2000.0, "warmroute simulate --x 'a b'"
    )


def test_the_page_is_whole_and_needs_nothing_else():
    made = page()
    structure = Structure(made)
    assert structure.stack == []
    assert {"html", "head", "style", "body", "table", "svg", "polyline"} <= set(structure.seen)
    assert "script" not in structure.seen
    assert not re.search(r"(src|href)=|url\(|@import", made)
    assert "<docs>" in "".join(structure.text)
    assert "prefers-color-scheme: dark" in made


def test_one_load_has_a_table_a_distribution_hits_and_a_load_chart_per_policy():
    made = page()
    assert made.count("<table>") == 1
    assert made.count("<svg ") == 4
    assert "Rising load" not in made
    assert "warmroute simulate --x &#x27;a b&#x27;" in made


def test_several_loads_have_a_knee():
    made = page({"rate": 1.0}, {"rate": 4.0})
    assert "Rising load" in made
    assert made.index("1 sessions per second") < made.index("4 sessions per second")
    assert made.count("<svg ") == 9


def test_many_workers_become_a_band():
    assert "<polygon" not in page()
    assert "<polygon" in page(replicas=12)


def test_the_best_of_each_column_is_marked():
    assert 'class="best"' in page()
