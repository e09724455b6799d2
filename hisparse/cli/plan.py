"""`hisparse plan`: what a deployment carries, before anything is bought or started."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from hisparse.cli import chart
from hisparse.cli.console import AsJson, err, out, table
from hisparse.config import GIB
from hisparse.errors import ConfigError

MIB = 1 << 20
WIDTH = 80


def plan(
    model: Annotated[str, typer.Option(help="deepseek-v3.2, glm-5, glm-5.1, glm-5.2, a checkpoint, or a config.json.")],
    gpu: Annotated[str, typer.Option(help="h100, h200, b200 or b300.")] = "h200",
    gpu_gib: Annotated[float | None, typer.Option(help="Memory of another GPU, instead.", min=1)] = None,
    tp: Annotated[int, typer.Option(help="GPUs of one replica.", min=1, max=8)] = 1,
    dp: Annotated[int, typer.Option(help="Replicas.", min=1)] = 1,
    ep: Annotated[int | None, typer.Option(help="GPUs that share the routed experts; default all.", min=1)] = None,
    row_dtype: Annotated[str, typer.Option(help="KV rows: bf16, or fp8 (fp8_ds_mla).")] = "bf16",
    indexer_dtype: Annotated[str, typer.Option(help="Indexer keys: bf16 or fp8.")] = "bf16",
    weights_dtype: Annotated[str, typer.Option(help="Linear weights: fp8 or bf16.")] = "fp8",
    weights_gib: Annotated[float | None, typer.Option(help="On one GPU, instead of counting them.", min=0)] = None,
    spec_tokens: Annotated[int, typer.Option(help="Draft tokens verified beside the next one.", min=0)] = 0,
    hot_rows: Annotated[int | None, typer.Option(help="Of a request's hot region; default 3 * top_k + 64.", min=1)] = None,
    position_table: Annotated[str, typer.Option(help="direct or hashed, as in the configuration.")] = "direct",
    host_gib: Annotated[float | None, typer.Option(help="Most host memory of one replica.", min=0)] = None,
    gpu_share: Annotated[float, typer.Option(help="Of the GPU's memory to plan with.")] = 0.9,
    workspace_gib: Annotated[float, typer.Option(help="Of that, for activations and buffers.", min=0)] = 4.0,
    contexts: Annotated[list[str] | None, typer.Option("--context", help="Tokens, e.g. 96k. Repeatable; default 8k to "
                                                       "1M.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Chart to write, FILE.svg or FILE.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many requests fit, with and without HiSparse, per context length.

    Starts nothing and needs no GPU. The numbers come from the layout and the admission arithmetic that the engine uses;
    what else they rest on is printed below the table.

    \b
    Examples:
      hisparse plan --model glm-5.2 --gpu h200 --tp 8
      hisparse plan --model deepseek-v3.2 --tp 8 --row-dtype fp8 --host-gib 1500
      hisparse plan --model ./config.json --gpu b200 --tp 4 --dp 2 --plot plan.svg
    """
    from hisparse.capacity.plan import CONTEXTS, CapacityPlan, Deployment
    from hisparse.capacity.presets import gpu_memory_bytes, model_config

    dtypes = {"--row-dtype": row_dtype, "--indexer-dtype": indexer_dtype, "--weights-dtype": weights_dtype}
    for option, given in dtypes.items():
        _check_choice(option, given, ("bf16", "fp8"))
    _check_choice("--position-table", position_table, ("direct", "hashed"))
    if plot is not None:
        chart.check_plot(plot)
    name, config = model_config(model)
    deployment = Deployment(
        model=name, config=config, gpu=gpu.lower() if gpu_gib is None else f"{gpu_gib:g} GiB",
        gpu_bytes=gpu_memory_bytes(gpu) if gpu_gib is None else int(gpu_gib * GIB), tp=tp, dp=dp, ep=ep,
        row_dtype=cast(Any, row_dtype), indexer_dtype=cast(Any, indexer_dtype), weights_dtype=cast(Any, weights_dtype),
        spec_tokens=spec_tokens, hot_rows=hot_rows, gpu_share=gpu_share, workspace_bytes=int(workspace_gib * GIB),
        weights_bytes=None if weights_gib is None else int(weights_gib * GIB),
        host_bytes=None if host_gib is None else int(host_gib * GIB), hashed=position_table == "hashed")
    result = CapacityPlan.of(deployment, sorted({_tokens(text) for text in contexts}) if contexts else CONTEXTS)
    if plot is not None:
        chart.write(plot, _title(result), [_panel(result)])
    if as_json:
        print(json.dumps(result.asdict()))
        return
    _print(result)
    if plot is not None:
        err.print(f"chart: {plot}", highlight=False, soft_wrap=True)


def _check_choice(option: str, given: str, known: tuple[str, str]) -> None:
    if given not in known:
        raise ConfigError(f"{option} must be {' or '.join(known)}, got {given!r}")


def _tokens(text: str) -> int:
    """Examples: "8192", "96k", "1M"."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if found is None or not int(found[1]):
        raise ConfigError(f"--context takes a number of tokens such as 8192, 96k or 1M, got {text!r}")
    return int(found[1]) << {"": 0, "k": 10, "m": 20}[found[2].lower()]


def _title(result: Any) -> str:
    d = result.deployment
    where = f"{d.tp * d.dp} x {d.gpu}" + (f" ({d.dp} replicas of {d.tp})" if d.dp > 1 else "")
    return f"{d.model} on {where}, {d.row_dtype} rows"


def _print(result: Any) -> None:
    layout = result.layout
    facts = [
        ("per token", f"{layout.host_block_bytes // layout.block_size:,} B of rows, "
                      f"{layout.indexer_page_bytes // layout.block_size:,} B of indexer keys"),
        ("per GPU", f"{result.weights_bytes / GIB:,.1f} GiB of weights, {result.kv_bytes / GIB:,.1f} GiB for KV"),
        ("hot region", f"{result.hot_rows[0]:,} rows in each of {len(result.hot_rows)} groups"),
        ("crossover", "none: no context is long enough" if result.crossover_tokens is None else
         f"from {result.crossover_tokens:,} tokens a host-backed request takes less GPU memory"),
    ]
    out.print(_title(result), style="bold", highlight=False, soft_wrap=True)
    for label, text in facts:
        out.print(f"{label:<11}{text}", highlight=False)
    columns = ("context", "device only", "HiSparse", "gain", "lives on", "host GiB", "fixed MiB")
    shown = table(*columns, title="requests that fit", right=set(columns) - {"lives on"})
    for row in result.rows:
        gain = f"{row.requests_hisparse / row.requests_device_only:.1f} x" if row.requests_device_only else "-"
        limited = "*" if row.limit == "host memory" else ""
        shown.add_row(chart.short(row.context_tokens), f"{row.requests_device_only:,}",
                      f"{row.requests_hisparse:,}{limited}", gain, row.landing, f"{row.host_bytes / GIB:,.0f}",
                      f"{row.fixed_bytes / MIB:,.0f}")
    out.print(shown)
    notes = ["fixed MiB: hot region, tail and tables of one host-backed request on each GPU.", *result.assumptions()]
    if any(row.limit == "host memory" for row in result.rows):
        notes.insert(0, "* the host pool is full, not the GPU.")
    for note in notes:
        first = "" if note.startswith("*") else "- "
        lines = textwrap.wrap(note, min(WIDTH, out.width) - 1, initial_indent=first, subsequent_indent="  ")
        out.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _panel(result: Any) -> chart.Panel:
    lines = {"device only": [(row.context_tokens, row.requests_device_only) for row in result.rows],
             "HiSparse": [(row.context_tokens, row.requests_hisparse) for row in result.rows]}
    return chart.Panel(title="requests that fit", x_label="context, tokens", y_label="requests", x_log=True, y_log=True,
                       lines=tuple(chart.Line(name=name, points=tuple(points)) for name, points in lines.items()))
