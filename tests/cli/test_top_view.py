import io

import pytest
from rich.console import Console

from extproc.adapters.holding import HeldState
from extproc.cli.top_view import view
from extproc.core.types import Outcome
from tests.support.core import members, worker
from tests.support.watched import Watched


@pytest.fixture
async def watched(tmp_path):
    async with Watched(tmp_path) as one:
        yield one


def shown(watched, height=None, width=180):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view(watched.board.state(), height))
    return console.file.getvalue()


async def test_a_decision_is_a_line_with_its_terms_as_a_bar(watched):
    watched.warm(1, range(1, 321))
    watched.ask("request-with-a-long-name")
    (line,) = [text for text in shown(watched).splitlines() if "request-with-" in text]
    entry = watched.lines()[0]
    best = entry["candidate_workers"][0]
    assert f" {best['total_ms']:,.1f} " in line
    assert f" {min(c['total_ms'] for c in entry['candidate_workers'][1:]):,.1f} " in line
    assert 0 < line.count("█") < 24
    assert line.count("█") + line.count("·") == 24
    for word in ("warm-partial", worker(1).endpoint, "320", "finished"):
        assert word in line


async def test_the_dearest_bar_is_full(watched):
    watched.ask("cold")
    (line,) = [text for text in shown(watched).splitlines() if "cold " in text and "10.0" in text]
    assert line.count("█") == 24


async def test_that_decisions_are_not_acted_on_is_shown(watched):
    assert "mode" not in shown(watched)
    watched.board.mode = "observe"
    assert "token-load (shadow: least-load), mode observe, on 127.0.0.1:50051" in shown(watched)


async def test_trouble_is_shown(watched):
    for _ in range(3):
        watched.router.on_scrape_failure(worker(2).endpoint)
    watched.end(watched.route("broken"), Outcome.CANCELLED)
    out = shown(watched)
    assert "! 10.0.0.2:8000: not ready" in out
    assert "(2 of 3 ready)" in out
    assert "cancelled" in out


async def test_a_last_resort_is_told_from_those_that_are_ready(watched):
    for n in range(3):
        for _ in range(3):
            watched.router.on_page_failure(worker(n).endpoint, 0.0, slow=True)
    out = shown(watched)
    assert out.count("last resort") == 3
    assert "(3 of 3 ready)" in out


async def test_nothing_yet_is_said(watched):
    out = shown(watched)
    assert "none yet" in out
    assert "Warnings" not in out


async def test_without_workers_it_is_not_ready(watched):
    watched.router.on_membership([], 0.0)
    out = shown(watched)
    assert "NOT READY" in out
    assert "pool default" in out


@pytest.mark.parametrize("height", [16, 24, 50])
async def test_it_fits_into_the_terminal(watched, height):
    watched.router.on_membership(members(40), watched.clock())
    for number in range(60):
        watched.ask(f"request-{number}")
    lines = shown(watched, height, width=250).splitlines()
    assert len(lines) <= height
    assert any("more" in line for line in lines)
    assert any("Recent decisions" in line for line in lines)


async def test_what_is_held_is_shown_and_for_whom(watched):
    waiting = {("acme", 2): 7, ("", 0): 1}
    watched.board.held = lambda: [HeldState("default", 8, 900, waiting, {"w": "queue"}, 2.0, 1.0)]
    assert "default: 8 held, about 2.0 s for one more, 1 workers full (acme at +2 7, no tenant 1)" in shown(
        watched
    )
    assert len(shown(watched, height=20).splitlines()) <= 20
