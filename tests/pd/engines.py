"""A prefill and a decode engine of real scheduler halves, importers and pools; the world moves every message between them.

What an engine around them would do (allocate, write KV, order commands) is done here, in small: a free list per tier,
generations bumped when a page is handed out, an answer when every rank has written every byte.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hisparse.config import PDConfig
from hisparse.pd.commands import ImportAck, PDCommand, PDOutput
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.endpoint import agent_name
from hisparse.pd.importer import CopyEvent, Importer
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.transfer_thread import TransferThread
from hisparse.types import Landing, RequestPages
from tests.pd.pools import DEVICE_BLOCKS, HOST_BLOCKS, NUM_LAYERS, Content, Pools, ids_of
from tests.pd.rig import LAYOUT, FakeClock, ManualEvent, RankMemory
from tests.pd.torn import Levers, TornTransport

CANARY = 0xA5
"""Every byte of free pages."""


class Engine:
    """Ranks and a scheduler half. `start` begins a new incarnation with new memory."""

    def __init__(self, name: str, network: LoopbackNetwork, levers: Levers, rng: random.Random, *, num_ranks: int,
                 config: dict[str, Any], drain_s: float = 0.5) -> None:
        self.name, self.network, self.levers, self.rng = name, network, levers, rng
        self.num_ranks, self.drain_s = num_ranks, drain_s
        self.config = PDConfig(staging_slots=rng.choice((1, 2, 4)), staging_slot_pages=rng.choice((1, 2, 3)),
                               landing_path=rng.choice(("staged", "direct")), **config)
        self.clock = FakeClock()
        self.clock.now += rng.uniform(0, 1e6)
        self.alive = False
        self.memories: list[RankMemory] = []
        self.ruins: list[RankMemory] = []
        """Memory of dead ranks, under garbage: READs that fly may still take bytes from it."""
        self.start()

    def start(self) -> None:
        self.ranks_start()
        self.pd = PDConnectorScheduler(LAYOUT, self.config, engine_id=self.name, incarnation=self.incarnation,
                                       num_ranks=self.num_ranks, clock=self.clock)
        self.pd.set_endpoints(self.endpoints)
        self.alive = True

    def ranks_start(self) -> None:
        """New ranks, new memory, a new incarnation."""
        self.incarnation = self.rng.getrandbits(60)
        self.pools = Pools(self.rng)
        self.memories = [RankMemory(0, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS) for _ in range(self.num_ranks)]
        self.transports, self.importers, self.endpoints = [], [], []
        self.orders: list[deque[PDCommand]] = [deque() for _ in self.memories]
        self.outputs: list[deque[PDOutput]] = [deque() for _ in self.memories]
        self.copies: list[list[ManualEvent]] = [[] for _ in self.memories]
        for rank, memory in enumerate(self.memories):
            memory.cache.generations[:], memory.pool.generations[:] = self.pools.generations
            memory.memory.device[:] = CANARY
            assert memory.memory.host is not None
            memory.memory.host[:] = CANARY
            agent = agent_name(self.name, self.incarnation, rank)
            transport = TornTransport(agent, self.network, self.levers, self.rng)
            for address, num_bytes in memory.memory.slabs:
                transport.register(address, num_bytes)
            self.transports.append(transport)
            self.endpoints.append(memory.memory.endpoint(rank, agent, transport.metadata()))
            self.importers.append(Importer(
                memory.memory, transport, rank=rank, host_writer=rank == 0, staging_slots=self.config.staging_slots,
                slot_pages=self.config.staging_slot_pages, direct=self.config.landing_path == "direct",
                drain_s=self.drain_s, clock=self.clock, copy_engine=self._copy_engine(self.copies[rank])))

    def ranks_die(self, *, linger: bool = False) -> None:
        """Every process is gone; what they had not reported yet stays in the mail. linger: cut off, but readable."""
        if not linger:
            for transport in self.transports:
                transport.die()
            for memory in self.memories:
                memory.memory.device[:] = self.rng.randrange(256)
                memory.memory.host[:] = self.rng.randrange(256)  # type: ignore[index]
        self.ruins += self.memories
        self.memories, self.transports, self.importers = [], [], []
        self.orders, self.copies = [], []

    def hand_out(self, rank: int, pages: RequestPages) -> None:
        """What a command tells a rank before it may write to pages that were handed out."""
        memory, (device, host) = self.memories[rank], ids_of(pages)
        memory.cache.store_generations(device, tuple(self.pools.generations[0][list(device)].tolist()))
        memory.pool.hand_out(host, tuple(self.pools.generations[1][list(host)].tolist()), self.incarnation)

    def build(self) -> PDCommand | None:
        """One engine step: the command goes into every rank's mail."""
        command = self.pd.build_metadata(0)
        if command is not None:
            for orders in self.orders:
                orders.append(command)
        return command

    def obey(self, rank: int) -> bool:
        """The rank takes its next command, as its transfer thread does (rank 0 sends the notices)."""
        if not self.orders[rank]:
            return False
        command = self.orders[rank].popleft()
        if rank:
            command = PDCommand(imports=command.imports, cancels=command.cancels)
        TransferThread._obey(_Thread(), command, self.transports[rank], self.importers[rank])  # type: ignore[arg-type]
        return True

    def pump(self, rank: int) -> bool:
        """One round of the rank's transfer thread; what it reports goes into the mail."""
        moved = self.importers[rank].pump()
        self.importers[rank].check()
        self._check_slots(rank)
        acks: list[ImportAck] = self.importers[rank].take_acks()
        notices = self.transports[rank].notices()
        if acks or notices:
            self.outputs[rank].append(PDOutput(rank=rank, incarnation=self.incarnation, acks=tuple(acks),
                                               notices=tuple(notices)))
        return moved

    def _check_slots(self, rank: int) -> None:
        """Nothing is on its way to a staging slot that somebody else may get."""
        near = self.transports[rank].destinations()
        for pool in (self.importers[rank].staging, self.importers[rank].generation_slots):
            offsets = near - pool.address
            written = set((offsets[(offsets >= 0) & (offsets < pool.num_bytes)] // pool.slot_bytes).tolist())
            assert not written & set(pool._free), f"slots {written} are free while READs may still write to them"

    def copy(self, rank: int) -> bool:
        """One copy out of staging runs, any of those handed over."""
        waiting = [event for event in self.copies[rank] if not event.seen]
        self.copies[rank][:] = waiting
        if waiting:
            self.rng.choice(waiting).complete()
        return bool(waiting)

    def _copy_engine(self, log: list[ManualEvent]) -> Callable[[Callable[[], None]], CopyEvent]:
        def engine(copy: Callable[[], None]) -> CopyEvent:
            log.append(ManualEvent(copy))
            return log[-1]

        return engine


@dataclass
class _Thread:
    """What TransferThread._obey keeps of notices."""

    failed_notices: int = 0
    _last_notice_s: float = 0.0


@dataclass
class Job:
    """A prompt at a prefill engine: pages, and what is still to be written to them."""

    prefill_id: str
    content: Content
    pages: RequestPages
    unsaid: list[int]
    """Ranks that have not got the command of the hand-out."""
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    """(rank, layer, page) to do; layer -1 = indexer."""

    def is_written(self) -> bool:
        """Every write was observed."""
        return not self.writes and not self.unsaid


class Prefill(Engine):
    """Computes prompts and leases their pages."""

    def start(self) -> None:
        super().start()
        self.queue: deque[tuple[str, Content]] = deque()
        self.jobs: list[Job] = []
        self.leased: dict[str, RequestPages] = {}

    def begin(self) -> bool:
        """The next prompt gets pages, if there is room. Each page lives on the device, in the host pool, or in both."""
        if not self.queue:
            return False
        prefill_id, content = self.queue[0]
        kinds = [self.rng.choice(((True, False), (False, True), (True, True))) for _ in range(content.num_pages)]
        pages = self.pools.take(content.num_tokens, [kind[0] for kind in kinds], [kind[1] for kind in kinds])
        if pages is None:
            return False
        self.queue.popleft()
        job = Job(prefill_id, content, pages, unsaid=list(range(self.num_ranks)))
        job.writes = [(rank, layer, page) for rank in range(self.num_ranks) for layer in range(-1, NUM_LAYERS)
                      for page in range(content.num_pages)]
        self.rng.shuffle(job.writes)
        self.jobs.append(job)
        return True

    def write(self, most: int) -> bool:
        """Some job writes some of its bytes; a rank hears of a hand-out before it writes."""
        jobs = [job for job in self.jobs if not job.is_written()]
        if not jobs:
            return False
        job = self.rng.choice(jobs)
        for _ in range(min(most, len(job.writes))):
            rank, layer, page = job.writes.pop()
            if rank in job.unsaid:
                job.unsaid.remove(rank)
                self.hand_out(rank, job.pages)
            memory, content, pages = self.memories[rank].memory, job.content, job.pages
            assert memory.host is not None
            if layer < 0:
                memory.device[pages.indexer_blocks[page], : LAYOUT.indexer_page_bytes] = content.indexer[page]
                continue
            block = pages.resident_blocks[LAYOUT.layer_group[layer]][page]
            if block:
                start = LAYOUT.layer_byte_offset(layer)
                memory.device[block, start : start + LAYOUT.layer_page_bytes] = content.rows[layer, page]
            if pages.host_blocks[page]:
                memory.host[layer, pages.host_blocks[page]] = content.rows[layer, page]
        return True

    def answer(self) -> tuple[str, dict[str, Any]] | None:
        """Leases what is written; (prefill id, kv_transfer_params)."""
        job = next((job for job in self.jobs if job.is_written()), None)
        if job is None:
            return None
        self.jobs.remove(job)
        self.leased[job.prefill_id] = job.pages
        params = self.pd.grant(job.prefill_id, job.pages, self.memories[0].generations_of(job.pages),
                               prompt_digest=job.content.digest)
        return job.prefill_id, json.loads(json.dumps(params))

    def collect(self) -> None:
        """Pages of leases that ended are free at once."""
        for prefill_id in self.pd.take_expired():
            self.pools.give(self.leased.pop(prefill_id))


class Decode(Engine):
    """Imports prompts. The pages of a request are pinned from the plan until loaded, failed or drained."""

    def allocate(self, content: Content, landing: Landing) -> RequestPages | None:
        """Fresh pages, of which no rank holds any row yet."""
        resident = [landing is Landing.RESIDENT or i == content.num_pages - 1 or self.rng.random() < 0.3
                    for i in range(content.num_pages)]
        pages = self.pools.take(content.num_tokens, resident, [True] * content.num_pages)
        if pages is not None:
            for rank in range(self.num_ranks):
                self.hand_out(rank, pages)
        return pages

    def reads(self, request_id: str) -> bool:
        """Some rank has begun with the request's import and is not done."""
        return any(self.pd._importing.get(request_id) in importer._jobs for importer in self.importers)

    def free(self, pages: RequestPages) -> None:
        """Nothing may be on its way to free pages. They carry a canary: whoever writes to them all the same is found."""
        device, host = ids_of(pages)
        for memory, transport in zip(self.memories, self.transports, strict=True):
            self._check_not_written(memory, transport.destinations(), device, host)
            memory.memory.device[list(device)] = CANARY
            memory.memory.host[:, list(host)] = CANARY  # type: ignore[index]
        self.pools.give(pages)

    def _check_not_written(self, memory: RankMemory, near: np.ndarray, device: tuple[int, ...], host: tuple[int, ...]) -> None:
        view = memory.memory
        assert view.host is not None
        for name, slab, size, ids in (("device", view.device, LAYOUT.block_bytes, device),
                                      ("host", view.host, LAYOUT.layer_page_bytes, host)):
            offsets = near - slab.ctypes.data
            blocks = offsets[(offsets >= 0) & (offsets < slab.nbytes)] // size
            written = set((blocks if name == "device" else blocks % HOST_BLOCKS).tolist()) & set(ids)
            assert not written, f"{name} pages {sorted(written)} are free while READs may still write to them"

    def check_free(self) -> None:
        """Nobody wrote to a free page."""
        for rank, memory in enumerate(self.memories):
            assert memory.memory.host is not None
            assert (memory.memory.device[self.pools.device] == CANARY).all(), f"rank {rank}: a free device page was written"
            assert (memory.memory.host[:, self.pools.host] == CANARY).all(), f"rank {rank}: a free host page was written"

    def check_bytes(self, content: Content, pages: RequestPages, landing: Landing) -> None:
        """What may be selected is this prompt's own KV, on every rank."""
        tail = content.num_tokens - (content.num_pages - 1) * LAYOUT.block_size
        for rank, memory in enumerate(self.memories):
            near, where = memory.memory, f"{content.name} on rank {rank}"
            assert near.host is not None
            keys = near.device[list(pages.indexer_blocks), : LAYOUT.indexer_page_bytes]
            assert (keys == content.indexer).all(), f"{where}: indexer keys of another page"
            mirrored = [i for i in range(content.num_pages) if pages.resident_blocks[0][i]]
            for layer, group in enumerate(LAYOUT.layer_group):
                blocks, start = [pages.resident_blocks[group][i] for i in mirrored], LAYOUT.layer_byte_offset(layer)
                rows = near.device[blocks, start : start + LAYOUT.layer_page_bytes]
                assert (rows == content.rows[layer, mirrored]).all(), f"{where}: resident rows of another page"
            if landing is Landing.HOST and rank == 0:
                hosts = list(pages.host_blocks)
                assert (near.host[:, hosts] == content.rows).all(), f"{where}: host rows of another page"
                masks = memory.pool.row_masks[hosts]
                assert (masks[:-1] == memory.pool.full_mask).all() and masks[-1] == (1 << tail) - 1, f"{where}: row masks"
            else:
                assert not memory.pool.row_masks[list(pages.host_blocks)].any(), f"{where}: durable without a host page"
