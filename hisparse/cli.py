"""Command line: `hisparse serve`, `status` and `demo`. Exit codes: 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from hisparse.actors.memory_plan import MemoryPlan
from hisparse.config import HiSparseConfig, load_config
from hisparse.errors import ConfigError, HiSparseError
from hisparse.layout import rows_text

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Host-tier KV cache for DeepSeek-Sparse-Attention models, as a Ray component.")
out = Console()
err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback()
def _root() -> None:
    """Keeps every command a verb."""


def read_configuration(config: Path | None, model: str | None, sets: list[str]) -> HiSparseConfig:
    """From a configuration file or a Serve file (its first application's `args`), a model, and `section.key=value`s.

    Raises:
        ConfigError: see `load_config`; or neither or both of file and model are given.
    """
    if (config is None) == (model is None):
        raise ConfigError("give either CONFIG.yaml or --model PATH ('recall' is the bundled checkpoint)")
    overrides: dict[str, Any] = {}
    for item in sets:
        path, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, got {item!r}")
        node = overrides
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = yaml.safe_load(value)
    if model is not None:
        return load_config({"model": {"path": model}}, overrides)
    assert config is not None
    source: Path | dict[str, Any] = config
    if config.is_file() and "applications:" in config.read_text():
        source = _from_serve_file(config)
    return load_config(source, overrides)


def _from_serve_file(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text())
    try:
        args = dict(data["applications"][0]["args"])
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path}: a Serve file needs the configuration in applications[0].args") from error
    http = data.get("http_options") or {}
    args["serve"] = {key: http[key] for key in ("host", "port") if key in http} | dict(args.get("serve") or {})
    return args


@app.command()
def serve(
    config: Annotated[Path | None, typer.Argument(help="Our configuration, or a Ray Serve file that holds it.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint directory, or 'recall'; the rest by default.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value. Repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print configuration and memory plan only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the OpenAI-compatible service until Ctrl-C. Starts Ray here if there is none."""
    resolved = read_configuration(config, model, sets or [])
    plans = [MemoryPlan.of(resolved.for_role(role)) for role in _roles(resolved)]
    if dry_run:
        _print_plan(resolved, plans, as_json)
        return
    _run(resolved, as_json)


def _roles(config: HiSparseConfig) -> list[Any]:
    return ["prefill", "decode"] if config.serve.prefill_replicas else ["colocated"]


def _print_plan(config: HiSparseConfig, plans: list[MemoryPlan], as_json: bool) -> None:
    data = config.model_dump(mode="json")
    data["serve"]["api_keys"] = ["***"] * len(config.serve.api_keys)
    if as_json:
        out.print_json(data={"config": data, "memory": [plan.asdict() for plan in plans]})
        return
    out.print(yaml.safe_dump(data, sort_keys=False).rstrip(), markup=False, highlight=False)
    table = Table("", *(plan.role for plan in plans), title="memory plan, per replica", title_justify="left")
    for cells in zip(*(plan.rows() for plan in plans)):
        table.add_row(cells[0][0], *(value for _, value in cells))
    out.print(table)
    for text, roles in _by_text([(plan.packing_text(), plan.role) for plan in plans]).items():
        out.print(f"\npacking of the device pool ({', '.join(roles)})\n{text}", markup=False, highlight=False, soft_wrap=True)


def _by_text(items: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text, role in items:
        found.setdefault(text, []).append(role)
    return found


def _run(config: HiSparseConfig, as_json: bool) -> None:
    from hisparse.actors.handles import start_cluster, stop_cluster
    from hisparse.serve.app import serving

    host, port = config.serve.host, config.serve.port or free_port(config.serve.host)
    started = start_cluster()
    _on_signals(signal.default_int_handler)  # after Ray set its own; and a shell's background job ignores SIGINT
    url = f"http://{host}:{port}"
    try:
        err.print(f"starting {'Ray and ' if started else ''}the service ...", highlight=False)
        with serving(config, port=port):
            if as_json:
                print(json.dumps({"url": f"{url}/v1", "health": f"{url}/health", "stats": f"{url}/stats"}), flush=True)
            else:
                out.print(f"serving at {url}/v1 (health: {url}/health, statistics: {url}/stats); Ctrl-C stops",
                          highlight=False, soft_wrap=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                _on_signals(signal.SIG_IGN)
                err.print("stopping: open streams end first ...")
    except KeyboardInterrupt:
        err.print("interrupted while starting")
    finally:
        _on_signals(signal.SIG_IGN)
        stop_cluster()
    err.print("stopped")


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def free_port(host: str) -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@app.command()
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


@app.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Leave the service running until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a local prefill/decode service real questions and check every token against transformers."""
    from hisparse.demo.run import run_demo

    raise typer.Exit(run_demo(keep=keep, as_json=as_json))


def main() -> None:
    """Entry point. A mistake of the caller ends with one message and status 2, a failure with status 1."""
    try:
        app()
    except ConfigError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except (HiSparseError, TimeoutError) as error:
        err.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
