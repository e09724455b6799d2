"""Admission of long prompts, and their page keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from hisparse.bench.control_plane.context import Context, K, Stopwatch, size
from hisparse.bench.control_plane.rig import BLOCK, Rig, make_manager, prompt, region_blocks
from hisparse.bench.report import Row
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.types import Landing


def _host_landings(manager: KVCacheManager, num_tokens: int, repeats: int, tick: Callable[[], Any]) -> Stopwatch:
    """Opens, admits, lands and frees prompts of their own. `tick` runs a step."""
    watch = Stopwatch()
    for i in range(repeats):
        name, tokens = f"landing-{num_tokens}-{i}", prompt(num_tokens, 10_000 + i)
        watch.time("open", manager.open, name, tokens, max_tokens=16)
        hit = watch.time("prefix", manager.prefix, name)
        for landing in Landing:
            fit = watch.time(f"fits {landing.value}", manager.fits, name, hit, landing=landing, import_tokens=num_tokens,
                             chunk_tokens=1)
        admission = watch.time("admit", manager.admit, name, hit, landing=Landing.HOST, import_tokens=num_tokens,
                               chunk_tokens=1)
        assert admission is not None and admission.import_target is not None, fit.reason
        assert sum(map(bool, admission.import_target.pages.host_blocks)) == num_tokens // BLOCK
        watch.time("step", tick)
        landed = watch.time("finish_load", manager.finish_load, name, failed=False)
        assert landed == num_tokens
        watch.time("free", manager.close, name)
        tick()
    return watch


def _prefix_hits(manager: KVCacheManager, num_tokens: int, repeats: int, tick: Callable[[], Any]) -> Stopwatch:
    """Lands one prompt, finishes it, and admits it again and again as a prefix hit."""
    watch = Stopwatch()
    tokens = prompt(num_tokens, 20_000)
    manager.open("first", tokens, max_tokens=16)
    assert manager.admit("first", manager.prefix("first"), landing=Landing.HOST, import_tokens=num_tokens, chunk_tokens=1)
    tick()
    assert manager.finish_load("first", failed=False) == num_tokens
    manager.close("first")
    for i in range(repeats):
        name = f"hit-{num_tokens}-{i}"
        manager.open(name, tokens, max_tokens=16)
        hit = watch.time("prefix", manager.prefix, name)
        fit = watch.time("fits", manager.fits, name, hit, landing=None, chunk_tokens=1)
        admission = watch.time("admit", manager.admit, name, hit, landing=None, chunk_tokens=1)
        assert admission is not None, fit.reason
        assert admission.cached_tokens == hit.tokens == num_tokens and not admission.indexer_keys
        watch.time("step", tick)
        watch.time("free", manager.close, name)
        tick()
    return watch


def _quiet_manager(context: Context, num_tokens: int, guests: int) -> tuple[KVCacheManager, Callable[[], None]]:
    """A manager with room for all guests, and nobody else; and its idle step."""
    layout, pages = context.layout, context.layout.pages(num_tokens)
    device = guests * (pages + region_blocks(layout) + 4 * layout.num_resident_groups)
    least = context.layout.pages(context.max_model_len) + region_blocks(layout) + 12 * layout.num_resident_groups
    manager = make_manager(layout, device_blocks=int(max(device, least) / 0.9) + 1,
                           host_blocks=max(guests * (pages + 2), layout.pages(context.max_model_len)) + 2,
                           max_seats=4, max_model_len=context.max_model_len)
    steps = iter(range(1, 1 << 30))

    def tick() -> None:
        step = next(steps)
        manager.plan_step(step, [])
        manager.retire(step, {})

    return manager, tick


def _admission_rows(context: Context, where: str, landings: Stopwatch, hits: Stopwatch, tokens: int) -> list[Row]:
    name, pages = size(tokens), tokens // BLOCK
    query = ["prefix", *(f"fits {landing.value}" for landing in Landing), "admit"]
    return [
        landings.row(context, f"admit {name} by host landing{where}", query, 25.0, admit_ms=landings.median("admit"),
                     admit_us_per_page=landings.median("admit") * 1e3 / pages, next_step_ms=landings.median("step"),
                     finish_load_ms=landings.median("finish_load"), free_ms=landings.median("free")),
        hits.row(context, f"admit {name} by prefix hit{where}", ["prefix", "fits", "admit"], 25.0,
                 admit_ms=hits.median("admit"), admit_us_per_page=hits.median("admit") * 1e3 / pages,
                 prefix_ms=hits.median("prefix"), next_step_ms=hits.median("step"), free_ms=hits.median("free")),
    ]


def admit(context: Context) -> list[Row]:
    """Nobody else there; both pools have plain free blocks. Also the page keys, once."""
    repeats, tokens = 5, context.longest_tokens
    manager, tick = _quiet_manager(context, tokens, repeats + 2)
    landings = _host_landings(manager, tokens, repeats, tick)
    hits = _prefix_hits(manager, tokens, repeats, tick)
    manager.check()
    return _admission_rows(context, "", landings, hits, tokens)


def admit_busy(context: Context) -> list[Row]:
    """Beside running requests: copies are under way, free device blocks are loose pages, free host pages published."""
    layout, tokens = context.layout, context.longest_tokens
    spare = layout.pages(tokens) + region_blocks(layout) + 4 * layout.num_resident_groups
    rig = Rig(layout, context.load(256, 8 * K, spare_blocks=spare))
    landings = _host_landings(rig.manager, tokens, 5, rig.step)
    hits = _prefix_hits(rig.manager, tokens, 5, rig.step)
    rig.manager.check()
    where = f" beside {rig.load.num_requests}x{size(rig.load.num_tokens)}"
    return _admission_rows(context, where, landings, hits, tokens)


def admit_growth(context: Context) -> list[Row]:
    """Page keys and admission over the length of the prompt."""
    rows = []
    lengths = [2 * K, 4 * K] if context.quick else [8 * K, 32 * K, 128 * K, 512 * K]
    for tokens in lengths:
        manager, tick = _quiet_manager(context, tokens, 7)
        landings, hits = _host_landings(manager, tokens, 5, tick), _prefix_hits(manager, tokens, 5, tick)
        pages = tokens // BLOCK
        for name, watch, part in (("keys", landings, "open"), ("host landing", landings, "admit"),
                                  ("prefix hit", hits, "admit")):
            rows.append(context.row(f"growth, {name}, {size(tokens)}", watch.median(part) * 1e3 / pages, "us/page"))
    return rows


def page_keys(context: Context) -> list[Row]:
    """`open` with a Python list. The ceiling is a chain of SHA-256 over bytes that are there already."""
    tokens = context.longest_tokens
    manager, _ = _quiet_manager(context, tokens, 1)
    watch = Stopwatch()
    for i in range(7):
        ids = prompt(tokens, 30_000 + i)
        watch.time("open", manager.open, f"keys-{i}", ids, max_tokens=16)
        manager.close(f"keys-{i}")
        watch.time("chain", _hash_chain, tokens // BLOCK)
    row = watch.row(context, f"page keys {size(tokens)}", ["open"], 40.0)
    chain_ms = min(watch.ms["chain"])
    return [context.row(row.case.removeprefix(f"{context.shape} "), row.value, "ms", bar=40.0, best=row.best, max=row.max,
                        yardstick=(chain_ms, "x chain"), detail=row.detail | {"sha256_chain_ms": chain_ms})]


def _hash_chain(num_pages: int) -> None:
    data, parent = bytes(BLOCK * 8), bytes(32)
    for _ in range(num_pages):
        parent = hashlib.sha256(parent + data).digest()
