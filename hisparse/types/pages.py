"""Pages of a request and where they are to land: what prefill leases and decode imports into."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Landing(enum.Enum):
    """Where an imported prefix lands on the decode side; chosen once per request."""

    RESIDENT = "resident"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPages:
    """Physical pages of positions [first_page * block_size, num_tokens) of one request, by group.

    All tuples cover pages first_page .. pages(num_tokens)-1. 0 = this tier does not hold the page.
    """

    first_page: int
    num_tokens: int
    indexer_blocks: tuple[int, ...]
    resident_blocks: tuple[tuple[int, ...], ...]
    """One tuple per resident group."""
    host_blocks: tuple[int, ...]

    @property
    def num_pages(self) -> int:
        return len(self.indexer_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGenerations:
    """Generations of a `RequestPages`, same shape; 0 where the page is not held."""

    indexer: tuple[int, ...]
    resident: tuple[tuple[int, ...], ...]
    host: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTarget:
    """Where a prefix computed elsewhere is to land, all blocks already leased to the request."""

    landing: Landing
    pages: RequestPages
