"""Small ranks with real pools, filled with random bytes, and the byte-for-byte oracle of an import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.pd.commands import ImportAck, ImportPlan
from hisparse.pd.copies import CopyEvent, copy_now
from hisparse.pd.endpoint import RankEndpoint, agent_name
from hisparse.pd.importer import Importer
from hisparse.pd.loopback import LoopbackFaults, LoopbackNetwork, LoopbackTransport
from hisparse.pd.memory import LocalMemory
from hisparse.pd.pages import PageTable, table_of
from hisparse.pd.paging import Paging, source_pages
from hisparse.types import Landing, PageGenerations, RequestPages
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool

SHAPE = ModelShape(
    model_type="glm_moe_dsa", num_layers=5, num_heads=2, kv_lora_rank=8, rope_dim=8, index_head_dim=8, top_k=8,
    max_positions=4096, vocab_size=64,
    index_groups=(IndexGroup(leader=0, layers=(0, 1)), IndexGroup(leader=2, layers=(2,)),
                  IndexGroup(leader=3, layers=(3, 4))),
)
LAYOUT = KVCacheLayout.build(SHAPE, block_size=4, dtype="float32", num_groups=2)
GROUPS = LAYOUT.num_resident_groups


class FakeClock:
    """Seconds that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class RankMemory:
    """DeviceCache and HostPool of one rank; every byte random, every generation a random uint64. Args: pool: a shared one."""

    def __init__(self, seed: int, *, device_blocks: int = 64, host_blocks: int = 32, layout: KVCacheLayout = LAYOUT,
                 pool: HostPool | None = None) -> None:
        self.layout = layout
        self.cache = DeviceCache(layout, device_blocks)
        self.pool = pool or HostPool.private(layout, host_blocks)
        self.memory = LocalMemory(layout, self.cache, self.pool)
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Every byte and every generation is the seed's."""
        rng = np.random.default_rng(seed)
        assert self.memory.host is not None
        self._fill_device(rng.integers(0, 256, (self.cache.num_blocks, self.layout.block_bytes), dtype=np.uint8))
        self.memory.host[:] = rng.integers(0, 256, self.memory.host.shape, dtype=np.uint8)
        for slab in (self.cache, self.pool):
            slab.generations[:] = rng.integers(1, 1 << 63, slab.num_blocks, dtype=np.uint64)

    def _fill_device(self, values: np.ndarray) -> None:
        self.memory.device[:] = values

    def device_bytes(self) -> np.ndarray:
        """uint8 [blocks, block_bytes], the packed allocation as it is now."""
        return self.memory.device

    # oracle: the bytes of one logical page of one layer, by tier
    def resident_row(self, layer: int, blocks: Sequence[int]) -> np.ndarray:
        start = self.layout.layer_byte_offset(layer)
        block = int(blocks[self.layout.layer_group[layer]])
        return self.device_bytes()[block, start : start + self.layout.layer_page_bytes].copy()

    def host_row(self, layer: int, block: int) -> np.ndarray:
        assert self.memory.host is not None
        return self.memory.host[layer, int(block)].copy()

    def indexer_row(self, block: int) -> np.ndarray:
        return self.device_bytes()[int(block), : self.layout.indexer_page_bytes].copy()

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        assert self.memory.host is not None
        return self.device_bytes().copy(), self.memory.host.copy()

    def overwrite(self, pages: RequestPages, value: int) -> None:
        """Every byte of the pages is `value`, in every tier that holds them."""
        device, host = blocks_of(pages)
        assert self.memory.host is not None
        self.memory.device[device] = value
        self.memory.host[:, host] = value

    def give_away(self, pages: RequestPages, value: int) -> None:
        """The pages get another owner: the generation first, then other bytes."""
        device, host = blocks_of(pages)
        self.cache.generations[device] += np.uint64(1)
        self.pool.generations[host] += np.uint64(1)
        self.overwrite(pages, value)

    def holds(self, pages: RequestPages, value: int) -> bool:
        """Whether every byte is still as `overwrite` left it."""
        device, host = blocks_of(pages)
        of_device, of_host = self.snapshot()
        return bool((of_device[device] == value).all() and (of_host[:, host] == value).all())

    def generations_of(self, pages: RequestPages) -> PageGenerations:
        def device(ids: Sequence[int]) -> tuple[int, ...]:
            return tuple(int(self.cache.generations[i]) if i else 0 for i in ids)

        return PageGenerations(
            indexer=device(pages.indexer_blocks), resident=tuple(device(ids) for ids in pages.resident_blocks),
            host=tuple(int(self.pool.generations[i]) if i else 0 for i in pages.host_blocks))


def blocks_of(pages: RequestPages) -> tuple[list[int], list[int]]:
    """The device blocks and the host pages that are named."""
    return ([*pages.indexer_blocks, *(block for group in pages.resident_blocks for block in group if block)],
            [block for block in pages.host_blocks if block])


def pick_pages(seed: int, num_pages: int, num_tokens: int, *, first_page: int = 0, resident: Sequence[bool],
               host: Sequence[bool], device_blocks: int = 64, host_blocks: int = 32, groups: int = GROUPS) -> RequestPages:
    """Distinct random block ids; `resident[i]`/`host[i]`: which tiers hold page i."""
    rng = np.random.default_rng(seed)
    ids = iter((rng.permutation(device_blocks - 1) + 1).tolist())
    hosts = iter((rng.permutation(host_blocks - 1) + 1).tolist())
    return RequestPages(
        first_page=first_page, num_tokens=num_tokens,
        indexer_blocks=tuple(next(ids) for _ in range(num_pages)),
        resident_blocks=tuple(tuple(next(ids) if resident[i] else 0 for i in range(num_pages)) for _ in range(groups)),
        host_blocks=tuple(next(hosts) if host[i] else 0 for i in range(num_pages)))


@dataclass
class Side:
    """One engine of one or more ranks on a loopback network."""

    name: str
    network: LoopbackNetwork
    incarnation: int = 0xABC
    num_ranks: int = 1
    seed: int = 1
    clock: FakeClock = field(default_factory=FakeClock)
    faults: LoopbackFaults = field(default_factory=LoopbackFaults)
    slots: int = 4
    slot_pages: int = 2
    direct: bool = False
    drain_s: float = 1.0
    copy_engine: Callable[[Callable[[], None]], CopyEvent] = copy_now
    staged_reads: int | None = None
    layout: KVCacheLayout = LAYOUT
    make_rank: Callable[..., RankMemory] = RankMemory
    ranks: list[RankMemory] = field(default_factory=list)
    transports: list[LoopbackTransport] = field(default_factory=list)
    importers: list[Importer] = field(default_factory=list)
    endpoints: list[RankEndpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(self.num_ranks):
            memory = self.make_rank(self.seed if rank == 0 else self.seed + 100 * rank, layout=self.layout)
            agent = agent_name(self.name, self.incarnation, rank)
            transport = LoopbackTransport(agent, network=self.network, faults=self.faults)
            for address, num_bytes in memory.memory.slabs:  # the importer registers those of a GPU
                transport.register(address, num_bytes)
            self.ranks.append(memory)
            self.transports.append(transport)
            self.endpoints.append(memory.memory.endpoint(rank, agent, transport.metadata()))
            self.importers.append(Importer(
                memory.memory, transport, rank=rank, host_writer=rank == 0, staging_slots=self.slots,
                slot_pages=self.slot_pages, direct=self.direct, drain_s=self.drain_s, clock=self.clock,
                staged_reads=self.staged_reads, copy_engine=self.copy_engine))

    def replicate(self) -> None:
        """MLA KV is replicated: all ranks of a prefill engine hold the same bytes; generations may differ by rank."""
        for other in self.ranks[1:]:
            assert other.memory.host is not None and self.ranks[0].memory.host is not None
            other.memory.device[:] = self.ranks[0].memory.device
            other.memory.host[:] = self.ranks[0].memory.host
            other.cache.generations[:] = self.ranks[0].cache.generations
            other.pool.generations[:] = self.ranks[0].pool.generations


def make_plan(prefill: Side, source: RequestPages, destination: RequestPages, landing: Landing, *, job_id: int = 1,
              num_ranks: int = 1, tail_rows: int = 4, deadline_s: float = 10.0, block_size: int = 4) -> ImportPlan:
    """Args: block_size: of the destination. The last page has `tail_rows` rows."""
    table: PageTable = table_of(source, prefill.ranks[0].generations_of(source))
    paging, first_token = Paging(prefill.layout.block_size, prefill.layout.num_resident_groups), \
        destination.first_page * block_size
    first, behind, skip = source_pages(
        first_token=first_token, num_tokens=first_token + (destination.num_pages - 1) * block_size + tail_rows,
        block_size=paging.block_size)
    return ImportPlan(
        job_id=job_id, peer_id=prefill.name,
        sources=tuple(prefill.endpoints[rank * len(prefill.endpoints) // num_ranks] for rank in range(num_ranks)),
        landing=landing, source=table.slice(first, behind) if first or paging.block_size != block_size else table,
        source_paging=paging, source_skip=skip, destination=table_of(destination), tail_rows=tail_rows, deadline_s=deadline_s)


def run_to_end(importer: Importer, *, limit: int = 10_000) -> list[ImportAck]:
    """Pumps until no import is left."""
    for _ in range(limit):
        importer.pump()
        importer.check()
        if not importer.busy():
            return importer.take_acks()
    raise AssertionError("imports did not end")


def expected_page(prefill: RankMemory, source: RequestPages, i: int, layer: int) -> np.ndarray:
    """What page i of a layer must be after the import."""
    if all(group[i] for group in source.resident_blocks):
        return prefill.resident_row(layer, [group[i] for group in source.resident_blocks])
    return prefill.host_row(layer, source.host_blocks[i])


class ManualEvent:
    """A copy event that a test completes."""

    def __init__(self, copy: object) -> None:
        self.copy, self.seen = copy, False

    def done(self) -> bool:
        return self.seen

    def complete(self) -> None:
        self.copy()  # type: ignore[operator]
        self.seen = True


def event_log() -> tuple[list[ManualEvent], object]:
    """A copy engine that only records, and its record."""
    log: list[ManualEvent] = []

    def engine(copy: object) -> CopyEvent:
        log.append(ManualEvent(copy))
        return log[-1]

    return log, engine
