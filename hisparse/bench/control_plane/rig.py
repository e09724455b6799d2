"""A cache manager in the steady state of a decode engine under pressure, driven like the engine drives it."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hisparse.cache.kv_cache_manager import CacheStats, KVCacheManager
from hisparse.config import CacheConfig, hot_rows
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.types import AckKind, HiSparseWorkerOutput, Landing, SparseKVOffloadCommand, TransferAck

BLOCK = 64
INCARNATION = 0x5EED
MAX_MODEL_LEN = 1 << 20
FULL_MASK = (1 << BLOCK) - 1
WATERMARK = 0.1
PHASES = ("allocate", "query", "plan", "retire", "acks", "extend")
"""Timed parts of a step, in the order in which the engine does them."""


def glm_5_2() -> KVCacheLayout:
    """78 layers; 21 own an indexer (0, 1, 2, 6, 10 .. 74). Packed as 20 resident and 20 hot groups."""
    leaders = [0, 1, *range(2, 78, 4)]
    return _layout("glm_moe_dsa", num_layers=78, num_heads=64, vocab=154_880, leaders=leaders, num_groups=20)


def deepseek_v3_2() -> KVCacheLayout:
    """61 layers, each with an indexer: 61 resident and 61 hot groups."""
    return _layout("deepseek_v32", num_layers=61, num_heads=128, vocab=129_280, leaders=list(range(61)), num_groups=61)


def _layout(model_type: str, *, num_layers: int, num_heads: int, vocab: int, leaders: list[int],
            num_groups: int) -> KVCacheLayout:
    ends = [*leaders[1:], num_layers]
    groups = tuple(IndexGroup(leader=first, layers=tuple(range(first, end))) for first, end in zip(leaders, ends, strict=True))
    shape = ModelShape(model_type=model_type, num_layers=num_layers, num_heads=num_heads, kv_lora_rank=512, rope_dim=64,
                       index_head_dim=128, top_k=2048, max_positions=MAX_MODEL_LEN, vocab_size=vocab, index_groups=groups)
    return KVCacheLayout.build(shape, block_size=BLOCK, dtype="bfloat16", num_groups=num_groups)


LAYOUTS = {"glm-5.2": glm_5_2, "deepseek-v3.2": deepseek_v3_2}


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Random token ids, another prompt for another seed."""
    return np.random.default_rng(seed).integers(0, 100_000, num_tokens).tolist()


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Setting up makes millions of objects; the collector would look at them again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def make_manager(layout: KVCacheLayout, *, device_blocks: int, host_blocks: int, max_seats: int,
                 elastic: bool = True, max_model_len: int = MAX_MODEL_LEN) -> KVCacheManager:
    """A manager with the default configuration but for the pools; `elastic=False` fixes the hot regions' size."""
    config = CacheConfig(block_size=BLOCK, device_blocks=device_blocks, watermark=WATERMARK)
    if not elastic:
        config = config.model_copy(update={"hot_rows_max": hot_rows(config, layout)})
    return KVCacheManager(layout, config, num_host_blocks=host_blocks, max_model_len=max_model_len, max_seats=max_seats,
                          max_query_tokens=512, num_ranks=1, incarnation=INCARNATION)


def region_blocks(layout: KVCacheLayout) -> int:
    """Device blocks of a hot region at its starting size."""
    return sum(layout.hot_blocks(rows) for rows in hot_rows(CacheConfig(), layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs.

    Attributes:
        num_tokens: context of each request when the measurement starts, about.
        staggered: an equal share of the requests seals a page in each step; else all in the same one.
        elastic: hot regions may grow (the default configuration). growing: and have room to, all the time.
        ack_delay: steps between a copy's enqueued and its completed. steps: decode steps the pools must have room for.
        spare_blocks: device blocks, and host pages, for guests.
    """

    num_requests: int
    num_tokens: int
    staggered: bool = True
    elastic: bool = True
    growing: bool = False
    ack_delay: int = 1
    steps: int = 1000
    spare_blocks: int = 0
    max_model_len: int = MAX_MODEL_LEN


class Rig:
    """Requests that read from host through hot regions, in a device pool without a plain free block.

    They arrive by HOST landings, then run chunks of a page until every free block is a loose page (so that each new
    page takes another's blocks), then decode until all rows of a page were mirrored. Builds acknowledgements like one
    rank; that is not timed.
    """

    def __init__(self, layout: KVCacheLayout, load: Load) -> None:
        self.layout, self.load = layout, load
        self.step_no = 0
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        """Seconds of the last step."""
        self.num_spills = 0
        """In the last command."""
        self._late: list[tuple[int, list[int]]] = []
        self.ids = [f"request-{i}" for i in range(load.num_requests)]
        self.computed: dict[str, int] = {}
        with no_gc():
            self.manager = self._make_manager()
            self._import_all()
            self._grow_regions()
            if not load.growing:
                self._fill_with_loose_pages()
            self._take_spare_blocks()
            for _ in range(BLOCK + 8):
                self.step()

    # ------------------------------------------------------------------------------------------- steady state
    def _make_manager(self) -> KVCacheManager:
        layout, load = self.layout, self.load
        n, groups, region = load.num_requests, layout.num_resident_groups, region_blocks(layout)
        pages = layout.pages(load.num_tokens)
        loose = math.ceil((pages + region) * WATERMARK / (1 - WATERMARK) / (1 + groups)) + 4
        grown = loose + load.steps // BLOCK + 8
        margin = 2 * groups if not load.growing else groups * (3 * load.steps // n + 8)
        busy = pages + grown + region + 4 * groups + margin
        least = layout.pages(load.max_model_len) + region + 12 * groups
        device = math.ceil(max(n * busy, least) / (1 - WATERMARK)) + load.spare_blocks
        host = n * (pages + grown + 64) + layout.pages(load.max_model_len) + 2 + load.spare_blocks
        return make_manager(layout, device_blocks=device, host_blocks=host, max_seats=n + 4, elastic=load.elastic,
                            max_model_len=load.max_model_len)

    def _import_all(self) -> None:
        load, manager = self.load, self.manager
        phases = load.num_requests if load.staggered else 1
        for i, request_id in enumerate(self.ids):
            length = load.num_tokens - (i % phases) * BLOCK // min(phases, BLOCK) % BLOCK
            manager.open(request_id, prompt(length, i), max_tokens=1 << 14)
            hit = manager.prefix(request_id)
            admission = manager.admit(request_id, hit, landing=Landing.HOST, import_tokens=length, chunk_tokens=1)
            assert admission is not None, manager.fits(request_id, hit, landing=Landing.HOST, import_tokens=length,
                                                       chunk_tokens=1).reason
        self._idle_step()
        for i, request_id in enumerate(self.ids):
            self.computed[request_id] = manager.finish_load(request_id, failed=False)
            manager.extend(request_id, [i])

    def _idle_step(self) -> None:
        self.step_no += 1
        self.manager.plan_step(self.step_no, [])
        self.manager.retire(self.step_no, {})

    def _grow_regions(self) -> None:
        """Regions that may grow have taken what they may, unless room is left for them on purpose."""
        before = -1
        while not self.load.growing and (now := self.manager.stats().hot_blocks_grown) != before:
            before = now
            self._idle_step()

    def _fill_with_loose_pages(self) -> None:
        for _ in range(400):
            before = self.manager.stats()
            self.step(tokens=BLOCK)
            if self.manager.stats().pages_reused - before.pages_reused >= 0.9 * len(self.ids):
                return
        raise RuntimeError(f"no steady state: {self.manager.stats()}")

    def _take_spare_blocks(self) -> None:
        """A request that is still loading takes what the wide steps needed beyond the watermark: decode steps that need
        blocks then get them from grown regions."""
        stats, layout = self.manager.stats(), self.layout
        watermark = int(WATERMARK * (stats.device_blocks_total + 1))
        spare = stats.device_blocks_free - watermark - self.load.spare_blocks
        pages = spare - region_blocks(layout) - 2 * layout.num_resident_groups
        if not self.load.elastic or self.load.growing or not 2 < pages <= layout.pages(self.load.max_model_len):
            return
        num_tokens = pages * BLOCK
        self.manager.open("loading", prompt(num_tokens, len(self.ids)), max_tokens=1)
        hit = self.manager.prefix("loading")
        self.manager.admit("loading", hit, landing=Landing.HOST, import_tokens=num_tokens, chunk_tokens=1)

    # ------------------------------------------------------------------------------------------- a step
    def step(self, tokens: int = 1) -> float:
        """One step of every request; returns the seconds that its scheduler-side calls took."""
        manager, ids, computed, clock = self.manager, self.ids, self.computed, time.perf_counter
        if tokens > 1:
            for request_id in ids:
                manager.extend(request_id, range(tokens - 1))
        self.step_no += 1
        step = self.step_no
        scheduled = [(request_id, computed[request_id], tokens) for request_id in ids]
        after = {request_id: first + tokens for request_id, first, _ in scheduled}
        granted = True

        t0 = clock()
        for request_id in ids:
            granted &= manager.allocate(request_id, tokens)
        t1 = clock()
        manager.all_context_pages_resident(ids)
        t2 = clock()
        command = manager.plan_step(step, scheduled)
        t3 = clock()

        if not granted or command is None:
            raise RuntimeError(f"step {step}: a request found no room; {manager.stats()}")
        outputs = self._acknowledge(command)
        self.num_spills = len(command.spills)
        accepted = [[step % 1000]] * len(ids)

        t4 = clock()
        manager.retire(step, after)
        t5 = clock()
        manager.on_worker_output(outputs)
        t6 = clock()
        for request_id, token in zip(ids, accepted):
            manager.extend(request_id, token)
        manager.overdue_transfers()
        t7 = clock()

        self.computed = after
        parts = (t1 - t0, t2 - t1, t3 - t2, t5 - t4, t6 - t5, t7 - t6)
        self.phases_s = dict(zip(PHASES, parts, strict=True))
        return sum(parts)

    def _acknowledge(self, command: SparseKVOffloadCommand) -> list[HiSparseWorkerOutput]:
        """Enqueued for the spills of this step; completed, all rows durable, for those of `ack_delay` steps ago."""
        new = [spill.id for spill in command.spills]
        self._late.append((command.step + self.load.ack_delay, new))
        acks = [TransferAck(incarnation=INCARNATION, rank=0, transfer_id=i, kind=AckKind.ENQUEUED) for i in new]
        while self._late and self._late[0][0] <= command.step:
            acks += [TransferAck(incarnation=INCARNATION, rank=0, transfer_id=i, kind=AckKind.COMPLETED, row_mask=FULL_MASK)
                     for i in self._late.pop(0)[1]]
        return [HiSparseWorkerOutput(rank=0, incarnation=INCARNATION, acks=tuple(acks))]


def difference(after: CacheStats, before: CacheStats) -> dict[str, int]:
    """What the counters counted in between."""
    names = ("spills_planned", "spills_without_bytes", "spills_completed", "pages_unpinned", "pages_reused",
             "pages_published", "hot_blocks_grown", "hot_blocks_taken_back")
    return {name: getattr(after, name) - getattr(before, name) for name in names}

