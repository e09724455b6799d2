"""`hisparse status`: the engines of a running service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.markup import escape

from hisparse.cli.console import AsJson, out, table
from hisparse.errors import HiSparseError
from hisparse.layout import rows_text


def status(
    url: Annotated[str, typer.Option(help="Of the service.")] = "http://127.0.0.1:8000",
    check: Annotated[bool, typer.Option(help="Also verify every engine's accounts.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="If the service wants one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the engines of a running service: health, requests, tiers, pending spills, leases.

    Exit code 1 if an engine is unhealthy, or if its accounts do not balance.

    \b
    Examples:
      hisparse status
      hisparse status --url http://gateway:8000 --check --json
    """
    request = urllib.request.Request(f"{url.rstrip('/')}/stats{'?check=1' if check else ''}")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            data = json.load(response)
    except urllib.error.HTTPError as error:
        hint = "; give the service's key with --api-key or OPENAI_API_KEY" if error.code in (401, 403) else ""
        raise HiSparseError(f"{url}/stats answered {error.code}: {_message(error)}{hint}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise HiSparseError(f"no service answers at {url} ({error}); start one with 'hisparse serve'") from error
    if as_json:
        print(json.dumps(data))
    else:
        _print_status(data)
    sick = [item for item in data["engines"] if not item["health"].get("ok") or item.get("check", "ok") != "ok"]
    if sick or not data["engines"]:
        raise typer.Exit(1)


def _message(error: urllib.error.HTTPError) -> str:
    """Of an error in OpenAI's shape, else the body's beginning."""
    body = error.read(4096)
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:400].decode(errors="replace")


def _print_status(data: dict[str, Any]) -> None:
    now, since = ("running", "waiting", "loading", "held"), ("finished", "preemptions", "import_failures", "check")
    shown = table("engine", "health", *now, title=escape(f"model {data['model']}"), right=now)
    for item in data["engines"]:
        health = "ok" if item["health"].get("ok") else f"[red]{escape(str(item['health'].get('reason')))}[/red]"
        shown.add_row(escape(item["engine"]), health, *(str(item.get(name, "-")) for name in now))
    out.print(shown)
    for item in data["engines"]:
        details = table("since its start, and its cache", "value", title=escape(item["engine"]), right=["value"])
        if item.get("hot_region_rows"):
            details.add_row("hot region at its start", rows_text(item["hot_region_rows"]))
        values = {name: item[name] for name in since if name in item} | (item.get("cache") or {})
        values |= {f"indexer_store_{name}": value for name, value in (item.get("indexer_store") or {}).items()}
        for key, value in values.items():
            details.add_row(escape(key), f"{value:,}" if type(value) is int else escape(str(value)))
        out.print(details)
