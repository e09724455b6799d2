"""`hisparse doctor`: whether this machine, or every node of the cluster, can run hisparse."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hisparse.cli.configuration import read_configuration
from hisparse.cli.console import AsJson, err, out, table
from hisparse.errors import HiSparseError

MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]", "skip": "[dim]skip[/dim]"}


def doctor(
    config: Annotated[Path | None, typer.Argument(help="Configuration or Serve file to check the machine against.")] = None,
    model: Annotated[str | None, typer.Option(help="Instead: a checkpoint, or 'recall', with defaults.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value. Repeatable.")] = None,
    on_ray: Annotated[bool, typer.Option("--ray", help="Look at every node of the running Ray cluster.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check packages, GPU, memory, ports and transports; each problem comes with its fix.

    Measures copy and gather rates where there is a GPU. With a configuration, the machine is held against what that needs.
    Exit code 1 if something fails; warnings do not count.

    \b
    Examples:
      hisparse doctor
      hisparse doctor deploy/ray/local.yaml
      hisparse doctor --ray --json
    """
    from hisparse.doctor.findings import Needs
    from hisparse.doctor.node import examine_node, needs_of

    needs = Needs()
    if config is not None or model is not None or sets:
        needs = needs_of(read_configuration(config, model, sets or []))
    with err.status("examining ...") if err.is_terminal and not as_json else contextlib.nullcontext():
        if on_ray:
            reports = [(report.name, report.findings) for report in _of_cluster(needs)]
        else:
            reports = [("this machine", tuple(examine_node(needs)))]
    count = {status: sum(found.status == status for _, findings in reports for found in findings) for status in MARKS}
    if as_json:
        print(json.dumps({"ok": not count["fail"], "count": count, "nodes": [
            {"node": name, "findings": [found.asdict() for found in findings]} for name, findings in reports]}))
    else:
        for name, findings in reports:
            out.print(_table(name, findings))
        out.print(f"{count['fail']} failed, {count['warn']} warnings, {count['ok']} ok", highlight=False)
    if count["fail"]:
        raise typer.Exit(1)


def _of_cluster(needs: Any) -> Any:
    from hisparse.actors.handles import join_cluster, stop_cluster
    from hisparse.doctor.cluster import examine_cluster

    if not join_cluster():
        raise HiSparseError("no Ray cluster runs here, and RAY_ADDRESS names none; start one with 'ray start --head', or leave "
                            "--ray out")
    try:
        return examine_cluster(needs)
    finally:
        stop_cluster()


def _table(name: str, findings: Any) -> Table:
    shown = table("", "check", "found", title=escape(name))
    for found in findings:
        text = escape(found.text) + (f"\n[bold]fix:[/bold] {escape(found.fix)}" if found.fix else "")
        shown.add_row(MARKS[found.status], escape(found.check), text)
    return shown

