"""Whether a READ may be posted now, which slot it passes through, and where its bytes go."""

from __future__ import annotations

from hisparse.pd.generations import generation_reads
from hisparse.pd.reads import Read
from hisparse.pd.running_import import RunningImport
from hisparse.pd.staging_pools import StagingPools
from hisparse.pd.transport import Descriptors

DIRECT_READS = 4
"""READs without a staging slot that one import has posted at a time."""


class ReadSlots:
    """Args: slot_pages, staged_reads: as Importer's."""

    def __init__(self, slots: StagingPools, *, slot_pages: int, staged_reads: int) -> None:
        self._slots, self._slot_pages, self._staged_reads = slots, slot_pages, staged_reads

    def find(self, job: RunningImport, read: Read) -> bool:
        """Gives the READ its slot if it needs one. False = there is no room now, in its pool or among the import's READs."""
        if read.pool is None:
            return sum(other.pool is None for other in job.posted) < DIRECT_READS
        if read.pages is not None and sum(other.pages is not None for other in job.posted) >= self._staged_reads:
            return False
        slot = read.pool.acquire(job.source.agent)
        read.slot = -1 if slot is None else slot
        return slot is not None

    def descriptors(self, job: RunningImport, read: Read) -> Descriptors:
        """Of a READ that found room."""
        if read.descriptors is not None:
            return read.descriptors
        if read.runs is not None:
            # No page has generation 0: a READ that moves nothing must not find an earlier answer in the slot.
            self._slots.generations.memory[read.slot] = 0
            return generation_reads(read.runs, self._slots.generations.slot_address(read.slot))
        assert job.reads is not None and read.pool is not None and read.pages is not None
        return job.reads.to_slot(read.pages, read.pool.slot_address(read.slot), self._slot_pages)
