"""Where commands write: results to stdout, everything else to stderr. Colours end where NO_COLOR or a pipe begins."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated

import rich.progress
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hisparse.bench.progress import Progress

out = Console()
err = Console(stderr=True)

FULL_WIDTH = 80
"""Columns from which on tables are drawn with all their lines."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def table(*columns: str, title: str | None = None, right: Collection[str] = ()) -> Table:
    """An empty table that loses nothing on a narrow terminal: lines go first, then words of headers are set below each other,
    then cells. `right`: columns of numbers."""
    narrow = out.width < FULL_WIDTH
    made = Table(title=title, title_justify="left", box=box.SIMPLE if narrow else box.HEAVY_HEAD, show_edge=not narrow,
                 padding=(0, 0) if narrow else (0, 1))
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


class _Warnings(logging.Handler):
    """What the package warns of, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        err.print(f"{level}: {record.getMessage()}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def show_warnings() -> None:
    """From now on, as lines of their own kind. Idempotent."""
    logger = logging.getLogger("hisparse")
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings(logging.WARNING))


class _Bar(Progress):
    """A bar on the terminal, with what was done last beside it."""

    def __init__(self, shown: rich.progress.Progress, title: str) -> None:
        self._shown, self._title = shown, title
        self._task, self._total = shown.add_task(title, total=None), 0

    def expect(self, steps: int) -> None:
        self._total += steps
        self._shown.update(self._task, total=self._total)

    def step(self, text: str) -> None:
        self._shown.update(self._task, advance=1, description=f"{self._title}: {escape(text.splitlines()[0][:60])}")

    def note(self, text: str) -> None:
        self._shown.console.print(text, markup=False, highlight=False)


class _Silence(Progress):
    def step(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@contextmanager
def bar(title: str, as_json: bool = False) -> Iterator[Progress]:
    """A progress bar where stderr is a terminal; lines where it is a file or pipe; nothing beside JSON."""
    if as_json:
        yield _Silence()
    elif not err.is_terminal:
        yield Progress()
    else:
        with rich.progress.Progress(console=err, transient=True) as shown:
            yield _Bar(shown, title)
