"""`hisparse bench serve`: load on a running service."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from hisparse.cli.console import AsJson, bar, out, table
from hisparse.cli.measured import Out, check_out, print_facts
from hisparse.errors import ConfigError, HiSparseError


def serve(
    url: Annotated[str, typer.Option(help="Of the service.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="If the service wants one.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option("--concurrency", "-c", min=1, help="Clients that each wait for "
                                                          "their answer. Repeatable; default 4, 8.")] = None,
    rate: Annotated[float | None, typer.Option(help="Instead: requests a second, at random times.")] = None,
    requests: Annotated[int, typer.Option("--requests", "-n", help="Of each level.", min=1)] = 32,
    alone: Annotated[int, typer.Option(help="Requests of one client alone, the baseline.", min=1)] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt, about.", min=1)] = 1024,
    output_tokens: Annotated[int, typer.Option(help="Of each answer.", min=1)] = 64,
    shared_prefix: Annotated[float, typer.Option(help="Share of each prompt that all begin with, 0 to 1.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exactly that length.")] = True,
    seed: Annotated[int | None, typer.Option(help="Of the prompts; default another each time: nothing is cached.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Of one request.", min=0.1)] = 300.0,
    path: Out = None,
    as_json: AsJson = False,
) -> None:
    """Put load on a running OpenAI-compatible service, on whatever it runs.

    Shows time to first token, time between tokens, throughput and cached prompt
    tokens, beside one client alone in the same run. Exit code 1 if a request
    failed otherwise than by 429 or 503.

    \b
    Examples:
      hisparse bench serve
      hisparse bench serve -c 1 -c 16 -c 64 -n 128 --prompt-tokens 8192
      hisparse bench serve --rate 4 --shared-prefix 0.8 --out load.jsonl
    """
    from hisparse.bench import report
    from hisparse.bench.serve import Load, run, warnings
    from hisparse.bench.serve import rows as rows_of

    if rate is not None and concurrency:
        raise ConfigError("--rate sends requests whether answers come or not, --concurrency waits for them: give one of them")
    load = Load(url=url, model=model, api_key=api_key, concurrency=tuple(concurrency or (4, 8)), rate=rate,
                num_requests=requests, alone=alone, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
                shared=shared_prefix, chat=chat, ignore_eos=ignore_eos, seed=seed, timeout_s=timeout_s)
    check_out(path)
    with bar("asking", as_json) as progress:
        facts, phases = run(load, progress=progress)
    rows = rows_of(phases)
    if path is not None:
        report.write(path, facts, rows)
    failed = {reason: count for phase in phases for reason, count in phase.failures.items()
              if not reason.startswith(("429", "503"))}
    if as_json:
        print(json.dumps({"facts": facts, "rows": [row.asdict() for row in rows], "warnings": warnings(phases)}))
    else:
        print_facts(facts)
        out.print(_load_table(phases))
        for text in [*warnings(phases), *(f"{count} x {text}" for phase in phases for text, count in phase.failures.items())]:
            out.print(f"- {text}", highlight=False, markup=False)
    if failed:
        raise HiSparseError(f"{sum(failed.values())} requests failed: {next(iter(failed))}")


def _load_table(phases: list[Any]) -> Table:
    numbers = ("answered", "first token", "token gap", "tokens/s", "cached")
    shown = table("load", *numbers, title="times in ms, p50 / p99; (x alone)", right=numbers)
    alone = phases[0]
    for phase in phases:
        def times(spread: Any, before: Any, phase: Any = phase) -> str:
            ratio = f"\n({spread.p50 / before.p50:.2f} x)" if phase is not alone and before.p50 else ""
            return f"{spread.p50 * 1e3:,.0f} / {spread.p99 * 1e3:,.0f}{ratio}" if before.p50 else "-"

        rate = f"{phase.output_tokens_per_s:,.0f}"
        if phase is not alone:
            rate += f"\n({phase.output_tokens_per_s / alone.output_tokens_per_s:.2f} x)"
        shown.add_row("alone" if phase is alone else phase.name, f"{len(phase.done)} of {len(phase.answers)}",
                      times(phase.first_token, alone.first_token), times(phase.token_gap, alone.token_gap), rate,
                      f"{phase.cached_share:.0%}")
    return shown
