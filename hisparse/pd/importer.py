"""Imports of one rank: a state machine over a Transport, moved on by `pump` from the thread that owns the transport.

Per import: data READs (straight to their place, or through staging slots and a copy) -> every piece seen -> generation
READs -> compare -> mirrors of what was read straight into host pages -> row masks -> acknowledged ok. Nothing is posted before
`ready` says that earlier work on the destination's pages is over. Any fault makes it failed: nothing more is posted, and
"failed" is acknowledged only when nothing of it can write memory any more: its copies are over, and its READs ended or its
peer's endpoint was closed.
A READ past the deadline gets `drain_s` more to end by itself; then the endpoint is closed, which fails that peer's
other imports too. Until then its pages and slots stay in quarantine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hisparse.errors import InvariantError, TransferError
from hisparse.pd.commands import ImportAck, ImportFailure, ImportPlan
from hisparse.pd.copies import CopyEvent, copy_now
from hisparse.pd.data_reads import data_reads
from hisparse.pd.descriptors import mirrored
from hisparse.pd.generations import GENERATION_BYTES, GenerationRun, first_difference, plan_check
from hisparse.pd.memory import LocalMemory
from hisparse.pd.peers import PeerTable
from hisparse.pd.read_slots import ReadSlots
from hisparse.pd.reads import Read
from hisparse.pd.repaging import ReadPlanners
from hisparse.pd.running_import import Phase, RunningImport
from hisparse.pd.scatter import make_scatter
from hisparse.pd.staging import SlotPool
from hisparse.pd.staging_pools import StagingPools
from hisparse.pd.transport import PeerLost, Transport
from hisparse.types import Landing

BRIDGE_BYTES = 1 << 19
"""Padding between two pages that is read with them on CUDA: a descriptor costs 8 us, in which a link moves more than that."""
MAX_READ_BYTES_CUDA = 256 << 20
"""Of a READ without a staging slot; between GPUs one of so many takes a millisecond."""


@dataclass(slots=True)
class _Lost:
    """An endpoint that must be closed before its READs count as over."""

    why: str
    retry_at_s: float = float("-inf")


class Importer:
    """All imports of one rank.

    Args:
        host_writer: this rank writes host pages (HOST landings); others read only indexer and mirrored pages.
        direct: HOST landings without staging; on CUDA that is for pages of the peer's host pool, pages of its GPU are staged
            (see StagingPools.used).
        slot_pages: whole pages per staging slot. drain_s: see the module.
        staged_reads: READs into slots that one import has posted at a time; None = as many as it gets slots for. 1 where
            posting a READ waits for the one before: its copies out of a slot then run beside the next READ.
        copy_engine: runs copies out of staging; returns the event that must be seen before the slot is free.
        ready: job id -> True once everything that was done with its pages before is over.
    Attributes:
        slots: that READs pass through.
    """

    def __init__(self, memory: LocalMemory, transport: Transport, *, rank: int, host_writer: bool, staging_slots: int,
                 slot_pages: int, direct: bool = False, drain_s: float = 1.0, staged_reads: int | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 copy_engine: Callable[[Callable[[], None]], CopyEvent] = copy_now,
                 ready: Callable[[int], bool] = lambda job_id: True) -> None:
        self._memory, self._layout, self._transport = memory, memory.layout, transport
        self._rank, self._writer = rank, host_writer
        self._slot_pages, self._drain_s = slot_pages, drain_s
        self._clock, self._copy, self._ready = clock, copy_engine, ready
        self._max_read_bytes = MAX_READ_BYTES_CUDA if memory.on_cuda else None
        self.slots = slots = StagingPools(memory, num_slots=staging_slots, slot_pages=slot_pages, direct=direct)
        self._room = ReadSlots(slots, slot_pages=slot_pages, staged_reads=staged_reads or staging_slots)
        for address, num_bytes in slots.slabs:
            transport.register(address, num_bytes)
        for address, num_bytes, gpu in (*memory.device_slabs, *slots.device_slabs):
            transport.register(address, num_bytes, gpu)
        self.peers = PeerTable(transport, clock, on_replaced=self._restarted)
        self._scatter = make_scatter(memory, slot_pages)
        self._planners = ReadPlanners(self._layout, memory.regions, one_memory=not memory.on_cuda,
                                      bridge_bytes=BRIDGE_BYTES if memory.on_cuda else 0)
        self._jobs: dict[int, RunningImport] = {}
        self._lost: dict[str, _Lost] = {}
        self._acks: list[ImportAck] = []

    # ---- orders
    def submit(self, plan: ImportPlan) -> None:
        """Starts an import. A peer that cannot be reached makes it failed, not an exception.

        Raises:
            InvariantError: the job is known, or a destination is not a page of this rank.
        """
        if plan.job_id in self._jobs:
            raise InvariantError(f"import {plan.job_id} is running already")
        self._memory.check_destination(plan)
        now = self._clock()
        pages = np.arange(plan.destination.num_pages, dtype=np.int64)
        to_host = plan.landing is Landing.HOST
        rows_of = pages if not to_host or self._writer else pages[mirrored(plan.destination)]
        source = plan.sources[self._rank]
        job = RunningImport(plan=plan, source=source, reads=None, started_at_s=now, deadline_s=now + plan.deadline_s,
                      rows_of=rows_of)
        self._jobs[plan.job_id] = job
        try:
            if source.agent in self._lost:
                raise TransferError(f"the endpoint of {source.agent} is being closed: {self._lost[source.agent].why}")
            self.peers.connect(plan.peer_id, source)
        except TransferError as error:
            self._fail(job, ImportFailure.REFUSED, str(error))
            return
        job.reads = planner = self._planners.make(plan, source)
        reads, job.straight = data_reads(planner, rows_of, self.slots, to_host=to_host and self._writer,
                                         slot_pages=self._slot_pages, max_read_bytes=self._max_read_bytes)
        job.waiting.extend(reads)

    def cancel(self, job_id: int) -> None:
        """Posts nothing more for it. It is acknowledged as failed when drained; unknown ids are ignored."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._fail(job, ImportFailure.CANCELLED, "cancelled")

    def cancel_all(self) -> None:
        for job in self._jobs.values():
            self._fail(job, ImportFailure.CANCELLED, "shutting down")

    # ---- progress
    def pump(self) -> bool:
        """One round over all imports; never waits. True = something moved, so call again soon."""
        moved = False
        for agent in list(self._lost):
            moved |= self._close_lost(agent)
        jobs = list(self._jobs.values())
        for job in jobs:
            moved |= self._look(job)
        for job in jobs:  # a slot that any of them gave back is for the oldest that needs one
            moved |= self._advance(job)
        return moved

    def busy(self) -> bool:
        return bool(self._jobs)

    def take_acks(self) -> list[ImportAck]:
        acks, self._acks = self._acks, []
        return acks

    def check(self) -> None:
        """Slots held are those of running imports."""
        self.slots.check(sum(read.slot >= 0 for job in self._jobs.values()
                             for read in (*job.posted, *job.landed, *job.copying)))

    def _look(self, job: RunningImport) -> bool:
        """At what was posted and copied, and at the clock. True = something is over."""
        now = self._clock()  # a READ that ended until now has ended in time
        moved = self._poll_reads(job)
        moved |= self._poll_copies(job)
        if job.failure is None and now >= job.deadline_s:
            self._fail(job, ImportFailure.TIMEOUT, f"not done within {job.plan.deadline_s:g} s")
        if job.posted and now >= job.deadline_s + self._drain_s:
            self._lose(job.source.agent, f"a READ did not end within {self._drain_s:g} s after its deadline")
        return moved

    def _advance(self, job: RunningImport) -> bool:
        moved = False
        job.ready = job.ready or self._ready(job.plan.job_id)
        if job.failure is None and job.ready:
            moved |= self._post(job)
        for read in job.landed:  # behind the next READ, which moves meanwhile
            self._start_copy(job, read)
        job.landed.clear()
        if job.checks is None and not job.waiting and job.failure is None:
            job.checks = self._plan_check(job)  # while the last READs move
        if job.posted or job.copying or job.waiting:
            return moved
        if job.failure is None and job.phase is Phase.DATA:
            self._start_verify(job)
            return True
        if job.failure is None and job.phase is Phase.VERIFY and self._start_mirrors(job):
            return True
        self._finish(job)
        return True

    def _poll_reads(self, job: RunningImport) -> bool:
        """Whether something moved."""
        moved = False
        for read in list(job.posted):
            if read.handle is None:
                continue  # lost: only the closed endpoint ends it
            try:
                if not self._transport.poll(read.handle):
                    continue
            except PeerLost as error:
                read.handle = None
                self._fail(job, ImportFailure.TRANSFER, str(error))
                self._lose(job.source.agent, str(error))
                return True
            except TransferError as error:
                job.posted.remove(read)
                self._free_slot(read)
                self._fail(job, ImportFailure.TRANSFER, str(error))
                return True
            moved = True
            job.posted.remove(read)
            if read.pages is not None:
                job.landed.append(read)
                continue
            if job.failure is None and read.runs is not None:
                self._compare(job, read)
            self._free_slot(read)
        return moved

    def _start_copy(self, job: RunningImport, read: Read) -> None:
        """Of a slot whose READ is over; of a failed import the slot is free."""
        if job.failure is not None:
            self._free_slot(read)
            return
        pages, pool, slot, planner = read.pages, read.pool, read.slot, job.reads
        assert pages is not None and pool is not None and planner is not None
        layered = planner.layered(read.memory)
        to_host = job.plan.landing is Landing.HOST and self._writer
        read.event = self._copy(
            lambda: self._scatter.from_slot(job.plan, pages, pool, slot, layered=layered, to_host=to_host))
        job.copying.append(read)

    def _poll_copies(self, job: RunningImport) -> bool:
        done = [read for read in job.copying if read.event is not None and read.event.done()]
        for read in done:
            job.copying.remove(read)
            self._free_slot(read)
        return bool(done)

    def _post(self, job: RunningImport) -> bool:
        moved, full = False, set[SlotPool | None]()
        while job.failure is None and (read := job.waiting.first(full)) is not None:
            if not self._room.find(job, read):
                full.add(read.pool)  # READs of other pools, or of none, go on
                continue
            job.waiting.take(read)
            moved = True
            descriptors = self._room.descriptors(job, read)
            try:
                read.handle = self._transport.read(job.source.agent, descriptors)
            except PeerLost as error:
                job.posted.append(read)
                self._fail(job, ImportFailure.TRANSFER, str(error))
                self._lose(job.source.agent, str(error))
                return True
            except TransferError as error:
                self._free_slot(read)
                self._fail(job, ImportFailure.TRANSFER, str(error))
                return True
            job.num_bytes += int(descriptors[:, 2].sum())
            job.posted.append(read)
        return moved

    # ---- generations
    def _plan_check(self, job: RunningImport) -> list[list[GenerationRun]]:
        pages = job.plan.source_of(job.rows_of, self._layout.block_size)
        return plan_check(job.plan, job.source, pages, GENERATION_BYTES)

    def _start_verify(self, job: RunningImport) -> None:
        assert job.checks is not None
        job.phase = Phase.VERIFY
        job.waiting.extend(Read(runs=batch, pool=self.slots.generations) for batch in job.checks)

    def _compare(self, job: RunningImport, read: Read) -> None:
        assert read.runs is not None
        difference = first_difference(read.runs, self.slots.generations.memory[read.slot])
        if difference:
            self._fail(job, ImportFailure.GENERATION, difference)

    def _start_mirrors(self, job: RunningImport) -> bool:
        """Pages that were staged have their mirrors. False = there are none to fill."""
        job.phase = Phase.MIRROR
        plan = job.plan
        if not (job.straight and mirrored(plan.destination).any()):
            return False
        job.copying.append(Read(event=self._copy(lambda: self._scatter.mirror_from_host(plan))))
        return True

    # ---- ends
    def _finish(self, job: RunningImport) -> None:
        if job.failure is None and job.plan.landing is Landing.HOST and self._writer:
            self._scatter.set_row_masks(job.plan)
        del self._jobs[job.plan.job_id]
        self._acks.append(ImportAck(job_id=job.plan.job_id, failure=job.failure, reason=job.reason,
                                    num_bytes=job.num_bytes, seconds=self._clock() - job.started_at_s))

    def _fail(self, job: RunningImport, failure: ImportFailure, reason: str) -> None:
        job.waiting.clear()
        if job.failure is None:
            job.failure, job.reason = failure, reason

    def _lose(self, agent: str, why: str) -> None:
        """The endpoint must be closed; until that works every READ of this peer stays in quarantine."""
        self._lost.setdefault(agent, _Lost(why=why))
        self._close_lost(agent)

    def _close_lost(self, agent: str) -> bool:
        lost, now = self._lost[agent], self._clock()
        if now < lost.retry_at_s:
            return False
        if not self.peers.disconnect(agent):
            lost.retry_at_s = now + self._drain_s
            return False
        del self._lost[agent]
        for job in self._jobs.values():
            if job.source.agent == agent:
                self._abort(job, ImportFailure.TRANSFER, f"the endpoint was closed: {lost.why}")
        return True

    def _restarted(self, old: str, new: str) -> None:
        """The peer table disconnected an agent for its successor, because of an import or of a notice."""
        self._lost.pop(old, None)
        for job in self._jobs.values():
            if job.source.agent == old:
                self._abort(job, ImportFailure.RESTARTED, f"{old} was replaced by {new}")

    def _abort(self, job: RunningImport, failure: ImportFailure, reason: str) -> None:
        """The job's endpoint is closed: its READs are over."""
        self._fail(job, failure, reason)
        for read in job.posted:
            self._free_slot(read)
        job.posted.clear()

    def _free_slot(self, read: Read) -> None:
        if read.slot >= 0 and read.pool is not None:
            read.pool.release(read.slot)
            read.slot = -1
