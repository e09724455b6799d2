"""The generation check: one READ of the serving rank's array after all data, and the comparison with the lease."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hisparse.pd.commands import ImportPlan
from hisparse.pd.descriptors import from_resident
from hisparse.pd.endpoint import DEVICE_GENERATIONS, HOST_GENERATIONS, GenerationArray, RankEndpoint
from hisparse.pd.pages import Generations, Ids
from hisparse.pd.transport import Descriptors

GENERATION_BYTES = 1 << 20
"""A lease whose pages span more than this of an array is read in merged runs instead of one slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRun:
    """A contiguous slice of a generation array, and what it must say.

    Attributes:
        first: lowest page id. count: entries from there. ids: the pages checked in it; expected: uint64 of each.
    """

    array: GenerationArray
    first: int
    count: int
    ids: Ids
    expected: Generations

    @property
    def num_bytes(self) -> int:
        return (self.count - 1) * self.array.stride + 8


def generation_runs(source: RankEndpoint, name: str, ids: Ids, expected: Generations,
                    max_bytes: int) -> list[GenerationRun]:
    """One run from lowest to highest id if that fits `max_bytes`, else runs cut at wide gaps, each within it."""
    if not ids.size:
        return []
    array = source.generation_array(name)
    order = np.argsort(ids, kind="stable")
    ids, expected = ids[order], expected[order]
    limit = max(1, (max_bytes - 8) // array.stride + 1)  # entries per run
    cuts = [0]
    if int(ids[-1] - ids[0]) >= limit:
        gap = max(1, 4096 // array.stride)  # reading across a smaller gap is cheaper than one more descriptor
        for i in range(1, ids.size):
            if ids[i] - ids[i - 1] > gap or ids[i] - ids[cuts[-1]] >= limit:
                cuts.append(i)
    return [GenerationRun(array=array, first=int(ids[a]), count=int(ids[b - 1] - ids[a]) + 1, ids=ids[a:b],
                          expected=expected[a:b])
            for a, b in zip(cuts, [*cuts[1:], ids.size], strict=True)]


def pages_read(plan: ImportPlan, pages: Ids) -> tuple[Ids, Generations, Ids, Generations]:
    """What a rank that read every indexer page and the rows of source pages `pages` (indices) must check.

    Returns: device page ids, their generations, host page ids, their generations.
    """
    source = plan.source
    resident = from_resident(source)
    gpu, cpu = pages[resident[pages]], pages[~resident[pages]]
    device_ids = np.concatenate([source.indexer, source.resident[:, gpu].ravel()])
    device_gens = np.concatenate([source.indexer_generations, source.resident_generations[:, gpu].ravel()])
    return device_ids, device_gens, source.host[cpu], source.host_generations[cpu]


def plan_check(plan: ImportPlan, source: RankEndpoint, pages: Ids, max_bytes: int) -> list[list[GenerationRun]]:
    """What a rank that read every indexer page and the rows of source pages `pages` (indices) must read, in batches of at
    most `max_bytes`."""
    device, device_gens, host, host_gens = pages_read(plan, pages)
    runs = generation_runs(source, DEVICE_GENERATIONS, device, device_gens, max_bytes)
    runs += generation_runs(source, HOST_GENERATIONS, host, host_gens, max_bytes)
    batches: list[list[GenerationRun]] = []
    room = 0
    for run in runs:
        if not batches or run.num_bytes > room:
            batches.append([])
            room = max_bytes
        batches[-1].append(run)
        room -= run.num_bytes
    return batches


def generation_reads(runs: list[GenerationRun], address: int) -> Descriptors:
    """Descriptors that bring the runs one after the other to `address`."""
    rows = []
    for run in runs:
        rows.append((run.array.address + run.first * run.array.stride, address, run.num_bytes))
        address += run.num_bytes
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def first_difference(runs: list[GenerationRun], slot: npt.NDArray[np.uint8]) -> str:
    """Compares what arrived (in the order of `generation_reads`) with the lease. "" = every page is still the same."""
    offset = 0
    for run in runs:
        got = np.ndarray(run.count, dtype="<u8", buffer=slot, offset=offset, strides=run.array.stride)
        seen = got[run.ids - run.first]
        bad = np.flatnonzero(seen != run.expected)
        if bad.size:
            i = bad[0]
            return (f"{run.array.name} page {run.ids[i]} has generation {seen[i]}, leased was {run.expected[i]}: "
                    "it was reused while it was read")
        offset += run.num_bytes
    return ""
