"""`hisparse demo`: real questions to a local service, every token checked."""

from __future__ import annotations

from typing import Annotated

import typer

from hisparse.cli.console import AsJson


def demo(
    keep: Annotated[bool, typer.Option(help="Leave the service running until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a local prefill/decode service real questions and check every token against transformers.

    \b
    Examples:
      hisparse demo
      hisparse demo --keep
    """
    from hisparse.demo.run import run_demo

    raise typer.Exit(run_demo(keep=keep, as_json=as_json))
