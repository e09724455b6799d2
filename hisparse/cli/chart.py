"""Line charts as SVG, written by hand: no plotting library, text stays text, light and dark, readable without colours.

A PNG is made of the SVG by another program, see `hisparse.cli.png`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hisparse.cli import png
from hisparse.errors import ConfigError

PANEL_WIDTH, PANEL_HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
HEAD_HEIGHT = 54
"""Title and legend."""
COLUMNS = 2
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2")
STYLE = """
  svg { background: #fff; font: 12px system-ui, sans-serif; fill: #222; }
  .axis { stroke: #888; fill: none; } .grid { stroke: #ddd; } .title { font-weight: 600; font-size: 13px; }
  .line { fill: none; stroke-width: 2; } .s0 { stroke: #0b5cad; } .s1 { stroke: #b3410e; } .s2 { stroke: #1d7a3e; }
  .s3 { stroke: #7a3aa0; } .s4 { stroke: #8a6d00; } .s5 { stroke: #555; }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181c; fill: #e4e6ea; } .axis { stroke: #888; } .grid { stroke: #33363c; }
    .s0 { stroke: #6db3ff; } .s1 { stroke: #ff9a66; } .s2 { stroke: #6fd694; } .s3 { stroke: #d39bf5; }
    .s4 { stroke: #e0c04d; } .s5 { stroke: #bbb; }
  }"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One named line; points by x, ascending."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes. On a logarithmic axis, values of 0 and less are left out of the line."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_log: bool = False
    y_log: bool = False


def check_plot(path: Path) -> None:
    """Raises ConfigError unless a chart may be written to `path`; before the work whose result it shows."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"charts are written as SVG or PNG, got {path}; name it {path.with_suffix('.svg')}")
    if path.suffix == ".png" and png.converter() is None:
        raise ConfigError(f"a PNG is made by one of {', '.join(png.PROGRAMS)}, none of which is installed; name the chart "
                          f"{path.with_suffix('.svg')}, which browsers show")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write the chart {path}: there is no directory {path.parent}")


def write(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Writes the panels, two in a row, with one legend.

    Raises:
        ConfigError: see `check_plot`; or the file cannot be written. HiSparseError: see `png.convert`.
    """
    check_plot(path)
    try:
        if path.suffix == ".png":
            png.convert(render(title, panels), path, width=_size(panels)[0], height=_size(panels)[1])
        else:
            path.write_text(render(title, panels))
    except OSError as error:
        raise ConfigError(f"cannot write the chart {path}: {error.strerror}") from error


def render(title: str, panels: Sequence[Panel]) -> str:
    """The SVG document."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    width, height = _size(panels)
    words = "; ".join(f"{panel.title}: " + ", ".join(_in_words(line) for line in panel.lines) for panel in panels)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
             'role="img" aria-labelledby="t d">',
             f'<title id="t">{escape(title)}</title><desc id="d">{escape(words)}</desc><style>{STYLE}</style>',
             f'<text x="16" y="20" class="title">{escape(title)}</text>']
    x = 16.0
    for i, name in enumerate(names):
        parts.append(f'<path d="M{x:.0f} 40h26" {_stroke(i)}/><text x="{x + 32:.0f}" y="44">{escape(name)}</text>')
        x += 32 + 7.2 * len(name) + 22
    for i, panel in enumerate(panels):
        at = (i % COLUMNS * PANEL_WIDTH, HEAD_HEIGHT + i // COLUMNS * PANEL_HEIGHT)
        parts += [f'<g transform="translate({at[0]} {at[1]})">', *_panel(panel, names), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _size(panels: Sequence[Panel]) -> tuple[int, int]:
    """Width and height of the document."""
    columns = min(COLUMNS, len(panels))
    return columns * PANEL_WIDTH, HEAD_HEIGHT + -(-len(panels) // columns) * PANEL_HEIGHT


def _panel(panel: Panel, names: list[str]) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    x_axis = _Axis([x for x, _ in points], LEFT, PANEL_WIDTH - RIGHT, log=panel.x_log)
    y_axis = _Axis([y for _, y in points], PANEL_HEIGHT - BOTTOM, TOP, log=panel.y_log, from_zero=not panel.y_log)
    bottom, right = PANEL_HEIGHT - BOTTOM, PANEL_WIDTH - RIGHT
    parts = [f'<text x="{LEFT}" y="22" class="title">{escape(panel.title)}</text>']
    for value in y_axis.ticks:
        y = y_axis.at(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" class="grid"/><text x="{LEFT - 6}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{short(value)}</text>')
    for value in x_axis.ticks:
        parts.append(f'<text x="{x_axis.at(value):.1f}" y="{bottom + 16}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" class="axis"/>')
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle">{escape(panel.x_label)}</text>')
    parts.append(f'<text transform="translate(14 {(TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">'
                 f'{escape(panel.y_label)}</text>')
    for line in panel.lines:
        drawn = [(x, y) for x, y in line.points if (x > 0 or not panel.x_log) and (y > 0 or not panel.y_log)]
        if not drawn:
            continue
        path = "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in drawn)
        parts.append(f'<path d="M{path}" {_stroke(names.index(line.name))}/>')
    return parts


class _Axis:
    """Values to pixels, and where the ticks are."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool, from_zero: bool = False) -> None:
        values = [value for value in values if value > 0] if log else list(values)
        low, high = (min(values), max(values)) if values else (1.0, 2.0)
        if from_zero:
            low = min(low, 0.0)
        if high <= low:
            high = low * 2 if log else low + 1
        self._log, self._start, self._end = log, start, end
        if log:
            base = 2 if high / low <= 4096 and low >= 1024 else 10
            first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
            self.ticks = [float(base**power) for power in range(first, last + 1)]
        else:
            step = _round_step((high - low) / 5)
            self.ticks = [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]
        self._low, self._high = self.ticks[0], self.ticks[-1]

    def at(self, value: float) -> float:
        low, high = (math.log(self._low), math.log(self._high)) if self._log else (self._low, self._high)
        share = ((math.log(value) if self._log else value) - low) / (high - low)
        return self._start + share * (self._end - self._start)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def short(value: float) -> str:
    """Examples: 131072 -> "128k", 1048576 -> "1M", 2500 -> "2,500", 0.5 -> "0.5"."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _in_words(line: Line) -> str:
    return f"{line.name} " + " ".join(f"{short(x)}: {y:,.6g}" for x, y in line.points)


def _stroke(index: int) -> str:
    return f'class="line s{index % 6}" stroke-dasharray="{DASHES[index % len(DASHES)]}"'
