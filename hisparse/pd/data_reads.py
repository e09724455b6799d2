"""The data READs of one import, in the order in which they are posted."""

from __future__ import annotations

from hisparse.pd.descriptors import ReadPlanner, split
from hisparse.pd.pages import Ids
from hisparse.pd.repaging import RepagingPlanner
from hisparse.pd.running_import import Read
from hisparse.pd.staging_pools import StagingPools
from hisparse.pd.transport import Descriptors


def data_reads(planner: ReadPlanner | RepagingPlanner, pages: Ids, slots: StagingPools, *, to_host: bool, slot_pages: int,
               max_read_bytes: int | None) -> list[Read]:
    """READs of every page's indexer keys and of the rows of `pages` (indices), straight to their place or to a slot.

    Those of slots have no descriptors yet, as their addresses are not known, and come last: whatever stands behind one waits
    for a slot, too. Only the first stands in front of all: the way out of a slot is the longer one, and begins at once.

    Args:
        to_host: this rank writes host pages. max_read_bytes: see `split`.
    """
    gpu = planner.resident(pages)
    direct: list[Descriptors] = [planner.indexer()]
    staged: list[Read] = []
    for from_gpu in (True, False):  # one READ has one kind of memory on either side
        some = pages[gpu == from_gpu]
        if not some.size:
            continue
        if slots.used(to_host=to_host, from_gpu=from_gpu):
            staged += [Read(pages=chunk, from_gpu=from_gpu) for chunk in planner.slot_chunks(some, slot_pages)]
        else:
            direct.append(planner.to_host(some) if to_host else planner.to_resident(some))
    reads = [Read(descriptors=part) for descriptors in direct for part in split(descriptors, max_read_bytes)]
    return [*staged[:1], *reads, *staged[1:]]
