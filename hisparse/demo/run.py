"""The demo from start to verdict: two settings of one service, nine real questions each, every token checked."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.actors.handles import start_cluster, stop_cluster
from hisparse.checkpoints import measured_recall
from hisparse.cli import free_port
from hisparse.config import HiSparseConfig, load_config, model_path
from hisparse.demo.client import Answer, ask_all
from hisparse.demo.prompts import DemoPrompt, demo_prompts
from hisparse.demo.reference import Reference, ReferencePool
from hisparse.demo.report import Verdict, answers_table, counters, parity, print_verdicts, recall
from hisparse.engine.tokenizer import Tokenizer
from hisparse.serve.instance import serving

ROOMY_BLOCKS = 2400
TIGHT_BLOCKS = 150
"""Two or three of the requests fit at once; the long ones only host-backed."""


def demo_config(device_blocks: int) -> HiSparseConfig:
    """One prefill and one decode replica of the bundled checkpoint; prefill always has room."""
    return load_config({
        "model": {"path": "recall", "max_model_len": 4224},
        "cache": {"device_blocks": device_blocks, "host_pool_gib": 0.25},
        "scheduler": {"max_num_seqs": 8, "prefill_chunk_tokens": 512, "max_step_tokens": 1024},
        "serve": {"prefill_replicas": 1, "decode_replicas": 1, "port": 0},
        "prefill": {"cache": {"device_blocks": ROOMY_BLOCKS}},
    })


def run_demo(*, keep: bool = False, as_json: bool = False) -> int:
    """Prints what happened; 0 only if every claim held. `keep`: leaves the second service running until Ctrl-C."""
    out = sys.stderr if as_json else sys.stdout
    console = Console(file=out, width=None if out.isatty() else 140)
    log = Path(tempfile.gettempdir()) / f"hisparse-demo-{os.getpid()}.log"
    try:
        with log.open("w") as messages, contextlib.redirect_stdout(messages), contextlib.redirect_stderr(messages):
            verdicts = _run(console, keep=keep)
    except BaseException:
        console.print(f"the demo broke off; Ray's own messages are in {log}", style="red")
        raise
    ok = all(verdict.ok for verdict in verdicts)
    if as_json:
        print(json.dumps({"ok": ok, "claims": [{"ok": v.ok, "claim": v.claim, "detail": v.detail} for v in verdicts]}))
    if ok:
        log.unlink()
    else:
        console.print(f"Ray's own messages are in {log}")
    return 0 if ok else 1


def _run(console: Console, *, keep: bool) -> list[Verdict]:
    """Both settings and the check, with Ray's messages kept away from the console."""
    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    began = time.perf_counter()
    config = demo_config(ROOMY_BLOCKS)
    tokenizer = Tokenizer(model_path(config.model))
    prompts = demo_prompts(lambda text: len(tokenizer.encode(text)))
    ids = [tokenizer.encode(prompt.text) for prompt in prompts]
    console.print(f"[bold]hisparse demo[/]: {len(prompts)} questions about documents of {min(map(len, ids))} to "
                  f"{max(map(len, ids))} tokens, prefill and decode in separate replicas on "
                  f"{os.cpu_count()} cores")
    recalled = measured_recall()
    shares = ", ".join(f"{int(tokens):,} tokens {share:.0%}" for tokens, share in recalled["exact_match"].items())
    console.print(f"the bundled checkpoint's recall with unmodified transformers, {recalled['documents']} documents each: "
                  f"{shares} ({recalled['hardware']}, {recalled['date']})", highlight=False)
    verdicts: list[Verdict] = []
    answers: dict[str, list[Answer]] = {}
    console.print("starting a local Ray cluster ...")
    start_cluster(join=False)
    try:
        with _service(console, "room for everything", config) as url:
            answers["roomy"], stats = _ask(console, url, prompts)
            console.print(answers_table("1. a device pool with room: KV lands resident, the host is only written",
                                        answers["roomy"]))
            verdicts += _roomy_claims(answers["roomy"], stats)
        with _service(console, "a tight device pool", demo_config(TIGHT_BLOCKS)) as url:
            answers["tight"], stats = _ask(console, url, prompts)
            console.print(answers_table("2. a tight device pool: KV lands in host memory, pages are spilled and reused",
                                        answers["tight"]))
            verdicts += _tight_claims(stats)
            references = _references(console, config, ids, prompts)
            for name, of_setting in answers.items():
                for verdict in (parity(of_setting, references), recall(of_setting)):
                    verdicts.append(Verdict(ok=verdict.ok, claim=f"{name}: {verdict.claim}", detail=verdict.detail))
            ok = all(verdict.ok for verdict in verdicts)
            console.print("\n[bold]what was promised[/]")
            print_verdicts(console, verdicts)
            console.print(f"\n{'[green bold]all held' if ok else '[red bold]NOT all held'}[/] after "
                          f"{time.perf_counter() - began:.0f} s")
            if keep:
                console.print(f"still serving at {url}/v1 (statistics: {url}/stats); where requests live, in a browser: "
                              f"{url}/residency; Ctrl-C stops", soft_wrap=True)
                with contextlib.suppress(KeyboardInterrupt):
                    threading.Event().wait()
    finally:
        stop_cluster()
    return verdicts


@contextlib.contextmanager
def _service(console: Console, what: str, config: HiSparseConfig) -> Iterator[str]:
    began = time.perf_counter()
    console.print(f"starting the service with {what} (cache.device_blocks = {config.cache.device_blocks} for decode) ...",
                  highlight=False)
    port = free_port(config.serve.host)
    with serving(config, port=port):
        console.print(f"ready after {time.perf_counter() - began:.0f} s", highlight=False)
        yield f"http://{config.serve.host}:{port}"


def _ask(console: Console, url: str, prompts: Sequence[DemoPrompt]) -> tuple[list[Answer], dict[str, Any]]:
    """Eight requests at once; the one that shares a prefix follows, so that there is something to share."""
    first = [prompt for prompt in prompts if prompt.shares_with is None]
    later = [prompt for prompt in prompts if prompt.shares_with is not None]

    def say(answer: Answer) -> None:
        said = answer.error or repr(answer.text.strip()[:24])
        console.print(f"  {answer.prompt.name}: {said}", highlight=False, markup=False)

    answers = ask_all(f"{url}/v1", "recall", first, later=later, on_done=say)
    return answers, _settled_stats(url)


def _settled_stats(url: str) -> dict[str, Any]:
    """The decode engine's counters once nothing is open; every account of every engine is checked."""
    deadline = time.monotonic() + 60.0
    while True:
        with urllib.request.urlopen(f"{url}/stats?check=1", timeout=30) as response:
            engines = json.load(response)["engines"]
        broken = [f"{engine['engine']}: {engine['check']}" for engine in engines if engine["check"] != "ok"]
        if broken:
            raise RuntimeError(f"an engine's accounts do not add up: {broken}")
        if not any(engine["running"] + engine["waiting"] + engine["loading"] + engine["held"] for engine in engines):
            return dict(next(engine for engine in engines if engine["role"] == "decode"))
        if time.monotonic() > deadline:
            raise TimeoutError(f"requests or leases are still open after a minute: {engines}")
        time.sleep(0.2)


def _roomy_claims(answers: Sequence[Answer], stats: dict[str, Any]) -> list[Verdict]:
    rows = stats["resolve"]
    reads = rows["miss_rows"] + rows["prefill_host_rows"]
    landings = [answer.stats.get("landing") for answer in answers]
    return [
        Verdict(ok=reads == 0, claim="roomy: host reads = 0", detail=f"{reads} rows"),
        Verdict(ok=all(landing in ("resident", None) for landing in landings) and stats["resident_landings"] > 0,
                claim="roomy: every import landed resident", detail=f"{stats['resident_landings']} of {len(answers)}"),
    ]


def _tight_claims(stats: dict[str, Any]) -> list[Verdict]:
    cache = stats["cache"]
    claims = counters({
        "HOST landings": stats["host_landings"], "spills": cache["spills_completed"],
        "reused blocks": cache["pages_reused"], "hot misses": stats["resolve"]["miss_rows"],
        "prefix hit tokens": cache["prefix_hit_tokens"], "preemptions": stats["preemptions"],
    })
    return [Verdict(ok=v.ok, claim=f"tight: {v.claim}", detail=v.detail) for v in claims]


def _references(console: Console, config: HiSparseConfig, ids: Sequence[Sequence[int]],
                prompts: Sequence[DemoPrompt]) -> list[Reference]:
    console.print("decoding every prompt once with unmodified transformers (eager, its own indexer and top-k) ...")
    pool = ReferencePool(model_path(config.model), prefill_chunk_tokens=config.scheduler.prefill_chunk_tokens,
                         threads=os.cpu_count() or 1)
    try:
        return [future.result() for future in [pool.submit(of, prompt.max_tokens) for of, prompt in zip(ids, prompts)]]
    finally:
        pool.close()
