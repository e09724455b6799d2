"""`hisparse bench`: the benchmarks, each number beside a ceiling or baseline of the same run."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hisparse.bench.catalogue import BENCHMARKS, Needs, why_no_gpu
from hisparse.cli.console import AsJson, bar, err, out, table
from hisparse.errors import ConfigError, HiSparseError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Benchmarks: each number beside a ceiling or baseline "
                  "that the same run measured. [bold]list[/bold] says what each needs.")

Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes, no bars: a smoke test.")]
Only = Annotated[list[str] | None, typer.Option(help="Part of it. Repeatable; default all.")]
Check = Annotated[bool, typer.Option("--check", help="Exit code 1 if a bar is missed.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE.jsonl", help="Keep the rows, one JSON object a line, and a "
                                          "table beside them (.md).")]


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the benchmarks: what each measures, needs and takes, and whether it runs here.

    \b
    Examples:
      hisparse bench list
      hisparse bench list --json
    """
    reason = why_no_gpu()
    rows = [{"name": name, "needs": found.needs.value, "takes": found.takes, "summary": found.summary,
             "here": found.needs is not Needs.GPU or reason is None} for name, found in BENCHMARKS.items()]
    if as_json:
        print(json.dumps({"benchmarks": rows, "no_gpu": reason}))
        return
    shown = table("bench", "needs", "takes", "here", "measures")
    for row in rows:
        shown.add_row(str(row["name"]), str(row["needs"]), str(row["takes"]), "yes" if row["here"] else "[yellow]no[/yellow]",
                      escape(str(row["summary"])))
    out.print(shown)
    if reason is not None:
        out.print(f"no GPU here: {reason}", highlight=False)


@app.command()
def resolver(quick: Quick = False, only: Only = None,
             span_gib: Annotated[float, typer.Option(help="Pinned host memory of the main cases.", min=0.5)] = 16.0,
             tune: Annotated[bool, typer.Option("--tune", help="Print times of launch geometries instead.")] = False,
             check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """Resolve a layer's top-k to rows: hits, misses copied in the same launch. Needs a GPU.

    Beside launch, look-up and copy-only floors. --only: main, resident, locality.

    \b
    Examples:
      hisparse bench resolver --quick
      hisparse bench resolver --only main --out resolver.jsonl --check
    """
    _measure("resolver", "hisparse.bench.resolver", path, check, as_json, quick=quick, only=only or (), span_gib=span_gib,
             tuning=tune)


@app.command()
def copy(quick: Quick = False, only: Only = None, check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """Write rows, mirror, spill, restore and scatter pages. Needs a GPU.

    Beside the copy engine and an append without mirror. --only: append, pages.

    \b
    Examples:
      hisparse bench copy --quick
      hisparse bench copy --only pages --out copy.jsonl
    """
    _measure("copy", "hisparse.bench.copies", path, check, as_json, quick=quick, only=only or ())


@app.command()
def attention(batch: Annotated[list[int] | None, typer.Option(help="Requests. Repeatable; default 1 to 256.", min=1)] = None,
              heads: Annotated[list[int] | None, typer.Option(help="Of a rank. Repeatable; default 64, 128.", min=1)] = None,
              rows: Annotated[list[str] | None, typer.Option(help="bf16 or fp8. Repeatable; default both.")] = None,
              check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """Sparse MLA at the real widths. Needs a GPU.

    Beside a plain gather of the same rows, dense products, and FlashMLA where it is installed.

    \b
    Examples:
      hisparse bench attention --batch 16 --heads 64 --rows bf16
      hisparse bench attention --out attention.jsonl --check
    """
    _measure("attention", "hisparse.bench.attention", path, check, as_json, batches=batch or (), heads=heads or (),
             row_kinds=rows or ())


@app.command()
def indexer(quick: Quick = False, check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """Score all positions and select the top-k. Needs a GPU.

    Beside reading the keys once, dense products and torch.topk.

    \b
    Examples:
      hisparse bench indexer --quick
      hisparse bench indexer --out indexer.jsonl
    """
    _measure("indexer", "hisparse.bench.indexer", path, check, as_json, quick=quick)


@app.command()
def step(layers: Annotated[int, typer.Option(help="Of the network, at GLM-5.2's widths.", min=3)] = 78, check: Check = False,
         path: Out = None, as_json: AsJson = False) -> None:
    """Decode steps with everything resident and mirrored. Needs a GPU.

    Beside the same engine with HiSparse off.

    \b
    Examples:
      hisparse bench step --layers 12
      hisparse bench step --out step.jsonl --check
    """
    _measure("step", "hisparse.bench.step", path, check, as_json, layers=layers)


@app.command("import")
def import_(device: Annotated[str, typer.Option(help="Where both engines keep their KV: cpu or cuda.")] = "cpu",
            quick: Quick = False,
            only: Annotated[list[str] | None, typer.Option(help="A word that the case's name has. Repeatable.")] = None,
            repeats: Annotated[int, typer.Option(help="Imports timed per case.", min=1)] = 7,
            slot_pages: Annotated[int | None, typer.Option(help="Of a staging slot; default 8, on CUDA 64.", min=1)] = None,
            check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """Import pages from a prefill engine into a decode engine, end to end. Runs on CPUs or GPUs.

    Beside a memcpy of the same bytes, or the copy engine and the link between two GPUs.

    \b
    Examples:
      hisparse bench import --quick
      hisparse bench import --only tiny --only direct
      hisparse bench import --device cuda --out import.jsonl
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    _measure("import", "hisparse.bench.pd_import", path, check, as_json, device=device, quick=quick, only=only or (),
             repeats=repeats, slot_pages=slot_pages)


@app.command()
def transport(quick: Quick = False, check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """READ pages between two processes over NIXL, under several UCX settings. Runs on CPUs.

    Beside a memcpy of the same bytes.

    \b
    Examples:
      hisparse bench transport --quick
      hisparse bench transport --out transport.jsonl
    """
    _measure("transport", "hisparse.bench.transport", path, check, as_json, quick=quick)


@app.command("control-plane")
def control_plane(quick: Quick = False,
                  shape: Annotated[list[str] | None, typer.Option(help="glm-5.2 or deepseek-v3.2. Repeatable; default "
                                                                  "both.")] = None,
                  only: Only = None, check: Check = False, path: Out = None, as_json: AsJson = False,
                  profile: Annotated[bool, typer.Option("--profile", help="Profile the steady step instead.")] = False) -> None:
    """The scheduler's side at real shapes: steps, admission, keys, spills, memory. Runs on CPUs.

    Beside dictionary look-ups of the same run. --only: steady, admit, spills, memory and others.

    \b
    Examples:
      hisparse bench control-plane --quick
      hisparse bench control-plane --shape glm-5.2 --only steady --check
    """
    if profile:
        from hisparse.bench.control_plane.rig import LAYOUTS
        from hisparse.bench.scheduling import profile as run

        for name in shape or LAYOUTS:
            run(name, quick=quick)
        return
    _measure("control-plane", "hisparse.bench.scheduling", path, check, as_json, quick=quick, shapes=shape or (),
             only=only or ())


@app.command()
def policy(quick: Quick = False,
           order: Annotated[list[str] | None, typer.Option(help="ascending, score or random. Repeatable; default all.")] = None,
           seeds: Annotated[int, typer.Option(help="Runs of each cell, averaged.", min=1)] = 2,
           check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """Count the rows that a hot region misses under the shipped policy. Runs on CPUs.

    Beside exact LRU, FIFO, LFU, random and Belady's optimum.

    \b
    Examples:
      hisparse bench policy --quick
      hisparse bench policy --order ascending --check
    """
    _measure("policy", "hisparse.bench.policy", path, check, as_json, quick=quick, orders=order or (), seeds=seeds)


@app.command()
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
    _check_out(path)
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
        _print_facts(facts)
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


def _measure(name: str, module: str, path: Path | None, check: bool, as_json: bool, **options: Any) -> None:
    """Runs a benchmark and prints what it found; exit code 1 for a missed bar that was to be checked, or a wrong answer."""
    from hisparse.bench import report

    _check_out(path)
    if BENCHMARKS[name].needs is Needs.GPU and (reason := why_no_gpu()) is not None:
        raise HiSparseError(f"bench {name} needs a CUDA device: {reason}; 'hisparse bench list' says what runs here")
    with bar(f"bench {name}", as_json) as progress, _no_number(name):
        facts, rows = importlib.import_module(module).run(progress=progress, **options)
    missed = report.missed(rows)
    if path is not None:
        report.write(path, facts, rows)
    if as_json:
        print(json.dumps({"facts": facts, "rows": [row.asdict() for row in rows], "missed": missed}))
    elif rows:
        _print_facts(facts)
        out.print(_table(rows))
    if path is not None:
        err.print(f"kept: {path} and {path.with_suffix('.md').name}", highlight=False, soft_wrap=True)
    if check and missed:
        raise HiSparseError(f"missed: {', '.join(missed)}")


@contextmanager
def _no_number(name: str) -> Iterator[None]:
    """A wrong answer, or a kernel that fails, ends a benchmark without a number."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        raise HiSparseError(f"bench {name} gives no number: {error}") from error


def _check_out(path: Path | None) -> None:
    if path is not None and (path.suffix == ".md" or not path.parent.is_dir()):
        raise ConfigError(f"--out {path}: name a FILE.jsonl in a directory that exists; the table goes beside it as .md")


def _print_facts(facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        out.print(f"{key.replace('_', ' ')}: {value}", highlight=False, markup=False, soft_wrap=True)


def _table(rows: list[Any]) -> Table:
    beside = any(row.yardstick for row in rows)
    bars = any(row.bar is not None for row in rows)
    numbers = ["value", *(["beside"] if beside else []), *(["bar", "ok"] if bars else [])]
    shown = table("case", *numbers, right=numbers)
    for row in rows:
        case, value, unit, bar_text, _, yard, *_, verdict = row.cells()
        ok = {"yes": "yes", "NO": "[red]NO[/red]", "": ""}[verdict]
        shown.add_row(escape(case), f"{value} {unit}", *([yard] if beside else []), *([bar_text, ok] if bars else []))
    return shown
