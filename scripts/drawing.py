"""Boxes, arrows, cells and words as SVG: one style, light and dark, readable without colours and by a screen reader."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 800
STYLE = """
  svg { background: #fff; font: 13px system-ui, sans-serif; fill: #222; }
  .title { font-weight: 600; font-size: 15px; } .head { font-weight: 600; } .small { font-size: 11.5px; }
  .code { font: 12px ui-monospace, monospace; } .dim { fill: #5a5f66; }
  .box { fill: #f6f7f9; stroke: #888; } .area { fill: none; stroke: #888; stroke-dasharray: 5 4; }
  .line { fill: none; stroke: #444; stroke-width: 1.5; } .dash { stroke-dasharray: 5 4; } .tip { fill: #444; }
  .grid { stroke: #ddd; fill: none; }
  .device { fill: #d6e6f8; stroke: #0b5cad; } .loose { fill: #eef5fc; stroke: #0b5cad; stroke-dasharray: 3 2; }
  .hot { fill: #fbe0d1; stroke: #b3410e; } .grown { fill: #fdf1ea; stroke: #b3410e; stroke-dasharray: 3 2; }
  .host { fill: #d5ecdc; stroke: #1d7a3e; } .move { fill: #ecdcf5; stroke: #7a3aa0; } .keys { fill: #f3e8c4; stroke: #8a6d00; }
  .none { fill: none; stroke: #bbb; }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181c; fill: #e4e6ea; } .dim { fill: #a4a9b2; }
    .box { fill: #22252b; stroke: #888; } .area { stroke: #888; } .line { stroke: #c4c8cf; } .tip { fill: #c4c8cf; }
    .grid { stroke: #33363c; }
    .device { fill: #16355a; stroke: #6db3ff; } .loose { fill: #16232f; stroke: #6db3ff; }
    .hot { fill: #5a2a12; stroke: #ff9a66; } .grown { fill: #2e1d14; stroke: #ff9a66; }
    .host { fill: #17402a; stroke: #6fd694; } .move { fill: #3c2350; stroke: #d39bf5; }
    .keys { fill: #463a0c; stroke: #e0c04d; }
    .none { stroke: #4a4e56; }
  }"""


class Drawing:
    """One picture. Coordinates are pixels from the top left; what is drawn later lies on top.

    Args:
        title, words: what a screen reader reads: the name, and what there is to see.
    """

    def __init__(self, title: str, words: str, height: int, width: int = WIDTH) -> None:
        self._head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                      f'height="{height}" role="img" aria-labelledby="t d">\n<title id="t">{escape(title)}</title>'
                      f'<desc id="d">{escape(words)}</desc>\n<style>{STYLE}\n</style>\n'
                      '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
                      '<path d="M0 0L8 4L0 8z" class="tip"/></marker>')
        self._parts: list[str] = []
        self.text(16, 24, title, "title")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], kind: str = "", anchor: str = "start", step: float = 17) -> None:
        for i, words in enumerate(lines):
            self.text(x, y + i * step, words, kind, anchor)

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str] = (), kind: str = "box", *,
            head: bool = True) -> None:
        """A rounded rectangle; the first of its lines is the heading. Words are centred."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        top = y + height / 2 - (len(lines) - 1) * 8 + 4.5
        for i, words in enumerate(lines):
            style = "head" if head and not i else "small"
            self.text(x + width / 2, top + 16 * i, words, style, "middle")

    def area(self, x: float, y: float, width: float, height: float, name: str) -> None:
        """A dashed frame around things, with its name inside at the top left."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="area"/>')
        self.text(x + 10, y + 18, name, "small dim")

    def arrow(self, *points: tuple[float, float], words: str = "", at: tuple[float, float] | None = None, dash: bool = False,
              anchor: str = "start") -> None:
        """Through the points; a tip at the last. `words` stand at `at`."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="line{" dash" if dash else ""}" marker-end="url(#tip)"/>')
        if words and at is not None:
            self.text(*at, words, "small", anchor)

    def rule(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="grid"/>')

    def cell(self, x: float, y: float, kind: str, letter: str = "", size: float = 18) -> None:
        """A small square with a letter: what a colour says, a letter says too."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" rx="2" class="{kind}"/>')
        if letter:
            self.text(x + size / 2, y + size / 2 + 4, letter, "small", "middle")

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        if height > 0:
            self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')

    def svg(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>", ""])
