"""An engine of real scheduler halves, importers and pools; the world moves every message between it and others.

What an engine around them would do (allocate, write KV, order commands) is done here, in small: a free list per tier,
generations bumped when a page is handed out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hisparse.config import PDConfig
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportAck, PDCommand, PDOutput
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.copies import CopyEvent
from hisparse.pd.endpoint import agent_name
from hisparse.pd.importer import Importer
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.mapped_reads import MappedReads
from hisparse.pd.overdue import ImportDeadlines
from hisparse.pd.transfer_thread import TransferThread
from hisparse.types import RequestPages
from tests.pd.pools import DEVICE_BLOCKS, HOST_BLOCKS, Pools, host_pools, ids_of
from tests.pd.rig import FakeClock, ManualEvent, RankMemory
from tests.pd.torn import Levers, TornGpu, TornTransport

CANARY = 0xA5
"""Every byte of free pages."""
CLOSE_S = 1.0
"""What closing an endpoint may take before its imports are overdue."""


class Engine:
    """Ranks and a scheduler half. `start` begins a new incarnation with new memory.

    Attributes:
        shared: the ranks map one host pool, which rank 0 writes; else each has its own.
        maps: the packed allocations are exported to others, and theirs mapped where they do so, too.
    """

    def __init__(self, name: str, network: LoopbackNetwork, levers: Levers, rng: random.Random, *, layout: KVCacheLayout,
                 num_ranks: int, config: dict[str, Any], drain_s: float = 0.5) -> None:
        self.layout, self.shared = layout, num_ranks > 1 and rng.random() < 0.5
        self.name, self.network, self.levers, self.rng = name, network, levers, rng
        self.maps = rng.random() < 0.7
        self.num_ranks, self.drain_s = num_ranks, drain_s
        self.config = PDConfig(staging_slots=rng.choice((1, 2, 4)), staging_slot_pages=rng.choice((1, 2, 3)),
                               landing_path=rng.choice(("staged", "direct")), **config)
        self.clock = FakeClock()
        self.clock.now += rng.uniform(0, 1e6)
        self.alive = False
        self.memories: list[RankMemory] = []
        self.gpus: list[TornGpu] = []
        """Of all ranks so far that map memory."""
        self.ruins: list[RankMemory] = []
        """Memory of dead ranks, under garbage: READs that fly may still take bytes from it."""
        self.start()

    def start(self) -> None:
        self.ranks_start()
        self.pd = PDConnectorScheduler(self.layout, self.config, engine_id=self.name, incarnation=self.incarnation,
                                       num_ranks=self.num_ranks, clock=self.clock)
        self.pd.set_endpoints(self.endpoints)
        self.alive = True

    def ranks_start(self) -> None:
        """New ranks, new memory, a new incarnation."""
        self.incarnation = self.rng.getrandbits(60)
        self.pools = Pools(self.rng, self.layout)
        self.memories = [RankMemory(0, device_blocks=DEVICE_BLOCKS, host_blocks=HOST_BLOCKS, layout=self.layout, pool=pool)
                         for pool in host_pools(self.layout, self.num_ranks, shared=self.shared)]
        self.transports, self.importers, self.endpoints = [], [], []
        self.orders: list[deque[PDCommand]] = [deque() for _ in self.memories]
        self.outputs: list[deque[PDOutput]] = [deque() for _ in self.memories]
        self.copies: list[list[ManualEvent]] = [[] for _ in self.memories]
        self.deadlines = [ImportDeadlines(self.drain_s + CLOSE_S, self.clock) for _ in self.memories]
        self.told: list[list[int]] = [[] for _ in self.memories]
        self.blocked_until_s = [0.0 for _ in self.memories]
        """The rank's transfer thread is inside one call of the transport until then."""
        for rank, memory in enumerate(self.memories):
            memory.cache.generations[:], memory.pool.generations[:] = self.pools.generations
            memory.memory.device[:] = CANARY
            assert memory.memory.host is not None
            memory.memory.host[:] = CANARY
            agent = agent_name(self.name, self.incarnation, rank)
            transport = TornTransport(agent, self.network, self.levers, self.rng)
            gpu = TornGpu(transport) if self.maps else None
            mapped = MappedReads(transport, gpu, host="here", clock=self.clock)
            for address, num_bytes in memory.memory.slabs:
                mapped.register(address, num_bytes, 0 if address == memory.cache.address else None)
            self.transports.append(transport)
            self.gpus += [gpu] if gpu is not None else []
            self.endpoints.append(memory.memory.endpoint(rank, agent, mapped.metadata()))
            self.importers.append(Importer(
                memory.memory, mapped, rank=rank, host_writer=self.writes_host(rank),
                staging_slots=self.config.staging_slots, slot_pages=self.config.staging_slot_pages,
                direct=self.config.landing_path == "direct", drain_s=self.drain_s, clock=self.clock,
                staged_reads=1 if self.config.staging_slot_pages == 2 else None,
                copy_engine=self._copy_engine(self.copies[rank])))

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

    def writes_host(self, rank: int) -> bool:
        return rank == 0 or not self.shared

    def hand_out(self, rank: int, pages: RequestPages) -> None:
        """What a command tells a rank before it may write to pages that were handed out."""
        memory, (device, host) = self.memories[rank], ids_of(pages)
        memory.cache.store_generations(device, tuple(self.pools.generations[0][list(device)].tolist()))
        if self.writes_host(rank):
            memory.pool.hand_out(host, tuple(self.pools.generations[1][list(host)].tolist()), self.incarnation)

    def build(self) -> PDCommand | None:
        """One engine step: the command goes into every rank's mail."""
        command = self.pd.build_metadata(0)
        if command is not None:
            for orders, deadlines in zip(self.orders, self.deadlines, strict=True):
                orders.append(command)
                for plan in command.imports:
                    deadlines.begin(plan)
        return command

    def obey(self, rank: int) -> bool:
        """The rank takes its next command, as its transfer thread does (rank 0 sends the notices)."""
        if not self.orders[rank] or self.blocked(rank):
            return False
        command = self.orders[rank].popleft()
        if rank:
            command = PDCommand(imports=command.imports, cancels=command.cancels)
        TransferThread._obey(_Thread(), command, self.transports[rank], self.importers[rank])  # type: ignore[arg-type]
        return True

    def pump(self, rank: int) -> bool:
        """One round of the rank's transfer thread, and what its step's thread reports then goes into the mail."""
        moved, acks, notices = False, list[ImportAck](), list[bytes]()
        if not self.blocked(rank):
            moved = self.importers[rank].pump()
            if moved:
                self.importers[rank].check()
            self._check_slots(rank)
            acks, notices = self.importers[rank].take_acks(), self.importers[rank]._transport.notices()
        for ack in acks:
            self.deadlines[rank].end(ack.job_id)
        late = self.deadlines[rank].late()
        if acks or notices or late != self.told[rank]:
            self.told[rank] = late
            self.outputs[rank].append(PDOutput(rank=rank, incarnation=self.incarnation, acks=tuple(acks),
                                               notices=tuple(notices), overdue=dict.fromkeys(late, "overdue")))
        return moved

    def blocked(self, rank: int) -> bool:
        return self.clock() < self.blocked_until_s[rank]

    def _check_slots(self, rank: int) -> None:
        """Nothing is on its way to a staging slot that somebody else may get."""
        near = self.transports[rank].destinations()
        if not near.size:
            return
        importer = self.importers[rank]
        for pool in filter(None, (importer.slots.cpu, importer.slots.gpu, importer.slots.generations)):
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
