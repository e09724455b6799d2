"""`hisparse trace`: selections of sparse layers, made from a calibrated generator, and what a hot region would miss of them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from hisparse.cli import chart
from hisparse.cli.console import AsJson, err, out, table
from hisparse.errors import ConfigError, HiSparseError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich",
                  help="Traces of the positions that sparse layers select: make them, and replay them through policies.")
HOT_ROWS = (3072, 4096, 6144, 8192)
STEPS, WARM = 260, 140
NAMES = {"clock": "CLOCK", "lru": "LRU", "stamp": "stamp", "fifo": "FIFO", "lfu": "LFU", "belady": "Belady"}

Kinds = Annotated[list[str] | None, typer.Option("--kind", help="sticky, typical, volatile or scan. Repeatable; default all.")]
Steps = Annotated[int, typer.Option(help="Decode steps to make.", min=1)]
Seed = Annotated[int, typer.Option(help="Of the generator.", min=0)]


@app.command()
def synth(
    path: Annotated[Path, typer.Argument(metavar="OUT.npz", help="Trace file to write.")],
    kinds: Kinds = None,
    steps: Steps = STEPS,
    seed: Seed = 0,
    context: Annotated[int | None, typer.Option(help="Tokens at the first step; default 131,072.", min=1)] = None,
    top_k: Annotated[int | None, typer.Option(help="Positions a step selects; default 2,048.", min=1)] = None,
    pool: Annotated[int | None, typer.Option(help="Positions that are alive.", min=1)] = None,
    skew: Annotated[float | None, typer.Option(help="Exponent of their Zipf-like weights; default 0.8.", min=0)] = None,
    drift: Annotated[int | None, typer.Option(help="Of them replaced each step; default 16.", min=0)] = None,
    recent: Annotated[int | None, typer.Option(help="Newest positions, always selected; default 64.", min=0)] = None,
    order: Annotated[str, typer.Option(help="Of a step's positions: ascending, score or random.")] = "ascending",
    as_json: AsJson = False,
) -> None:
    """Write a trace of generated selections.

    A layer's live positions form a pool, each with a weight; a step draws top-k of them without replacement, and always
    the newest ones. The kinds differ in the pool: 6,000 positions (sticky), 8,000 (typical), 12,500 (volatile), and a scan,
    whose pool moves on by one position each step. The options change every chosen kind.

    \b
    Examples:
      hisparse trace synth all.npz
      hisparse trace synth small.npz --kind typical --top-k 256 --pool 1000 --context 8192
    """
    changes = {"context": context, "top_k": top_k, "pool": pool, "skew": skew, "drift": drift, "recent": recent}
    made = _synthesise(kinds, steps, seed, {key: value for key, value in changes.items() if value is not None}, order)
    made.save(path)
    facts = {"path": str(path), "bytes": path.stat().st_size, "series": [series.name for series in made.series],
             "steps": steps, "source": made.source}
    if as_json:
        print(json.dumps(facts))
    else:
        out.print(f"{path}: {', '.join(facts['series'])}; {steps} steps each, {facts['bytes']:,} bytes", highlight=False,
                  soft_wrap=True)


@app.command()
def replay(
    path: Annotated[Path | None, typer.Argument(metavar="[TRACE.npz]", help="Default: what 'trace synth' makes.")] = None,
    hot_rows: Annotated[list[int] | None, typer.Option("--hot-rows", help="Size of the hot region. Repeatable; default "
                                                       "3072, 4096, 6144 and 8192.", min=1)] = None,
    policies: Annotated[list[str] | None, typer.Option("--policy", help="clock, lru, stamp, fifo, lfu or belady. Repeatable; "
                                                       "default all.")] = None,
    warm: Annotated[int | None, typer.Option(help="First steps, which fill the region and do not count; default 140, or half "
                                             "of a shorter trace.", min=0)] = None,
    kinds: Kinds = None,
    steps: Annotated[int, typer.Option(help="Decode steps to make without a trace.", min=1)] = STEPS,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Chart to write, FILE.svg or FILE.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many rows per layer and step a hot region would miss.

    clock is the policy of this hisparse, run by the very code that decode uses; belady is the optimum, which knows the future.
    Every miss is a row read from host memory. In a trace file, a series is one layer of one request.

    \b
    Examples:
      hisparse trace replay
      hisparse trace replay all.npz --hot-rows 4096 --policy clock --policy lru
      hisparse trace replay all.npz --plot misses.svg --json
    """
    from hisparse.trace.replay import POLICIES, Misses
    from hisparse.trace.replay import replay as run
    from hisparse.trace.trace_file import Trace

    if plot is not None:
        chart.check_plot(plot)
    if path is not None and kinds:
        raise ConfigError("--kind chooses what to generate; a trace file is replayed as it is: leave one of them out")
    found = _synthesise(kinds, steps, seed, {}, "ascending") if path is None else Trace.load(path)
    sizes, names = sorted(set(hot_rows or HOT_ROWS)), list(dict.fromkeys(policies or POLICIES))
    rows: list[Misses] = []
    with Progress(console=err, transient=True, disable=as_json or not err.is_terminal) as progress:
        task = progress.add_task("replaying", total=len(found.series) * len(sizes) * len(names))
        for series in found.series:
            first = min(WARM, len(series.steps) // 2) if warm is None else warm
            for row in run(series, hot_rows=sizes, policies=names, warm_steps=first):
                rows.append(row)
                progress.advance(task)
    if plot is not None:
        chart.write(plot, "Rows missed per layer and step", _panels(rows))
    if as_json:
        print(json.dumps({"source": found.source, "unit": "rows missed per layer and step",
                          "misses": [dataclasses.asdict(row) for row in rows]}))
        return
    _print(rows, names)
    if plot is not None:
        err.print(f"chart: {plot}", highlight=False, soft_wrap=True)


@app.command()
def record(
    path: Annotated[Path, typer.Argument(metavar="OUT.npz", help="Trace file to write.")],
    model: Annotated[str, typer.Option(help="Checkpoint directory, or 'recall'.")],
    prompt: Annotated[Path, typer.Option(help="Text file: the prompt.")],
    max_tokens: Annotated[int, typer.Option(help="Decode steps to record.", min=1)] = 256,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value. Repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Record what one request selects, layer by layer, on an engine in this process.

    To record real traffic, give a running service a directory: hisparse serve ... --set trace.directory=DIR

    \b
    Examples:
      hisparse trace record mine.npz --model recall --prompt README.md
      hisparse trace record mine.npz --model PATH --prompt t.txt --max-tokens 99
    """
    from hisparse.cli.configuration import read_configuration
    from hisparse.config import model_path
    from hisparse.engine.tokenizer import Tokenizer
    from hisparse.trace.trace_file import Trace, check_name

    check_name(path)
    try:
        text = prompt.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the prompt {prompt}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix="hisparse-trace-") as folder:
        config = read_configuration(None, model, [*(sets or []), f"trace.directory={folder}", f"trace.steps={max_tokens}"])
        token_ids = Tokenizer(model_path(config.model)).encode(text)
        _generate(config.for_role("colocated"), token_ids, max_tokens)
        files = list(Path(folder).glob("*.npz"))
        if not files:
            raise HiSparseError(f"nothing was recorded: the answer ended at its first token; raise --max-tokens ({max_tokens})")
        found = Trace.load(files[0])
    found.save(path)
    facts = {"path": str(path), "bytes": path.stat().st_size, "series": [series.name for series in found.series],
             "steps": len(found.series[0].steps), "prompt_tokens": len(token_ids)}
    if as_json:
        print(json.dumps(facts))
    else:
        out.print(f"{path}: {len(found.series)} layers, {facts['steps']} steps after a prompt of {len(token_ids):,} tokens, "
                  f"{facts['bytes']:,} bytes", highlight=False, soft_wrap=True)


def _generate(config: Any, token_ids: list[int], max_tokens: int) -> None:
    """One answer of an engine without Ray, to its full length."""
    from hisparse.testing.local_engine import LocalEngine
    from hisparse.types import SamplingParams

    engine = LocalEngine(config)
    try:
        (answer,) = engine.generate([token_ids], SamplingParams(max_tokens=max_tokens + 1, ignore_eos=True))
    finally:
        engine.close()
    if answer.error is not None:
        raise HiSparseError(f"the engine did not answer: {answer.error}")


def _synthesise(kinds: list[str] | None, steps: int, seed: int, changes: dict[str, Any], order: str) -> Any:
    from hisparse.trace.selection import LAYER_TYPES, Order
    from hisparse.trace.synth import synthesise

    for kind in kinds or ():
        if kind not in LAYER_TYPES:
            raise ConfigError(f"no kind of layer is named {kind!r}; there are {', '.join(LAYER_TYPES)}")
    if order not in [known.value for known in Order]:
        raise ConfigError(f"--order must be {', '.join(known.value for known in Order)}, got {order!r}")
    models = {kind: dataclasses.replace(LAYER_TYPES[kind], **changes) for kind in dict.fromkeys(kinds or LAYER_TYPES)}
    return synthesise(models, num_steps=steps, seed=seed, order=Order(order))


def _print(rows: list[Any], policies: list[str]) -> None:
    numbers = ["hot rows", *(NAMES[policy] for policy in policies)]
    shown = table("layer", *numbers, title="rows missed per layer and step", right=numbers)
    found = {(row.series, row.hot_rows, row.policy): row.mean for row in rows}
    last = None
    for series, size in dict.fromkeys((row.series, row.hot_rows) for row in rows):
        if last not in (None, series):
            shown.add_section()
        shown.add_row("" if series == last else series, f"{size:,}",
                      *(f"{found[series, size, policy]:,.0f}" for policy in policies))
        last = series
    out.print(shown)


def _panels(rows: list[Any]) -> list[chart.Panel]:
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        lines.setdefault(row.series, {}).setdefault(row.policy, []).append((row.hot_rows, row.mean))
    return [chart.Panel(title=series, x_label="hot rows", y_label="rows missed",
                        lines=tuple(chart.Line(name=NAMES[policy], points=tuple(points)) for policy, points in found.items()))
            for series, found in lines.items()]
