"""`hisparse bench`: the benchmarks, each number beside a ceiling or baseline of the same run."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape

from hisparse.bench.catalogue import BENCHMARKS, Needs, why_no_gpu
from hisparse.cli.bench_serve import serve
from hisparse.cli.console import AsJson, out, table
from hisparse.cli.measured import Out, measure
from hisparse.errors import ConfigError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Benchmarks: each number beside a ceiling or baseline "
                  "that the same run measured. [bold]list[/bold] says what each needs.")

Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes, no bars: a smoke test.")]
Only = Annotated[list[str] | None, typer.Option(help="Part of it. Repeatable; default all.")]
Check = Annotated[bool, typer.Option("--check", help="Exit code 1 if a bar is missed.")]


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
    measure("resolver", "hisparse.bench.resolver", path, check, as_json, quick=quick, only=only or (), span_gib=span_gib,
             tuning=tune)


@app.command()
def copy(quick: Quick = False, only: Only = None, check: Check = False, path: Out = None, as_json: AsJson = False) -> None:
    """Write rows, mirror, spill, restore and scatter pages. Needs a GPU.

    Beside the copy engine and an append alone. --only: append, pages.

    \b
    Examples:
      hisparse bench copy --quick
      hisparse bench copy --only pages --out copy.jsonl
    """
    measure("copy", "hisparse.bench.copies", path, check, as_json, quick=quick, only=only or ())


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
    measure("attention", "hisparse.bench.attention", path, check, as_json, batches=batch or (), heads=heads or (),
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
    measure("indexer", "hisparse.bench.indexer", path, check, as_json, quick=quick)


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
    measure("step", "hisparse.bench.step", path, check, as_json, layers=layers)


@app.command("import")
def import_(device: Annotated[str, typer.Option(help="Where both engines keep their KV: cpu or cuda.")] = "cpu",
            quick: Quick = False,
            only: Annotated[list[str] | None, typer.Option(help="A word that the case's name has. Repeatable.")] = None,
            repeats: Annotated[int, typer.Option(help="Imports timed per case.", min=1)] = 7,
            slot_pages: Annotated[int | None, typer.Option(help="Of a staging slot; default as an engine.", min=1)] = None,
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
    measure("import", "hisparse.bench.pd_import", path, check, as_json, device=device, quick=quick, only=only or (),
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
    measure("transport", "hisparse.bench.transport", path, check, as_json, quick=quick)


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
    measure("control-plane", "hisparse.bench.scheduling", path, check, as_json, quick=quick, shapes=shape or (),
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
    measure("policy", "hisparse.bench.policy", path, check, as_json, quick=quick, orders=order or (), seeds=seeds)


app.command()(serve)
