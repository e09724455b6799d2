"""Charts: points are where their values say, nothing leaves its panel, and text is escaped."""

from __future__ import annotations

import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hisparse.cli import chart, png
from hisparse.cli.chart import (
    BOTTOM,
    LEFT,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    RIGHT,
    TOP,
    Line,
    Panel,
    check_plot,
    render,
    short,
    write,
)
from hisparse.errors import ConfigError, HiSparseError

SVG = "{http://www.w3.org/2000/svg}"


def panel(points: list[tuple[float, float]], **changes: bool) -> Panel:
    return Panel(title="a < b", x_label="x & y", y_label="y", lines=(Line(name="one", points=tuple(points)),), **changes)


def lines_of(*panels: Panel) -> list[list[tuple[float, float]]]:
    """Pixels of each drawn line, in its panel."""
    root = ElementTree.fromstring(render("title", panels))
    paths = [path.get("d", "") for group in root.iter(f"{SVG}g") for path in group.iter(f"{SVG}path")
             if "line" in (path.get("class") or "").split()]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths]


def test_a_linear_axis() -> None:
    ((first, middle, last),) = lines_of(panel([(0, 0), (50, 250), (100, 1000)]))
    assert first == (LEFT, PANEL_HEIGHT - BOTTOM) and last == (PANEL_WIDTH - RIGHT, TOP)
    assert middle == (pytest.approx((LEFT + PANEL_WIDTH - RIGHT) / 2), pytest.approx(PANEL_HEIGHT - BOTTOM - 0.25 * (
        PANEL_HEIGHT - BOTTOM - TOP), abs=0.1))


def test_logarithmic_axes_double_and_leave_out_zero() -> None:
    points = [(8192, 100), (16_384, 10), (32_768, 1), (65_536, 0)]
    ((a, b, c),) = lines_of(panel(points, x_log=True, y_log=True))
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.2) and b[1] - a[1] == pytest.approx(c[1] - b[1], abs=0.2)
    assert (a[1], c[1]) == (TOP, PANEL_HEIGHT - BOTTOM)


@pytest.mark.parametrize("points", [[(1, 1)], [(5, 0), (5, 0)], [(1, 3), (2, 1e6)], [(4096, 0.2), (8192, 17)], []])
def test_nothing_leaves_its_panel(points: list[tuple[float, float]]) -> None:
    for log in (False, True):
        for drawn in lines_of(panel(points, y_log=log), panel(points, x_log=log)):
            assert all(LEFT <= x <= PANEL_WIDTH - RIGHT and TOP <= y <= PANEL_HEIGHT - BOTTOM for x, y in drawn)


def test_text_is_escaped_and_the_values_are_readable_without_sight() -> None:
    root = ElementTree.fromstring(render("<misses>", [panel([(4096, 12.5)])]))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"<misses>", "a < b", "x & y", "one"} <= set(texts)
    described = root.find(f"{SVG}desc")
    assert described is not None and described.text == "a < b: one 4k: 12.5"
    assert [short(value) for value in (131_072, 1 << 20, 2500, 0.5, 0)] == ["128k", "1M", "2,500", "0.5", "0"]


def test_where_a_chart_may_go(tmp_path: Path) -> None:
    write(tmp_path / "a.svg", "t", [panel([(1, 2)])])
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    for path, text in ((tmp_path / "a.pdf", "name it .*a.svg"), (tmp_path / "no" / "a.svg", "no directory")):
        with pytest.raises(ConfigError, match=text):
            check_plot(path)


PANELS = [panel([(1, 1), (2, 5), (3, 2)]), panel([(1, 9), (3, 1)])]


def test_a_png_is_made_by_a_program_that_is_there(tmp_path: Path) -> None:
    if png.converter() is None:
        pytest.skip(f"none of {', '.join(png.PROGRAMS)} is installed")
    path = tmp_path / "chart.png"
    chart.write(path, "two", PANELS)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 5000, "more than a blank page"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (2 * len(PANELS) * chart.PANEL_WIDTH, 2 * (chart.HEAD_HEIGHT + chart.PANEL_HEIGHT))


@pytest.mark.parametrize("name", png.PROGRAMS)
def test_programs_that_make_pngs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """A stand-in for each writes down its arguments where the picture is expected."""
    program = tmp_path / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport pathlib, re, sys\n"
                       "out = re.search(r'\\S*chart\\.png', ' '.join(sys.argv)).group().rpartition('=')[2]\n"
                       "pathlib.Path(out).write_text(' '.join(sys.argv[1:]))\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert png.converter() == name
    chart.write(tmp_path / "made.png", "two", PANELS)
    said = (tmp_path / "made.png").read_text()
    assert "chart.svg" in said and ("2" in said or str(2 * len(PANELS) * chart.PANEL_WIDTH) in said)
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no display')\n")
    with pytest.raises(HiSparseError, match=f"{name} made no picture: no display; write an .svg instead"):
        chart.write(tmp_path / "made.png", "two", PANELS)


def test_without_such_a_program_an_svg_is_suggested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"rsvg-convert.*none of which is installed; name the chart .*chart\.svg"):
        chart.check_plot(tmp_path / "chart.png")
    with pytest.raises(HiSparseError, match="none of"):
        png.convert("<svg/>", tmp_path / "chart.png", width=1, height=1)
