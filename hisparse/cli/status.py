"""`hisparse status`: the engines of a running service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.table import Table

from hisparse.cli.console import AsJson, out
from hisparse.errors import HiSparseError
from hisparse.layout import rows_text


def status(
    url: Annotated[str, typer.Option(help="Of the service.")] = "http://127.0.0.1:8000",
    check: Annotated[bool, typer.Option(help="Also verify every engine's accounts.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="If the service wants one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the engines of a running service: health, requests, tiers, pending spills, leases."""
    request = urllib.request.Request(f"{url.rstrip('/')}/stats{'?check=1' if check else ''}")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            data = json.load(response)
    except urllib.error.HTTPError as error:
        raise HiSparseError(f"{url}/stats answered {error.code}: {error.read(400).decode(errors='replace')}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise HiSparseError(f"no service answers at {url} ({error}); start one with 'hisparse serve'") from error
    if as_json:
        print(json.dumps(data))
    else:
        _print_status(data)
    sick = [item for item in data["engines"] if not item["health"].get("ok") or item.get("check", "ok") != "ok"]
    if sick or not data["engines"]:
        raise typer.Exit(1)


def _print_status(data: dict[str, Any]) -> None:
    names = ("running", "waiting", "loading", "held", "finished", "preemptions", "import_failures", "check")
    table = Table("engine", "health", *names, title=f"model {data['model']}", title_justify="left")
    for item in data["engines"]:
        health = "ok" if item["health"].get("ok") else f"[red]{item['health'].get('reason')}[/red]"
        table.add_row(item["engine"], health, *(str(item.get(name, "-")) for name in names))
    out.print(table)
    for item in data["engines"]:
        cache = Table("cache", "value", title=item["engine"], title_justify="left")
        if item.get("hot_region_rows"):
            cache.add_row("hot region at its start", rows_text(item["hot_region_rows"]))
        for key, value in (item.get("cache") or {}).items():
            cache.add_row(key, str(value))
        out.print(cache)
