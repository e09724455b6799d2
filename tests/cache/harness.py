"""A small engine around the cache manager and the fake worker: every selectable row is checked in every step."""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass, field

from hisparse.cache.kv_cache_manager import Admission, CacheStats, Fit, KVCacheManager
from hisparse.cache.prefix import ExtraKeys
from hisparse.cache.retention import Retention
from hisparse.config import CacheConfig, hot_rows
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.types import HiSparseWorkerOutput, Landing, SparseKVOffloadCommand
from tests.cache.fake_worker import FakeWorker, HostMemory, Import, Row


def small_layout(block_size: int = 4, groups: int = 2, top_k: int = 4, dtype: str = "float32") -> KVCacheLayout:
    """`groups` resident groups of two layers each."""
    shape = ModelShape(
        model_type="glm_moe_dsa", num_layers=2 * groups, num_heads=2, kv_lora_rank=12, rope_dim=4, index_head_dim=8,
        top_k=top_k, max_positions=1 << 20, vocab_size=512,
        index_groups=tuple(IndexGroup(leader=2 * g, layers=(2 * g, 2 * g + 1)) for g in range(groups)))
    return KVCacheLayout.build(shape, block_size=block_size, num_groups=groups, dtype=dtype)


# ------------------------------------------------------------------------------------------------ insides
# Everything these tests know about how the cache stores its state, beyond the facade: adapt it here.


def watermark_blocks(manager: KVCacheManager) -> int:
    """Free blocks below which requests must go hot, from the configuration alone."""
    return max(region_blocks(manager), int(manager.config.device_blocks * manager.config.watermark))


def region_blocks(manager: KVCacheManager) -> int:
    """Blocks of one hot region at its starting size, over all groups; from the configuration alone."""
    return sum(rows // manager.layout.block_size for rows in hot_rows(manager.config, manager.layout))


def is_host_backed(manager: KVCacheManager, request_id: str) -> bool:
    """Holds a hot region, or is required to take one."""
    return manager.core.live[request_id].host_backed


def hot_region(manager: KVCacheManager, request_id: str) -> list[list[int]]:
    """Blocks of a request's hot region by group, in slot order; [] = none."""
    return manager.core.live[request_id].hot


def page_keys(manager: KVCacheManager, request_id: str) -> list[bytes]:
    return list(manager._identities[request_id].keys.keys)


# ------------------------------------------------------------------------------------------------ rows


def next_row(previous: Row, token: int) -> Row:
    """The row of the position after `previous`. It depends on every token so far; its low bits are its position."""
    return (hash((previous, token)) & 0xFFFFFFFFFFFF) << 20 | (previous + 1) & 0xFFFFF


def needs(fit: Fit) -> dict[str, int]:
    """Blocks of each pool that the answer says an admission takes."""
    return {pool: int(need) for pool, need in re.findall(r"(device|host): needs (\d+) of", fit.reason)}


def available(stats: CacheStats, pool: str) -> int:
    """Free blocks not promised to others."""
    if pool == "host":
        return stats.host_blocks_free - stats.host_blocks_reserved
    return stats.device_blocks_free + stats.hot_blocks_elastic - stats.device_blocks_reserved


class Store:
    """An indexer store that remembers rows by page key; loads and stores finish when the test says so."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.capacity = capacity
        self.pages: dict[bytes, list[Row]] = {}
        self.stores: list[tuple[bytes, int]] = []

    def hit(self, keys: list[bytes], first_page: int) -> int:
        count = 0
        while first_page + count < len(keys) and keys[first_page + count] in self.pages:
            count += 1
        return count

    def plan_store(self, key: bytes, device_block: int) -> bool:
        if key in self.pages or len(self.pages) + len(self.stores) >= self.capacity:
            return False
        self.stores.append((key, device_block))
        return True

    def finish(self, h: Harness, index: int = 0) -> None:
        """One planned store is done on every rank."""
        key, block = self.stores.pop(index)
        for worker in h.workers:
            assert worker.device[block] == h.worker.device[block], f"ranks hold different rows in indexer block {block}"
        self.pages[key] = list(h.worker.device[block])
        h.manager.unpin_indexer([block])


@dataclass
class Req:
    request_id: str
    tokens: list[int]
    max_tokens: int
    prompt: int
    extra: ExtraKeys = field(default_factory=ExtraKeys)
    state: str = "waiting"
    computed: int = 0
    seat: int = -1
    preemptions: int = 0
    retention: Retention | None = None
    _rows: list[Row] = field(default_factory=list)

    def rows(self, num_tokens: int | None = None) -> list[Row]:
        """KV of the first positions (default: of every token), which depends on the extra keys too."""
        rows = self._rows
        if len(rows) < len(self.tokens):
            row = rows[-1] if rows else zlib.crc32(repr(self.extra).encode()) << 20 | 0xFFFFF
            for token in self.tokens[len(rows) :]:
                row = next_row(row, token)
                rows.append(row)
        return rows[: len(self.tokens) if num_tokens is None else num_tokens]

    def draft_rows(self, drafts: list[int]) -> list[Row]:
        """Every row if these tokens followed."""
        rows = self.rows()
        for token in drafts:
            rows.append(next_row(rows[-1], token))
        return rows


class Harness:
    """Drives one manager and its workers. `step()` is one pass of a scheduler like the engine's; tests may also call
    its parts. `private`: every rank has a host pool of its own, else rank 0 writes one for all."""

    def __init__(self, *, device_blocks: int = 64, host_blocks: int = 64, max_model_len: int = 64, seats: int = 4,
                 chunk: int = 8, groups: int = 2, block_size: int = 4, seed: int = 0, hot_rows: int | list[int] = 8,
                 store: Store | None = None, clock: list[float] | None = None, num_ranks: int = 1, private: bool = False,
                 **config: object) -> None:
        self.layout = small_layout(block_size, groups)
        self.chunk = chunk
        self.rng = random.Random(seed)
        self.clock = clock or [0.0]
        self.store = store
        self.num_ranks, self.private, self.host_blocks = num_ranks, private, host_blocks
        self.config = CacheConfig(block_size=block_size, device_blocks=device_blocks, hot_rows=hot_rows,
                                  **{"hot_rows_max": hot_rows, **config})  # type: ignore[arg-type]
        self.manager = KVCacheManager(
            self.layout, self.config, num_host_blocks=host_blocks, max_model_len=max_model_len, max_seats=seats,
            max_query_tokens=chunk, num_ranks=num_ranks, num_host_writers=num_ranks if private else 1, incarnation=1000,
            clock=lambda: self.clock[0], indexer_offload=store)
        self.workers = self.new_workers(1000)
        self.reqs: dict[str, Req] = {}
        self.imports: dict[str, Import] = {}
        self.loads: dict[str, tuple[tuple[bytes, ...], tuple[int, ...]]] = {}
        self.step_number = 0
        self.tiers: list[tuple[str, int, str]] = []
        """(request, position, tier) of every row read in the last step."""
        self.complete_each_step = True
        self.last: SparseKVOffloadCommand | None = None
        self.finished: dict[str, list[int]] = {}

    def new_workers(self, incarnation: int, hosts: list[HostMemory] | None = None) -> list[FakeWorker]:
        """One per rank, with empty device memory, on the host memory given or on new one."""
        if hosts is None:
            hosts = [HostMemory(self.host_blocks, self.layout.block_size)
                     for _ in range(self.num_ranks if self.private else 1)]
        return [FakeWorker(self.layout, self.config.device_blocks, hosts[rank if self.private else 0], incarnation, rank,
                           writer=self.private or rank == 0) for rank in range(self.num_ranks)]

    @property
    def worker(self) -> FakeWorker:
        """Rank 0."""
        return self.workers[0]

    @property
    def writers(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.writer]

    # ------------------------------------------------------------------------------------------- requests
    def add(self, request_id: str, tokens: list[int], max_tokens: int = 4, extra: ExtraKeys | None = None,
            retention: Retention | None = None) -> Req:
        extra = extra or ExtraKeys()
        self.manager.open(request_id, tokens, extra_keys=extra, max_tokens=max_tokens, retention=retention)
        req = Req(request_id, list(tokens), max_tokens, len(tokens), extra, retention=retention)
        self.reqs[request_id] = req
        return req

    def admit(self, req: Req, landing: Landing | None = None, import_tokens: int = 0) -> Admission | None:
        prefix = self.manager.prefix(req.request_id)
        chunk = min(self.chunk, max(1, len(req.tokens) - prefix.tokens))
        fit = self.manager.fits(req.request_id, prefix, landing=landing, import_tokens=import_tokens, chunk_tokens=chunk)
        if not fit.now:
            return None
        before = self.manager.stats()
        admission = self.manager.admit(req.request_id, prefix, landing=landing, import_tokens=import_tokens,
                                       chunk_tokens=chunk)
        if admission is None:
            return None
        after = self.manager.stats()
        if prefix.tokens or admission.import_target:  # else there are two ways in, and the answer names the smaller need
            for pool, need in needs(fit).items():
                taken = available(before, pool) - available(after, pool)
                assert taken <= need, f"admission of {req.request_id} took {taken} {pool} blocks: {fit.reason}"
        req.seat, req.computed, req.state = admission.seat, admission.cached_tokens, "running"
        if admission.import_target is not None:
            self.imports[req.request_id] = Import(req.request_id, admission.import_target, req.rows(import_tokens))
            req.state = "loading"
        if admission.indexer_blocks:
            self.loads[req.request_id] = (admission.indexer_keys, admission.indexer_blocks)
            req.state = "loading"
        return admission

    def land(self, request_id: str, num_rows: int | None = None) -> None:
        """Bytes arrive on every rank: all of an import, or its first rows; indexer pages of a load."""
        load, pages = self.imports.pop(request_id, None), self.loads.pop(request_id, None)
        for worker in self.workers:
            if load is not None:
                worker.land(load, num_rows)
            if pages is not None:
                assert self.store is not None
                for key, block in zip(*pages, strict=True):
                    worker.outside_write(block, self.store.pages[key])

    def finish_load(self, request_id: str, *, failed: bool = False, num_rows: int | None = None) -> int:
        """Bytes land (a failed load: only the first `num_rows` of an import, by default none), and the manager hears."""
        if not failed:
            self.land(request_id)
        else:
            self.loads.pop(request_id, None)
            self.land(request_id, num_rows or 0)
        valid = self.manager.finish_load(request_id, failed=failed)
        req = self.reqs.get(request_id)
        if req is not None and req.state == "loading":
            req.computed, req.state = valid, "running"
        return valid

    def preempt(self, req: Req) -> None:
        self.manager.preempt(req.request_id)
        req.state, req.seat, req.computed = "waiting", -1, 0
        req.preemptions += 1

    def finish(self, req: Req, *, finished: bool = True) -> None:
        self.manager.free(req.request_id, finished=finished)
        self.manager.close(req.request_id)
        req.state = "finished"
        self.finished[req.request_id] = req.tokens
        del self.reqs[req.request_id]

    # ------------------------------------------------------------------------------------------- one pass
    def schedule(self) -> list[tuple[Req, int, int]]:
        """Like the engine's scheduler: running first in order, halving chunks, waiting, then preempting the last."""
        chosen: dict[str, tuple[Req, int, int]] = {}
        preempted = False
        for req in [r for r in self.reqs.values() if r.state == "running"]:
            if req.state != "running":
                continue
            if req.computed >= len(req.tokens):
                chosen[req.request_id] = (req, len(req.tokens) - 1, 1)
                continue
            tokens = min(self.chunk, len(req.tokens) - req.computed)
            while True:
                if self.manager.allocate(req.request_id, tokens):
                    chosen[req.request_id] = (req, req.computed, tokens)
                    break
                if tokens > self.layout.block_size:
                    tokens = max(tokens // 2, self.layout.block_size)
                    continue
                if self.manager.has_pending_reclamation():
                    break
                running = [r for r in self.reqs.values() if r.state == "running"]
                victim = running[-1]
                if victim is req and len(running) == 1 and any(r.state == "loading" for r in self.reqs.values()):
                    break
                preempted = True
                self.preempt(victim)
                chosen.pop(victim.request_id, None)
                if victim is req:
                    break
        if not preempted:
            for req in [r for r in self.reqs.values() if r.state == "waiting"]:
                admission = self.admit(req)
                if admission is None:
                    break
                if req.state != "running":
                    continue
                if req.computed >= len(req.tokens):
                    chosen[req.request_id] = (req, len(req.tokens) - 1, 1)
                    continue
                tokens = min(self.chunk, len(req.tokens) - req.computed)
                if self.manager.allocate(req.request_id, tokens):
                    chosen[req.request_id] = (req, req.computed, tokens)
        return list(chosen.values())

    def dispatch(self, chosen: list[tuple[Req, int, int]]) -> SparseKVOffloadCommand:
        """Builds the command, runs it on the worker, checks every row that attention may select."""
        plain = self.manager.all_context_pages_resident([req.request_id for req, _, _ in chosen])
        self.step_number += 1
        command = self.manager.plan_step(self.step_number, [(r.request_id, first, n) for r, first, n in chosen])
        assert command is not None
        self.last = command
        self.tiers = []
        for worker in self.workers:
            worker.receive(command)
            worker.start(command)
            for req, first, n in chosen:
                start = max(first, req.computed)
                worker.write(req.seat, start, req.rows(first + n)[start:])
            for req, first, n in chosen:
                tiers = worker.check_rows(req.seat, req.rows(first + n), req.request_id)
                assert not plain or set(tiers) == {"resident"}
                if worker is self.worker:
                    self.tiers += [(req.request_id, p, tiers[p // worker.size]) for p in range(first + n)]
            worker.end()
        return command

    def outputs(self) -> list[HiSparseWorkerOutput]:
        return [worker.output() for worker in self.workers]

    def complete_all(self) -> None:
        """Every copy of every rank is reached, in any order."""
        for worker in self.workers:
            worker.complete_all(self.rng)

    def retire(self, chosen: list[tuple[Req, int, int]], *, acks: bool = True) -> None:
        """The step's output is back: acknowledgements, rows, sampled tokens, finished requests."""
        if acks:
            self.manager.on_worker_output(self.outputs())
        self.manager.retire(self.step_number, {req.request_id: first + n for req, first, n in chosen})
        for req, first, n in chosen:
            if req.state != "running":
                continue
            req.computed = first + n
            if req.computed == len(req.tokens):
                if len(req.tokens) - req.prompt + 1 >= req.max_tokens:
                    self.finish(req)
                else:
                    token = (sum(req.tokens) * 31 + len(req.tokens)) % 500
                    req.tokens.append(token)
                    self.manager.extend(req.request_id, [token])
        if self.store is not None:
            for key, block in self.manager.take_sealed_indexer_pages():
                if not self.store.plan_store(key, block):
                    self.manager.unpin_indexer([block])
            while self.store.stores:
                self.store.finish(self)

    def step(self) -> int:
        """One whole pass; returns the number of chunks scheduled."""
        chosen = self.schedule()
        self.dispatch(chosen)
        if self.complete_each_step:
            self.complete_all()
        self.retire(chosen)
        for request_id in [*self.imports, *self.loads]:
            if request_id in self.imports or request_id in self.loads:
                self.finish_load(request_id)
        self.manager.check()
        return len(chosen)

    def run(self, limit: int = 2000) -> int:
        """Steps until nothing is left; returns the number of steps. Fails when nothing moves for long."""
        for steps in range(limit):
            if not self.reqs and not self.manager.has_pending_work():
                return steps
            self.step()
        live = [(r.request_id, r.state, r.computed) for r in self.reqs.values()]
        raise AssertionError(f"no end after {limit} steps: {live}; loads not landed {[*self.imports, *self.loads]}, "
                             f"copies {[list(worker.copies) for worker in self.workers]}; {self.manager.stats()}")

    def drain(self) -> None:
        """Everything back: only published pages and copies may remain, all unreferenced."""
        self.run()
        for request_id in list(self.imports) + list(self.loads):
            self.finish_load(request_id)
        self.manager.check()
        stats = self.manager.stats()
        assert stats.device_blocks_free == stats.device_blocks_total
        assert stats.host_blocks_free == stats.host_blocks_total
        assert stats.device_blocks_reserved == stats.host_blocks_reserved == 0
