"""What every benchmark's verb does with its numbers: run, print, keep, judge."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hisparse.bench.catalogue import BENCHMARKS, Needs, why_no_gpu
from hisparse.cli.console import bar, err, out, table
from hisparse.errors import ConfigError, HiSparseError

Out = Annotated[Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Keep the rows, one JSON object a line, and a "
                                          "table beside them (.md).")]


def measure(name: str, module: str, path: Path | None, check: bool, as_json: bool, **options: Any) -> None:
    """Runs a benchmark and prints what it found; exit code 1 for a missed bar that was to be checked, or a wrong answer."""
    from hisparse.bench import report

    check_out(path)
    if BENCHMARKS[name].needs is Needs.GPU and (reason := why_no_gpu()) is not None:
        raise HiSparseError(f"bench {name} needs a CUDA device: {reason}; 'hisparse bench list' says what runs here")
    with bar(f"bench {name}", as_json) as progress, _no_number(name):
        facts, rows = importlib.import_module(module).run(progress=progress, **options)
    missed = report.missed(rows)
    if path is not None:
        report.write(path, facts, rows)
    if as_json:
        print(json.dumps({"facts": facts, "rows": [row.asdict() for row in rows], "missed": missed}))
    elif rows:
        print_facts(facts)
        out.print(_table(rows))
    if path is not None:
        err.print(f"kept: {path} and {path.with_suffix('.md').name}", highlight=False, soft_wrap=True)
    if check and missed:
        raise HiSparseError(f"missed: {', '.join(missed)}")


@contextmanager
def _no_number(name: str) -> Iterator[None]:
    """A wrong answer, or a kernel that fails, ends a benchmark without a number."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        raise HiSparseError(f"bench {name} gives no number: {error}") from error


def check_out(path: Path | None) -> None:
    """Raises ConfigError unless rows may be kept at `path`; before they are measured."""
    if path is not None and (path.suffix == ".md" or not path.parent.is_dir()):
        raise ConfigError(f"--out {path}: name a FILE.jsonl in a directory that exists; the table goes beside it as .md")


def print_facts(facts: dict[str, Any]) -> None:
    """Where, when and with what the numbers were measured, one line each."""
    for key, value in facts.items():
        out.print(f"{key.replace('_', ' ')}: {value}", highlight=False, markup=False, soft_wrap=True)


def _table(rows: list[Any]) -> Table:
    beside = any(row.yardstick for row in rows)
    bars = any(row.bar is not None for row in rows)
    numbers = ["value", *(["beside"] if beside else []), *(["bar", "ok"] if bars else [])]
    shown = table("case", *numbers, right=numbers)
    for row in rows:
        case, value, unit, bar_text, _, yard, *_, verdict = row.cells()
        ok = {"yes": "yes", "NO": "[red]NO[/red]", "": ""}[verdict]
        shown.add_row(escape(case), f"{value} {unit}", *([yard] if beside else []), *([bar_text, ok] if bars else []))
    return shown
