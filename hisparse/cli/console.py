"""Where commands write: results to stdout, everything else to stderr. Colours end where NO_COLOR or a pipe begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import rich.progress
import typer
from rich.console import Console
from rich.markup import escape

from hisparse.bench.progress import Progress

out = Console()
err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


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
