"""The residency page in a headless Chromium, over the real API with scripted engines."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from hisparse.cli import free_port
from hisparse.serve.ingress import create_api
from tests.integration.browser import SCREENSHOTS, PageServer, check_layout, listen, open_browser, until
from tests.serve.conftest import small_config
from tests.serve.fakes import FakeBackend
from tests.serve.residency_world import ScriptedEngine, service

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OPEN_REQUESTS = "#requests tbody tr"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


class Site:
    """The API with its page, and what the engines behind it report."""

    def __init__(self, reports: Any, **serve: Any) -> None:
        self.backend = FakeBackend()
        self.backend.residency_reports = reports
        self.server = PageServer(lambda: create_api(small_config(**serve), lambda: self.backend), free_port("127.0.0.1"))
        self.page_url = f"{self.server.url}/residency"


@pytest.fixture
def make_site() -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(reports: Any, **serve: Any) -> Site:
        sites.append(Site(reports, **serve))
        return sites[-1]

    yield make
    for site in sites:
        site.server.stop()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    contexts = []

    def make(url: str, *, width: int = 1280, scheme: str = "light", **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()


def live(page: Page) -> None:
    page.wait_for_selector('#status[data-state="live"]')


def updates(page: Page, count: int) -> None:
    """Waits for so many frames more."""
    page.evaluate("""count => new Promise(resolve => {
      const text = document.getElementById("updated");
      const seen = new MutationObserver(() => { if (--count <= 0) { seen.disconnect(); resolve(); } });
      seen.observe(text, {childList: true, characterData: true, subtree: true});
    })""", count)


@pytest.mark.parametrize(("fault", "found"), [
    ("<p style='width:2000px'>wide</p>", "beside"), ("<p style='position:relative;left:-50px'>left</p>", "beside"),
    ("<p style='width:30px;overflow:hidden;white-space:nowrap'>much too long a word</p>", "cut off"),
    ("<p style='margin-top:-30px'>over what stands above</p>", "one over the other"),
    ("<p style='color:#999'>pale</p>", "contrast"), ("<p style='opacity:1;color:rgba(0,0,0,.4)'>pale too</p>", "contrast"),
])
def test_the_check_of_a_layout_sees_a_fault(open_page: Callable[..., Page], fault: str, found: str) -> None:
    page = open_page("about:blank", width=360)
    style = "".join(f".k-{kind} {{ background: #06c; }}" for kind in ("device", "hot", "host", "import"))
    page.set_content(f"<style>{style}</style><section>{'<p>line</p>' * 5}</section>")
    check_layout(page, texts=5)
    page.set_content(f"<style>{style}</style><section>{'<p>line</p>' * 5}{fault}</section>")
    with pytest.raises(AssertionError, match=found):
        check_layout(page, texts=5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("requests", [0, 3, 256])
def test_it_looks_right(requests: int, scheme: str, make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    site = make_site(service(requests, longest_pages=2048 if requests == 256 else 60))
    page = open_page("about:blank", scheme=scheme)
    complaints = listen(page)
    page.goto(site.page_url)
    live(page)
    if requests:
        updates(page, 1)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 900})
        check_layout(page)
        page.screenshot(path=SCREENSHOTS / f"residency-{requests}-{scheme}-{width}.png", full_page=True)
    assert page.locator("#empty").is_visible() == (requests == 0)
    assert page.locator(OPEN_REQUESTS).count() == min(requests, 20)
    assert complaints == []


def test_the_figures_are_those_of_the_engines(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    engine = ScriptedEngine(requests=3, longest_pages=60)
    site = make_site(lambda: [engine.report()])
    page = open_page(site.page_url)
    live(page)
    updates(page, 2)
    report = engine.report()
    for asked in report["requests"]:
        row = page.locator(OPEN_REQUESTS, has_text=asked["id"])
        text = row.inner_text()
        assert f"{asked['device']:,} on device" in text and asked["state"] in text and engine.name in text
        if asked["host"]:
            assert f"{asked['host']:,} host only" in text and f"{asked['hot_rows']:,}" in text
            assert row.locator("td.where svg path.f-host").get_attribute("d")
        assert re.search(r"\d %", text), "a rate, from the second frame on"
        assert row.locator("td.rate path").get_attribute("d")
    card = page.locator(".engines .card").inner_text()
    pools = report["pools"]
    assert f"{pools['host']['pages']:,} of {pools['host']['total']:,} pages" in card and "healthy" in card
    assert f"hot regions {pools['device']['hot']:,}" in card and re.search(r"tokens/s\s+\d", card)
    failed = page.locator("#landings tbody tr", has_text="generation")
    assert "page 12 of host blocks was reused while it was read" in failed.inner_text()
    assert "prefill-90d1f3a2c4e6" in page.locator("#landings tbody tr").first.inner_text()
    assert page.locator("#spills tbody tr").count() == len(report["pending"]) > 0


def test_the_empty_page_explains_itself_and_its_command_works(make_site: Callable[..., Site],
                                                               open_page: Callable[..., Page]) -> None:
    site = make_site(service(0))
    page = open_page(site.page_url)
    live(page)
    assert "No request is open" in page.inner_text("#empty") and "has a row here" in page.inner_text("#empty")
    words = shlex.split(page.inner_text("#curl").replace("\\\n", " "))
    assert words[0] == "curl" and words[1] == f"{site.server.url}/v1/completions"
    headers = dict(value.split(": ", 1) for flag, value in itertools.pairwise(words) if flag == "-H")
    body = next(value for flag, value in itertools.pairwise(words) if flag == "-d")
    answer = httpx.post(words[1], headers=headers, content=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert site.backend.calls[-1].text == json.loads(body)["prompt"]
    page.click("#copy")
    page.locator("#copied", has_text=re.compile(".")).wait_for()


def test_one_sampling_for_all_and_none_for_nobody(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    site = make_site(service(3))
    assert site.backend.samplings == 0
    pages = [open_page(site.page_url) for _ in range(3)]
    for page in pages:
        live(page)
    before = site.backend.samplings
    updates(pages[0], 2)
    assert site.backend.samplings - before <= 4, "once a second, not once a second and viewer"
    for page in pages[1:]:
        page.close()
    pages[0].click("#pause")
    pages[0].locator("#status", has_text="Paused").wait_for()
    assert pages[0].get_attribute("#pause", "aria-pressed") == "true"

    def quiet() -> bool:
        seen = site.backend.samplings
        pages[0].wait_for_timeout(1500)
        return site.backend.samplings == seen

    until(quiet)
    pages[0].click("#pause")
    live(pages[0])


def test_a_lost_connection_says_so_keeps_the_figures_and_comes_back(make_site: Callable[..., Site],
                                                                    open_page: Callable[..., Page]) -> None:
    site = make_site(service(3))
    page = open_page(site.page_url)
    live(page)
    site.server.stop()
    page.wait_for_selector("#lost-notice", state="visible")
    notice = page.inner_text("#lost-notice")
    assert "Connection lost" in notice and "Next attempt in" in notice
    assert re.search(r"figures below are of \d\d:\d\d:\d\d", notice)
    assert page.inner_text("#status") == "Connection lost, retrying" and page.locator(OPEN_REQUESTS).count() == 3
    check_layout(page)
    page.screenshot(path=SCREENSHOTS / "residency-lost.png", full_page=True)
    site.server.start()
    page.click("#retry")
    live(page)
    assert page.locator("#lost-notice").is_hidden()


def test_a_silent_connection_is_a_lost_one(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    site = make_site(service(3))
    page = open_page("about:blank")
    page.clock.install()
    page.goto(site.page_url)
    live(page)
    page.route("**/residency/events", lambda route: route.abort())  # of the next attempt
    page.clock.fast_forward(30_000)
    page.wait_for_selector("#lost-notice", state="visible")
    assert page.inner_text("#status") == "Connection lost, retrying"
    page.unroute("**/residency/events")
    page.clock.fast_forward(30_000)
    live(page)


def test_what_the_service_answers_is_shown(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    site = make_site(TimeoutError("the cluster's directory does not answer"))
    page = open_page(site.page_url)
    page.wait_for_selector("#trouble-notice", state="visible")
    assert "the cluster's directory does not answer" in page.inner_text("#trouble-text")
    site.backend.residency_reports = []
    page.locator("#trouble-text", has_text="No engine runs").wait_for()
    site.backend.residency_reports = [
        {"engine": "decode-1", "health": {"ok": False, "reason": "rank 0 of decode-1 is dead"}},
        {"engine": "decode-2", "health": {"ok": True, "reason": ""}}]
    page.wait_for_selector(".card .sick")
    assert "rank 0 of decode-1 is dead" in page.inner_text(".card .sick")
    assert "busy with a long step" in page.inner_text("#engines") and page.locator("#trouble-notice").is_hidden()
    check_layout(page)


def test_a_refusal_is_shown_in_the_service_s_words(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    site = make_site(service(3))
    page = open_page("about:blank", width=360)
    words = "this service has no API keys, so it answers only clients on its own machine"
    page.route("**/residency/events", lambda route: route.fulfill(status=403, json={"error": {"message": words}}))
    page.goto(site.page_url)
    page.locator("#lost-text", has_text=words).wait_for()
    assert page.inner_text("#lost-title") == "No connection" and site.backend.samplings == 0
    check_layout(page, texts=10)


def test_a_key_is_asked_for_and_stays_in_the_tab(make_site: Callable[..., Site], open_page: Callable[..., Page],
                                                 tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red r-key\nblue b-key\n")
    engine = ScriptedEngine(requests=4, tenants=("red", "blue"))
    site = make_site(lambda: [engine.report()], api_keys_file=str(keys))
    page = open_page(site.page_url, width=360, scheme="dark")
    page.wait_for_selector("#key-notice", state="visible")
    assert page.evaluate("document.activeElement.id") == "key" and page.locator("#engines-section").is_hidden()
    check_layout(page, texts=10)
    page.screenshot(path=SCREENSHOTS / "residency-key.png", full_page=True)
    for wrong, told in (("with space ✓", "cannot be a key"), ("wrong", "does not accept that key")):
        page.fill("#key", wrong)
        page.keyboard.press("Enter")
        page.locator("#key-text", has_text=told).wait_for()
    page.fill("#key", "r-key")
    page.keyboard.press("Enter")
    live(page)
    text = page.inner_text("#requests")
    assert all((name in text) == (i % 2 == 0) for i, name in enumerate(engine.names)) and text.count("other-") == 2
    assert "tenant red" in text and "blue" not in page.content() and page.locator("#masked").is_visible()
    assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [0, "", site.page_url]
    assert "r-key" not in page.content()
    page.reload()
    live(page)
    other = open_page(site.page_url)
    other.wait_for_selector("#key-notice", state="visible")


def test_what_a_client_names_is_text_and_nothing_else(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    names = ["<img src=x onerror=window.broken=1>", "</script><script>window.broken=1</script>",
             "\u202egnirts\u202c \u2028 \n\ndata: {}", "x" * 500, "{{7*7}} ${7*7} &lt;b&gt;", "' onmouseover='window.broken=1"]
    engine = ScriptedEngine("<b>engine</b>", names=names, tenants=("<i>tenant</i>",))
    engine.health = {"ok": False, "reason": "<svg onload=window.broken=1>"}
    site = make_site(lambda: [engine.report()])
    page = open_page("about:blank", width=360)
    complaints = listen(page)
    page.goto(site.page_url)
    live(page)
    text = page.inner_text("#requests")
    for name in (names[0], names[1], names[4], names[5], "<b>engine</b>", "<i>tenant</i>"):
        assert name in text
    assert page.locator("main img, main b, main i, main script, main svg svg").count() == 0
    assert page.evaluate("window.broken") is None and complaints == []
    check_layout(page)


def test_256_requests_can_be_sorted_found_and_listed(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    engine = ScriptedEngine(requests=256, longest_pages=2048)
    site = make_site(lambda: [engine.report()])
    page = open_page(site.page_url)
    live(page)
    assert page.inner_text("#shown") == "20 of 256 shown" and page.locator("#skyline").is_visible()

    def column(label: str) -> list[str]:
        return page.locator(f'#requests td[data-label="{label}"]').all_inner_texts()

    tokens = [int(value.replace(",", "")) for value in column("Tokens")]
    page.get_by_role("button", name="Tokens").click()
    assert page.get_attribute('#requests th:has-text("Tokens")', "aria-sort") == "descending"
    assert page.get_attribute('#requests th:has-text("Pages")', "aria-sort") == "none"
    tokens = [int(value.replace(",", "")) for value in column("Tokens")]
    assert tokens == sorted(tokens, reverse=True)
    page.select_option("#sort", "rate")
    updates(page, 1)
    rates = [float(value.replace("\N{EN DASH}", "101").removesuffix("%")) for value in column("From the device")]
    assert rates == sorted(rates) and rates[0] < 100
    page.select_option("#most", label="all")
    assert page.locator(OPEN_REQUESTS).count() == 256 and page.inner_text("#shown") == ""
    page.fill("#filter", engine.names[77][5:20])
    assert page.locator(OPEN_REQUESTS).count() == 1 and engine.names[77] in page.inner_text(OPEN_REQUESTS)
    page.fill("#filter", "waiting")
    assert set(column("State")) == {"waiting"}
    check_layout(page)


def test_it_works_with_a_keyboard_and_a_screen_reader(make_site: Callable[..., Site], open_page: Callable[..., Page]) -> None:
    site = make_site(service(3))
    page = open_page(site.page_url, reduced_motion="reduce", width=360)
    live(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the requests"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        outline = page.evaluate("""() => { const it = document.activeElement;
            return it === document.body ? null : [it.id || it.textContent.trim(), getComputedStyle(it).outlineStyle,
              parseFloat(getComputedStyle(it).outlineWidth)]; }""")
        if outline is None:
            break
        assert outline[1] != "none" and outline[2] >= 2, f"no focus shown at {outline[0]}"
        reached.add(outline[0])
    assert {"pause", "filter", "sort", "most", "Tokens", "State", "How to read this page"} <= reached
    tree = page.locator("body").aria_snapshot()
    for landmark in ("banner", "main", "contentinfo", 'region "Requests"', 'region "Engines"', 'table "Requests"',
                     'heading "Residency" [level=1]', 'columnheader "Pages by place"', 'searchbox "Find"', 'combobox "Sort by"',
                     'button "Pause"', "status: Live"):
        assert landmark in tree, f"{landmark} is not in\n{tree}"
    assert page.get_by_role("table", name="Requests").get_by_role("row").count() == 4, "also where rows are drawn as cards"
    assert page.locator('[role="status"], [aria-live]').count() == 2, "figures that change each second are not read out"
    assert page.evaluate("getComputedStyle(document.querySelector('main section')).transitionDuration") == "0s"
    assert page.locator("svg:not([aria-hidden=true])").count() == 0, "what a graphic says stands beside it as text"
