"""The commands together, and how each of them ends."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from hisparse.cli import bench, config, demo, doctor, plan, serve, status, trace
from hisparse.cli.console import err, out, show_warnings
from hisparse.errors import ConfigError, HiSparseError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
                  help="Host-tier KV cache for DeepSeek-Sparse-Attention models, as a Ray component.")


def _version(wanted: bool) -> None:
    if wanted:
        try:
            out.print(f"hisparse {version('hisparse')}", highlight=False)
        except PackageNotFoundError:
            out.print("hisparse, not installed: run from a source tree")
        raise typer.Exit


@app.callback(epilog="Exit codes: 0 ok, 1 failed, 2 usage.")
def _root(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Keeps every command a verb."""


app.command()(serve.serve)
app.command()(plan.plan)
app.command()(doctor.doctor)
app.command()(status.status)
app.command()(demo.demo)
app.add_typer(bench.app, name="bench")
app.add_typer(trace.app, name="trace")
app.add_typer(config.app, name="config")


def main(arguments: list[str] | None = None) -> None:
    """Entry point. A mistake of the caller ends with one message and status 2, a failure with status 1, Ctrl-C with 130.

    Args:
        arguments: instead of the process's.
    """
    if arguments is not None:
        sys.argv = ["hisparse", *arguments]
    show_warnings()
    try:
        app(prog_name="hisparse")
    except KeyboardInterrupt:  # inside of a command, typer does the same
        sys.exit(130)
    except ConfigError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except (HiSparseError, TimeoutError) as error:
        err.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
