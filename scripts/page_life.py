"""A few requests under the real cache manager, without a worker: what pictures of page states are drawn from.

Deterministic: the manager is, and acknowledgements come at fixed steps (a copy is enqueued in its step, completed in the next).
"""

from __future__ import annotations

from dataclasses import dataclass

import hisparse.embedding as hs
from hisparse.cache.residency import PageState
from hisparse.types import AckKind, TransferAck

PAGE, CHUNK, HOT_ROWS = 4, 8, 8


@dataclass(frozen=True, slots=True)
class Moment:
    """After one step: states of every request's pages, and blocks of the device pool by what holds them."""

    step: int
    pages: dict[str, tuple[PageState, ...]]
    blocks: dict[str, int]
    """indexer, resident (pinned), loose, hot, grown, free: they add up to the pool."""
    event: str


class SmallEngine:
    """One chunk of a prompt, or a token of each running request, a step. Pages of 4 tokens, one resident group."""

    def __init__(self, device_blocks: int, *, hot_rows_max: int = HOT_ROWS, watermark: float = 0.15) -> None:
        shape = hs.ModelShape(model_type="picture", num_layers=4, num_heads=2, kv_lora_rank=12, rope_dim=4, index_head_dim=8,
                              top_k=4, max_positions=256, vocab_size=32,
                              index_groups=(hs.IndexGroup(leader=0, layers=(0, 1, 2, 3)),))
        config = hs.CacheConfig(block_size=PAGE, device_blocks=device_blocks, host_pool_gib=0.001, hot_rows=HOT_ROWS,
                                hot_rows_max=hot_rows_max, watermark=watermark)
        setup = hs.CacheSetup(layout=hs.KVCacheLayout.build(shape, block_size=PAGE), config=config, max_model_len=96,
                              max_seats=4, max_query_tokens=CHUNK, incarnation=1)
        self.cache = setup.manager()
        self.moments: list[Moment] = []
        self._tokens: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self._in_flight: list[int] = []
        self._salt = 0

    def start(self, name: str, prompt: int) -> None:
        """Admits `name` and computes its prompt, a chunk a step; the others decode meanwhile."""
        self._salt += 1000
        self.cache.open(name, range(self._salt, self._salt + prompt), max_tokens=48)
        while not self.cache.admit(name, self.cache.prefix(name), chunk_tokens=CHUNK):
            self.decode(f"{name} waits")
        first, event = 0, f"{name} arrives, {prompt // PAGE} pages of prompt"
        while first < prompt:
            count = min(CHUNK, prompt - first)
            others = self._next_tokens()
            if self.cache.allocate(name, count):
                others.append((name, first, count))
                first += count
            self._run(others, event)
            event = ""
        self._tokens[name] = prompt

    def decode(self, event: str = "", steps: int = 1) -> None:
        for _ in range(steps):
            self._run(self._next_tokens(), event)
            event = ""

    def end(self, name: str) -> None:
        self.cache.close(name)
        del self._tokens[name]

    def _next_tokens(self) -> list[tuple[str, int, int]]:
        chosen = []
        for name, position in self._tokens.items():
            if self._accepted.get(name, 0) < position:
                self.cache.extend(name, [position])
                self._accepted[name] = position
            if not self.cache.allocate(name, 1):
                if not self.cache.has_pending_reclamation():
                    raise RuntimeError(f"{name} finds no block for position {position}: choose a larger pool")
                continue  # a copy under way frees some: it waits a step
            chosen.append((name, position, 1))
            self._tokens[name] = position + 1
        return chosen

    def _run(self, scheduled: list[tuple[str, int, int]], event: str) -> None:
        step = len(self.moments) + 1
        command = self.cache.plan_step(step, scheduled)
        assert command is not None
        acks = [TransferAck(1, 0, transfer, AckKind.COMPLETED, (1 << PAGE) - 1) for transfer in self._in_flight]
        acks += [TransferAck(1, 0, spill.id, AckKind.ENQUEUED) for spill in command.spills]
        self._in_flight = [spill.id for spill in command.spills]
        self.cache.on_worker_output([hs.HiSparseWorkerOutput(rank=0, incarnation=1, acks=tuple(acks))])
        self.cache.retire(step, {name: first + count for name, first, count in scheduled})
        self.cache.check()
        names = dict.fromkeys([*self._tokens, *(name for name, _, _ in scheduled)])
        pages = {name: tuple(PageState(view.state) for view in self.cache.page_views(name))
                 for name in names if self.cache.seat(name) >= 0}
        self.moments.append(Moment(step, pages, self._blocks(pages), event))

    def _blocks(self, pages: dict[str, tuple[PageState, ...]]) -> dict[str, int]:
        """One indexer block a page, and one resident block a page on the device: there is one resident group."""
        stats = self.cache.stats()
        loose = stats.pages_clean_loose
        used = {"indexer": sum(map(len, pages.values())),
                "resident": stats.pages_gpu_only + stats.pages_spilling + stats.pages_clean_pinned, "loose": loose,
                "hot": stats.hot_blocks - stats.hot_blocks_elastic, "grown": stats.hot_blocks_elastic}
        return used | {"free": stats.device_blocks_total - sum(used.values())}


def life_of_a_request() -> list[Moment]:
    """"a" runs alone, then with "b", then "c" wants room too: its pages go from the device, not from the host."""
    engine = SmallEngine(42)
    engine.start("a", 24)
    engine.decode("a decodes alone", 2)
    engine.start("b", 24)
    engine.decode("two decode", 8)
    engine.decode("too few blocks are free")
    engine.start("c", 16)
    engine.decode("three decode", 2)
    return engine.moments


def elastic_region() -> list[Moment]:
    """"b" ends and leaves blocks free; "c" wants them."""
    engine = SmallEngine(44, hot_rows_max=4 * HOT_ROWS, watermark=0.1)
    engine.start("a", 32)
    engine.decode("a decodes alone", 8)
    engine.start("b", 28)
    engine.decode("two decode", 5)
    engine.end("b")
    engine.decode("b ends", 9)
    engine.start("c", 24)
    engine.decode("a and c decode", 8)
    return engine.moments
