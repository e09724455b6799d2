"""The data READs of one import, in the order in which they are posted."""

from __future__ import annotations

from hisparse.pd.descriptors import ReadPlanner, split
from hisparse.pd.pages import Ids
from hisparse.pd.reads import Read
from hisparse.pd.repaging import RepagingPlanner
from hisparse.pd.staging_pools import StagingPools
from hisparse.pd.transport import Descriptors


def data_reads(planner: ReadPlanner | RepagingPlanner, pages: Ids, slots: StagingPools, *, to_host: bool, slot_pages: int,
               max_read_bytes: int | None) -> tuple[list[Read], bool]:
    """READs of every page's indexer keys and of the rows of `pages` (indices), straight to their place or to a slot.

    Those of slots have no descriptors yet, as their addresses are not known, and come last. Only the first stands in front of
    all: the way out of a slot is the longer one, and begins at once.

    Args:
        to_host: this rank writes host pages. max_read_bytes: see `split`.
    Returns: the READs, and whether pages go to the host without a slot, so that their mirrors are still to be filled.
    """
    straight: list[Descriptors] = [planner.indexer()]
    staged: list[Read] = []
    num_straight = 0
    for memory, some in planner.by_memory(pages):  # one READ has one kind of memory on either side
        if slots.used(memory, to_host=to_host):
            pool = slots.of(memory)
            staged += [Read(pages=chunk, memory=memory, pool=pool) for chunk in planner.slot_chunks(some, slot_pages)]
        else:
            straight += planner.straight(some, to_host=to_host)
            num_straight += some.size
    reads = [Read(descriptors=part) for descriptors in straight for part in split(descriptors, max_read_bytes)]
    return [*staged[:1], *reads, *staged[1:]], to_host and num_straight > 0
