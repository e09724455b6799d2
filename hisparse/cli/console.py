"""Where commands write: results to stdout, everything else to stderr. Colours end where NO_COLOR or a pipe begins."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
