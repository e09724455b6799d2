"""`hisparse serve`: the service until Ctrl-C, or what it would reserve."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hisparse.actors.memory_plan import MemoryPlan
from hisparse.cli.configuration import read_configuration
from hisparse.cli.console import AsJson, err, out, table
from hisparse.config import HiSparseConfig
from hisparse.doctor.findings import Status
from hisparse.errors import HiSparseError


def serve(
    config: Annotated[Path | None, typer.Argument(help="Our configuration, or a Ray Serve file that holds it.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint directory, or 'recall'; the rest by default.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value. Repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print configuration and memory plan only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the OpenAI-compatible service until Ctrl-C. Starts Ray here if there is none.

    \b
    Examples:
      hisparse serve deploy/ray/local.yaml
      hisparse serve --model /path/to/checkpoint --set cache.host_pool_gib=8
      hisparse serve deploy/ray/local.yaml --dry-run
    """
    resolved = read_configuration(config, model, sets or [])
    plans = [MemoryPlan.of(resolved.for_role(role)) for role in _roles(resolved)]
    if dry_run:
        _print_plan(resolved, plans, as_json)
        return
    _run(resolved, as_json)


def _roles(config: HiSparseConfig) -> list[Any]:
    return ["prefill", "decode"] if config.serve.prefill_replicas else ["colocated"]


def _print_plan(config: HiSparseConfig, plans: list[MemoryPlan], as_json: bool) -> None:
    from hisparse.doctor.node import needs_of
    from hisparse.doctor.preflight import problems, text_of

    found = problems(needs_of(config), with_port=False)
    data = config.model_dump(mode="json")
    data["serve"]["api_keys"] = ["***"] * len(config.serve.api_keys)
    if as_json:
        out.print_json(data={"config": data, "memory": [plan.asdict() for plan in plans],
                             "problems_here": [item.asdict() for item in found]})
        return
    out.print(yaml.safe_dump(data, sort_keys=False).rstrip(), markup=False, highlight=False)
    shown = table("", *(plan.role for plan in plans), title="memory plan, per replica")
    for cells in zip(*(plan.rows() for plan in plans)):
        shown.add_row(cells[0][0], *(value for _, value in cells))
    out.print(shown)
    for text, roles in _by_text([(plan.packing_text(), plan.role) for plan in plans]).items():
        out.print(f"\npacking of the device pool ({', '.join(roles)})\n{text}", markup=False, highlight=False)
    if found:
        err.print(f"all replicas together do not fit on this machine:\n{text_of(found)}", style="yellow", markup=False,
                  highlight=False, soft_wrap=True)


def _by_text(items: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text, role in items:
        found.setdefault(text, []).append(role)
    return found


def _run(config: HiSparseConfig, as_json: bool) -> None:
    from hisparse.actors.handles import cluster_address, start_cluster, stop_cluster
    from hisparse.serve.instance import serving

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what it says while all is well says less than we do
    try:
        started = start_cluster()
        _on_signals(signal.default_int_handler)  # after Ray set its own; and a shell's background job ignores SIGINT
        _check_room(config, started)
        port = config.serve.port or free_port(config.serve.host)
        where = "Ray and the service" if started else f"the service on the Ray cluster at {cluster_address()}"
        err.print(f"starting {where} ...", highlight=False, soft_wrap=True)
        with serving(config, port=port):
            _print_where(f"http://{config.serve.host}:{port}", as_json)
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


def _check_room(config: HiSparseConfig, started: bool) -> None:
    """Raises HiSparseError for what would keep the service from starting here; waiting replicas would not say it.

    Memory and port are this machine's, so they are looked at only if all replicas come here.
    """
    from hisparse.actors.handles import cluster_nodes, free_resources
    from hisparse.doctor.cluster import judge
    from hisparse.doctor.node import needs_of
    from hisparse.doctor.preflight import problems, text_of
    from hisparse.serve.instance import check_no_other_serve

    if not started:
        check_no_other_serve()
    nodes, needs = cluster_nodes(), needs_of(config)
    found = [item for item in judge(nodes, needs) if item.status is Status.FAIL]
    if len(nodes) == 1:
        found += problems(needs)
    if found:
        raise HiSparseError(f"the service cannot start here:\n{text_of(found)}")
    free = free_resources()
    for kind, wanted in (("CPU", needs.num_cpus), ("GPU", needs.num_gpus)):
        if wanted > free.get(kind, 0.0):
            err.print(f"the service reserves {wanted:g} {kind}, of which {free.get(kind, 0.0):g} are free now: it waits until "
                      "others give theirs back ('ray status')", style="yellow", highlight=False, soft_wrap=True)


def _print_where(url: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": f"{url}/v1", "health": f"{url}/health", "stats": f"{url}/stats",
                          "residency": f"{url}/residency"}), flush=True)
    else:
        out.print(f"serving at {url}/v1 (health: {url}/health, statistics: {url}/stats); Ctrl-C stops", highlight=False,
                  soft_wrap=True)
        out.print(f"where requests live, in a browser: {url}/residency", highlight=False, soft_wrap=True)


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def free_port(host: str) -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
