"""A headless Chromium for tests of pages, a server for them, and what a page must be whatever it shows."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]
SCREENSHOTS = Path(os.environ.get("HISPARSE_SCREENSHOTS", Path(__file__).parents[2] / "build" / "screenshots"))


@contextmanager
def open_browser() -> Iterator[Browser]:
    """With a profile of its own. Skips where there is no Chromium.

    Playwright's loop runs until the end of the block: no `asyncio.run` in it.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class PageServer:
    """A FastAPI app on a port of this machine, in a thread; can be stopped and started again."""

    def __init__(self, app: Callable[[], Any], port: int) -> None:
        self._app, self.port = app, port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        import uvicorn

        self._server = uvicorn.Server(uvicorn.Config(self._app(), host="127.0.0.1", port=self.port, log_level="error",
                                                     lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """What `condition` gives as soon as it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)
    return value


def listen(page: Page) -> list[str]:
    """What the page complains of from now on: errors, warnings, violations of its policy."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return complaints


def check_layout(page: Page, *, texts: int = 20) -> None:
    """Nothing beside the window, no text cut off or over another, every text and graphic with enough contrast."""
    found = page.evaluate(_MEASURE)
    assert found["beside"] == [], f"beside the window of {found['width']} px: {found['beside']}"
    assert found["cut"] == [], f"cut off: {found['cut']}"
    assert found["over"] == [], f"one over the other: {found['over']}"
    assert found["pale"] == [], f"contrast below 4.5 (text) or 3 (graphics): {found['pale']}"
    assert found["texts"] >= texts, "there is something to check"


_MEASURE = """() => {
  const result = {width: innerWidth, beside: [], cut: [], over: [], pale: [], texts: 0};
  const whole = document.documentElement.scrollWidth;
  if (whole > innerWidth) result.beside.push(`page of ${whole} px`);

  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => top.slice(0, 3).map((value, i) => value * top[3] + under[i] * (1 - top[3])).concat(1);
  const behind = node => {
    const layers = [];
    for (; node && layers.at(-1)?.[3] !== 1; node = node.parentElement)
      layers.push(rgba(getComputedStyle(node).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const linear = value => value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);

  const boxes = [];
  const inside = (rect, bounds) => rect.left >= bounds.left - 1 && rect.right <= bounds.right + 1
    && rect.top >= bounds.top - 1 && rect.bottom <= bounds.bottom + 1;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const parent = node.parentElement, words = node.textContent.trim().slice(0, 40);
    if (!words || ["SCRIPT", "STYLE", "OPTION"].includes(parent.tagName) || !parent.checkVisibility()) continue;
    const head = parent.closest("thead");
    if (parent.closest(".skip") || (head && getComputedStyle(head).clipPath !== "none")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const ratio = contrast(over(rgba(getComputedStyle(parent).color), behind(parent)), behind(parent));
    if (ratio < 4.5) result.pale.push(`${words}: ${ratio.toFixed(2)}`);
    for (const rect of range.getClientRects()) {
      if (!rect.width || !rect.height) continue;
      result.texts += 1;
      if (rect.left < -0.5 || rect.right > innerWidth + 0.5) result.beside.push(words);
      for (let box = parent; box && box !== document.body; box = box.parentElement)
        if (getComputedStyle(box).overflowX !== "visible" && !inside(rect, box.getBoundingClientRect())) result.cut.push(words);
      boxes.push([rect, words, node]);
    }
  }
  for (const svg of document.querySelectorAll("svg"))
    if (svg.checkVisibility()) boxes.push([svg.getBoundingClientRect(), "a graphic", svg]);
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [a, first, one] = boxes[i], [b, second, two] = boxes[j];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (one !== two && wide > 1.5 && high > 3) result.over.push(`${first} | ${second}`);
  }
  for (const kind of ["device", "hot", "host", "import"]) {
    const probe = document.createElement("span");
    probe.className = `key k-${kind}`;
    document.querySelector("section:not(.bare)").append(probe);
    const ratio = contrast(behind(probe), behind(probe.parentElement));
    if (ratio < 3) result.pale.push(`graphic ${kind}: ${ratio.toFixed(2)}`);
    probe.remove();
  }
  return result;
}"""
