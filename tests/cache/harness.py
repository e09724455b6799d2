"""A small engine around the cache manager and the fake worker: every selectable row is checked in every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hisparse.cache.kv_cache_manager import Admission, KVCacheManager
from hisparse.cache.prefix import ExtraKeys
from hisparse.config import CacheConfig
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.types import Landing, SparseKVOffloadCommand
from tests.cache.fake_worker import FakeWorker, Import, Row


def small_layout(block_size: int = 4, groups: int = 2, top_k: int = 4) -> KVCacheLayout:
    """`groups` resident groups of two layers each."""
    shape = ModelShape(
        model_type="glm_moe_dsa", num_layers=2 * groups, num_heads=2, kv_lora_rank=12, rope_dim=4, index_head_dim=8,
        top_k=top_k, max_positions=1 << 20, vocab_size=512,
        index_groups=tuple(IndexGroup(leader=2 * g, layers=(2 * g, 2 * g + 1)) for g in range(groups)))
    return KVCacheLayout.build(shape, block_size=block_size, num_groups=groups)


class Store:
    """An indexer store that remembers rows by page key; loads and stores finish when the test says so."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.capacity = capacity
        self.pages: dict[bytes, list[Row | str]] = {}
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

    def row(self, position: int) -> Row:
        """KV depends on every token up to the position, and on the extra keys."""
        return (repr((self.tokens[: position + 1], self.extra)), position)


class Harness:
    """Drives one manager. `step()` is one pass of a scheduler like the engine's; tests may also call its parts."""

    def __init__(self, *, device_blocks: int = 64, host_blocks: int = 64, max_model_len: int = 64, seats: int = 4,
                 chunk: int = 8, groups: int = 2, block_size: int = 4, seed: int = 0, hot_rows: int = 8,
                 store: Store | None = None, clock: list[float] | None = None, **config: object) -> None:
        self.layout = small_layout(block_size, groups)
        self.chunk = chunk
        self.rng = random.Random(seed)
        self.clock = clock or [0.0]
        self.store = store
        self.config = CacheConfig(block_size=block_size, device_blocks=device_blocks, hot_rows=hot_rows,
                                  **{"hot_rows_max": hot_rows, **config})  # type: ignore[arg-type]
        self.manager = KVCacheManager(
            self.layout, self.config, num_host_blocks=host_blocks, max_model_len=max_model_len, max_seats=seats,
            max_query_tokens=chunk, num_ranks=1, incarnation=1000, clock=lambda: self.clock[0], indexer_offload=store)
        self.worker = FakeWorker(self.layout, device_blocks, host_blocks, seats, 1000)
        self.reqs: dict[str, Req] = {}
        self.imports: dict[str, Import] = {}
        self.loads: dict[str, tuple[tuple[bytes, ...], tuple[int, ...]]] = {}
        self.step_number = 0
        self.tiers: list[tuple[str, int, str]] = []
        """(request, position, tier) of every row read in the last step."""
        self.complete_each_step = True
        self.last: SparseKVOffloadCommand | None = None
        self.finished: dict[str, list[int]] = {}

    # ------------------------------------------------------------------------------------------- requests
    def add(self, request_id: str, tokens: list[int], max_tokens: int = 4, extra: ExtraKeys | None = None) -> Req:
        extra = extra or ExtraKeys()
        self.manager.open(request_id, tokens, extra_keys=extra, max_tokens=max_tokens)
        req = Req(request_id, list(tokens), max_tokens, len(tokens), extra)
        self.reqs[request_id] = req
        return req

    def admit(self, req: Req, landing: Landing | None = None, import_tokens: int = 0) -> Admission | None:
        prefix = self.manager.prefix(req.request_id)
        chunk = min(self.chunk, max(1, len(req.tokens) - prefix.tokens))
        if not self.manager.fits(req.request_id, prefix, landing=landing, import_tokens=import_tokens,
                                 chunk_tokens=chunk).now:
            return None
        admission = self.manager.admit(req.request_id, prefix, landing=landing, import_tokens=import_tokens,
                                       chunk_tokens=chunk)
        if admission is None:
            return None
        req.seat, req.computed, req.state = admission.seat, admission.cached_tokens, "running"
        if admission.import_target is not None:
            rows = [req.row(position) for position in range(import_tokens)]
            self.imports[req.request_id] = Import(req.request_id, admission.import_target, rows)
            req.state = "loading"
        if admission.indexer_blocks:
            self.loads[req.request_id] = (admission.indexer_keys, admission.indexer_blocks)
            req.state = "loading"
        return admission

    def finish_load(self, request_id: str, *, failed: bool = False, partial: bool = False) -> int:
        """Bytes land (or only some, then the load fails), and the manager hears of it."""
        load, pages = self.imports.pop(request_id, None), self.loads.pop(request_id, None)
        if load is not None and (not failed or partial):
            self.worker.land(load)
        if pages is not None and not failed:
            assert self.store is not None
            self.worker.outside_write(pages[1])
            for key, block in zip(*pages, strict=True):
                for offset, row in enumerate(self.store.pages[key]):
                    self.worker.device[block, offset] = row
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
        self.worker.receive(command)
        self.worker.start(command)
        self.tiers = []
        for req, first, n in chosen:
            start = max(first, req.computed)
            rows = [req.row(position) for position in range(start, first + n)]
            self.worker.write(req.seat, start, rows)
        for req, first, n in chosen:
            for position in range(first + n):
                tier, value = self.worker.resolve(req.seat, position)
                assert value == req.row(position), f"{req.request_id} position {position} from {tier}: {value}"
                assert not plain or tier == "resident"
                assert self.worker.indexer_row(req.seat, position) == req.row(position)
                self.tiers.append((req.request_id, position, tier))
        self.worker.end()
        return command

    def retire(self, chosen: list[tuple[Req, int, int]], *, acks: bool = True) -> None:
        """The step's output is back: acknowledgements, rows, sampled tokens, finished requests."""
        if acks:
            self.manager.on_worker_output([self.worker.output()])
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
            for key, block in self.store.stores:
                self.store.pages[key] = [self.worker.device[block, row] for row in range(self.layout.block_size)]
                self.manager.unpin_indexer([block])
            self.store.stores.clear()

    def step(self) -> int:
        """One whole pass; returns the number of chunks scheduled."""
        chosen = self.schedule()
        self.dispatch(chosen)
        if self.complete_each_step:
            self.worker.complete_all(self.rng)
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
        raise AssertionError(f"no end after {limit} steps: {live}; pending loads {list(self.manager.loads.pending)}, "
                             f"copies {list(self.worker.copies)}; {self.manager.stats()}")

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
