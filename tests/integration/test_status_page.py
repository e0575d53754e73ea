"""The status page in a real browser, and that page, command and endpoint say what the log says."""

import asyncio

import aiohttp
import pytest

from extproc.cli import main
from tests.support.browser import Browser, require_chromium
from tests.support.core import worker
from tests.support.watched import Watched

WORD = "s3cret"
NASTY = '<img src=x onerror="document.title=1"><b>id</b>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    require_chromium()
    with Browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


class Page:
    """A page whose server lives in this event loop: the browser is driven from a thread."""

    def __init__(self, browser):
        self.browser = browser

    def __getattr__(self, name):
        method = getattr(self.browser, name)
        return lambda *given, **named: asyncio.to_thread(method, *given, **named)

    async def until_text(self, selector, *words):
        await self.until(lambda: all(word in self.browser.text(selector) for word in words))


@pytest.fixture
async def watched(tmp_path):
    async with Watched(tmp_path) as one:
        one.warm(1, range(1, 321))
        for number in range(4):
            one.ask(f"request-{number}")
        yield one


@pytest.fixture
async def page(browser):
    one = Page(browser)
    yield one
    complaints = await one.complaints()
    assert not [text for text in complaints if "Content Security" in text or "Uncaught" in text], complaints


async def test_it_shows_workers_decisions_prefixes_and_that_all_is_well(page, watched):
    await page.show(watched.url)
    await page.until_text("#decisions", "request-3", "warm-partial")
    tiles = await page.text("#tiles")
    assert "4\nrequests routed" in tiles
    workers = await page.text("#workers")
    for n in range(3):
        assert worker(n).endpoint in workers
    assert "events complete" in workers
    assert "25 %" in workers
    key = watched.lines()[-1]["prefix_key"]
    assert key in await page.text("#prefixes")
    assert "as it should be" in await page.text("#warnings")
    assert "token-load" in await page.text("header")


async def test_it_is_live(page, watched):
    await page.show(watched.url)
    await page.until_text("#decisions", "request-3")
    watched.ask("afterwards")
    for _ in range(3):
        watched.router.on_scrape_failure(worker(2).endpoint)
    await page.until_text("#decisions", "afterwards")
    await page.until_text("#warnings", "10.0.0.2:8000", "not ready", "requests suffer")
    assert "not ready" in await page.text("#workers")
    for n in range(3):
        for _ in range(3):
            watched.router.on_page_failure(worker(n).endpoint, watched.clock(), slow=True)
    await page.until_text("#warnings", "pool default", "all the same")
    await page.until_text("#workers", "last resort")


async def test_bars_are_as_long_as_the_terms_are(page, watched):
    await page.show(watched.url)
    await page.until(lambda: page.browser.all(".decision .bar"))
    widths = await page.script(
        "return [...document.querySelectorAll('.decision')[0].querySelectorAll('.bar')].map(b => "
        "[...b.children].map(i => parseFloat(i.style.width)))"
    )
    found = watched.lines()[-1]["candidate_workers"]
    longest = max(candidate["total_ms"] for candidate in found[:2])
    for bar, candidate in zip(widths, found[:2], strict=True):
        expected = [
            100 * candidate[term] / longest for term in ("queue_ms", "prefill_ms", "decode_ms", "kv_risk_ms")
        ]
        assert bar == pytest.approx(expected, abs=0.01)


async def test_log_command_endpoint_and_page_tell_the_same_facts(page, watched, capsys):
    ended = {"cached_tokens": 16, "output_tokens": 7, "duration_ms": 400.0, "attempts": 2}
    elsewhere = worker(0).endpoint
    decision = watched.route("the-one")
    watched.end(decision, served_by=elsewhere, first_body_ms=91.0, upstream_first_body_ms=90.0, **ended)
    line = watched.lines()[-1]
    async with aiohttp.ClientSession() as client, client.get(f"{watched.url}/explain/the-one") as reply:
        answer = await reply.json()
    assert answer["decision"] == line

    for source in (["--admin", watched.url], ["--log", str(watched.file)]):
        assert await asyncio.to_thread(main, ["explain", "the-one", *source]) == 0
        assert capsys.readouterr().out == answer["text"]

    await page.show(watched.url)
    await page.until_text("#decisions", "the-one")
    await page.script("document.querySelector('.decision > button').click()")
    await page.until_text(".story", "Candidates")
    story = await page.text(".decision:first-child")
    told = answer["explanation"]
    sentences = [*told["request"], *told["why"], *told["happened"], *told["shadows"]]
    assert len(sentences) > 8
    for sentence in sentences:
        assert sentence in story
        assert sentence in answer["text"]
    rows = await page.script(
        "return [...document.querySelectorAll('.story tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[0] for row in rows] == [candidate["worker"] for candidate in line["candidate_workers"]]
    for row, candidate in zip(rows, line["candidate_workers"], strict=True):
        for cell, name in (
            (1, "total_ms"),
            (2, "queue_ms"),
            (3, "prefill_ms"),
            (4, "decode_ms"),
            (5, "kv_risk_ms"),
        ):
            assert float(row[cell].removesuffix(" ms")) == pytest.approx(
                candidate[name], rel=0.005, abs=0.051
            )
        assert row[6].replace(",", "") == str(candidate["cached_tokens"])
        assert row[7].replace(",", "") == str(candidate["uncovered_tokens"])


async def test_what_is_being_read_stays_while_others_come(page, watched):
    await page.show(watched.url)
    await page.until_text("#decisions", "request-3")
    await page.script("document.querySelector('.decision > button').click()")
    await page.until_text(".story", "What happened")
    for number in range(30):
        watched.ask(f"later-{number}")
    await page.until_text("#decisions", "later-29")
    assert "request-3" in await page.text("#decisions")
    assert "request-0" not in await page.text("#decisions")


async def test_it_can_be_paused(page, watched):
    await page.show(watched.url)
    await page.until_text("#decisions", "request-3")
    await page.script("document.getElementById('pause').click()")
    watched.ask("unseen")
    await page.script("return poll()")  # the next turn, at once
    assert "unseen" not in await page.text("#decisions")
    await page.script("document.getElementById('pause').click()")
    await page.until_text("#decisions", "unseen")


async def test_what_clients_name_is_text_and_never_markup(page, watched):
    decision = watched.route(NASTY)
    watched.end(decision, details=NASTY)
    await page.show(watched.url)
    await page.until_text("#decisions", NASTY)
    await page.script("document.querySelector('.decision > button').click()")
    await page.until_text(".story", "What happened")
    assert await page.script("return document.querySelectorAll('main img, main b b').length") == 0
    assert await page.script("return document.title") == "Warmroute"


async def test_a_lost_server_is_said_and_found_again(page, watched):
    await page.show(watched.url)
    await page.until_text("#decisions", "request-3")
    where = watched.admin.address
    await watched.admin.close()
    await page.until_text("#gone", "does not answer")
    await watched.admin.start(where)
    await page.until(lambda: not page.browser.text("#gone"))


async def test_a_token_is_asked_for_once(page, tmp_path):
    async with Watched(tmp_path, token=WORD) as watched:
        watched.ask("guarded")
        await page.show(watched.url)
        await page.until_text("#token", "admin token")
        assert "guarded" not in await page.text("body")
        await page.script("document.getElementById('secret').value = arguments[0]", WORD)
        await page.script("document.querySelector('#token button').click()")
        await page.until_text("#decisions", "guarded")
        await page.show(watched.url)
        await page.until_text("#decisions", "guarded")


async def test_before_anything_happened_it_says_so(page, tmp_path):
    async with Watched(tmp_path, workers=0) as watched:
        await page.show(watched.url)
        await page.until_text("#workers", "discovery has found none")
        assert "None yet" in await page.text("#decisions")
        assert "it has no workers" in await page.text("#warnings")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 800, 1280])
async def test_it_fits_and_can_be_read(page, watched, width, dark, tmp_path):
    for _ in range(3):
        watched.router.on_scrape_failure(worker(2).endpoint)
    watched.ask("a-request-id-that-is-much-longer-than-any-screen-is-wide-" * 4)
    await page.show(watched.url, width=width, dark=dark)
    await page.until_text("#decisions", "request-3")
    await page.until_text("#warnings", "not ready")
    await page.script("document.querySelector('.decision > button').click()")
    await page.until_text(".story", "Candidates")
    assert await page.script("return document.documentElement.scrollWidth <= innerWidth")
    assert await page.script(CONTRAST) == []
    await page.screenshot(tmp_path / "page.png")


CONTRAST = """
function rgb(text) { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; }
function light([r, g, b]) {
  const f = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
}
function behind(node) {
  for (; node; node = node.parentElement) {
    const color = rgb(getComputedStyle(node).backgroundColor);
    if (color[3] > 0) return color;
  }
  return [255, 255, 255, 1];
}
const found = [];
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !node.offsetParent || ['SCRIPT', 'STYLE'].includes(node.tagName)) continue;
  const a = light(rgb(getComputedStyle(node).color)), b = light(behind(node));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push(node.textContent.trim().slice(0, 40) + ' ' + ratio.toFixed(2));
}
return found;
"""
"""Texts whose contrast to what is behind them is below 4.5 : 1 (WCAG 2.2, 1.4.3, level AA)."""
