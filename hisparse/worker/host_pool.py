"""The host pool: every layer's rows of every host page, and a header per page.

Skeleton: the private and shared backings follow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from hisparse.layout import KVCacheLayout


class HostPool:
    """Body `[layer][host block][block_size][row_bytes]` and, per host page, key, row mask, generation and incarnation.

    Attributes:
        num_blocks: host pages incl. the null block 0.
        shared: more than one rank may map it; only the writer rank writes.
        path: file behind a shared pool, else None.
        keys: numpy uint8 [num_blocks, 32]; row_masks, generations, incarnations: numpy uint64 [num_blocks].
        address, nbytes: of the body (page-aligned).
    """

    num_blocks: int
    shared: bool
    path: Path | None
    keys: np.ndarray
    row_masks: np.ndarray
    generations: np.ndarray
    incarnations: np.ndarray
    address: int
    nbytes: int

    @classmethod
    def private(cls, layout: KVCacheLayout, num_blocks: int) -> HostPool:
        """Anonymous memory of this process (children do not copy it on write)."""
        raise NotImplementedError

    @classmethod
    def shared_file(cls, layout: KVCacheLayout, num_blocks: int, path: str | Path) -> HostPool: ...  # see HostPool.shared

    @classmethod
    def attach(cls, layout: KVCacheLayout, num_blocks: int, path: str | Path, *, timeout_s: float = 5.0) -> HostPool:
        """Maps a pool that its owner created. ConfigError when it does not appear in time or has another shape."""
        raise NotImplementedError

    def rows(self, layer: int) -> Tensor:
        """[num_blocks * block_size, row_elems] of one layer: row `host_block * block_size + row`."""
        raise NotImplementedError

    def close(self) -> None:
        """Unmaps. Idempotent."""

    def unlink(self) -> None:
        """Removes the file of a shared pool. Idempotent."""
