"""Pictures of the docs: the committed files are what the script draws, and what it draws is there to be read."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from hisparse.cache.residency import PageState

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return script("pictures")


def test_the_committed_pictures_are_what_the_script_draws(pictures: ModuleType) -> None:
    drawn = pictures.files()
    assert {path.name for path in drawn} == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    for path, text in drawn.items():
        assert path.read_text() == text, f"{path} is stale: run python scripts/pictures.py"
    assert pictures.files() == drawn, "two runs draw different pictures"


def test_every_picture_can_be_read(pictures: ModuleType) -> None:
    for path, text in pictures.files().items():
        root = ElementTree.fromstring(text)
        title, words = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
        assert root.get("role") == "img" and title is not None and words is not None, path
        assert title.text and words.text and len(words.text) > 60, path
        style = root.find(f"{SVG}style")
        assert style is not None and style.text is not None
        light, dark = style.text.split("@media (prefers-color-scheme: dark)")
        used = {kind for item in root.iter() for kind in (item.get("class") or "").split()}
        filled = {kind for kind in used if re.search(rf"\.{kind} {{[^}}]*(?:fill|stroke): #", light)}
        assert used <= set(re.findall(r"\.([a-z]+) {", light)), f"{path}: a class without a style"
        assert filled <= set(re.findall(r"\.([a-z]+) {", dark)), f"{path}: {filled} have no colour in the dark"
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for item in root.iter():
            if item.get("x") is not None:
                assert 0 <= float(item.get("x", 0)) <= width and 0 <= float(item.get("y", 0)) <= height, (path, item.attrib)


def _luminance(colour: str) -> float:
    full = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
    parts = [int(full[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_words_stand_out_from_what_they_stand_on() -> None:
    """By WCAG's measure of contrast, in both modes."""
    for style in script("drawing").STYLE.split("@media"):
        fills = dict(re.findall(r"(?:\.|)(\w+) \{[^}]*(?<!-)fill: (#\w+)", style))
        ground = re.search(r"background: (#\w+)", style)
        assert ground is not None and {"svg", "dim", "device", "hot", "host", "move", "keys", "loose", "grown"} <= set(fills)
        boxes = {name: colour for name, colour in fills.items() if name not in ("svg", "dim", "tip")}
        for words, on in [("svg", boxes), ("dim", {"ground": ground[1]}), ("svg", {"ground": ground[1]})]:
            for name, colour in on.items():
                high, low = sorted((_luminance(fills[words]), _luminance(colour)), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= 4.5, f"{words} on {name}"


def test_the_life_that_is_drawn_is_the_one_told() -> None:
    moments = script("page_life").life_of_a_request()
    first_page = [moment.pages["a"][0] for moment in moments]
    assert list(dict.fromkeys(first_page)) == [
        PageState.SPILLING, PageState.CLEAN_PINNED, PageState.CLEAN_LOOSE, PageState.HOST_ONLY]
    assert all(moment.pages["a"][-1] in (PageState.GPU_ONLY, PageState.SPILLING) for moment in moments), "the tail stays"


def test_the_region_that_is_drawn_grows_and_gives_back() -> None:
    moments = script("page_life").elastic_region()
    grown = [moment.blocks["grown"] for moment in moments]
    assert grown[0] == 0 and max(grown) >= 4 and grown[-1] <= 1, grown
    totals = {sum(moment.blocks.values()) for moment in moments}
    assert len(totals) == 1 and min(min(moment.blocks.values()) for moment in moments) >= 0
