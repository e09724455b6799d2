"""What the cache asks of an indexer store; `connector.base.IndexerOffload` is the same boundary seen from above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class IndexerStore(Protocol):
    """Scheduler half of a store of indexer pages outside the device pool."""

    def hit(self, keys: Sequence[bytes], first_page: int) -> int:
        """Consecutive pages from `keys[first_page]` on that the store holds. Pure."""

    def plan_store(self, key: bytes, device_block: int) -> bool:
        """Plans a copy of one sealed page. True: the block stays pinned by the caller until it is released."""
