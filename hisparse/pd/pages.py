"""Page ids and generations of a request as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.connector.base import PageGenerations
from hisparse.pd.narrow import narrow, widen
from hisparse.types import RequestPages

Ids = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """Ids and generations of some pages, by cache. 0 = this tier does not hold the page.

    Attributes:
        indexer, host: int64 [pages]. resident: int64 [groups, pages]. `*_generations`: uint64, same shapes.
    """

    indexer: Ids
    resident: Ids
    host: Ids
    indexer_generations: Generations
    resident_generations: Generations
    host_generations: Generations

    @property
    def num_pages(self) -> int:
        return int(self.indexer.shape[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Plans go to every rank with a step: packed (`narrow`), a third of the size."""
        return _unpacked, (self.resident.shape, *(narrow(item) for item in (
            self.indexer, self.resident, self.host,
            self.indexer_generations, self.resident_generations, self.host_generations)))

    def slice(self, first: int, last: int) -> PageTable:
        """Pages [first, last)."""
        return PageTable(
            indexer=self.indexer[first:last], resident=self.resident[:, first:last], host=self.host[first:last],
            indexer_generations=self.indexer_generations[first:last],
            resident_generations=self.resident_generations[:, first:last],
            host_generations=self.host_generations[first:last])


def table_of(pages: RequestPages, generations: PageGenerations | None = None) -> PageTable:
    """Arrays of a RequestPages (and of its PageGenerations; None = all zero)."""
    def ids(values: Sequence[Any]) -> Ids:
        return np.asarray(values, dtype=np.int64)

    def gens(values: Sequence[Any], like: Ids) -> Generations:
        return np.asarray(values, dtype=np.uint64).reshape(like.shape)

    num = pages.num_pages
    indexer, host = ids(pages.indexer_blocks), ids(pages.host_blocks)
    resident = ids(pages.resident_blocks).reshape(len(pages.resident_blocks), num)
    if generations is None:
        return PageTable(indexer=indexer, resident=resident, host=host,
                         indexer_generations=np.zeros(indexer.shape, np.uint64),
                         resident_generations=np.zeros(resident.shape, np.uint64),
                         host_generations=np.zeros(host.shape, np.uint64))
    return PageTable(indexer=indexer, resident=resident, host=host,
                     indexer_generations=gens(generations.indexer, indexer),
                     resident_generations=gens(generations.resident, resident),
                     host_generations=gens(generations.host, host))


def _unpacked(shape: tuple[int, int], *packed: bytes) -> PageTable:
    groups, pages = shape
    indexer, resident, host, of_indexer, of_resident, of_host = (
        widen(raw, count, "a page table") for raw, count in zip(packed, (pages, groups * pages, pages) * 2, strict=True))
    return PageTable(
        indexer=indexer.view(np.int64), resident=resident.view(np.int64).reshape(shape), host=host.view(np.int64),
        indexer_generations=of_indexer, resident_generations=of_resident.reshape(shape), host_generations=of_host)
