"""`hisparse config`: what can be configured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from hisparse.cli.console import AsJson, err
from hisparse.errors import ConfigError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Options of a configuration: all of them, as a page.")


@app.callback()
def _group() -> None:
    """Keeps 'reference' a verb of its own."""


@app.command()
def reference(
    path: Annotated[Path | None, typer.Option("--out", metavar="FILE.md", help="Write the page there instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print every option: type, default, limits, unit, scope, variable, meaning.

    \b
    Examples:
      hisparse config reference | less
      hisparse config reference --out docs/configuration.md
      hisparse config reference --json | jq '.options[].path'
    """
    from hisparse.config.options import options
    from hisparse.config.reference import page
    from hisparse.config.spellings import SPELLINGS

    if as_json:
        print(json.dumps({
            "options": [dataclasses.asdict(option) | {"variable": option.variable} for option in options().values()],
            "spellings": {name: found.option for name, found in SPELLINGS.items()}}))
    elif path is None:
        print(page(), end="")
    else:
        try:
            path.write_text(page())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        err.print(f"written: {path}", highlight=False, soft_wrap=True)
